"""A limit on concurrent tasks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from asel.runtime.loop import PerLoop

__all__ = ["Limiter"]


class Limiter:
    """Admits a fixed number of tasks of an event loop at a time, in the order in which they arrive.

    Unlike anyio's limiters it is not bound to an event loop, so one object can serve several. The limit applies to each
    loop separately: a task of one loop cannot wait for a task of another.
    """

    def __init__(self, limit: int) -> None:
        self._gates = PerLoop(lambda: _Gate(limit))

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Hold one of the slots while the block runs."""
        gate = self._gates.here()  # looked up once: a task of a loop that died may be closed in another
        await gate.enter()
        try:
            yield
        finally:
            gate.admit_next()

    @property
    def free(self) -> int:
        """The number of tasks of this loop that would be admitted at once."""
        return self._gates.here().free


class _Gate:
    def __init__(self, free: int) -> None:
        self.free = free
        self._waiting: OrderedDict[anyio.Event, None] = OrderedDict()

    async def enter(self) -> None:
        if self.free:
            self.free -= 1
            return
        turn = anyio.Event()
        self._waiting[turn] = None
        try:
            await turn.wait()
        except BaseException:
            if turn.is_set():  # admitted and cancelled in the same moment
                self.admit_next()
            else:
                del self._waiting[turn]
            raise

    def admit_next(self) -> None:
        if self._waiting:
            turn, _ = self._waiting.popitem(last=False)
            turn.set()
        else:
            self.free += 1
