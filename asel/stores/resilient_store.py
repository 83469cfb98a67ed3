"""A selector's view of its store: calls have a time limit, each outage is reported once, and no result is lost.

A store that fails is not tried for a while, longer each time, so that a dead store costs its callers only
an occasional timeout. A result that could not be stored is kept, and stored when the store works again. An open
selector probes a failed store by itself, so the end of an outage is reported even if no caller asks for a cold key.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from dataclasses import replace
from typing import Generic

import anyio

from asel.errors import InvalidRequestError, StoreError
from asel.events import Persisted, RecordRejected, StoreFailed, StoreRead
from asel.events.dispatcher import Dispatcher
from asel.kernels.candidates import same_config
from asel.kernels.kernel import Cfg
from asel.kernels.keys import CacheKey
from asel.redaction import redact
from asel.runtime.limiter import Limiter
from asel.runtime.loop import ordinary_errors
from asel.stores.circuit_breaker import CircuitBreaker, timeout_error
from asel.stores.claims import Claims
from asel.stores.config_store import ConfigStore, ConfigStoreDefaults, Stored, StoreQuery
from asel.stores.protocol import Claim
from asel.stores.records import Rejected
from asel.stores.summaries import RecordSummary
from asel.stores.unsaved_results import UnsavedResult, UnsavedResults
from asel.tuning.outcomes import TuneReport

__all__ = ["ResilientStore"]

# Concurrent reads and claims. More would not be answered sooner: see MAX_IN_FLIGHT in redis/client.py.
_MAX_AT_ONCE = 64


class ResilientStore(Generic[Cfg]):
    """Finds, keeps and claims on behalf of a selector. Only `find` and `peek` raise."""

    def __init__(
        self,
        store: ConfigStore[Cfg],
        events: Dispatcher,
        timeout_s: float,
        *,
        is_barred: Callable[[CacheKey, Cfg], bool],
        adopt: Callable[[TuneReport[Cfg], Stored[Cfg]], object],
        on_kept: Callable[[TuneReport[Cfg]], object],
    ) -> None:
        self.timeout_s = timeout_s
        self._store = store
        self._is_barred = is_barred
        self._adopt = adopt
        self._on_kept = on_kept
        self._events = events
        self._breaker: CircuitBreaker = CircuitBreaker(events, self._wake_task)
        self._limiter = Limiter(_MAX_AT_ONCE)
        self._claims: Claims[Cfg] = Claims(
            store, self._breaker, events, self._limiter, timeout_s, lambda *found: self.found_by(*found) is not None
        )
        self._unsaved: UnsavedResults[Cfg] = UnsavedResults()
        self._changed = anyio.Event()
        # True iff a task of the selector stores the unsaved results.
        self._is_serving = False

    @property
    def changes_together(self) -> bool:
        """Whether the processes that share the store change configs at the same points of one program."""
        return self._store.changes_together

    @property
    def unsaved(self) -> int:
        """The number of results that wait for the store to work again."""
        return len(self._unsaved)

    async def fetch(self, query: StoreQuery[Cfg]) -> Stored[Cfg] | None:
        """Return the stored config for a query, within `timeout_s`, and emit `store_read`.

        Raises:
            StoreError: it failed, or it is not tried for a while after a failure.
        """
        async with self._limiter.slot():  # the time limit starts here, so that waiting for a slot does not count
            start = self._events.now()
            stored = await self._read(query)
            self._events(StoreRead(key=query.key, start=start, end=self._events.now(), found=stored is not None))
        if not self._is_serving:
            await self._probe()
        return stored

    async def _read(self, query: StoreQuery[Cfg]) -> Stored[Cfg] | None:
        if (why := self._breaker.begin_attempt("get")) is not None:
            raise StoreError(why)
        with self._breaker.attempt("get", query, self.timeout_s):
            stored = await self._store.find(query)
        self._breaker.note_success("get", query.key)
        return self._usable(query.key, stored)

    async def peek(self, query: StoreQuery[Cfg]) -> Stored[Cfg] | None:
        """Return the stored config for a query, within `timeout_s`, without reporting anything.

        Raises:
            StoreError: it failed.
        """
        try:
            with anyio.fail_after(self.timeout_s), ordinary_errors("the store"):
                return self._usable(query.key, await self._store.find(query))
        except Exception as error:
            raise StoreError(f"{type(error).__name__}: {redact(error)}") from error

    def _usable(self, key: CacheKey, stored: Stored[Cfg] | None) -> Stored[Cfg] | None:
        """Return a stored config, or None if it failed in a real call of this process."""
        return None if stored is None or self._is_barred(key, stored.cfg) else stored

    async def reports(self, query: StoreQuery[Cfg]) -> list[TuneReport[Cfg]]:
        """Return the reports of earlier tunes of a key; [] if the store does not answer in time."""
        return await self._read_reports(query, lambda: self._store.reports(query))

    async def _read_reports(
        self, query: StoreQuery[Cfg], ask: Callable[[], Awaitable[list[TuneReport[Cfg]]]]
    ) -> list[TuneReport[Cfg]]:
        async with self._limiter.slot():
            if self._breaker.begin_attempt("get") is None:
                with suppress(StoreError), self._breaker.attempt("get", query, self.timeout_s):
                    return await ask()
        return []

    @property
    def can_list(self) -> bool:
        """Whether the store can list its records."""
        return getattr(type(self._store), "summaries", None) is not ConfigStoreDefaults.summaries

    async def preload(self, devices: Iterable[str], take: Callable[[list[RecordSummary]], bool]) -> int:
        """Pass the records of some devices to `take`, batch by batch, and return their number.

        Ends when there are no more, when `take` returns False, or after `timeout_s`. A failure is reported, not raised.
        """
        count = 0
        query: StoreQuery[Cfg] = StoreQuery(CacheKey(", ".join(devices), "*", "*"), "", {})
        if self._breaker.begin_attempt("get") is not None:
            return 0
        with suppress(StoreError), self._breaker.attempt("get", query):
            with anyio.move_on_after(self.timeout_s) as scope:
                for device in devices:
                    async with aclosing(self._store.summaries(device)) as batches:
                        async for batch in batches:
                            count += len(batch)
                            if not take(batch):
                                return count
            if scope.cancelled_caught and not count:
                raise timeout_error(self.timeout_s)
        return count

    def read_summary(self, summary: RecordSummary, query: StoreQuery[Cfg]) -> Stored[Cfg] | None:
        """Return the config of a preloaded record; None if it cannot be used, or if it failed in a real call."""
        try:
            return self._usable(query.key, self._store.read_summary(summary, query))
        except Exception as error:  # a user's own store may raise anything; this may be any thread
            self._emit_rejected(Rejected("the store", f"{type(error).__name__}: {redact(error)}", query.key))
            return None

    async def earlier_tunes(self, query: StoreQuery[Cfg], limit: int) -> list[TuneReport[Cfg]]:
        """Return the reports of the same kernel for other calls, newest first; [] if the store does not answer."""
        return await self._read_reports(query, lambda: self._store.earlier_tunes(query, limit))

    def claim(
        self, query: StoreQuery[Cfg], wait_s: float, on_held_elsewhere: Callable[[], object], *, anew: bool = False
    ) -> AbstractAsyncContextManager[Claim]:
        """Hold the right to tune, if the store grants it; if the store fails, every process tunes.

        `on_held_elsewhere` is called if another process holds it, and not if the store failed. With
        `anew`, an existing record does not end the wait.
        """
        return self._claims.claim(query, wait_s, on_held_elsewhere, anew)

    def found_by(self, claim: Claim, query: StoreQuery[Cfg]) -> Stored[Cfg] | None:
        """Return the config that another process stored before this one acquired the claim."""
        try:
            found = None if claim.record is None else self._store.read(claim.record, query)
            return self._usable(query.key, found)
        except Exception as error:  # the store put something else than a record into the claim
            self._breaker.note_failure("claim", error, query, self._events.now())
            return None

    async def keep(
        self,
        report: TuneReport[Cfg],
        *,
        replace: bool,
        claim: Claim | None = None,
        scope: anyio.CancelScope | None = None,
    ) -> Stored[Cfg] | None:
        """Store a result and return the stored config; None if that has to wait until the store works again.

        Shielded, because a tune is expensive, and bounded by `timeout_s`, because a store may hang.
        `scope` becomes the shield, so that a caller can give it a deadline.
        """
        start, before = self._events.now(), self._unsaved.of(report.key, report.checksum)
        if self._breaker.begin_attempt("put") is not None:
            self._save_later(report, replace, before)
            return None
        scope = anyio.CancelScope() if scope is None else scope
        scope.shield, scope.deadline = True, min(scope.deadline, anyio.current_time() + self.timeout_s)
        error: Exception = timeout_error(self.timeout_s)
        with scope:
            try:
                with ordinary_errors("the store"):
                    stored = await self._store.keep(report, replace=replace, claim=claim)
            except InvalidRequestError as refused:  # the config cannot be stored; the store works
                self._events(StoreFailed.of(report.key, "put", start, self._events.now(), refused))
                self._breaker.end_attempt("put")
                self._unsaved.remove(report, before)
                return None
            except Exception as failure:
                error = failure
            except BaseException:  # the time limit's, or asyncio's own cancellation, which ignores shields
                self._breaker.end_attempt("put")
                self._save_later(report, replace, before)
                raise
            else:
                self._unsaved.remove(report, before)
                self._breaker.note_success("put", report.key)
                self._report_kept(report, stored, start)
                return self._usable(report.key, stored)
        self._breaker.note_failure("put", error, StoreQuery(report.key, report.checksum, report.environment), start)
        self._save_later(report, replace, before)
        return None

    async def withdraw(self, query: StoreQuery[Cfg], cfg: Cfg, instead: TuneReport[Cfg] | None) -> bool:
        """Remove the record whose config is `cfg`, and store `instead` in its place; return whether it was removed.

        A record that another process has put in its place meanwhile stays. If the store fails, the record stays as
        well.
        """
        before = self._unsaved.of(query.key, query.checksum)
        if before is not None and same_config(before.report.winner, cfg):
            self._unsaved.remove(before.report, before)
            if instead is not None:
                self._save_later(instead, before.replace, None)
            return True
        if self._breaker.begin_attempt("put") is not None:
            return False
        try:
            with self._breaker.attempt("put", query, self.timeout_s):
                stored = await self._store.find(query)
                if stored is None or not same_config(stored.cfg, cfg):
                    return False
                if self._store.can_withdraw:
                    await self._store.withdraw(stored)
        except StoreError:
            return False
        if instead is not None:
            await self.keep(instead, replace=not self._store.can_withdraw)
        return True

    def _report_kept(self, report: TuneReport[Cfg], stored: Stored[Cfg], start: float) -> None:
        self._on_kept(report)
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

    # Results that could not be stored.

    def _save_later(self, report: TuneReport[Cfg], replace: bool, before: UnsavedResult | None) -> None:
        if self._store.changes_together:  # by then the other ranks may have another answer
            return
        self._unsaved.put(UnsavedResult(report, replace), before)
        self._wake_task()

    def _wake_task(self) -> None:
        if self._unsaved or self._breaker.is_failing:
            self._changed.set()

    async def serve(self) -> None:
        """Store unsaved results and probe a failed store, while the selector is open."""
        async with self._store.rejections_to(self._emit_rejected):
            self._is_serving = True
            try:
                await self._serve()
            finally:
                self._is_serving = False

    async def _serve(self) -> None:
        while True:
            self._changed = anyio.Event()
            if self._unsaved or self._breaker.is_failing:
                with anyio.move_on_after(max(self._breaker.backoff_left_s(), 0.01)):
                    await self._changed.wait()
                await self._probe()
                await self.flush()
            else:
                await self._changed.wait()

    async def _probe(self) -> None:
        """Retry the failed operations whose back-off is over and that no caller is retrying."""
        breaker, query = self._breaker, self._breaker.last_failed
        if query is None:
            return
        if breaker.has_failed("get") and not await self._answers(query):
            return
        if breaker.has_failed("put") and not self._unsaved and breaker.begin_attempt("put") is None:
            try:
                if await self._answers(query):  # with no result waiting, a read is the only evidence
                    breaker.note_success("put", query.key)
            finally:
                breaker.end_attempt("put")
        if breaker.has_failed("claim") and breaker.begin_attempt("claim") is None:
            # Not the claim that failed: to another process, it would look like a tune in progress.
            await self._claims.probe(replace(query, checksum="probe"))

    async def _answers(self, query: StoreQuery[Cfg]) -> bool:
        try:
            await self._read(query)
        except StoreError:
            return False
        return True

    async def catch_up(self) -> None:
        """Store the unsaved results after a successful put, unless a task of the selector does so."""
        if not self._is_serving:
            await self.flush()

    async def flush(self, until: float = math.inf) -> None:
        """Store the unsaved results until the store fails again. If another process was first, adopt its result."""
        for waiting in self._unsaved.all():
            report = waiting.report
            if self._unsaved.of(report.key, report.checksum) is not waiting:
                continue  # a newer result took its place
            stored = await self.keep(report, replace=waiting.replace, scope=anyio.CancelScope(deadline=until))
            if stored is None and self._unsaved.of(report.key, report.checksum) is not None:
                return
            if stored is not None and stored.adopted:
                self._adopt(report, stored)

    async def close(self, until: float) -> None:
        """Try once more to store the unsaved results, even during a back-off."""
        if self._unsaved and anyio.current_time() < until:
            self._breaker.allow_all()
            await self.flush(until)

    def _emit_rejected(self, rejected: Rejected) -> None:
        now = self._events.now()
        self._events(
            RecordRejected(
                key=rejected.key, start=now, end=now, where=redact(rejected.where), reason=redact(rejected.reason)
            )
        )
