"""The right to run on a device: one holder at a time, so that timings are taken alone."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
from anyio.lowlevel import RunVar

from asel.threads import Busy

__all__ = ["Lane", "LaneStuck", "compile_slots", "lane_for"]


class LaneStuck(Exception):
    """A thread that was left behind still runs on the device."""


class Lane:
    """One device's turn-taking, shared by every tune in the event loop."""

    def __init__(self) -> None:
        self._taken = False
        self._stuck = False
        self._changed = anyio.Event()

    @asynccontextmanager
    async def held(self, left_behind: list[Busy]) -> AsyncIterator[None]:
        """Hold the lane; afterwards it is free once every thread in `left_behind` has come back.

        Raises:
            LaneStuck: the holder before left a thread behind, so there is no telling when.
        """
        while self._taken:
            if self._stuck:
                raise LaneStuck
            await self._changed.wait()
        self._taken = True
        try:
            yield
        finally:
            self._release(left_behind)

    def _release(self, left_behind: list[Busy]) -> None:
        busy = next((thread for thread in left_behind if thread.alive), None)
        if busy is None:
            self._taken = self._stuck = False
        else:
            self._stuck = True
            busy.when_done(lambda: self._release(left_behind))
        # Also those who wait must learn that the lane is stuck.
        woken, self._changed = self._changed, anyio.Event()
        woken.set()


_lanes: RunVar[dict[Any, Lane]] = RunVar("asel_lanes")
_slots: RunVar[anyio.CapacityLimiter] = RunVar("asel_compile_slots")


def lane_for(device: Any) -> Lane:
    """Return the running loop's lane for a device."""
    lanes = _lanes.get(None)
    if lanes is None:
        _lanes.set(lanes := {})
    return lanes.setdefault(device, Lane())


def compile_slots() -> anyio.CapacityLimiter:
    """Return the running loop's limit on compiling at once.

    One thread on two cores: a second one takes the event loop's p99 lag past 10 ms.
    """
    limiter = _slots.get(None)
    if limiter is None:
        _slots.set(limiter := anyio.CapacityLimiter(max(1, (os.cpu_count() or 1) // 2 - 1)))
    return limiter
