"""A chain's dealings with its store: within a bound, told once for each change of state, nothing lost.

A store that fails is left alone for a while, longer each time, so that a dead one costs its callers
one timeout now and then. A result that could not be stored is kept, and stored when it works again.
"""

from __future__ import annotations

import math
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Generic, Literal

import anyio

from asel.cache import ConfigCache
from asel.errors import InvalidRequestError, StoreError
from asel.events import ClaimWait, FanOut, Persisted, RecordRejected, StoreFailed, StoreRead, StoreRecovered, StoreRetry
from asel.kernel import Cfg
from asel.keys import CacheKey
from asel.outcomes import TuneReport
from asel.persistence import Persistence, Sought, Stored
from asel.stores.protocol import Claim
from asel.stores.records import Rejected

__all__ = ["Keeper"]

Operation = Literal["get", "put", "claim"]
_FIRST_REST_S, _LONGEST_REST_S = 1.0, 30.0
_MOST_UNSAVED = 10_000


@dataclass(slots=True)
class _Trouble:
    """An operation that failed, and when it may be tried again."""

    why: str
    rest_s: float
    until: float
    trying: bool = False


class _Health:
    """Whether a store works.

    A store that cannot be read is taken for gone, and nothing is tried; one that cannot be written
    is still read.
    """

    def __init__(self, events: FanOut) -> None:
        self._events = events
        self._troubles: dict[Operation, _Trouble] = {}
        self._since = 0.0

    def why_not(self, operation: Operation) -> str | None:
        """Say why an operation is not to be tried now; after a rest, one caller at a time tries again."""
        trouble = self._troubles.get("get") or self._troubles.get(operation)
        if trouble is None:
            return None
        if (left := trouble.until - self._events.now()) > 0:
            return f"the store failed ({trouble.why}) and is tried again in {left:.1f} s"
        if trouble.trying:
            return f"the store failed ({trouble.why}) and is being tried again"
        trouble.trying = trouble is self._troubles.get(operation)
        return None

    def rest_left_s(self) -> float:
        now = self._events.now()
        return max((trouble.until - now for trouble in self._troubles.values()), default=0.0)

    def failed(self, operation: Operation, error: Exception, key: CacheKey, start: float) -> None:
        now, before = self._events.now(), self._troubles.get(operation)
        was_well = not self._troubles
        rest_s = _FIRST_REST_S if before is None else min(2 * before.rest_s, _LONGEST_REST_S)
        self._troubles[operation] = _Trouble(_in_words(error), rest_s, now + rest_s)
        if was_well:
            self._since = start
        kind = StoreFailed if was_well else StoreRetry
        self._events(kind.of(key, operation, start, now, error))

    def worked(self, operation: Operation, key: CacheKey) -> None:
        over = [self._troubles.pop(operation, None)]
        if operation == "put":  # a store that takes a record can be read, too
            over.append(self._troubles.pop("get", None))
        if any(over) and not self._troubles:
            now = self._events.now()
            self._events(
                StoreRecovered(key=key, start=self._since, end=now, operation=operation, failing_s=now - self._since)
            )

    def forgive(self) -> None:
        """Let everything be tried at once."""
        for trouble in self._troubles.values():
            trouble.until, trouble.trying = self._events.now(), False

    def let_go(self, operation: Operation) -> None:
        """Let another caller try: this one was cancelled before there was an answer."""
        if (trouble := self._troubles.get(operation)) is not None:
            trouble.trying = False


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


class Keeper(Generic[Cfg]):
    """Finds, keeps and claims on behalf of a chain. Raises nothing but StoreError, and only when asked to find."""

    def __init__(self, place: Persistence[Cfg], cache: ConfigCache[Cfg], events: FanOut, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._place = place
        self._cache = cache
        self._events = events
        self._health = _Health(events)
        self._unsaved: dict[tuple[CacheKey, str], tuple[TuneReport[Cfg], bool]] = {}
        self._news = anyio.Event()

    @property
    def unsaved(self) -> int:
        """How many results wait for the store to work again."""
        return len(self._unsaved)

    async def find(self, sought: Sought[Cfg]) -> Stored[Cfg] | None:
        """Return what the store has, within `timeout_s`.

        Raises:
            StoreError: it failed, or is being left alone after it did.
        """
        if (why := self._health.why_not("get")) is not None:
            raise StoreError(why)
        start = self._events.now()
        try:
            with anyio.fail_after(self.timeout_s):
                stored = await self._place.find(sought)
        except Exception as failure:  # a store's failure makes its tier decline
            error = failure if str(failure) or not isinstance(failure, TimeoutError) else self._late()
            self._health.failed("get", error, sought.key, start)
            raise StoreError(_in_words(error)) from error
        except BaseException:
            self._health.let_go("get")
            raise
        self._health.worked("get", sought.key)
        self._events(StoreRead(key=sought.key, start=start, end=self._events.now(), found=stored is not None))
        self._tell_saver()
        return stored

    async def reports(self, sought: Sought[Cfg]) -> list[TuneReport[Cfg]]:
        """Return what earlier tunes of a key found; nothing where the store does not say in time."""
        if self._health.why_not("get") is None:
            start = self._events.now()
            try:
                with anyio.fail_after(self.timeout_s):
                    return await self._place.reports(sought)
            except Exception as error:
                self._health.failed("get", error, sought.key, start)
            finally:
                self._health.let_go("get")
        return []

    @asynccontextmanager
    async def claim(self, sought: Sought[Cfg], wait_s: float, on_wait: Callable[[], object]) -> AsyncIterator[Claim]:
        """Hold the right to tune, as far as it can be had; where the store fails, everybody tunes.

        `on_wait` is called where another process holds it and `wait_s` allows to wait.
        """
        claim, start, stack = Claim(), self._events.now(), AsyncExitStack()
        if self._place.has_claims and self._health.why_not("claim") is None:
            try:
                claim = await self._claimed(stack, sought, wait_s, on_wait)
                self._health.worked("claim", sought.key)
                self._tell_wait(sought.key, claim, start)
            except Exception as error:
                self._health.failed("claim", error, sought.key, start)
            except BaseException:
                self._health.let_go("claim")
                raise
        try:
            yield claim
        finally:
            await self._give_back(stack, sought.key)

    async def _give_back(self, stack: AsyncExitStack, key: CacheKey) -> None:
        start = self._events.now()
        try:
            await stack.__aexit__(*sys.exc_info())
        except Exception as error:  # it ends with this process at the latest
            self._health.failed("claim", error, key, start)

    async def _claimed(
        self, stack: AsyncExitStack, sought: Sought[Cfg], wait_s: float, on_wait: Callable[[], object]
    ) -> Claim:
        async with AsyncExitStack() as first:
            claim = await first.enter_async_context(self._place.claim(sought, 0.0))
            if claim.held or claim.record is not None or wait_s <= 0:
                stack.push_async_exit(first.pop_all())
                return claim
        on_wait()
        return await stack.enter_async_context(self._place.claim(sought, wait_s))

    def found_by(self, claim: Claim, sought: Sought[Cfg]) -> Stored[Cfg] | None:
        """Return what another process stored before the claim was ours, or while we waited for it."""
        return None if claim.record is None else self._place.read(claim.record, sought)

    def _tell_wait(self, key: CacheKey, claim: Claim, start: float) -> None:
        now = self._events.now()
        outcome: Literal["record", "held", "timed_out"] = "held" if claim.held else "timed_out"
        if claim.record is not None:
            outcome = "record"
        self._events(ClaimWait(key=key, start=start, end=now, waited_s=now - start, outcome=outcome))

    async def keep(
        self,
        report: TuneReport[Cfg],
        *,
        replace: bool,
        claim: Claim | None = None,
        scope: anyio.CancelScope | None = None,
    ) -> Stored[Cfg] | None:
        """Store a result and return what is stored; None where that has to wait until the store works again.

        Shielded, because the result is paid for, and bounded by `timeout_s`, because a store may hang;
        `scope` is the shield, for whoever may have to cut it short.
        """
        address, start = (report.key, report.checksum), self._events.now()
        if self._health.why_not("put") is not None:
            self._save_later(report, replace)
            return None
        scope = anyio.CancelScope() if scope is None else scope
        scope.shield, scope.deadline = True, min(scope.deadline, anyio.current_time() + self.timeout_s)
        error: Exception = self._late()
        with scope:
            try:
                stored = await self._place.keep(report, replace=replace, claim=claim)
            except InvalidRequestError as refused:  # the config cannot be stored: no fault of the store's
                self._events(StoreFailed.of(report.key, "put", start, self._events.now(), refused))
                self._health.let_go("put")
                return None
            except Exception as failure:
                error = failure
            else:
                self._unsaved.pop(address, None)
                self._health.worked("put", report.key)
                self._tell_kept(report, stored, start)
                return stored
        self._health.failed("put", error, report.key, start)
        self._save_later(report, replace)
        return None

    def _tell_kept(self, report: TuneReport[Cfg], stored: Stored[Cfg], start: float) -> None:
        self._events(
            Persisted(
                key=report.key,
                start=start,
                end=self._events.now(),
                tune_id=report.tune_id,
                cfg=stored.cfg,
                adopted=stored.adopted,
                conflict=stored.conflict,
            )
        )

    def _late(self) -> TimeoutError:
        return TimeoutError(f"the store did not answer within {self.timeout_s:g} s")

    # What could not be stored.

    def _save_later(self, report: TuneReport[Cfg], replace: bool) -> None:
        address = (report.key, report.checksum)
        self._unsaved.pop(address, None)
        self._unsaved[address] = (report, replace)
        while len(self._unsaved) > _MOST_UNSAVED:
            del self._unsaved[next(iter(self._unsaved))]
        self._tell_saver()

    def _tell_saver(self) -> None:
        if self._unsaved:
            self._news.set()

    async def serve(self) -> None:
        """Store what could not be stored before, for as long as the chain is open."""
        async with self._place.told(self._tell_rejected):
            while True:
                self._news = anyio.Event()
                if self._unsaved:
                    with anyio.move_on_after(max(self._health.rest_left_s(), 0.01)):
                        await self._news.wait()
                    await self.flush()
                else:
                    await self._news.wait()

    async def flush(self, until: float = math.inf) -> None:
        """Try to store what is waiting, until the store fails again; others' results are adopted into memory."""
        for report, replace in list(self._unsaved.values()):
            stored = await self.keep(report, replace=replace, scope=anyio.CancelScope(deadline=until))
            if stored is None:
                return
            if stored.adopted:
                self._cache.adopt(report.key, report.checksum, stored.cfg, stored.report)

    async def close(self, until: float) -> None:
        """Try once more, whatever happened, before it is too late."""
        if self._unsaved and anyio.current_time() < until:
            self._health.forgive()
            await self.flush(until)

    def _tell_rejected(self, rejected: Rejected) -> None:
        now = self._events.now()
        self._events(RecordRejected(key=rejected.key, start=now, end=now, where=rejected.where, reason=rejected.reason))
