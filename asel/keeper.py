"""A chain's dealings with its store: within a bound, told once for each change of state, nothing lost.

A store that fails is left alone for a while, longer each time, so that a dead one costs its callers
one timeout now and then. A result that could not be stored is kept, and stored when it works again. An open chain
probes a failed store by itself, so the end of an outage is reported even if no caller asks for a cold key.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Generic

import anyio

from asel.cache import ConfigCache
from asel.claims import Claims, late
from asel.errors import InvalidRequestError, StoreError
from asel.events import Persisted, RecordRejected, StoreFailed, StoreRead
from asel.fanout import FanOut
from asel.health import Health, in_words
from asel.kernel import Cfg
from asel.keys import CacheKey, alike
from asel.limiter import Limiter
from asel.outcomes import TuneReport
from asel.persistence import Persistence, Sought, Stored
from asel.redaction import redact
from asel.stores.protocol import Claim
from asel.stores.records import Rejected

__all__ = ["Keeper"]

_MOST_UNSAVED = 10_000
# Concurrent reads and claims. More would not be answered sooner: see MAX_IN_FLIGHT in stores/links.py.
_MAX_AT_ONCE = 64

# A result that waits to be stored, and whether it is to replace what is there.
_Unsaved = tuple[TuneReport[Cfg], bool]


class Keeper(Generic[Cfg]):
    """Finds, keeps and claims on behalf of a chain. Raises nothing but StoreError, and only when asked to find."""

    def __init__(self, place: Persistence[Cfg], cache: ConfigCache[Cfg], events: FanOut, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._place = place
        self._cache = cache
        self._events = events
        self._health: Health = Health(events, self._wake_server)
        self._limiter = Limiter(_MAX_AT_ONCE)
        self._claims: Claims[Cfg] = Claims(
            place, self._health, events, self._limiter, timeout_s, lambda *found: self.found_by(*found) is not None
        )
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
        async with self._limiter:  # the time limit starts here, so a crowd does not time out behind itself
            start = self._events.now()
            stored = await self._read(sought)
            self._events(StoreRead(key=sought.key, start=start, end=self._events.now(), found=stored is not None))
        if not self._served:
            await self._probe()
        return stored

    async def _read(self, sought: Sought[Cfg]) -> Stored[Cfg] | None:
        if (why := self._health.why_not("get")) is not None:
            raise StoreError(why)
        start = self._events.now()
        try:
            with anyio.fail_after(self.timeout_s):
                stored = self._usable(sought.key, await self._place.find(sought))
        except Exception as failure:  # a store's failure makes its tier decline
            error = failure if str(failure) or not isinstance(failure, TimeoutError) else late(self.timeout_s)
            self._health.failed("get", error, sought, start)
            raise StoreError(in_words(error)) from error
        except BaseException:
            self._health.let_go("get")
            raise
        self._health.worked("get", sought.key)
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
        async with self._limiter:
            if self._health.why_not("get") is None:
                start = self._events.now()
                try:
                    with anyio.fail_after(self.timeout_s):
                        return await self._place.reports(sought)
                except Exception as error:
                    self._health.failed("get", error, sought, start)
                finally:
                    self._health.let_go("get")
        return []

    def claim(
        self, sought: Sought[Cfg], wait_s: float, on_held_elsewhere: Callable[[], object], *, anew: bool = False
    ) -> AbstractAsyncContextManager[Claim]:
        """Hold the right to tune, as far as it can be had; where the store fails, everybody tunes.

        `on_held_elsewhere` is called where another process holds it, and not where the store failed. With
        `anew`, a record that is there does not end the wait.
        """
        return self._claims.claim(sought, wait_s, on_held_elsewhere, anew)

    def found_by(self, claim: Claim, sought: Sought[Cfg]) -> Stored[Cfg] | None:
        """Return what another process stored before the claim was ours, or while we waited for it."""
        try:
            found = None if claim.record is None else self._place.read(claim.record, sought)
            return self._usable(sought.key, found)
        except Exception as error:  # what came with the claim is no record
            self._health.failed("claim", error, sought, self._events.now())
            return None

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
        error: Exception = late(self.timeout_s)
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
        self._health.failed("put", error, Sought(report.key, report.checksum, report.environment), start)
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
            error = failure if str(failure) or not isinstance(failure, TimeoutError) else late(self.timeout_s)
        finally:
            self._health.let_go("put")
        if error is not None:
            self._health.failed("put", error, sought, start)
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

    # What could not be stored.

    def _save_later(self, report: TuneReport[Cfg], replace: bool, waiting: _Unsaved[Cfg] | None) -> None:
        if self._no_longer_waits(report, waiting):
            self._unsaved[report.key, report.checksum] = (report, replace)
        while len(self._unsaved) > _MOST_UNSAVED:
            del self._unsaved[next(iter(self._unsaved))]
        self._wake_server()

    def _no_longer_waits(self, report: TuneReport[Cfg], waiting: _Unsaved[Cfg] | None) -> bool:
        """Take out what waited when `report` was about to be stored; False where a newer result took its place."""
        address = (report.key, report.checksum)
        if self._unsaved.get(address) is not waiting:
            return False
        self._unsaved.pop(address, None)
        return True

    def _wake_server(self) -> None:
        if self._unsaved or self._health.is_failing:
            self._news.set()

    async def serve(self) -> None:
        """Store waiting results and probe a failed store, for as long as the chain is open."""
        async with self._place.told(self._tell_rejected):
            self._served = True
            try:
                await self._serve()
            finally:
                self._served = False

    async def _serve(self) -> None:
        while True:
            self._news = anyio.Event()
            if self._unsaved or self._health.is_failing:
                with anyio.move_on_after(max(self._health.rest_left_s(), 0.01)):
                    await self._news.wait()
                await self._probe()
                await self.flush()
            else:
                await self._news.wait()

    async def _probe(self) -> None:
        """Retry operations that failed, once their rest is over and if no caller is retrying them."""
        health, sought = self._health, self._health.last_failed
        if sought is None:
            return
        if health.has_failed("get") and not await self._answers(sought):
            return
        if health.has_failed("put") and not self._unsaved and health.why_not("put") is None:
            try:
                if await self._answers(sought):  # with no result waiting, a read is the only evidence
                    health.worked("put", sought.key)
            finally:
                health.let_go("put")
        if health.has_failed("claim") and health.why_not("claim") is None:
            # Not the claim that failed: another process would take it for a tune in progress.
            await self._claims.probe(replace(sought, checksum="probe"))

    async def _answers(self, sought: Sought[Cfg]) -> bool:
        try:
            await self._read(sought)
        except StoreError:
            return False
        return True

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
