"""A bound on how much is done at once."""

from __future__ import annotations

from collections import OrderedDict

import anyio

__all__ = ["Limiter"]


class Limiter:
    """Lets a number of tasks in at once, and the others in the order in which they came.

    Unlike anyio's own it belongs to no event loop while nobody waits, so one object may serve one loop after another.
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
            if turn.is_set():  # cancelled in the moment it was let in
                self._let_in()
            else:
                del self._waiting[turn]
            raise

    async def __aexit__(self, *error: object) -> None:
        self._let_in()

    def _let_in(self) -> None:
        if self._waiting:
            turn, _ = self._waiting.popitem(last=False)
            turn.set()
        else:
            self._free += 1
