"""Locks on devices: one holder at a time, so that samples never overlap."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from math import inf
from typing import Any

import anyio
from anyio.lowlevel import RunVar

from asel.runtime.threads import AbandonedThread
from asel.tuning.host_lock import HostLock, host_device

__all__ = [
    "DeviceLock",
    "DeviceStuck",
    "alone_on",
    "compile_slots",
    "core_count",
    "default_compile_width",
    "device_lock_for",
    "lowering",
]


class DeviceStuck(Exception):
    """An abandoned thread still runs on the device."""


class DeviceLock:
    """The lock of one device, shared by all tunes in the event loop: first come, first served.

    A release wakes only the next in line: with thousands of cold keys, waking every waiter would take quadratic time.
    The task that released the device may take it again before the next one runs. So a tune's samples stay together,
    and many concurrent tunes end one by one instead of all at the end.
    """

    def __init__(self) -> None:
        self._held = False
        self._last_holder = 0
        self._stuck_at = inf
        # The waiters, in order: a scope that ends the wait once the device is stuck, and the event that wakes it.
        self._queue: OrderedDict[anyio.CancelScope, anyio.Event] = OrderedDict()

    @asynccontextmanager
    async def held(self, left_behind: list[AbandonedThread], patience_s: float = 0.0) -> AsyncIterator[None]:
        """Hold the device inside the block; afterwards it is free once every thread in `left_behind` has finished.

        Waiters give a cancelled holder's thread until it has had the device for `patience_s`. They do not wait for the
        thread of a holder that timed out.

        Raises:
            DeviceStuck: an abandoned thread has not finished, and may never do so.
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
        """Return once the device is free and it is this waiter's turn."""
        while not await self._wait_for_turn() and self._held:
            # False if the thread finished just after the deadline, before this task ran.
            if anyio.current_time() >= self._stuck_at:
                raise DeviceStuck

    async def _wait_for_turn(self) -> bool:
        """Return True once the device is free, or False once it is stuck."""
        is_free = False
        with anyio.CancelScope(deadline=self._stuck_at) as wait:
            try:
                while not is_free:
                    woken = self._queue[wait] = anyio.Event()  # a waiter that finds the device taken keeps its place
                    await woken.wait()
                    is_free = not self._held
            finally:
                del self._queue[wait]
                if not is_free:
                    self._wake_next()  # this waiter may have been woken and cancelled at the same time
        return is_free

    def _wake_next(self) -> None:
        if self._queue and not self._held:
            next(iter(self._queue.values())).set()

    def _release(self, left_behind: list[AbandonedThread], stuck_at: float) -> None:
        busy = next((thread for thread in left_behind if thread.alive), None)
        if busy is None:
            self._held = False
            self._set_stuck_at(inf)
            self._wake_next()
        else:
            self._set_stuck_at(stuck_at)
            busy.when_done(lambda: self._release(left_behind, stuck_at))

    def _set_stuck_at(self, stuck_at: float) -> None:
        """Change the time from which the device counts as stuck, also for current waiters."""
        if stuck_at != self._stuck_at:
            self._stuck_at = stuck_at
            for wait in self._queue:
                wait.deadline = stuck_at


_device_locks: RunVar[dict[Any, DeviceLock]] = RunVar("asel_device_locks")
_host_locks: RunVar[dict[str, HostLock]] = RunVar("asel_host_locks")
_slots: RunVar[dict[int, anyio.CapacityLimiter]] = RunVar("asel_compile_slots")
_lowering: RunVar[anyio.Lock] = RunVar("asel_lowering")


def device_lock_for(device: Any) -> DeviceLock:
    """Return the running loop's lock for a device."""
    locks = _device_locks.get(None)
    if locks is None:
        _device_locks.set(locks := {})
    return locks.setdefault(device, DeviceLock())


def _host_lock(name: str) -> HostLock:
    locks = _host_locks.get(None)
    if locks is None:
        _host_locks.set(locks := {})
    return locks.get(name) or locks.setdefault(name, HostLock(name))


@asynccontextmanager
async def alone_on(
    devices: Iterable[Any],
    left_behind: list[AbandonedThread],
    patience_s: float = 0.0,
    *,
    across_processes: bool = False,
) -> AsyncIterator[None]:
    """Hold several devices, always in one order; with `across_processes`, lock out the host's other processes."""
    devices = sorted(devices, key=repr)
    async with AsyncExitStack() as stack:
        for device in devices:
            await stack.enter_async_context(device_lock_for(device).held(left_behind, patience_s))
        if across_processes:
            for name in sorted({host_device(device) for device in devices}):
                await stack.enter_async_context(_host_lock(name).held(left_behind))
        yield


def default_compile_width() -> int:
    """Return the default number of candidates compiled at once, while requests are being served.

    That is one thread on two cores: with a second one, the event loop's p99 lag exceeds 10 ms.
    """
    return max(1, core_count() // 2 - 1)


def core_count() -> int:
    return os.cpu_count() or 1


def compile_slots(width: int) -> anyio.CapacityLimiter:
    """Return the running loop's limiter for compiling, shared by the tunes of this width."""
    slots = _slots.get(None)
    if slots is None:
        _slots.set(slots := {})
    if width not in slots:
        slots[width] = anyio.CapacityLimiter(width)
    return slots[width]


def lowering() -> anyio.Lock:
    """Return the running loop's lock for lowering: it holds the interpreter, so two at once would not be faster."""
    lock = _lowering.get(None)
    if lock is None:
        _lowering.set(lock := anyio.Lock())
    return lock
