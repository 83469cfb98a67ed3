"""Work in a thread that blocks until a test releases it."""

from __future__ import annotations

import threading

import anyio

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


async def leave_behind(gate: Gate, left_behind: list, what: str = "waiting", **options) -> bool:
    """Cancel a gated step before it ends; return whether the cancellation was delivered."""
    with anyio.move_on_after(0) as scope:
        await run_in_thread(what, gate.work, left_behind=left_behind, **options)
    return scope.cancelled_caught
