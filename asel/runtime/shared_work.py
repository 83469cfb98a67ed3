"""One piece of work that many callers wait for.

State changes are synchronous; awaits surround them.
"""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import anyio

from asel.errors import InvalidRequestError
from asel.runtime.loop import LoopHandle

__all__ = ["OtherLoopError", "Shared"]

T = TypeVar("T")


def _running_loop() -> LoopHandle | None:
    try:
        return LoopHandle()
    except anyio.NoEventLoopError:
        return None


class OtherLoopError(InvalidRequestError):
    """The work belongs to another event loop, so it cannot be waited for in this one."""


class Shared(Generic[T]):
    """Work whose result is not there yet.

    It ends exactly once: with a result, with an error, or abandoned by its last waiter.
    """

    def __init__(self, id: str = "") -> None:
        self.id = id
        self.waiters = 0
        self.ended = False
        self._result: T
        self._error: Exception | None = None
        self._changed = anyio.Event()
        self._loop = _running_loop()
        # True iff a task is doing the work at this moment.
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
        """Return once there is a result or an error."""
        while not self.ended:
            await self._changed.wait()

    async def wait(self, leave: Callable[[], bool] = lambda: False) -> T | None:
        """Return the result of work that another task does; None as soon as `leave()` is true.

        `leave` is called before the wait and after each `wake`.

        Raises:
            Exception: a copy of the work's error.
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
        """Return the result, doing the work here unless another task is doing it.

        `work` calls `succeed` or `fail`. If its task is cancelled before that, the next waiter calls `work` again,
        which resumes. The last waiter to leave calls `abandon`.
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

    @property
    def is_in_this_loop(self) -> bool:
        return self._loop is None or self._loop.is_running_here()

    @property
    def is_orphaned(self) -> bool:
        """True iff the loop that did the work has ended, so that the work never will."""
        return not self.ended and self._loop is not None and self._loop.has_ended()

    def _check_loop(self) -> None:
        # An event of another loop may never wake this task.
        if not self.is_in_this_loop:
            raise OtherLoopError(
                "this key is being tuned in another event loop; a cache's tunes belong to one loop. "
                "Give each loop a cache of its own, or ask from here with choose_nowait."
            )

    def wake(self) -> None:
        """Have every waiter call its `leave` again."""
        woken, self._changed = self._changed, anyio.Event()
        woken.set()

    def _outcome(self) -> T:
        if self._error is not None:
            # A copy for each waiter: an error raised in many tasks would collect all their tracebacks.
            raise copy.copy(self._error) from self._error
        return self._result
