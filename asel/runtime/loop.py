"""Event loops: their clocks, calls into them from any thread, and tasks that no task group owns.

anyio offers none of these.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context, copy_context
from typing import Any, Generic, TypeVar

import anyio
from anyio.lowlevel import current_token

from asel.redaction import redact

__all__ = [
    "LoopHandle",
    "PerLoop",
    "context_for_another_loop",
    "is_failure",
    "ordinary_errors",
    "raise_interrupts_at_awaits",
    "spawn_loop_task",
]

T = TypeVar("T")
# The number of forks between the first process and this one: a parent's event loops do not run in its child.
_generation = 0


def _count_fork() -> None:
    global _generation
    _generation += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


class LoopHandle:
    """The event loop that was running when this object was made, for use from any thread.

    `now` is that loop's clock (a virtual one in tests), so events from all threads are timed by one clock.
    """

    def __init__(self) -> None:
        native: Any = current_token().native_token
        self.native = native
        self._thread = threading.get_ident()
        self._generation = _generation
        self._post: Callable[..., object]
        self.now: Callable[[], float]
        if isinstance(native, asyncio.AbstractEventLoop):
            self._post = native.call_soon_threadsafe
            # What asyncio's own loops call, without their method around it: every hit reads the time.
            own = type(native).time is asyncio.BaseEventLoop.time
            self.now = time.monotonic if own else native.time
            virtual = getattr(native, "virtual", False)
        else:
            import trio

            clock = trio.lowlevel.current_clock()
            self._post = native.run_sync_soon
            self.now = clock.current_time
            virtual = hasattr(clock, "jump")
        # A virtual clock does not follow the wall clock, so their difference at this moment is kept.
        self._epoch_ns = self._epoch_now_ns() if virtual else None

    def epoch_ns(self) -> int:
        """Return the offset from this loop's clock to Unix time, in nanoseconds."""
        # Computed each time: the wall clock may be set, and the loop's clock stops while the machine sleeps.
        return self._epoch_now_ns() if self._epoch_ns is None else self._epoch_ns

    def _epoch_now_ns(self) -> int:
        return time.time_ns() - round(self.now() * 1e9)

    def is_current(self) -> bool:
        """Return whether the caller runs in this loop's thread."""
        return threading.get_ident() == self._thread

    def is_running_here(self) -> bool:
        """Return whether the caller runs in this loop, and not in another loop of its thread."""
        if isinstance(self.native, asyncio.AbstractEventLoop):
            return asyncio._get_running_loop() is self.native
        return self.is_current() and current_token().native_token is self.native

    def has_ended(self) -> bool:
        """Return whether the loop is closed, so that nothing will run in it any more."""
        return not self.post(lambda: None)

    def post(self, callback: Callable[[], object]) -> bool:
        """Have the loop call `callback` soon, in the caller's context; False if the loop has ended.

        In the child of a fork, it has: waking the child's copy of the loop would wake the parent's loop.
        """
        if self._generation != _generation:
            return False
        try:
            self._post(context_for_another_loop().run, callback)
        except RuntimeError:
            # asyncio raises RuntimeError itself, trio a subclass of it.
            return False
        return True


def context_for_another_loop() -> Context:
    """Return a copy of this context that does not name this event loop's library.

    anyio's `run` sets a variable to that name. An asyncio task that inherits "trio" would be mistaken for a trio task.
    """
    context = copy_context()
    if (sniffio := sys.modules.get("sniffio")) is not None:
        context.run(sniffio.current_async_library_cvar.set, None)
    return context


class PerLoop(Generic[T]):
    """One object for each event loop, made on first use there and freed with the loop."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: weakref.WeakKeyDictionary[Any, T] = weakref.WeakKeyDictionary()

    def here(self) -> T:
        """Return the running loop's object."""
        loop = current_token().native_token
        if (made := self._made.get(loop)) is None:
            made = self._made[loop] = self._make()
        return made


def is_failure(error: BaseException) -> bool:
    """Return whether an exception is a failure of the code that raised it, rather than an order to end the task.

    On asyncio any code may raise CancelledError, for instance when a task that it waits for was cancelled. If it were
    not caught, the calling task would end silently, as if cancelled, and its task group with it.
    """
    if isinstance(error, Exception):
        return True
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_failure, error.exceptions))
    if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
        return False
    try:
        cancelled = anyio.get_cancelled_exc_class()
    except anyio.NoEventLoopError:
        return True
    return not (isinstance(error, cancelled) and _is_cancelled())


@contextmanager
def ordinary_errors(what: str) -> Iterator[None]:
    """Raise every failure as an Exception, so that `except Exception` catches it."""
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        if not is_failure(error):
            raise
        raise RuntimeError(f"{what} raised {type(error).__name__}: {redact(error)}") from error


def _is_cancelled() -> bool:
    """Return whether the running task was cancelled from outside."""
    if not isinstance(current_token().native_token, asyncio.AbstractEventLoop):
        return True  # on trio, nothing else raises Cancelled
    task = asyncio.current_task()
    return anyio.current_effective_deadline() == -math.inf or (task is not None and task.cancelling() > 0)


def spawn_loop_task(work: Callable[[], Coroutine[Any, Any, None]]) -> object:
    """Run `work` in a task that belongs to the event loop and to no task group.

    For work that many tasks share and none owns. It is cancelled when the loop ends. Keep the returned object until
    then: asyncio holds tasks weakly.
    """
    native: Any = current_token().native_token
    if isinstance(native, asyncio.AbstractEventLoop):
        return native.create_task(work())
    import trio

    return trio.lowlevel.spawn_system_task(work, context=copy_context())


def raise_interrupts_at_awaits(*functions: Callable[..., Awaitable[Any]]) -> None:
    """Have trio raise KeyboardInterrupt in these functions only at an await; asyncio may raise it anywhere."""
    if not isinstance(current_token().native_token, asyncio.AbstractEventLoop):
        import trio

        for function in functions:
            trio.lowlevel.enable_ki_protection(function)
