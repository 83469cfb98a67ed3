"""Work in a thread that blocks until a test releases it; and a gate that opens once the main thread waits."""

from __future__ import annotations

import sys
import threading
from traceback import walk_stack

import anyio
import anyio.lowlevel

from asel.runtime.threads import run_in_thread

PATIENCE_S = 10.0  # after this a closed gate fails the test; no passing test waits so long


class Gate:
    """Work that signals its start and then blocks until the gate is opened."""

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
        self._open.set()  # also if the test failed, so that no thread outlives it
        if self.thread is not None:
            self.thread.join(PATIENCE_S)


async def until_the_main_thread_waits() -> None:
    """Return once the main thread is in the wait of a condition, so that an interrupt arrives there.

    Elsewhere it may arrive in a weak reference's callback, where Python ignores it.
    """
    main_thread, waiting = threading.main_thread().ident, threading.Condition.wait.__code__
    while not any(frame.f_code is waiting for frame, _ in walk_stack(sys._current_frames()[main_thread])):
        await anyio.lowlevel.checkpoint()


async def leave_behind(gate: Gate, left_behind: list, what: str = "waiting", **options) -> bool:
    """Cancel a gated step before it ends; return whether the cancellation was delivered."""
    with anyio.move_on_after(0) as scope:
        await run_in_thread(what, gate.work, left_behind=left_behind, **options)
    return scope.cancelled_caught
