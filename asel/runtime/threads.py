"""Blocking steps in our own daemon threads.

anyio's worker threads differ in two ways: on asyncio, an abandoned thread gives its token back at once, as if it
had finished, and the interpreter waits for it at exit. A candidate that hangs must do neither.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

import anyio
from anyio.lowlevel import RunVar

from asel.redaction import redact
from asel.runtime.loop import LoopHandle

__all__ = ["AbandonedThread", "end_grace", "leave_to_thread", "run_in_thread", "threads_are_busy"]

T = TypeVar("T")
What = str | Callable[[], str]
"""A description of a step for messages; a function if the description changes as the step proceeds."""
logger = logging.getLogger("asel")
# How long a stopped thread may take to end. A thread that runs Python needs less.
_STOP_S = 0.05


class AbandonedThread:
    """A thread whose caller stopped waiting before its step ended."""

    def __init__(self, step: _Step[Any]) -> None:
        self.what = step.what
        self._step = step

    @property
    def alive(self) -> bool:
        return not self._step.over

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the step has ended: in the loop, or here if it has already ended."""
        with self._step.lock:
            if not self._step.over:
                self._step.callbacks.append(callback)
                return
        callback()


def _exit() -> Any:
    raise SystemExit


class _Result(Generic[T]):
    """The value that a step returned, or the error that it raised."""

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
        self._thread_id: int | None = None
        self._is_stopped = False

    @property
    def what(self) -> str:
        return self._what if isinstance(self._what, str) else self._what()

    def run(self) -> None:
        result = self.result
        try:
            with self.lock:
                self._thread_id = threading.get_ident()
                work = _exit if self._is_stopped else self.work
            result.value = self.context.run(work)
            result.error = None
        except BaseException as error:
            result.error = error
        with self.lock:  # so that `stop` never interrupts the thread's next step
            self._thread_id = None
        # Drops the step's references to device arrays before the step is reported as over, while the thread counts
        # as busy: a thread that frees an array while the interpreter ends crashes inside JAX, and with it the program.
        self._what = self.what
        del work, self.work, self.context, self.result, result

    def stop(self) -> None:
        """Raise SystemExit in the thread as soon as it runs Python again.

        `except Exception` does not catch SystemExit, and a thread that ends with it prints nothing. In Python 3.13 the
        handlers of the interrupted function may miss it (python/cpython#139622); those of its callers do not.
        """
        with self.lock:
            self._is_stopped = True
            if self._thread_id is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._thread_id), ctypes.py_object(SystemExit)
                )

    def notify_waiters(self) -> None:
        # Under the lock, so that a callback is either called here or refused by `when_done`.
        with self.lock:
            self.over = True
        while self.callbacks:
            try:
                self.loop.post(self.callbacks.pop(0))
            except Exception:  # the other callbacks still have to be called
                logger.exception("the end of %s could not be reported", self.what)


class _ThreadPool:
    """The threads that run steps: one for each concurrent step, kept for `patience_s` after it."""

    def __init__(self, patience_s: float = 0.2) -> None:
        self.patience_s = patience_s
        self.forget()

    def forget(self) -> None:
        """Forget all threads: the child of a fork has none of them."""
        self.lock = threading.Lock()
        self.busy: set[_PoolThread] = set()
        self.idle: list[_PoolThread] = []

    def start(self, step: _Step[Any]) -> None:
        """Run a step in an idle thread, or else in a new one.

        Raises:
            RuntimeError: no thread can be started.
        """
        with self.lock:
            if self.idle:
                worker = self.idle.pop()  # the most recently used thread is the warmest
                self.busy.add(worker)
                worker.step = step
                worker.woken.put(None)
                return
        _PoolThread(self, step)


class _PoolThread:
    """A thread that runs one step after another, and ends when it has been idle for a while.

    Starting a thread takes longer than waking one, and the first run of a program in a new thread is slower than
    the next.
    """

    def __init__(self, pool: _ThreadPool, step: _Step[Any]) -> None:
        self.step: _Step[Any] | None = step
        self.woken: SimpleQueue[None] = SimpleQueue()
        self.woken.put(None)
        self._pool = pool
        self._thread = threading.Thread(target=self._work, name=f"asel: {step.what}", daemon=True)
        pool.busy.add(self)
        try:
            self._thread.start()
        except RuntimeError:
            pool.busy.discard(self)
            raise

    def _work(self) -> None:
        step = None
        try:
            while (step := self._next()) is not None:
                self._thread.name = f"asel: {step.what}"
                step.run()
                self._rest()  # first, so that a caller that learns of the end finds the thread idle
                step.notify_waiters()
                step = None
        finally:
            # Other code may raise an exception in this thread at any moment, such as a candidate's own timeout. That
            # is most likely when the thread wakes; its next step then goes to another thread.
            if step is not None:
                step.notify_waiters()
            while (step := self._take()) is not None:
                self._pool.start(step)

    def _next(self) -> _Step[Any] | None:
        with suppress(Empty):
            self.woken.get(timeout=self._pool.patience_s)
        return self._take()

    def _take(self) -> _Step[Any] | None:
        """Return the next step; if there is none, leave the pool."""
        with self._pool.lock:
            step, self.step = self.step, None
            if step is None:
                self._pool.busy.discard(self)
                if self in self._pool.idle:
                    self._pool.idle.remove(self)
            return step

    def _rest(self) -> None:
        with self._pool.lock:
            self._pool.busy.discard(self)
            self._pool.idle.append(self)


_pool = _ThreadPool()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.forget)


@atexit.register
def _let_threads_finish() -> None:
    # A thread inside JAX may crash the interpreter while it shuts down. A thread that is about to finish gets a
    # moment to do so; a thread that hangs does not keep the program running.
    deadline = time.monotonic() + 0.5
    while _pool.busy and time.monotonic() < deadline:
        time.sleep(0.01)


def threads_are_busy() -> bool:
    """Return whether a thread is still running a step, perhaps inside JAX."""
    return bool(_pool.busy)


def leave_to_thread(what: str, work: Callable[[], None]) -> None:
    """Run `work` in a thread without waiting for it; its exceptions are dropped.

    Raises:
        RuntimeError: no thread can be started.
    """
    _pool.start(_Step(what, work, LoopHandle()))


_graces: RunVar[set[anyio.CancelScope]] = RunVar("asel_graces")


@contextmanager
def _registered(grace: anyio.CancelScope) -> Iterator[None]:
    graces = _graces.get(None)
    if graces is None:
        _graces.set(graces := set())
    graces.add(grace)
    try:
        yield
    finally:
        graces.discard(grace)


def end_grace() -> None:
    """Stop waiting for the threads of this loop whose callers were cancelled."""
    for grace in _graces.get(set()):
        grace.cancel()


async def run_in_thread(
    what: What,
    work: Callable[[], T],
    *,
    grace_s: float | Callable[[], float] = 0.0,
    left_behind: list[AbandonedThread] | None = None,
    stops: bool = False,
) -> T:
    """Run `work` in a thread with the caller's context variables, and return its result.

    If the caller is cancelled, the thread has `grace_s` seconds to finish; after that it is abandoned and added to
    `left_behind`. With `stops`, an exception is raised in the thread first, as soon as it runs Python again: so a
    Python loop no longer competes for the interpreter. A thread that blocks or computes outside Python is not stopped.
    """
    done = anyio.Event()
    step = _Step(what, work, LoopHandle(), done.set)
    result = step.result
    _pool.start(step)
    try:
        await done.wait()
    finally:
        if not step.over:
            patience = grace_s() if callable(grace_s) else grace_s
            if patience > 0:
                with anyio.move_on_after(patience, shield=True) as grace, _registered(grace):
                    await done.wait()
            if stops and not step.over:
                step.stop()
                with anyio.move_on_after(_STOP_S, shield=True):
                    await done.wait()
            if not step.over and left_behind is not None:
                left_behind.append(AbandonedThread(step))
    if result.error is None:
        return result.value
    if isinstance(result.error, Exception):
        raise result.error
    # SystemExit and the like come from the candidate, and must not end the event loop.
    raise RuntimeError(f"{step.what} raised {type(result.error).__name__}: {redact(result.error)}") from result.error
