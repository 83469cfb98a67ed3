"""A claim in Redis: a key that ends by itself unless its holder renews it."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import anyio

from asel.errors import StoreError
from asel.stores.links import Link, Wire, helpers
from asel.stores.protocol import Claim
from asel.stores.records import Address
from asel.stores.scripts import ACQUIRE, RELEASE, RENEW, Names

__all__ = ["Lease"]


class Lease:
    """The attempts of one caller to hold an address, and the holding."""

    def __init__(self, link: Link, names: Names, address: Address, *, lease_s: float, renew_s: float) -> None:
        self.token = secrets.token_hex(16)
        self._link = link
        self._key = names.lease(address)
        self._channel = names.wake(address)
        self._lease_s = lease_s
        self._renew_s = renew_s
        self._grace_s = link.timeout_s / 10
        self._ends = 0.0
        self._others_s = 0.0
        self._bell = anyio.Event()
        self._hung_on: Wire | None = None

    async def attempt(self) -> Callable[[], Awaitable[object]] | None:
        """Return how to give the lease back, or None where another holds it.

        From before the question on, the bell rings when it may be worth asking again.
        """
        self.hush()
        asked = False

        def ready(wire: Wire) -> None:
            nonlocal asked
            self.hush()
            wire.hang(self._bell, self._channel)
            self._hung_on, asked = wire, True

        sent = anyio.current_time()
        try:
            left_ms = await self._link.run(ACQUIRE, [self._key], self.token, self._lease_ms, ready=ready)
        except anyio.get_cancelled_exc_class():
            if asked:  # it may be ours, and nobody would know
                with anyio.CancelScope(shield=True):
                    await self.release()
            raise
        except StoreError:
            if asked:  # the same, but time is up: should Redis be slow and not gone, a moment is enough
                with anyio.move_on_after(self._grace_s, shield=True):
                    await self.release()
            raise
        if left_ms:
            self._others_s = left_ms / 1000
            return None
        # Counted from before Redis heard of it: it is over there later than here.
        self._ends = sent + self._lease_s
        self.hush()
        return self.release

    async def pause(self) -> None:
        """Return when somebody published something, or the other's lease is over: the dead publish nothing."""
        with anyio.move_on_after(self._others_s + 0.005):
            await self._bell.wait()

    def hush(self) -> None:
        if self._hung_on is not None:
            self._hung_on.unhang(self._bell, self._channel)
        self._bell, self._hung_on = anyio.Event(), None

    async def release(self) -> None:
        # Redis is gone, and takes the lease along in time.
        with suppress(StoreError):
            await self._link.run(RELEASE, [self._key], self.token, self._channel)

    @asynccontextmanager
    async def renewed(self, claim: Claim) -> AsyncIterator[None]:
        """Keep the lease while the block runs; the claim is told when it could not be kept."""
        async with helpers() as tasks:
            tasks.start_soon(self._beat, claim)
            yield

    async def _beat(self, claim: Claim) -> None:
        # A lease that cannot be renewed in time is another's for all one knows.
        pause_s = self._renew_s
        while True:
            renewed: int | None = None
            with anyio.CancelScope(deadline=self._ends) as scope:
                await anyio.sleep(pause_s)
                sent = anyio.current_time()
                with suppress(StoreError):
                    renewed = await self._link.run(RENEW, [self._key], self.token, self._lease_ms)
            if renewed:
                self._ends, pause_s = sent + self._lease_s, self._renew_s
            elif renewed == 0 or scope.cancelled_caught or anyio.current_time() >= self._ends:
                claim.held = False
                return
            else:
                pause_s = min(self._renew_s, 1.0)

    @property
    def _lease_ms(self) -> int:
        return max(1, round(self._lease_s * 1000))
