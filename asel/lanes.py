"""The right to run on a device: one holder at a time, so that timings are taken alone."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from math import inf
from typing import Any

import anyio
from anyio.lowlevel import RunVar

from asel.threads import Busy

__all__ = ["Lane", "LaneStuck", "alone_on", "compile_slots", "lane_for", "lowering"]


class LaneStuck(Exception):
    """A thread that was left behind still runs on the device."""


class Lane:
    """One device's turn-taking, shared by every tune in the event loop."""

    def __init__(self) -> None:
        self._taken = False
        self._stuck_at = inf
        self._changed = anyio.Event()

    @asynccontextmanager
    async def held(self, left_behind: list[Busy], patience_s: float = 0.0) -> AsyncIterator[None]:
        """Hold the lane; afterwards it is free once every thread in `left_behind` has come back.

        Whoever comes next waits for a thread that was left behind in the middle of its work, until it has
        had the lane for `patience_s`; for one that took too long, nobody does.

        Raises:
            LaneStuck: a thread that was left behind does not come back, and there is no telling when it will.
        """
        while self._taken:
            left_s = self._stuck_at - anyio.current_time()
            if left_s <= 0:
                raise LaneStuck
            with anyio.move_on_after(left_s):
                await self._changed.wait()
        self._taken = True
        stuck_at = anyio.current_time() + patience_s
        try:
            yield
        except TimeoutError:
            stuck_at = -inf
            raise
        finally:
            self._release(left_behind, stuck_at)

    def _release(self, left_behind: list[Busy], stuck_at: float) -> None:
        busy = next((thread for thread in left_behind if thread.alive), None)
        if busy is None:
            self._taken, self._stuck_at = False, inf
        else:
            self._stuck_at = stuck_at
            busy.when_done(lambda: self._release(left_behind, stuck_at))
        # Also those who wait must learn that the lane is stuck.
        woken, self._changed = self._changed, anyio.Event()
        woken.set()


_lanes: RunVar[dict[Any, Lane]] = RunVar("asel_lanes")
_slots: RunVar[anyio.CapacityLimiter] = RunVar("asel_compile_slots")
_lowering: RunVar[anyio.Lock] = RunVar("asel_lowering")


def lane_for(device: Any) -> Lane:
    """Return the running loop's lane for a device."""
    lanes = _lanes.get(None)
    if lanes is None:
        _lanes.set(lanes := {})
    return lanes.setdefault(device, Lane())


@asynccontextmanager
async def alone_on(devices: Iterable[Any], left_behind: list[Busy], patience_s: float = 0.0) -> AsyncIterator[None]:
    """Hold the lanes of all these devices, in one order for everybody."""
    async with AsyncExitStack() as stack:
        for device in sorted(devices, key=repr):
            await stack.enter_async_context(lane_for(device).held(left_behind, patience_s))
        yield


def compile_slots() -> anyio.CapacityLimiter:
    """Return the running loop's limit on compiling at once.

    One thread on two cores: a second one takes the event loop's p99 lag past 10 ms.
    """
    limiter = _slots.get(None)
    if limiter is None:
        _slots.set(limiter := anyio.CapacityLimiter(max(1, (os.cpu_count() or 1) // 2 - 1)))
    return limiter


def lowering() -> anyio.Lock:
    """Return the running loop's turn to lower a program: two that hold the interpreter by turns are no faster."""
    lock = _lowering.get(None)
    if lock is None:
        _lowering.set(lock := anyio.Lock())
    return lock
