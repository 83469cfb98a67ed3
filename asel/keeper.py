"""A chain's dealings with its store: within a bound, told once for each change of state, nothing lost.

A store that fails is left alone for a while, longer each time, so that a dead one costs its callers
one timeout now and then. A result that could not be stored is kept, and stored when it works again.
"""

from __future__ import annotations

import math
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Generic, Literal

import anyio
import anyio.lowlevel

from asel.cache import ConfigCache
from asel.errors import InvalidRequestError, StoreError
from asel.events import ClaimWait, Persisted, RecordRejected, StoreFailed, StoreRead
from asel.fanout import FanOut
from asel.health import Health, in_words
from asel.kernel import Cfg
from asel.keys import CacheKey, alike
from asel.outcomes import TuneReport
from asel.persistence import Persistence, Sought, Stored
from asel.redaction import redact
from asel.stores.protocol import Claim
from asel.stores.records import Rejected

__all__ = ["Keeper"]

_MOST_UNSAVED = 10_000


# A result that waits to be stored, and whether it is to replace what is there.
_Unsaved = tuple[TuneReport[Cfg], bool]


class Keeper(Generic[Cfg]):
    """Finds, keeps and claims on behalf of a chain. Raises nothing but StoreError, and only when asked to find."""

    def __init__(self, place: Persistence[Cfg], cache: ConfigCache[Cfg], events: FanOut, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._place = place
        self._cache = cache
        self._events = events
        self._health = Health(events)
        self._unsaved: dict[tuple[CacheKey, str], _Unsaved[Cfg]] = {}
        self._news = anyio.Event()
        # True iff a task of the chain's sees to what could not be stored.
        self._served = False

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
                stored = self._usable(sought.key, await self._place.find(sought))
        except Exception as failure:  # a store's failure makes its tier decline
            error = failure if str(failure) or not isinstance(failure, TimeoutError) else self._late()
            self._health.failed("get", error, sought.key, start)
            raise StoreError(in_words(error)) from error
        except BaseException:
            self._health.let_go("get")
            raise
        self._health.worked("get", sought.key)
        self._events(StoreRead(key=sought.key, start=start, end=self._events.now(), found=stored is not None))
        self._tell_saver()
        return stored

    async def peek(self, sought: Sought[Cfg]) -> Stored[Cfg] | None:
        """Return what the store has, within `timeout_s`, and tell nobody.

        Raises:
            Exception: what the store failed with.
        """
        with anyio.fail_after(self.timeout_s):
            return self._usable(sought.key, await self._place.find(sought))

    def _usable(self, key: CacheKey, stored: Stored[Cfg] | None) -> Stored[Cfg] | None:
        """Return what was found, or None where it failed in a real call of this process."""
        return None if stored is None or self._cache.is_barred(key, stored.cfg) else stored

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
    async def claim(
        self, sought: Sought[Cfg], wait_s: float, on_held_elsewhere: Callable[[], object], *, anew: bool = False
    ) -> AsyncIterator[Claim]:
        """Hold the right to tune, as far as it can be had; where the store fails, everybody tunes.

        `on_held_elsewhere` is called where another process holds it, and not where the store failed. With
        `anew`, a record that is there does not end the wait.
        """
        claim, start, stack = Claim(), self._events.now(), AsyncExitStack()
        # Outermost, so that it ends whatever the store's own block does to come and to go.
        bound = stack.enter_context(anyio.CancelScope(deadline=anyio.current_time() + self.timeout_s))
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
                failure = error if isinstance(error, Exception) else self._late()
                self._health.failed("claim", failure, sought.key, start)
        bound.deadline = math.inf
        try:
            yield claim
        finally:
            await self._give_back(stack, bound, sought.key)

    async def _give_back(self, stack: AsyncExitStack, bound: anyio.CancelScope, key: CacheKey) -> None:
        start, was_late = self._events.now(), bound.cancel_called
        bound.deadline = anyio.current_time() + self.timeout_s
        try:
            await stack.__aexit__(*sys.exc_info())
        except Exception as error:  # it ends with this process at the latest
            self._health.failed("claim", error, key, start)
        if bound.cancelled_caught and not was_late:
            self._health.failed("claim", self._late(), key, start)

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
            claim = await first.enter_async_context(self._place.claim(sought, 0.0, anew))
            if not claim.held:
                on_held_elsewhere()
            if claim.held or wait_s <= 0:
                stack.push_async_exit(first.pop_all())
                return claim
        bound.deadline = anyio.current_time() + wait_s + self.timeout_s
        async with AsyncExitStack() as second:
            claim = await second.enter_async_context(self._place.claim(sought, wait_s, anew))
            if claim.held or claim.record is None or self.found_by(claim, sought) is not None:
                stack.push_async_exit(second.pop_all())
                return claim
        # The record that ended the wait is none we can read: whoever replaces it is waited for.
        return await stack.enter_async_context(self._place.claim(sought, wait_s, True))

    def found_by(self, claim: Claim, sought: Sought[Cfg]) -> Stored[Cfg] | None:
        """Return what another process stored before the claim was ours, or while we waited for it."""
        try:
            found = None if claim.record is None else self._place.read(claim.record, sought)
            return self._usable(sought.key, found)
        except Exception as error:  # what came with the claim is no record
            self._health.failed("claim", error, sought.key, self._events.now())
            return None

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
        start, waiting = self._events.now(), self._unsaved.get((report.key, report.checksum))
        if self._health.why_not("put") is not None:
            self._save_later(report, replace, waiting)
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
                self._no_longer_waits(report, waiting)
                return None
            except Exception as failure:
                error = failure
            except BaseException:  # the bound's, or asyncio's own cancellation, which knows no shield
                self._health.let_go("put")
                self._save_later(report, replace, waiting)
                raise
            else:
                self._no_longer_waits(report, waiting)
                self._health.worked("put", report.key)
                self._tell_kept(report, stored, start)
                return self._usable(report.key, stored)
        self._health.failed("put", error, report.key, start)
        self._save_later(report, replace, waiting)
        return None

    async def withdraw(self, sought: Sought[Cfg], cfg: Cfg, instead: TuneReport[Cfg] | None) -> bool:
        """Take out the record that answers with `cfg`, and keep `instead` in its place; tell whether it was there.

        Only that very record goes: what another process has put in its place meanwhile stays. Where the store
        fails it stays, too, and whoever finds it finds out.
        """
        waiting = self._unsaved.get((sought.key, sought.checksum))
        if waiting is not None and alike(waiting[0].winner, cfg):
            self._no_longer_waits(waiting[0], waiting)
            if instead is not None:
                self._save_later(instead, waiting[1], None)
            return True
        if self._health.why_not("put") is not None:
            return False
        start, error = self._events.now(), None
        try:
            with anyio.fail_after(self.timeout_s):
                stored = await self._place.find(sought)
                if stored is None or not alike(stored.cfg, cfg):
                    return False
                # A place that cannot remove a record can replace it.
                remove = getattr(self._place, "withdraw", None)
                if remove is not None:
                    await remove(stored)
        except Exception as failure:
            error = failure if str(failure) or not isinstance(failure, TimeoutError) else self._late()
        finally:
            self._health.let_go("put")
        if error is not None:
            self._health.failed("put", error, sought.key, start)
            return False
        if instead is not None:
            await self.keep(instead, replace=remove is None)
        return True

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

    def _save_later(self, report: TuneReport[Cfg], replace: bool, waiting: _Unsaved[Cfg] | None) -> None:
        if self._no_longer_waits(report, waiting):
            self._unsaved[report.key, report.checksum] = (report, replace)
        while len(self._unsaved) > _MOST_UNSAVED:
            del self._unsaved[next(iter(self._unsaved))]
        self._tell_saver()

    def _no_longer_waits(self, report: TuneReport[Cfg], waiting: _Unsaved[Cfg] | None) -> bool:
        """Take out what waited when `report` was about to be stored; False where a newer result took its place."""
        address = (report.key, report.checksum)
        if self._unsaved.get(address) is not waiting:
            return False
        self._unsaved.pop(address, None)
        return True

    def _tell_saver(self) -> None:
        if self._unsaved:
            self._news.set()

    async def serve(self) -> None:
        """Store what could not be stored before, for as long as the chain is open."""
        async with self._place.told(self._tell_rejected):
            self._served = True
            try:
                await self._serve()
            finally:
                self._served = False

    async def _serve(self) -> None:
        while True:
            self._news = anyio.Event()
            if self._unsaved:
                with anyio.move_on_after(max(self._health.rest_left_s(), 0.01)):
                    await self._news.wait()
                await self.flush()
            else:
                await self._news.wait()

    async def catch_up(self) -> None:
        """Store what is waiting, after something else could be, where nobody else sees to it."""
        if not self._served:
            await self.flush()

    async def flush(self, until: float = math.inf) -> None:
        """Try to store what is waiting, until the store fails again; others' results are adopted into memory."""
        for address, waiting in list(self._unsaved.items()):
            if self._unsaved.get(address) is not waiting:
                continue  # a newer result took its place
            report, replace = waiting
            stored = await self.keep(report, replace=replace, scope=anyio.CancelScope(deadline=until))
            if stored is None and address in self._unsaved:
                return
            if stored is not None and stored.adopted:
                self._cache.adopt(report.key, report.checksum, stored.cfg, stored.report)

    async def close(self, until: float) -> None:
        """Try once more, whatever happened, before it is too late."""
        if self._unsaved and anyio.current_time() < until:
            self._health.forgive()
            await self.flush(until)

    def _tell_rejected(self, rejected: Rejected) -> None:
        now = self._events.now()
        self._events(
            RecordRejected(
                key=rejected.key, start=now, end=now, where=redact(rejected.where), reason=redact(rejected.reason)
            )
        )
