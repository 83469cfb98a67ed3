"""The store reads of one chain: callers of one key share one."""

from __future__ import annotations

from functools import partial
from typing import Generic

import anyio

from asel.cache import ConfigCache
from asel.errors import SelectorClosedError, StoreError
from asel.fanout import FanOut
from asel.keeper import Keeper
from asel.kernel import Cfg
from asel.keys import CacheKey
from asel.memo import Memo
from asel.pending import Shared
from asel.persistence import Sought, Stored

__all__ = ["Reading"]

# How long a miss is believed. Another process may store the key meanwhile: one that is about to tune looks again.
REREAD_AFTER_S = 5.0
_REMEMBERED = 65_536

Question = tuple[CacheKey, str, bool]


class Reading(Generic[Cfg]):
    """Reads records, and keeps what it read in memory before anyone is told."""

    def __init__(self, cache: ConfigCache[Cfg], keeper: Keeper[Cfg], events: FanOut) -> None:
        self._cache = cache
        self._keeper = keeper
        self._events = events
        self._in_flight: dict[Question, Shared[Stored[Cfg] | None]] = {}
        self._missed: Memo[float] = Memo(_REMEMBERED)
        self._scopes: set[anyio.CancelScope] = set()

    def close(self) -> None:
        """Cut every read short: whoever waits for one gets SelectorClosedError."""
        for scope in self._scopes:
            scope.cancel()

    async def load(self, sought: Sought[Cfg]) -> Stored[Cfg] | None:
        """Return the store's record, or None where it has none.

        Raises:
            StoreError: the store failed; an event has told of it.
            SelectorClosedError: the chain closed before the store answered.
        """
        question = _question(sought)
        if self.has_just_missed(sought):
            return None
        read = self._in_flight.get(question)
        if read is None:
            read = self._in_flight[question] = Shared()
        return await read.carry(partial(self._read, sought, question, read), partial(self._forget, question))

    def has_just_missed(self, sought: Sought[Cfg]) -> bool:
        """Tell whether the store was asked a moment ago, and had nothing."""
        missed = self._missed.get(_question(sought))
        return missed is not None and 0 <= self._events.now() - missed < REREAD_AFTER_S

    async def _read(self, sought: Sought[Cfg], question: Question, read: Shared[Stored[Cfg] | None]) -> None:
        scope = anyio.CancelScope()
        self._scopes.add(scope)
        try:
            with scope:
                stored = await self._keeper.find(sought)
                self._forget(question)
                read.succeed(self._remembered(sought, question, stored))
                return
        except StoreError as error:
            self._forget(question)
            read.fail(error)
            return
        finally:
            self._scopes.discard(scope)
        self._forget(question)
        read.fail(SelectorClosedError(f"the chain was closed while {sought.key.op_id!r} was read from the store"))

    def _remembered(self, sought: Sought[Cfg], question: Question, stored: Stored[Cfg] | None) -> Stored[Cfg] | None:
        if stored is None:
            self._missed.put(question, self._events.now())
            return None
        self._missed.forget(question)
        done = self._cache.remember(sought.key, sought.checksum, stored.cfg, stored.report, foreign=stored.foreign)
        return Stored(done.cfg, done.provenance.report)

    def _forget(self, question: Question) -> None:
        self._in_flight.pop(question, None)


def _question(sought: Sought[Cfg]) -> Question:
    return sought.key, sought.checksum, sought.exact
