"""A claim in Redis: a key that expires unless its holder renews it."""

from __future__ import annotations

import math
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

import anyio

from asel.errors import StoreError
from asel.stores.protocol import Claim
from asel.stores.records import Address, Record
from asel.stores.redis.claim_queues import Place
from asel.stores.redis.client import Link, background_tasks
from asel.stores.redis.scripts import ACQUIRE, RELEASE, RENEW, UNPUBLISHED, Names
from asel.stores.redis.wakeups import Subscription

__all__ = ["Lease"]

# Poll intervals of a waiter without wake-ups, and with them: pub/sub does not guarantee delivery.
_FIRST_POLL_S, _LONGEST_POLL_S = 0.1, 1.0
_SUBSCRIBED_POLL_S = 5.0
# Retry intervals of a holder that cannot renew. The first is short, so that after a restart of Redis the holder renews
# its lease before a waiter takes it (see _FIRST_PAUSE_S in asel/stores/claims.py).
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.05, 1.0


class Lease:
    """One caller's attempts to hold an address, and its renewals.

    Callers that wait for the same claim share a queue; only the first in the queue talks to Redis.
    """

    def __init__(
        self,
        link: Link,
        names: Names,
        address: Address,
        *,
        waits: bool = False,
        anew: bool = False,
        lease_s: float,
        renew_s: float,
    ) -> None:
        self.token = secrets.token_hex(16)
        self._link = link
        self._key = names.lease(address)
        self._channel = names.wake(address)
        self._waits = waits
        self._place = Place(link.queues, (address, anew))
        self._lease_s = lease_s
        self._renew_s = renew_s
        self._grace_s = link.timeout_s / 10
        self._ends_at = 0.0
        self._others_left_s = 0.0
        self._poll_s = _FIRST_POLL_S
        self._subscription = Subscription(self._channel)

    async def attempt(self) -> Callable[[], Awaitable[object]] | None:
        """Return the function that releases the lease, or None if another caller holds it.

        A caller that waits is subscribed before the last request, so it cannot miss a later wake-up.
        """
        if self._waits and not await self._place.reach_front():
            return None
        with self._failing_together():
            is_ours = await self._acquire()
            if not is_ours and self._waits and await self._subscribe():
                # The lease may have been released before the subscription took effect.
                is_ours = await self._acquire()
        return self.release if is_ours else None

    async def look(self, read: Callable[[], Awaitable[Record | None]]) -> Record | None:
        """Return the record that ends the wait, and pass it to every caller in the queue."""
        if self._place.record is None:
            with self._failing_together():
                self._place.record = await read()
            if self._place.record is not None:
                self._place.share(self._place.record)
        return self._place.record

    async def pause(self) -> None:
        """Return on a wake-up, when the holder's lease may have ended, or when it is time to poll."""
        others_s = self._others_left_s + 0.005  # a dead holder publishes nothing
        if self._subscription.is_subscribed:
            with anyio.move_on_after(min(_SUBSCRIBED_POLL_S, others_s)):
                await self._subscription.notified.wait()
        else:
            await anyio.sleep(min(self._poll_s, others_s))
            self._poll_s = min(2 * self._poll_s, _LONGEST_POLL_S)

    def stop_waiting(self) -> None:
        self._subscription.unsubscribe()
        self._place.leave()

    async def release(self) -> None:
        with suppress(StoreError):  # if Redis is unreachable, the lease expires
            async with self._link.turn(urgent=True) as turn:
                if await turn.run(RELEASE, [self._key], self.token, self._channel) == UNPUBLISHED:
                    self._link.wakeups.rights.refuse()

    @asynccontextmanager
    async def renewed(self, claim: Claim) -> AsyncIterator[None]:
        """Renew the lease while the block runs, and keep `claim.held` up to date."""
        async with background_tasks() as tasks:
            tasks.start_soon(self._keep_renewing, claim)
            yield

    async def _acquire(self) -> bool:
        asked = False

        def note() -> None:
            nonlocal asked
            asked = True

        self._subscription.clear()
        sent = anyio.current_time()
        try:
            async with self._link.turn() as turn:
                sent = anyio.current_time()
                left_ms = await turn.run(ACQUIRE, [self._key], self.token, self._lease_ms, before=note)
        except anyio.get_cancelled_exc_class():
            if asked:  # Redis may have granted it even though the answer was lost
                with anyio.CancelScope(shield=True):
                    await self.release()
            raise
        except StoreError:
            if asked:  # as above; but the time is up, so a Redis that is only slow gets a moment
                with anyio.move_on_after(self._grace_s, shield=True):
                    await self.release()
            raise
        self._others_left_s = left_ms / 1000
        # Counted from before the request was sent, so that it never ends here later than in Redis.
        self._ends_at = sent + self._lease_s
        return not left_ms

    async def _subscribe(self) -> bool:
        """Subscribe; return False if the caller was subscribed already, or cannot be."""
        if self._subscription.is_subscribed:
            return False
        self._subscription.unsubscribe()
        self._subscription = Subscription(self._channel)
        return await self._link.wakeups.subscribe(self._subscription)

    async def _keep_renewing(self, claim: Claim) -> None:
        pause_s, retry_s = self._renew_s, _FIRST_RETRY_S
        while True:
            renewed = None
            # A lease that was not renewed in time may belong to another process by now.
            with anyio.CancelScope(deadline=self._ends_at if claim.held else math.inf) as scope:
                with anyio.move_on_after(pause_s):
                    await self._link.dialer.until_lost()
                renewed = await self._renew()
            if renewed is False:  # another process holds it
                claim.held = False
                return
            claim.held = bool(renewed) or (claim.held and not scope.cancelled_caught)
            if renewed:
                pause_s, retry_s = self._renew_s, _FIRST_RETRY_S
            else:
                pause_s, retry_s = retry_s, min(2 * retry_s, _LONGEST_RETRY_S)

    async def _renew(self) -> bool | None:
        """Return whether the lease is ours; None if Redis did not answer."""
        with suppress(StoreError):
            async with self._link.turn(urgent=True) as turn:
                sent = anyio.current_time()
                is_ours = await turn.run(RENEW, [self._key], self.token, self._lease_ms)
                if is_ours:
                    self._ends_at = sent + self._lease_s
                return bool(is_ours)
        return None

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        """If a request fails, fail every caller in the queue."""
        try:
            yield
        except StoreError as error:
            if self._waits:
                self._place.fail(error)
            raise

    @property
    def _lease_ms(self) -> int:
        return max(1, round(self._lease_s * 1000))
