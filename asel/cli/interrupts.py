"""Ctrl-C: ends the process at once outside of an event loop, and cancels what runs in one.

Python's own `KeyboardInterrupt` is no way out while modules are imported: extension modules print its traceback and
raise errors of their own instead.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import NoReturn, TypeVar, TypeVarTuple

__all__ = ["end_at_once", "run_loop", "say_when_stopped"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_INTERRUPTED = 130
"""What shells expect of a program that Ctrl-C has ended."""
_SHOW_CURSOR = "\x1b[?25h"


def end_at_once(said: str = "stopped") -> None:
    """From now on, have Ctrl-C print this and end the process, unless an event loop runs.

    A process that was started to ignore Ctrl-C, as shells do in the background, goes on ignoring it.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN or threading.current_thread() is not threading.main_thread():
        return  # only the main thread may set a handler

    def end(number: int, frame: FrameType | None) -> NoReturn:
        cursor = _SHOW_CURSOR if os.isatty(2) else ""  # a live display has hidden it
        os.write(2, f"{cursor}asel: {said}\n".encode())
        os._exit(_INTERRUPTED)

    end.said = said  # type: ignore[attr-defined]
    signal.signal(signal.SIGINT, end)


def say_when_stopped(said: str) -> None:
    """Have Ctrl-C print something else from now on, if it ends this process at once."""
    if hasattr(signal.getsignal(signal.SIGINT), "said"):
        end_at_once(said)


def run_loop(function: Callable[[*Ts], Awaitable[T]], *args: *Ts, backend: str = "asyncio") -> T:
    """Run a coroutine function in an event loop, which handles Ctrl-C by cancelling it."""
    import anyio

    from asel.cli.errors import problem

    outside = signal.getsignal(signal.SIGINT)
    said = getattr(outside, "said", None)
    if said is None:
        return anyio.run(function, *args, backend=backend)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return anyio.run(function, *args, backend=backend)
    except (KeyboardInterrupt, BaseExceptionGroup) as error:  # trio's is in a group, one for each task group
        if isinstance(error, BaseExceptionGroup) and error.subgroup(KeyboardInterrupt) is None:
            raise
        problem(said)
        raise KeyboardInterrupt from None
    finally:
        signal.signal(signal.SIGINT, outside)
