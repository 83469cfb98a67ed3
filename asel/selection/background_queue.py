"""The queue of keys whose callers could not wait; the event loop tunes each of them once."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Awaitable, Callable
from contextvars import Context

import anyio
from anyio.abc import TaskGroup

from asel.kernels.keys import CacheKey
from asel.runtime.fork import renew_after_fork
from asel.runtime.jax_settings import current_settings
from asel.runtime.loop import LoopHandle, context_for_another_loop
from asel.selection.call import Call

__all__ = ["BackgroundQueue"]


class BackgroundQueue:
    """Takes calls from any thread, and passes each to `handle` on the selector's event loop."""

    def __init__(self, handle: Callable[[Call], Awaitable[None]]) -> None:
        self._handle = handle
        self._lock = threading.Lock()
        self._loop: LoopHandle | None = None
        self._inbox: deque[tuple[Context, Call]] = deque()
        self._queued: set[tuple[CacheKey, str]] = set()
        self._arrived, self._handled = anyio.Event(), anyio.Event()
        renew_after_fork(self)

    def renew(self) -> None:
        """Reset to a closed queue: its loop has ended, or belongs to the parent of a fork."""
        self._lock = threading.Lock()
        self._loop = None
        self._inbox.clear()
        self._queued.clear()

    def open(self, loop: LoopHandle) -> None:
        self._arrived, self._handled = anyio.Event(), anyio.Event()
        self._loop = loop

    def add(self, call: Call) -> bool:
        """Queue a call, unless its key and checksum are queued already; return False if the queue is closed."""
        address = (call.key, call.checksum)
        settings = current_settings()  # they belong to this thread, which need not be the loop's
        with self._lock:
            loop = self._loop
            if loop is None:
                return False
            if address not in self._queued:
                call.settings = settings
                self._queued.add(address)
                self._inbox.append((context_for_another_loop(), call))
                loop.post(lambda: self._arrived.set())
        return True

    async def serve(self, tasks: TaskGroup) -> None:
        """Handle queued calls, each in its own task, until cancelled."""
        while True:
            self._arrived = anyio.Event()  # before the inbox is read, so that no call is missed
            while self._inbox:
                context, call = self._inbox.popleft()
                context.run(tasks.start_soon, self._handle_one, call)  # in the caller's telemetry context
            await self._arrived.wait()

    async def _handle_one(self, call: Call) -> None:
        try:
            await self._handle(call)
        finally:
            self._queued.discard((call.key, call.checksum))
            self._notify()

    @property
    def is_empty(self) -> bool:
        return not self._queued

    @property
    def size(self) -> int:
        return len(self._queued)

    async def until_empty(self) -> None:
        while self._queued:
            await self._handled.wait()

    def close(self) -> None:
        """Drop all queued calls, and refuse new ones."""
        with self._lock:
            self._loop = None
            self._inbox.clear()
            self._queued.clear()
        self._notify()

    def _notify(self) -> None:
        woken, self._handled = self._handled, anyio.Event()
        woken.set()
