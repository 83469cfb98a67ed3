"""The store reads of one chain: callers of one key share one."""

from __future__ import annotations

from functools import partial
from typing import Generic

import anyio

from asel.cache import ConfigCache
from asel.errors import SelectorClosedError, StoreError
from asel.events import FanOut, StoreFailed, StoreRead
from asel.kernel import Cfg
from asel.keys import CacheKey
from asel.pending import Shared
from asel.persistent import Persistence, Stored

__all__ = ["Reading"]


class Reading(Generic[Cfg]):
    """Reads records, within a bound, and keeps what it read in memory before anyone is told."""

    def __init__(
        self, cache: ConfigCache[Cfg], store: Persistence[Cfg], events: FanOut, store_timeout_s: float
    ) -> None:
        self._cache = cache
        self._store = store
        self._events = events
        self._store_timeout_s = store_timeout_s
        self._in_flight: dict[tuple[CacheKey, str], Shared[Stored[Cfg] | None]] = {}
        self._scopes: set[anyio.CancelScope] = set()
        self._closed = False

    def open(self) -> None:
        self._closed = False

    def close(self) -> None:
        """Cut every read short: whoever waits for one gets SelectorClosedError."""
        self._closed = True
        for scope in self._scopes:
            scope.cancel()

    async def load(self, key: CacheKey, checksum: str) -> Stored[Cfg] | None:
        """Return the store's record, or None where it has none.

        Raises:
            StoreError: the store failed; an event has told of it.
            SelectorClosedError: the chain closed before the store answered.
        """
        address = (key, checksum)
        read = self._in_flight.get(address)
        if read is None:
            read = self._in_flight[address] = Shared()
        return await read.carry(partial(self._read, *address, read), partial(self._in_flight.pop, address, None))

    async def _read(self, key: CacheKey, checksum: str, read: Shared[Stored[Cfg] | None]) -> None:
        start = self._events.now()
        error: Exception
        scope = anyio.move_on_after(self._store_timeout_s)
        self._scopes.add(scope)
        try:
            with scope:
                stored = await self._store.load(key, checksum)
                self._events(StoreRead(key=key, start=start, end=self._events.now(), found=stored is not None))
                if stored is not None:
                    done = self._cache.remember(key, checksum, stored.cfg, stored.report)
                    stored = Stored(done.cfg, done.provenance.report)
                self._in_flight.pop((key, checksum), None)
                read.succeed(stored)
                return
            error = TimeoutError(f"the store did not answer within {self._store_timeout_s:g} s")
        except Exception as failure:  # a store's failure makes its tier decline
            error = failure
        finally:
            self._scopes.discard(scope)
        self._in_flight.pop((key, checksum), None)
        if self._closed:
            read.fail(SelectorClosedError(f"the chain was closed while {key.op_id!r} was read from the store"))
            return
        self._events(StoreFailed.of(key, "get", start, self._events.now(), error))
        told = StoreError(f"{type(error).__name__}: {error}")
        told.__cause__ = error
        read.fail(told)
