"""What anyio does not offer: the running loop's clock as a value, calls into it that do not wait, tasks of no one's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from typing import Any

from anyio.lowlevel import current_token

__all__ = ["LoopHandle", "in_a_task_of_its_own"]


class LoopHandle:
    """The event loop it was made in, for use from any thread.

    `now` is that loop's clock (a virtual one in tests), so every time in an event, whichever
    thread it comes from, is on one axis.
    """

    def __init__(self) -> None:
        native: Any = current_token().native_token
        self.native = native
        self._thread = threading.get_ident()
        self._post: Callable[..., object]
        self.now: Callable[[], float]
        if isinstance(native, asyncio.AbstractEventLoop):
            self._post = native.call_soon_threadsafe
            self.now = native.time
        else:
            import trio

            self._post = native.run_sync_soon
            self.now = trio.lowlevel.current_clock().current_time

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
