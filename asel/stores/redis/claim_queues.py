"""Queues of callers in one process that wait for the same claim; the first in each asks Redis for all of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import TypeAlias

import anyio

from asel.errors import StoreError
from asel.stores.records import Record

__all__ = ["Place", "Queues"]

# By claim, in order of arrival.
Queues: TypeAlias = "dict[Hashable, OrderedDict[Place, None]]"


class Place:
    """A caller's place in a queue."""

    def __init__(self, queues: Queues, claim: Hashable) -> None:
        self._queues = queues
        self._claim = claim
        self._news = anyio.Event()
        self._failure: StoreError | None = None
        self.record: Record | None = None
        """The record that the first in the queue found, which ends the wait."""

    async def reach_front(self) -> bool:
        """Wait to be first in the queue; return False if a caller ahead found a record.

        Raises:
            StoreError: a request of a caller ahead failed.
        """
        queue = self._queues.setdefault(self._claim, OrderedDict())
        queue[self] = None
        if next(iter(queue)) is not self and not self._news.is_set():
            await self._news.wait()
        if self._failure is not None:
            raise StoreError(str(self._failure), location=self._failure.location)
        return self.record is None

    def share(self, record: Record) -> None:
        """Pass a record to every caller in the queue."""
        for place in self._queues.get(self._claim, {}):
            place.record = record
            place._news.set()

    def fail(self, error: StoreError) -> None:
        """Fail every caller in the queue: otherwise each in turn would wait for the same timeout."""
        for place in self._queues.get(self._claim, {}):
            place._failure = error
            place._news.set()

    def leave(self) -> None:
        queue = self._queues.get(self._claim)
        if queue is None or self not in queue:
            return
        del queue[self]
        if queue:
            next(iter(queue))._news.set()
        else:
            del self._queues[self._claim]
