"""Ctrl-C: cancels the tasks of a running event loop; without one, it ends the process immediately.

Python's `KeyboardInterrupt` does not end a process reliably while modules are imported: extension modules print its
traceback and raise other errors instead.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import NoReturn, TypeVar, TypeVarTuple

__all__ = ["end_at_once", "run_loop", "set_stop_message"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_INTERRUPTED = 130
"""The exit code that shells expect after Ctrl-C."""
_SHOW_CURSOR = "\x1b[?25h"


def end_at_once(message: str = "stopped") -> None:
    """Make Ctrl-C print a message and end the process, except while an event loop runs.

    A process that was started with Ctrl-C ignored, as shells do in the background, continues to ignore it.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN or threading.current_thread() is not threading.main_thread():
        return  # only the main thread may set a handler

    def end(number: int, frame: FrameType | None) -> NoReturn:
        cursor = _SHOW_CURSOR if os.isatty(2) else ""  # a live display hides it
        os.write(2, f"{cursor}asel: {message}\n".encode())
        os._exit(_INTERRUPTED)

    end.message = message  # type: ignore[attr-defined]
    signal.signal(signal.SIGINT, end)


def set_stop_message(message: str) -> None:
    """Change the message of `end_at_once`, if it was called."""
    if hasattr(signal.getsignal(signal.SIGINT), "message"):
        end_at_once(message)


def run_loop(function: Callable[[*Ts], Awaitable[T]], *args: *Ts, backend: str = "asyncio") -> T:
    """Run a coroutine function in an event loop, which handles Ctrl-C by cancelling it."""
    import anyio

    from asel.cli.errors import problem

    outside = signal.getsignal(signal.SIGINT)
    message = getattr(outside, "message", None)
    if message is None:
        return anyio.run(function, *args, backend=backend)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return anyio.run(function, *args, backend=backend)
    except (KeyboardInterrupt, BaseExceptionGroup) as error:  # trio nests it in a group for each task group
        if isinstance(error, BaseExceptionGroup) and error.subgroup(KeyboardInterrupt) is None:
            raise
        problem(message)
        raise KeyboardInterrupt from None
    finally:
        signal.signal(signal.SIGINT, outside)
