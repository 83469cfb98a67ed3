"""What anyio does not offer: the running loop's clock as a value, calls into it that do not wait, tasks of no one's."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from typing import Any

from anyio.lowlevel import current_token

__all__ = ["LoopHandle", "in_a_task_of_its_own"]


class LoopHandle:
    """The event loop it was made in, for use from any thread.

    `now` is that loop's clock (a virtual one in tests), so every time in an event, whichever
    thread it comes from, is on one axis. `epoch_ns` is when that clock was at zero, on the wall's.
    """

    def __init__(self) -> None:
        native: Any = current_token().native_token
        self.native = native
        self._thread = threading.get_ident()
        self._post: Callable[..., object]
        self.now: Callable[[], float]
        if isinstance(native, asyncio.AbstractEventLoop):
            self._post = native.call_soon_threadsafe
            # What asyncio's own loops would call, without the call in between: hits are timed.
            own = type(native).time is asyncio.BaseEventLoop.time
            self.now = time.monotonic if own else native.time
            virtual = getattr(native, "virtual", False)
        else:
            import trio

            clock = trio.lowlevel.current_clock()
            self._post = native.run_sync_soon
            self.now = clock.current_time
            virtual = hasattr(clock, "jump")
        # A virtual clock has no fixed relation to the wall's, so it is given one, from here on.
        self._epoch_ns = self._epoch_now_ns() if virtual else None

    def epoch_ns(self) -> int:
        """Return what to add to a time of this loop, in nanoseconds, to get the time of day."""
        # Asked anew each time: the wall's clock is set, and a machine that sleeps stops the loop's.
        return self._epoch_now_ns() if self._epoch_ns is None else self._epoch_ns

    def _epoch_now_ns(self) -> int:
        return time.time_ns() - round(self.now() * 1e9)

    def is_current(self) -> bool:
        """Tell whether the calling code runs in this loop's thread."""
        return threading.get_ident() == self._thread

    def post(self, callback: Callable[[], object]) -> bool:
        """Have the loop call `callback` soon, in the caller's context; False if the loop has ended."""
        try:
            self._post(copy_context().run, callback)
        except RuntimeError:
            # asyncio raises RuntimeError, trio its RunFinishedError, which is one.
            return False
        return True


def in_a_task_of_its_own(work: Callable[[], Coroutine[Any, Any, None]]) -> object:
    """Have `work` done by a task that belongs to the loop and to no task group; keep what is returned until it ends.

    For what many tasks share and none of them owns. It is cancelled when the loop ends.
    """
    native: Any = current_token().native_token
    if isinstance(native, asyncio.AbstractEventLoop):
        return native.create_task(work())
    import trio

    return trio.lowlevel.spawn_system_task(work)
