"""An event loop in its own thread, with an open context manager, for code without a loop."""

from __future__ import annotations

import atexit
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from typing import Any, TypeVar

import anyio
from anyio.from_thread import BlockingPortal

from asel.errors import InvalidRequestError, SelectorClosedError
from asel.runtime.loop import LoopHandle, context_for_another_loop

__all__ = ["LoopThread"]

T = TypeVar("T")
_AT_EXIT_S = 10.0
"""How long the end of the program waits for each loop that is still running; closing a selector takes less."""
_SIGNAL_CHECK_S = 0.5
"""How often a wait checks for Ctrl-C: a signal just before Python blocks on a lock does not interrupt the lock."""


class LoopThread:
    """Runs an event loop in a daemon thread, inside the block that `held` opens, until it is stopped.

    At the end of the program it is stopped, after Python has waited for all non-daemon threads. If Ctrl-C ended the
    program, `hurry` is called first.

    Raises:
        BaseException: `held` raised it while opening.
    """

    def __init__(self, held: AbstractAsyncContextManager[Any], backend: str, hurry: Callable[[], object]) -> None:
        self._held = held
        self.hurry = hurry
        self._pid = os.getpid()
        self._opened: Future[BlockingPortal] = Future()
        self._ended: Future[None] = Future()
        self._loop: LoopHandle | None = None
        self._thread = threading.Thread(target=self._run, args=(backend,), name="asel loop", daemon=True)
        self._thread.start()
        try:
            self._portal = _result(self._opened)
        except KeyboardInterrupt:
            self._opened.add_done_callback(lambda _: self.stop())
            raise
        _running.add(self)

    def _run(self, backend: str) -> None:
        try:
            anyio.run(self._serve, backend=backend)
        except BaseException as error:
            while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
                error = error.exceptions[0]  # the portal's task group wraps errors
            if not self._opened.done():
                self._opened.set_exception(error)
            self._ended.set_exception(error)
        else:
            self._ended.set_result(None)

    async def _serve(self) -> None:
        self._loop, self._stop = LoopHandle(), anyio.Event()
        async with BlockingPortal() as portal, self._held:
            self._opened.set_result(portal)
            await self._stop.wait()

    def call(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Run a coroutine function in the loop and return its result. Ctrl-C in the caller cancels the call.

        Raises:
            InvalidRequestError: this is the loop's own thread, or another process.
            SelectorClosedError: the loop was stopped.
        """
        if os.getpid() != self._pid:
            raise InvalidRequestError("this selector was opened before a fork; open one in each process")
        if threading.current_thread() is self._thread:
            raise InvalidRequestError("called on the selector's own event loop, which cannot wait; use choose_nowait")
        try:
            future: Future[T] = self._start(partial(self._portal.start_task_soon, function, *args))
        except RuntimeError:
            raise SelectorClosedError("the selector is closed") from None
        try:
            return _result(future)
        except BaseException:
            future.cancel()
            raise

    def _start(self, start: Callable[[], Future[T]]) -> Future[T]:
        try:
            return start()
        except RuntimeError:
            # The loop has ended, or both loops are trio's: a task of one cannot call into the other from its thread.
            with ThreadPoolExecutor(1) as thread:
                return thread.submit(context_for_another_loop().run, start).result()

    def run_soon(self, work: Callable[[], object]) -> None:
        """Run `work` in the loop, before later calls, without waiting for it; do nothing if the loop has ended."""
        if (loop := self._loop) is not None:
            loop.post(work)

    def stop(self) -> None:
        """Have the loop close `held` and end. Does not wait, since the garbage collector may call it."""
        if (loop := self._loop) is not None:
            loop.post(self._stop.set)

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until the loop has ended.

        Raises:
            BaseException: `held` raised it while closing.
        """
        if os.getpid() == self._pid and threading.current_thread() is not self._thread:
            _result(self._ended, timeout_s)


def _result(future: Future[T], timeout_s: float | None = None) -> T:
    """Return the result of a future, or raise its error; Ctrl-C ends the wait.

    Raises:
        TimeoutError: there was no result within `timeout_s`.
    """
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    while (left_s := deadline - time.monotonic()) > 0 and not future.done():
        with suppress(TimeoutError):  # the wait's, or the future's own, which is raised below
            return future.result(min(left_s, _SIGNAL_CHECK_S))
    return future.result(0)


_running: weakref.WeakSet[LoopThread] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    running = list(_running)
    was_interrupted = getattr(sys, "last_type", None) is KeyboardInterrupt  # no code caught it
    for loop in running:
        if was_interrupted:
            loop.hurry()
        loop.stop()
    for loop in running:
        try:
            loop.join(_AT_EXIT_S)
        except Exception:  # the selector has reported it to its sinks, and the program is ending
            continue
