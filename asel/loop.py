"""Two things anyio does not offer: the running loop's clock as a value, and a call into the loop that does not wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextvars import copy_context
from typing import Any

from anyio.lowlevel import current_token

__all__ = ["LoopHandle"]


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
