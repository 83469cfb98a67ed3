"""The queue of keys whose callers could not wait: the loop tunes each once."""

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
    """A queue from any thread to the chain's loop."""

    def __init__(self, see_to: Callable[[Call], Awaitable[None]]) -> None:
        self._see_to = see_to
        self._lock = threading.Lock()
        self._loop: LoopHandle | None = None
        self._inbox: deque[tuple[Context, Call]] = deque()
        self._queued: set[tuple[CacheKey, str]] = set()
        self._mail, self._progress = anyio.Event(), anyio.Event()
        renew_after_fork(self)

    def renew(self) -> None:
        """Be closed: the loop that would see to the queue has ended, or belongs to the parent of a fork."""
        self._lock = threading.Lock()
        self._loop = None
        self._inbox.clear()
        self._queued.clear()

    def open(self, loop: LoopHandle) -> None:
        self._mail, self._progress = anyio.Event(), anyio.Event()
        self._loop = loop

    def add(self, call: Call) -> bool:
        """Have the loop see to a call, once for its key and checksum; False if there is no loop to do so."""
        address = (call.key, call.checksum)
        settings = current_settings()  # of this thread, which need not be the loop's
        with self._lock:
            loop = self._loop
            if loop is None:
                return False
            if address not in self._queued:
                call.settings = settings
                self._queued.add(address)
                self._inbox.append((context_for_another_loop(), call))
                loop.post(lambda: self._mail.set())
        return True

    async def serve(self, tasks: TaskGroup) -> None:
        """See to what comes in, for as long as the chain is open."""
        while True:
            self._mail = anyio.Event()  # before the inbox is looked at, so that no mail is missed
            while self._inbox:
                context, call = self._inbox.popleft()
                context.run(tasks.start_soon, self._handle, call)  # in the caller's telemetry context
            await self._mail.wait()

    async def _handle(self, call: Call) -> None:
        try:
            await self._see_to(call)
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
            await self._progress.wait()

    def close(self) -> None:
        """Forget what is queued, and take no more."""
        with self._lock:
            self._loop = None
            self._inbox.clear()
            self._queued.clear()
        self._notify()

    def _notify(self) -> None:
        woken, self._progress = self._progress, anyio.Event()
        woken.set()
