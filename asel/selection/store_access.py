"""A selector's way to its store: reads that callers of one key share, and what is loaded, kept and withdrawn."""

from __future__ import annotations

from functools import partial
from typing import Generic

import anyio

from asel.errors import SelectorClosedError, StoreError
from asel.events.dispatcher import Dispatcher
from asel.kernels.candidates import same_config
from asel.kernels.kernel import Cfg
from asel.kernels.keys import CacheKey
from asel.runtime.bounded_memo import BoundedMemo
from asel.runtime.shared_work import Shared
from asel.selection.cache import ConfigCache
from asel.selection.preload import preload
from asel.stores.config_store import ConfigStore, Stored, StoreQuery
from asel.stores.resilient_store import ResilientStore
from asel.tuning.outcomes import TuneReport

__all__ = ["StoreAccess"]

# How long a miss is believed. Another process may store the key meanwhile: one that is about to tune looks again.
REREAD_AFTER_S = 5.0
_MAX_REMEMBERED = 65_536

Question = tuple[CacheKey, str, bool]


class StoreAccess(Generic[Cfg]):
    """Reads records, and has them in memory before any caller continues.

    `for_tunes` is where results of tunes go, and claims are made: nowhere, if the owner does not want them stored.
    """

    def __init__(
        self,
        place: ConfigStore[Cfg],
        cache: ConfigCache[Cfg],
        events: Dispatcher,
        *,
        timeout_s: float,
        keeps_tunes: bool,
    ) -> None:
        self._cache = cache
        self._events = events
        self.resilient: ResilientStore[Cfg] = ResilientStore(
            place,
            events,
            timeout_s,
            is_barred=cache.quarantine.has,
            adopt=lambda report, stored: cache.adopt(report.key, report.checksum, stored.cfg, stored.report),
            on_kept=self._forget_miss,
        )
        self.for_tunes = self.resilient if keeps_tunes else None
        self.peek = self.resilient.peek
        self._in_flight: dict[Question, Shared[Stored[Cfg] | None]] = {}
        self._missed: BoundedMemo[float] = BoundedMemo(_MAX_REMEMBERED)
        self._scopes: set[anyio.CancelScope] = set()

    async def preload(self) -> None:
        """Load what the store has for this machine's devices, as far as there is time and room."""
        scope = anyio.CancelScope()
        self._scopes.add(scope)
        try:
            with scope:
                await preload(self._cache, self.resilient)
        finally:
            self._scopes.discard(scope)

    def stop_reading(self) -> None:
        """Cut every read short, and the preload: callers that wait for one get SelectorClosedError."""
        for scope in self._scopes:
            scope.cancel()

    async def load(self, query: StoreQuery[Cfg]) -> Stored[Cfg] | None:
        """Return the store's record, or None if it has none.

        Raises:
            StoreError: the store failed, which has its event.
            SelectorClosedError: the selector closed before the store answered.
        """
        question = _question(query)
        if self.has_just_missed(query):
            return None
        read = self._in_flight.get(question)
        if read is None or not read.is_in_this_loop:  # a read in another loop cannot be waited for
            read = self._in_flight[question] = Shared()
        return await read.carry(partial(self._read, query, question, read), partial(self._forget, question, read))

    async def load_report(self, query: StoreQuery[Cfg], cfg: Cfg) -> TuneReport[Cfg] | None:
        """Return the report that came with a config, and keep it in memory; None if the store has no such."""
        try:
            stored = await self.peek(query)
        except StoreError:
            return None
        if stored is None or stored.report is None or not same_config(stored.cfg, cfg):
            return None
        self._cache.remember(query.key, query.checksum, cfg, stored.report, foreign=stored.foreign)
        return stored.report

    def has_just_missed(self, query: StoreQuery[Cfg]) -> bool:
        """Tell whether the store was asked a moment ago, and had nothing."""
        missed = self._missed.get(_question(query))
        return missed is not None and 0 <= self._events.now() - missed < REREAD_AFTER_S

    def _forget_miss(self, kept: TuneReport[Cfg]) -> None:
        """Have the store asked for this key again: memory may lose the config soon, if it is cleared or full."""
        for exact in (False, True):
            self._missed.forget((kept.key, kept.checksum, exact))

    async def _read(self, query: StoreQuery[Cfg], question: Question, read: Shared[Stored[Cfg] | None]) -> None:
        scope = anyio.CancelScope()
        self._scopes.add(scope)
        try:
            with scope:
                stored = await self.resilient.fetch(query)
                self._forget(question, read)
                read.succeed(self._remembered(query, question, stored))
                return
        except StoreError as error:
            self._forget(question, read)
            read.fail(error)
            return
        finally:
            self._scopes.discard(scope)
        self._forget(question, read)
        read.fail(SelectorClosedError(f"the selector was closed while {query.key.op_id!r} was read from the store"))

    def _remembered(self, query: StoreQuery[Cfg], question: Question, stored: Stored[Cfg] | None) -> Stored[Cfg] | None:
        if stored is None:
            self._missed.put(question, self._events.now())
            return None
        self._missed.forget(question)
        done = self._cache.remember(query.key, query.checksum, stored.cfg, stored.report, foreign=stored.foreign)
        return Stored(done.cfg, done.provenance.report)

    def _forget(self, question: Question, read: Shared[Stored[Cfg] | None]) -> None:
        if self._in_flight.get(question) is read:
            del self._in_flight[question]


def _question(query: StoreQuery[Cfg]) -> Question:
    return query.key, query.checksum, query.exact
