"""A limit on concurrent tasks."""

from __future__ import annotations

from collections import OrderedDict

import anyio

__all__ = ["Limiter"]


class Limiter:
    """Admits a fixed number of tasks at a time, in the order in which they arrive.

    Unlike anyio's limiters it is not bound to an event loop, so one object can serve several loops in turn.
    """

    def __init__(self, limit: int) -> None:
        self._free = limit
        self._waiting: OrderedDict[anyio.Event, None] = OrderedDict()

    async def __aenter__(self) -> None:
        if self._free:
            self._free -= 1
            return
        turn = anyio.Event()
        self._waiting[turn] = None
        try:
            await turn.wait()
        except BaseException:
            if turn.is_set():  # admitted and cancelled in the same moment
                self._admit_next()
            else:
                del self._waiting[turn]
            raise

    async def __aexit__(self, *error: object) -> None:
        self._admit_next()

    def _admit_next(self) -> None:
        if self._waiting:
            turn, _ = self._waiting.popitem(last=False)
            turn.set()
        else:
            self._free += 1
