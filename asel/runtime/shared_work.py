"""One piece of work that many callers wait for: how it is joined, carried and ended.

Knows nothing of kernels. State changes are plain functions; the awaits are around them.
"""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import anyio

from asel.errors import InvalidRequestError
from asel.runtime.loop import LoopHandle

__all__ = ["InAnotherLoop", "Shared"]

T = TypeVar("T")


def _running_loop() -> LoopHandle | None:
    try:
        return LoopHandle()
    except anyio.NoEventLoopError:
        return None


class InAnotherLoop(InvalidRequestError):
    """The work belongs to another event loop, so it cannot be waited for in this one."""


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

        `leave` is called again after each `wake`.

        Raises:
            Exception: the error of the work, copied for this waiter.
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

        `work` ends this object by `succeed` or `fail`. If its task is cancelled first, the next waiter
        calls `work` again, which resumes; the last waiter to leave calls `abandon`.
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
        """True iff the loop that did the work has ended, so that no task will end it."""
        return not self.ended and self._loop is not None and self._loop.has_ended()

    def _check_loop(self) -> None:
        # An event of another loop would be waited for in vain, or worse.
        if not self.is_in_this_loop:
            raise InAnotherLoop(
                "this key is being tuned in another event loop; a cache's tunes belong to one loop. "
                "Give each loop a cache of its own, or ask from here with choose_nowait."
            )

    def wake(self) -> None:
        """Have every waiter call its `leave` again."""
        woken, self._changed = self._changed, anyio.Event()
        woken.set()

    def _outcome(self) -> T:
        if self._error is not None:
            # A copy each: the same error object raised in many tasks would share one traceback.
            raise copy.copy(self._error) from self._error
        return self._result
