"""A selector's access to its store: callers of one key share a read, and its record is put into memory."""

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

# Seconds. How long a miss counts. Another process may store the key meanwhile, so a tune reads the store again.
REREAD_AFTER_S = 5.0
_MAX_REMEMBERED = 65_536

ReadKey = tuple[CacheKey, str, bool]


class StoreAccess(Generic[Cfg]):
    """Reads records, and puts them into memory before any caller continues.

    `for_tunes` is the store for the results and claims of tunes; None with `persist_autotune=False`.
    """

    def __init__(
        self,
        store: ConfigStore[Cfg],
        cache: ConfigCache[Cfg],
        events: Dispatcher,
        *,
        timeout_s: float,
        keeps_tunes: bool,
    ) -> None:
        self._cache = cache
        self._events = events
        self.resilient: ResilientStore[Cfg] = ResilientStore(
            store,
            events,
            timeout_s,
            is_barred=cache.quarantine.is_barred,
            adopt=lambda report, stored: cache.adopt(report.key, report.checksum, stored.cfg, stored.report),
            on_kept=self._forget_miss,
        )
        self.for_tunes = self.resilient if keeps_tunes else None
        self.peek = self.resilient.peek
        self._in_flight: dict[ReadKey, Shared[Stored[Cfg] | None]] = {}
        self._missed: BoundedMemo[float] = BoundedMemo(_MAX_REMEMBERED)
        self._scopes: set[anyio.CancelScope] = set()

    async def preload(self) -> None:
        """Load the records for this machine's devices, as far as there is time and room."""
        scope = anyio.CancelScope()
        self._scopes.add(scope)
        try:
            with scope:
                await preload(self._cache, self.resilient)
        finally:
            self._scopes.discard(scope)

    def stop_reading(self) -> None:
        """Cancel the preload and every read; callers that wait for a read get SelectorClosedError."""
        for scope in self._scopes:
            scope.cancel()

    async def load(self, query: StoreQuery[Cfg]) -> Stored[Cfg] | None:
        """Return the store's record, or None if it has none.

        Raises:
            StoreError: the store failed, and an event reported it.
            SelectorClosedError: the selector closed before the store answered.
        """
        read_key = _read_key(query)
        if self.has_just_missed(query):
            return None
        read = self._in_flight.get(read_key)
        if read is None or not read.is_in_this_loop:  # a read in another loop cannot be waited for
            read = self._in_flight[read_key] = Shared()
        return await read.carry(partial(self._read, query, read_key, read), partial(self._forget, read_key, read))

    async def load_report(self, query: StoreQuery[Cfg], cfg: Cfg) -> TuneReport[Cfg] | None:
        """Return the stored report for a config, and keep it in memory; None if the store has none."""
        try:
            stored = await self.peek(query)
        except StoreError:
            return None
        if stored is None or stored.report is None or not same_config(stored.cfg, cfg):
            return None
        self._cache.remember(query.key, query.checksum, cfg, stored.report, foreign=stored.foreign)
        return stored.report

    def has_just_missed(self, query: StoreQuery[Cfg]) -> bool:
        """Return whether the store was read within `REREAD_AFTER_S` seconds and had no record."""
        missed = self._missed.get(_read_key(query))
        return missed is not None and 0 <= self._events.now() - missed < REREAD_AFTER_S

    def _forget_miss(self, kept: TuneReport[Cfg]) -> None:
        """Have the next miss in memory read the store, which now has a record."""
        for exact in (False, True):
            self._missed.forget((kept.key, kept.checksum, exact))

    async def _read(self, query: StoreQuery[Cfg], read_key: ReadKey, read: Shared[Stored[Cfg] | None]) -> None:
        scope = anyio.CancelScope()
        self._scopes.add(scope)
        try:
            with scope:
                stored = await self.resilient.fetch(query)
                self._forget(read_key, read)
                read.succeed(self._remembered(query, read_key, stored))
                return
        except StoreError as error:
            self._forget(read_key, read)
            read.fail(error)
            return
        finally:
            self._scopes.discard(scope)
        self._forget(read_key, read)
        read.fail(SelectorClosedError(f"the selector was closed while {query.key.op_id!r} was read from the store"))

    def _remembered(self, query: StoreQuery[Cfg], read_key: ReadKey, stored: Stored[Cfg] | None) -> Stored[Cfg] | None:
        if stored is None:
            self._missed.put(read_key, self._events.now())
            return None
        self._missed.forget(read_key)
        done = self._cache.remember(query.key, query.checksum, stored.cfg, stored.report, foreign=stored.foreign)
        return Stored(done.cfg, done.provenance.report)

    def _forget(self, read_key: ReadKey, read: Shared[Stored[Cfg] | None]) -> None:
        if self._in_flight.get(read_key) is read:
            del self._in_flight[read_key]


def _read_key(query: StoreQuery[Cfg]) -> ReadKey:
    return query.key, query.checksum, query.exact
