"""Work in a thread that stands still until a test lets it go; and a gate that opens once the main thread waits."""

from __future__ import annotations

import sys
import threading
from traceback import walk_stack

import anyio
import anyio.lowlevel

from asel.runtime.threads import run_in_thread

PATIENCE_S = 10.0  # how long a gate holds before the test is called broken; never reached by a passing one


class Gate:
    """Work that says it has begun and then stands still until it is let go."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self._open = threading.Event()
        self.thread: threading.Thread | None = None

    def work(self) -> str:
        self.thread = threading.current_thread()
        self.entered.set()
        assert self._open.wait(PATIENCE_S)
        return "done"

    def open(self) -> None:
        self._open.set()

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._open.set()  # whatever the test found, no thread outlives it
        if self.thread is not None:
            self.thread.join(PATIENCE_S)


async def until_the_main_thread_waits() -> None:
    """Return once the main thread is in the wait of a condition, so that an interrupt strikes nowhere else.

    Elsewhere it may strike in a weak reference's callback, where Python ignores it.
    """
    main_thread, waiting = threading.main_thread().ident, threading.Condition.wait.__code__
    while not any(frame.f_code is waiting for frame, _ in walk_stack(sys._current_frames()[main_thread])):
        await anyio.lowlevel.checkpoint()


async def leave_behind(gate: Gate, left_behind: list, what: str = "waiting", **options) -> bool:
    """Cancel a gated step before it can end; tell whether the cancellation came through."""
    with anyio.move_on_after(0) as scope:
        await run_in_thread(what, gate.work, left_behind=left_behind, **options)
    return scope.cancelled_caught
