"""The store reads of one chain: callers of one key share one."""

from __future__ import annotations

from functools import partial
from typing import Generic

from asel.cache import ConfigCache, Provenance
from asel.errors import StoreError
from asel.events import FanOut, StoreFailed
from asel.kernel import Cfg
from asel.keys import CacheKey
from asel.pending import Pending
from asel.persistent import Persistence, Stored

__all__ = ["Reading"]


class Reading(Generic[Cfg]):
    """Reads records, and keeps what it read in memory before anyone is told."""

    def __init__(self, cache: ConfigCache[Cfg], store: Persistence[Cfg], events: FanOut) -> None:
        self._cache = cache
        self._store = store
        self._events = events
        self._in_flight: dict[tuple[CacheKey, str], Pending[Stored[Cfg] | None]] = {}

    async def load(self, key: CacheKey, checksum: str) -> Stored[Cfg] | None:
        """Return the store's record, or None where it has none.

        Raises:
            StoreError: the store failed; an event has told of it.
        """
        address = (key, checksum)
        read = self._in_flight.get(address)
        if read is None:
            read = self._in_flight[address] = Pending()
        return await read.carry(partial(self._read, *address, read), partial(self._in_flight.pop, address, None))

    async def _read(self, key: CacheKey, checksum: str, read: Pending[Stored[Cfg] | None]) -> None:
        start = self._events.now()
        try:
            stored = await self._store.load(key, checksum)
        except Exception as error:  # a store's failure makes its tier decline
            self._events(StoreFailed.of(key, "get", start, self._events.now(), error))
            failure = StoreError(f"{type(error).__name__}: {error}")
            failure.__cause__ = error
            self._in_flight.pop((key, checksum), None)
            read.fail(failure)
            return
        if stored is not None:
            self._cache.remember(key, checksum, stored.cfg, Provenance("persistent", stored.report))
        self._in_flight.pop((key, checksum), None)
        read.succeed(stored)
