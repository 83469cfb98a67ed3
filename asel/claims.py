"""A chain's claims: the right to tune a key, exclusive among the processes that share a store."""

from __future__ import annotations

import math
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Generic, Literal

import anyio
import anyio.lowlevel

from asel.events import ClaimWait
from asel.fanout import FanOut
from asel.health import Health
from asel.kernel import Cfg
from asel.keys import CacheKey
from asel.limiter import Limiter
from asel.persistence import Persistence, Sought
from asel.stores.protocol import Claim

__all__ = ["Claims", "late"]

# How long a waiter retries a failing store before it tunes by itself: enough for a Redis to restart.
_PATIENCE_S = 5.0
# Pauses between those retries. The holder renews its claim as soon as the store is back; the first pause lets it.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 1.0


def late(timeout_s: float) -> TimeoutError:
    return TimeoutError(f"the store did not answer within {timeout_s:g} s")


class Claims(Generic[Cfg]):
    """Takes claims within the store's time limit, and waits for claims that other processes hold."""

    def __init__(
        self,
        place: Persistence[Cfg],
        health: Health,
        events: FanOut,
        limiter: Limiter,
        timeout_s: float,
        can_use: Callable[[Claim, Sought[Cfg]], bool],
    ) -> None:
        self._place = place
        self._health = health
        self._events = events
        self._limiter = limiter
        self._timeout_s = timeout_s
        self._can_use = can_use

    @asynccontextmanager
    async def claim(
        self, sought: Sought[Cfg], wait_s: float, on_held_elsewhere: Callable[[], object], anew: bool
    ) -> AsyncIterator[Claim]:
        claim, start, stack = Claim(), self._events.now(), AsyncExitStack()
        # Outermost, so that it ends whatever the store's own block does to come and to go.
        bound = stack.enter_context(anyio.CancelScope())
        if self._place.has_claims and self._health.why_not("claim") is None:
            try:
                found = await self._claimed(stack, bound, sought, wait_s, on_held_elsewhere, anew)
                bound.deadline = math.inf
                await anyio.lowlevel.checkpoint_if_cancelled()  # a shielded store does not notice that it is late
                claim = found
                self._health.worked("claim", sought.key)
                self._tell_wait(sought.key, claim, start)
            except BaseException as error:
                self._health.let_go("claim")
                was_late = await stack.__aexit__(type(error), error, error.__traceback__)
                if not was_late and not isinstance(error, Exception):
                    raise
                failure = error if isinstance(error, Exception) else late(self._timeout_s)
                self._health.failed("claim", failure, sought, start)
        bound.deadline = math.inf
        try:
            yield claim
        finally:
            await self._give_back(stack, bound, sought)

    async def _give_back(self, stack: AsyncExitStack, bound: anyio.CancelScope, sought: Sought[Cfg]) -> None:
        start, was_late = self._events.now(), bound.cancel_called
        bound.deadline = anyio.current_time() + self._timeout_s
        try:
            await stack.__aexit__(*sys.exc_info())
        except Exception as error:  # it ends with this process at the latest
            self._health.failed("claim", error, sought, start)
        if bound.cancelled_caught and not was_late:
            self._health.failed("claim", late(self._timeout_s), sought, start)

    async def _claimed(
        self,
        stack: AsyncExitStack,
        bound: anyio.CancelScope,
        sought: Sought[Cfg],
        wait_s: float,
        on_held_elsewhere: Callable[[], object],
        anew: bool,
    ) -> Claim:
        async with AsyncExitStack() as first:
            async with self._limiter:
                bound.deadline = anyio.current_time() + self._timeout_s
                claim = await first.enter_async_context(self._place.claim(sought, 0.0, anew))
            if not claim.held:
                on_held_elsewhere()
            if claim.held or wait_s <= 0:
                stack.push_async_exit(first.pop_all())
                return claim
        until = anyio.current_time() + wait_s
        bound.deadline = until + self._timeout_s
        claim = await self._waited(stack, sought, until, anew)
        if claim.held or claim.record is None or self._can_use(claim, sought):
            return claim
        # This process cannot read the record that ended the wait, so it waits for a holder that replaces it.
        return await self._waited(stack, sought, until, True)

    async def _waited(self, stack: AsyncExitStack, sought: Sought[Cfg], until: float, anew: bool) -> Claim:
        """Wait for a claim that another process holds, and retry if the store fails for a moment."""
        give_up, pause_s = None, _FIRST_PAUSE_S
        while True:
            began, start = anyio.current_time(), self._events.now()
            try:
                async with AsyncExitStack() as wait:
                    claim = await wait.enter_async_context(self._place.claim(sought, max(until - began, 0.0), anew))
                    stack.push_async_exit(wait.pop_all())
                    return claim
            except Exception as error:
                now = anyio.current_time()
                if give_up is None or now - began > _PATIENCE_S:  # the store had recovered
                    give_up, pause_s = now + _PATIENCE_S, _FIRST_PAUSE_S
                if now + pause_s > min(give_up, until):
                    raise
                self._health.failed("claim", error, sought, start)
            await anyio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _tell_wait(self, key: CacheKey, claim: Claim, start: float) -> None:
        now = self._events.now()
        outcome: Literal["record", "held", "timed_out"] = "held" if claim.held else "timed_out"
        if claim.record is not None:
            outcome = "record"
        self._events(ClaimWait(key=key, start=start, end=now, waited_s=now - start, outcome=outcome))

    async def probe(self, sought: Sought[Cfg]) -> None:
        """Take and return a claim that no other process wants, to see whether claims work again."""
        start = self._events.now()
        error: Exception = late(self._timeout_s)
        try:
            with anyio.move_on_after(self._timeout_s):
                async with self._place.claim(sought, 0.0, False):
                    self._health.worked("claim", sought.key)
                return
        except Exception as failure:
            error = failure
        finally:
            self._health.let_go("claim")
        self._health.failed("claim", error, sought, start)
