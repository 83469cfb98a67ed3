"""Blocking steps in daemon threads of our own.

anyio's worker threads would do, but for two things: on asyncio an abandoned thread's token is
handed back at once, as if the thread were free, and the interpreter waits for it at exit. A
candidate that hangs must do neither.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

import anyio

from asel.loop import LoopHandle
from asel.redaction import redact

__all__ = ["Busy", "leave_to_thread", "run_in_thread"]

T = TypeVar("T")
What = str | Callable[[], str]
"""What a step does; a function, where that changes as it goes."""
logger = logging.getLogger("asel")


class Busy:
    """A thread that was left behind at its step."""

    def __init__(self, step: _Step[Any]) -> None:
        self.what = step.what
        self._step = step

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


class _Result(Generic[T]):
    """What a step returned, or else raised."""

    value: T
    error: BaseException | None = RuntimeError("its thread was killed")


class _Step(Generic[T]):
    def __init__(self, what: What, work: Callable[[], T], loop: LoopHandle, *callbacks: Callable[[], object]) -> None:
        self._what = what
        self.work = work
        self.loop = loop
        self.context = copy_context()
        self.lock = threading.Lock()
        self.callbacks = list(callbacks)
        self.over = False
        self.result: _Result[T] = _Result()

    @property
    def what(self) -> str:
        return self._what if isinstance(self._what, str) else self._what()

    def run(self) -> None:
        result = self.result
        try:
            result.value = self.context.run(self.work)
            result.error = None
        except BaseException as error:
            result.error = error
        # With all they hold of the device, before anyone hears that the step is over, and while the thread counts as
        # busy: one that drops an array as the interpreter ends is killed within JAX, and the program with it.
        self._what = self.what
        del self.work, self.context, self.result, result

    def tell(self) -> None:
        # Under the lock, so that a callback is either seen here or refused by `when_done`.
        with self.lock:
            self.over = True
        while self.callbacks:
            try:
                self.loop.post(self.callbacks.pop(0))
            except Exception:  # the thread has others to tell
                logger.exception("nobody could be told that %s is over", self.what)


class _Crew:
    """The threads that do steps: as many as there are steps at once, and for a moment after."""

    def __init__(self, patience_s: float = 0.2) -> None:
        self.patience_s = patience_s
        self.forget()

    def forget(self) -> None:
        """Have no threads, as the child of a fork has none."""
        self.lock = threading.Lock()
        self.busy: set[_Worker] = set()
        self.idle: list[_Worker] = []

    def start(self, step: _Step[Any]) -> None:
        """Have a step done by an idle thread, or else by a new one.

        Raises:
            RuntimeError: no thread can be started.
        """
        with self.lock:
            if self.idle:
                worker = self.idle.pop()  # the last to come is the warmest
                self.busy.add(worker)
                worker.step = step
                worker.woken.put(None)
                return
        _Worker(self, step)


class _Worker:
    """A thread that does one step after another, and ends when none has come for a while.

    Starting one takes longer than handing over to one that is there, and the first run of a program in a
    new thread is slower than the next.
    """

    def __init__(self, crew: _Crew, step: _Step[Any]) -> None:
        self.step: _Step[Any] | None = step
        self.woken: SimpleQueue[None] = SimpleQueue()
        self.woken.put(None)
        self._crew = crew
        self._thread = threading.Thread(target=self._work, name=f"asel: {step.what}", daemon=True)
        crew.busy.add(self)
        try:
            self._thread.start()
        except RuntimeError:
            crew.busy.discard(self)
            raise

    def _work(self) -> None:
        step = None
        try:
            while (step := self._next()) is not None:
                self._thread.name = f"asel: {step.what}"
                step.run()
                self._rest()  # first, so that who hears that the step is over finds it idle
                step.tell()
                step = None
        finally:
            # An exception may be thrown into a thread from outside, by a candidate's own timeout say. It strikes
            # at any moment, most likely when the thread wakes: the step it was woken for is another's then.
            if step is not None:
                step.tell()
            while (step := self._take()) is not None:
                self._crew.start(step)

    def _next(self) -> _Step[Any] | None:
        with suppress(Empty):
            self.woken.get(timeout=self._crew.patience_s)
        return self._take()

    def _take(self) -> _Step[Any] | None:
        """Return the step that was handed over; where there is none, be no longer there for any."""
        with self._crew.lock:
            step, self.step = self.step, None
            if step is None:
                self._crew.busy.discard(self)
                if self in self._crew.idle:
                    self._crew.idle.remove(self)
            return step

    def _rest(self) -> None:
        with self._crew.lock:
            self._crew.busy.discard(self)
            self._crew.idle.append(self)


_crew = _Crew()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_crew.forget)


@atexit.register
def _let_threads_finish() -> None:
    # A thread that is inside JAX while the interpreter comes down may crash it. One that is about to
    # finish gets a moment; one that hangs does not keep the program.
    deadline = time.monotonic() + 0.5
    while _crew.busy and time.monotonic() < deadline:
        time.sleep(0.01)


def leave_to_thread(what: str, work: Callable[[], None]) -> None:
    """Have `work` done by a thread and wait for nothing; whatever it raises is its own business.

    Raises:
        RuntimeError: no thread can be started.
    """
    _crew.start(_Step(what, work, LoopHandle()))


async def run_in_thread(
    what: What,
    work: Callable[[], T],
    *,
    grace_s: float | Callable[[], float] = 0.0,
    left_behind: list[Busy] | None = None,
) -> T:
    """Return what `work` returns, from a thread that has the caller's context variables.

    A thread cannot be stopped. When the wait is cancelled, it is given `grace_s` seconds to come
    back; after that it is left behind, and said to be in `left_behind`.
    """
    done = anyio.Event()
    step = _Step(what, work, LoopHandle(), done.set)
    result = step.result
    _crew.start(step)
    try:
        await done.wait()
    finally:
        if not step.over:
            patience = grace_s() if callable(grace_s) else grace_s
            if patience > 0:
                with anyio.move_on_after(patience, shield=True):
                    await done.wait()
            if not step.over and left_behind is not None:
                left_behind.append(Busy(step))
    if result.error is None:
        return result.value
    if isinstance(result.error, Exception):
        raise result.error
    # SystemExit and the like are the candidate's business, not the event loop's.
    raise RuntimeError(f"{step.what} raised {type(result.error).__name__}: {redact(result.error)}") from result.error
