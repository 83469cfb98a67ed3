"""Blocking steps in daemon threads of our own.

anyio's worker threads would do, but for two things: on asyncio an abandoned thread's token is
handed back at once, as if the thread were free, and the interpreter waits for it at exit. A
candidate that hangs must do neither.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from contextvars import copy_context
from typing import Any, Generic, TypeVar

import anyio

from asel.loop import LoopHandle

__all__ = ["Busy", "run_in_thread"]

T = TypeVar("T")


class Busy:
    """A thread that was left behind at its step."""

    def __init__(self, step: _Step[Any], loop: LoopHandle) -> None:
        self.what = step.what
        self._step = step
        self._loop = loop

    @property
    def alive(self) -> bool:
        return not self._step.over

    def when_done(self, callback: Callable[[], None]) -> None:
        """Have the loop call `callback` once the thread has come back."""
        with self._step.lock:
            if not self._step.over:
                self._step.callbacks.append(callback)
                return
        callback()


class _Step(Generic[T]):
    def __init__(self, what: str, work: Callable[[], T], loop: LoopHandle, done: anyio.Event) -> None:
        self.what = what
        self.work = work
        self.loop = loop
        self.lock = threading.Lock()
        self.callbacks: list[Callable[[], object]] = [done.set]
        self.over = False
        self.result: T
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self.work()
        except BaseException as error:
            self.error = error
        del self.work  # with all it holds of the device, before anyone hears that the step is over
        # Under the lock, so that a callback is either seen here or refused by `when_done`.
        with self.lock:
            self.over = True
        for callback in self.callbacks:
            self.loop.post(callback)


_live: set[threading.Thread] = set()


def _start(step: _Step[Any]) -> None:
    def body() -> None:
        try:
            step.run()
        finally:
            _live.discard(thread)

    thread = threading.Thread(target=copy_context().run, args=(body,), name=f"asel: {step.what}", daemon=True)
    _live.add(thread)
    thread.start()


@atexit.register
def _let_threads_finish() -> None:
    # A thread that is inside JAX while the interpreter comes down may crash it. One that is about to
    # finish gets a moment; one that hangs does not keep the program.
    deadline = time.monotonic() + 0.5
    for thread in list(_live):
        thread.join(max(0.0, deadline - time.monotonic()))


async def run_in_thread(
    what: str,
    work: Callable[[], T],
    *,
    grace_s: float | Callable[[], float] = 0.0,
    left_behind: list[Busy] | None = None,
) -> T:
    """Return what `work` returns, from a thread that has the caller's context variables.

    A thread cannot be stopped. When the wait is cancelled, it is given `grace_s` seconds to come
    back; after that it is left behind, and said to be in `left_behind`.
    """
    loop, done = LoopHandle(), anyio.Event()
    step = _Step(what, work, loop, done)
    _start(step)
    try:
        await done.wait()
    finally:
        if not step.over:
            patience = grace_s() if callable(grace_s) else grace_s
            if patience > 0:
                with anyio.move_on_after(patience, shield=True):
                    await done.wait()
            if not step.over and left_behind is not None:
                left_behind.append(Busy(step, loop))
    if step.error is None:
        return step.result
    if isinstance(step.error, Exception):
        raise step.error
    # SystemExit and the like are the candidate's business, not the event loop's.
    raise RuntimeError(f"{what} raised {type(step.error).__name__}: {step.error}") from step.error
