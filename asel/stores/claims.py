"""A selector's claims: the right to tune a key, exclusive among the processes that share a store."""

from __future__ import annotations

import math
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Generic, Literal

import anyio
import anyio.lowlevel

from asel.events import ClaimWait
from asel.events.dispatcher import Dispatcher
from asel.kernels.kernel import Cfg
from asel.kernels.keys import CacheKey
from asel.runtime.limiter import Limiter
from asel.runtime.loop import ordinary_errors
from asel.stores.circuit_breaker import CircuitBreaker, timeout_error
from asel.stores.config_store import ConfigStore, StoreQuery
from asel.stores.protocol import Claim

__all__ = ["Claims"]

# How long a waiter retries a failing store before it tunes by itself: long enough for a restart of Redis.
_PATIENCE_S = 5.0
# Pauses between those retries. The first is long enough for the holder to renew its claim when the store is back.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 1.0


class Claims(Generic[Cfg]):
    """Takes claims within the store's time limit, and waits for claims that other processes hold."""

    def __init__(
        self,
        store: ConfigStore[Cfg],
        breaker: CircuitBreaker,
        events: Dispatcher,
        limiter: Limiter,
        timeout_s: float,
        can_use: Callable[[Claim, StoreQuery[Cfg]], bool],
    ) -> None:
        self._store = store
        self._breaker = breaker
        self._events = events
        self._limiter = limiter
        self._timeout_s = timeout_s
        self._can_use = can_use

    @asynccontextmanager
    async def claim(
        self, query: StoreQuery[Cfg], wait_s: float, on_held_elsewhere: Callable[[], object], anew: bool
    ) -> AsyncIterator[Claim]:
        claim, block, start = Claim(), AsyncExitStack(), self._events.now()
        # One deadline, moved as the claim is taken, held and released. Its scope is the outermost, so that it also
        # limits the time for entering and leaving the store's block.
        scope = block.enter_context(anyio.CancelScope())
        if self._store.has_claims and self._breaker.begin_attempt("claim") is None:
            try:
                with ordinary_errors("the store"):
                    found = await self._take(block, scope, query, wait_s, on_held_elsewhere, anew)
                scope.deadline = math.inf
                await anyio.lowlevel.checkpoint_if_cancelled()  # a store that shields itself misses its deadline
                claim = found
                self._breaker.note_success("claim", query.key)
                self._report_wait(query.key, claim, start)
            except BaseException as error:
                self._breaker.end_attempt("claim")
                was_late = await block.__aexit__(type(error), error, error.__traceback__)
                if not was_late and not isinstance(error, Exception):
                    raise
                failure = error if isinstance(error, Exception) else timeout_error(self._timeout_s)
                self._breaker.note_failure("claim", failure, query, start)
        scope.deadline = math.inf
        try:
            yield claim
        finally:
            await self._give_back(block, scope, query)

    async def _give_back(self, block: AsyncExitStack, scope: anyio.CancelScope, query: StoreQuery[Cfg]) -> None:
        start, was_late = self._events.now(), scope.cancel_called
        scope.deadline = anyio.current_time() + self._timeout_s
        try:
            with ordinary_errors("the store"):
                await block.__aexit__(*sys.exc_info())
        except Exception as error:  # the claim ends with this process at the latest
            self._breaker.note_failure("claim", error, query, start)
        if scope.cancelled_caught and not was_late:
            self._breaker.note_failure("claim", timeout_error(self._timeout_s), query, start)

    async def _take(
        self,
        block: AsyncExitStack,
        scope: anyio.CancelScope,
        query: StoreQuery[Cfg],
        wait_s: float,
        on_held_elsewhere: Callable[[], object],
        anew: bool,
    ) -> Claim:
        """Try once without waiting; then wait for the process that holds the claim, and retry if the store fails."""
        async with AsyncExitStack() as attempt:
            async with self._limiter.slot():
                scope.deadline = anyio.current_time() + self._timeout_s
                claim = await attempt.enter_async_context(self._store.claim(query, 0.0, anew))
            if not claim.held:
                on_held_elsewhere()
            until, give_up, pause_s = anyio.current_time() + wait_s, -math.inf, 0.0
            scope.deadline = until + self._timeout_s
            while not claim.held and wait_s > 0:
                await attempt.aclose()
                began, start = anyio.current_time(), self._events.now()
                try:
                    waited = self._store.claim(query, max(until - began, 0.0), anew)
                    claim = await attempt.enter_async_context(waited)
                except Exception as error:
                    now = anyio.current_time()
                    if give_up == -math.inf or now - began > _PATIENCE_S:  # the store had recovered
                        give_up, pause_s = now + _PATIENCE_S, _FIRST_PAUSE_S
                    if now + pause_s > min(give_up, until):
                        raise
                    self._breaker.note_failure("claim", error, query, start)
                    await anyio.sleep(pause_s)
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                    continue
                if claim.record is None or anew or self._can_use(claim, query):
                    break
                anew = True  # this process cannot read the record, so it waits for the holder to replace it
            block.push_async_exit(attempt.pop_all())
            return claim

    def _report_wait(self, key: CacheKey, claim: Claim, start: float) -> None:
        now = self._events.now()
        outcome: Literal["record", "held", "timed_out"] = "held" if claim.held else "timed_out"
        if claim.record is not None:
            outcome = "record"
        self._events(ClaimWait(key=key, start=start, end=now, waited_s=now - start, outcome=outcome))

    async def probe(self, query: StoreQuery[Cfg]) -> None:
        """Take and release a claim that no other process wants, to find out whether claims work again."""
        start = self._events.now()
        error: Exception = timeout_error(self._timeout_s)
        try:
            with anyio.move_on_after(self._timeout_s):
                async with self._store.claim(query, 0.0, False):
                    self._breaker.note_success("claim", query.key)
                return
        except Exception as failure:
            error = failure
        finally:
            self._breaker.end_attempt("claim")
        self._breaker.note_failure("claim", error, query, start)
