"""One piece of work that many callers wait for: how it is joined, carried and ended.

Knows nothing of kernels. State changes are plain functions; the awaits are around them.
"""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

import anyio
from anyio.lowlevel import current_token

from asel.errors import InvalidRequestError

__all__ = ["Shared"]

T = TypeVar("T")


def _running_loop() -> Any:
    try:
        return current_token().native_token
    except anyio.NoEventLoopError:
        return None


class Shared(Generic[T]):
    """A result that is on its way.

    Ends exactly once: with a result, with an error, or abandoned by its last waiter.
    """

    def __init__(self, id: str = "") -> None:
        self.id = id
        self.waiters = 0
        self.ended = False
        self._result: T
        self._error: Exception | None = None
        self._changed = anyio.Event()
        self._loop = _running_loop()
        # True iff some task is carrying the work at this moment.
        self._carried = False

    def succeed(self, result: T) -> None:
        if not self.ended:
            self._result = result
            self._end()

    def fail(self, error: Exception) -> None:
        if not self.ended:
            self._error = error
            self._end()

    def _end(self) -> None:
        self.ended = True
        self._changed.set()

    async def until_ended(self) -> None:
        """Return once there is a result or an error, whichever it is."""
        while not self.ended:
            await self._changed.wait()

    async def wait(self, leave: Callable[[], bool] = lambda: False) -> T | None:
        """Return the result of work that some other task carries; None once `leave` says not to wait for it.

        `leave` is asked again whenever something has changed.

        Raises:
            Exception: what the work failed with, as a copy of the waiter's own.
        """
        self._check_loop()
        self.waiters += 1
        try:
            while not self.ended:
                if leave():
                    return None
                await self._changed.wait()
        finally:
            self.waiters -= 1
        return self._outcome()

    async def carry(self, work: Callable[[], Awaitable[None]], abandon: Callable[[], object]) -> T:
        """Return the result, doing the work here if nobody else is.

        `work` ends this object by `succeed` or `fail`. If its task is cancelled first, the next waiter
        calls `work` again and goes on from what was left; the last waiter to leave calls `abandon`.
        """
        self._check_loop()
        self.waiters += 1
        try:
            while not self.ended:
                if self._carried:
                    await self._changed.wait()
                    continue
                self._carried = True
                try:
                    await work()
                finally:
                    self._carried = False
                    if not self.ended:
                        self.wake()  # the next waiter carries on
        finally:
            self.waiters -= 1
            if not self.ended and self.waiters == 0:
                self.ended = True
                abandon()
        return self._outcome()

    def _check_loop(self) -> None:
        # An event of another loop would be waited for in vain, or worse.
        if self._loop is not None and _running_loop() is not self._loop:
            raise InvalidRequestError(
                "this key is being tuned in another event loop; a cache's tunes belong to one loop. "
                "Give each loop a cache of its own, or ask from here with choose_nowait."
            )

    def wake(self) -> None:
        """Have every waiter look again at how things stand."""
        woken, self._changed = self._changed, anyio.Event()
        woken.set()

    def _outcome(self) -> T:
        if self._error is not None:
            # A copy each: the same error object raised in many tasks would share one traceback.
            raise copy.copy(self._error) from self._error
        return self._result
