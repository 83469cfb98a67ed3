"""The right to run on a device: one holder at a time, so that timings are taken alone."""

from __future__ import annotations

import os
from collections import OrderedDict
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
    """One device's turn-taking, shared by every tune in the event loop: first come, first served.

    A release wakes the next in line and nobody else: to wake every waiter would cost quadratic time with
    thousands of cold keys at once. The task that released the lane may take it again before the next one
    runs. So a tune's samples stay together, and many tunes at once end one by one, not all at the end.
    """

    def __init__(self) -> None:
        self._held = False
        self._last_holder = 0
        self._stuck_at = inf
        # Those who wait, in order: the scope that ends the wait once the lane is stuck, and the event that wakes.
        self._queue: OrderedDict[anyio.CancelScope, anyio.Event] = OrderedDict()

    @asynccontextmanager
    async def held(self, left_behind: list[Busy], patience_s: float = 0.0) -> AsyncIterator[None]:
        """Hold the lane; afterwards it is free once every thread in `left_behind` has come back.

        A thread left behind by a cancelled holder keeps the next in line waiting until it has had the lane
        for `patience_s`. After a holder that timed out, nobody waits.

        Raises:
            LaneStuck: a thread that was left behind does not come back, and there is no telling when it will.
        """
        task = anyio.get_current_task().id
        if self._held or (self._queue and task != self._last_holder):
            await self._wait_in_line()
        self._held, self._last_holder = True, task
        stuck_at = anyio.current_time() + patience_s
        try:
            yield
        except TimeoutError:
            stuck_at = -inf
            raise
        finally:
            self._release(left_behind, stuck_at)

    async def _wait_in_line(self) -> None:
        """Return once the lane is free and it is this waiter's turn."""
        while not await self._wait_for_turn() and self._held:
            # Unless the thread returned after the deadline had ended the wait, and before this task ran.
            if anyio.current_time() >= self._stuck_at:
                raise LaneStuck

    async def _wait_for_turn(self) -> bool:
        """Return whether the lane is free; False once it is stuck."""
        is_free = False
        with anyio.CancelScope(deadline=self._stuck_at) as wait:
            try:
                while not is_free:
                    woken = self._queue[wait] = anyio.Event()  # a waiter woken in vain keeps its place
                    await woken.wait()
                    is_free = not self._held
            finally:
                del self._queue[wait]
                if not is_free:
                    self._wake_next()  # this waiter may have been woken and cancelled at once
        return is_free

    def _wake_next(self) -> None:
        if self._queue and not self._held:
            next(iter(self._queue.values())).set()

    def _release(self, left_behind: list[Busy], stuck_at: float) -> None:
        busy = next((thread for thread in left_behind if thread.alive), None)
        if busy is None:
            self._held = False
            self._set_stuck_at(inf)
            self._wake_next()
        else:
            self._set_stuck_at(stuck_at)
            busy.when_done(lambda: self._release(left_behind, stuck_at))

    def _set_stuck_at(self, stuck_at: float) -> None:
        """Change when waiting becomes pointless, also for those who wait already."""
        if stuck_at != self._stuck_at:
            self._stuck_at = stuck_at
            for wait in self._queue:
                wait.deadline = stuck_at


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
