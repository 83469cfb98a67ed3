"""Opens and closes a selector: its event loop, its task group, and the order in which its parts end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
from anyio.abc import TaskGroup

from asel.errors import InvalidRequestError, SelectorClosedError
from asel.events import Closed, EventStream
from asel.events.dispatcher import Dispatcher
from asel.runtime.loop import LoopHandle, raise_interrupts_at_awaits
from asel.runtime.task_group import OwnTaskGroup
from asel.runtime.threads import end_grace, run_in_thread
from asel.selection.selector_state import SelectorState
from asel.selection.store_access import StoreAccess
from asel.selection.tunes import Tunes
from asel.stores.resilient_store import ResilientStore

__all__ = ["Lifetime", "is_second_interrupt"]

_CLOSED_TOO_SOON = "the selector was closed while it was being opened"


class Lifetime:
    """Opens and closes one selector, any number of times.

    `tasks` is its task group while it is open. A selector that is not open may be used in any loop.
    """

    def __init__(
        self, state: SelectorState, events: Dispatcher, store: StoreAccess[Any] | None, tunes: Tunes[Any]
    ) -> None:
        self._state = state
        self._events = events
        self._store = store
        self._tunes = tunes
        self.tasks: TaskGroup | None = None
        self._group: OwnTaskGroup | None = None
        self._loop: LoopHandle | None = None
        self._closed: anyio.Event | None = None
        self._streams: list[EventStream] = []
        self._cancelled_tunes = 0

    # The event loop.

    def check_loop(self) -> bool:
        """Return whether the selector is open in the running loop.

        Raises:
            InvalidRequestError: it is open in another loop, whose tasks cannot be awaited here.
        """
        if self.tasks is None:
            return False
        assert self._loop is not None
        if self._loop.is_running_here():
            return True
        if self._has_lost_its_loop():
            return False
        raise InvalidRequestError(
            "this chain is open in another event loop, and cannot be awaited in this one. Ask with choose_nowait, "
            "which any thread may call; or use a BlockingSelector in code without a loop, or a chain for each loop."
        )

    def use_loop(self) -> bool:
        """Take the time from the running loop; return False if the selector is open in it and does so already.

        Raises:
            InvalidRequestError: it is open in another loop.
        """
        if self.check_loop():
            return False
        loop = LoopHandle()
        if self._loop is not None and self._loop.native is not loop.native:
            self._tunes.shift_clock(loop.now() - self._loop.now())  # trio's clocks start anywhere
        self._loop = loop
        self._events.bind(loop)
        return True

    def _has_lost_its_loop(self) -> bool:
        """Return whether the loop ended while the selector was open; if so, reset the selector to not open."""
        if self._loop is None or not self._loop.has_ended():
            return False
        self.tasks = self._group = None
        self._tunes.forget_all()
        return True

    # Opening.

    async def open(self, resources: Sequence[Any], *, preload: bool) -> None:
        """Open in the running loop, and enter the context managers in `resources`.

        Raises:
            InvalidRequestError: it is open already.
            SelectorClosedError: another task closed it before it was open.
            Exception: a resource raised it while opening.
        """
        if self._group is not None and not self._has_lost_its_loop():
            raise InvalidRequestError("this chain is open already; share the object instead of entering it again")
        if self._closed is not None and self._loop is not None and self._loop.is_running_here():
            await self._closed.wait()  # the store and the sinks are still being closed
            if self._group is not None:
                raise InvalidRequestError("this chain was opened by another task; share the object instead")
        self.use_loop()
        assert self._loop is not None
        self._state.closed = self._state.hurried = False
        raise_interrupts_at_awaits(self.close, self._serve_queue, ResilientStore.serve)
        group = self._group = OwnTaskGroup(resources)
        try:
            tasks = await group.open()
        except BaseException:
            if self._group is group:
                self._group = None
            raise
        if self._group is not group:
            group.cancel_tasks()
            raise SelectorClosedError(_CLOSED_TOO_SOON)
        self.tasks, self._cancelled_tunes = tasks, 0
        self._tunes.open(tasks, self._loop)
        tasks.start_soon(self._serve_queue, tasks)
        if self._store is not None:
            tasks.start_soon(self._store.resilient.serve)
            if preload:
                try:
                    await self._store.preload()
                except BaseException:
                    await self.close()
                    raise
                if self._group is not group:
                    raise SelectorClosedError(_CLOSED_TOO_SOON)

    async def _serve_queue(self, tasks: TaskGroup) -> None:
        try:
            await self._tunes.background_queue.serve(tasks)
        finally:
            # The task group is ending and takes no more tunes. If instead this task's loop died, the selector may be
            # open in another loop by now.
            if self.tasks is tasks:
                self._stop()

    # Closing.

    def _stop(self) -> None:
        """Refuse new calls, and end every wait with SelectorClosedError."""
        self._state.closed = True
        if self._store is not None:
            self._store.stop_reading()
        self._cancelled_tunes += self._tunes.close()

    async def close(self, *, hurried: bool = False) -> None:
        """Close, or wait for the task that is closing the selector already."""
        group, self._group = self._group, None
        if group is None:
            if self._closed is not None:
                await self._closed.wait()
            return
        self.tasks, self._closed = None, anyio.Event()
        start = self._events.now()
        self._state.hurried = hurried
        try:
            try:
                await self._end_tasks(group)
            except BaseException:
                # Also for an interrupt before the first await: asyncio raises KeyboardInterrupt between any two lines.
                self._hurry(group)
                raise
        finally:
            try:
                if self._store is not None and not self._state.hurried:
                    await self._store.resilient.close(start + self._state.close_grace_s)
                await group.close_resources(self._state.close_grace_s)
            finally:
                await self._end_events(start)
                self._closed.set()

    async def _end_tasks(self, group: OwnTaskGroup) -> None:
        """Cancel all tunes, and wait until their threads have finished or Ctrl-C interrupts."""
        with anyio.CancelScope(shield=True):
            self._stop()
            await group.end_tasks()

    def _hurry(self, group: OwnTaskGroup) -> None:
        """Stop waiting for threads, and for the store to save results."""
        self._state.hurried = True  # for tunes whose cancellation has not reached them yet
        self._stop()
        self._tunes.shared.stop_saving()
        group.cancel_tasks()
        end_grace()

    async def _end_events(self, start: float) -> None:
        """Emit `closed`, and wait for the delivery of all events."""
        self._events(
            Closed(
                key=None,
                start=start,
                end=self._events.now(),
                cancelled=self._cancelled_tunes,
                abandoned=self._tunes.shared.still_busy(),
                unsaved=0 if self._store is None else self._store.resilient.unsaved,
            )
        )
        for stream in list(self._streams):
            stream.end()
        if not self._events.is_flushed:
            # Shielded, so that the events of past answers are delivered. The flush itself is bounded by the grace.
            with anyio.CancelScope(shield=True):
                await run_in_thread("flushing telemetry", partial(self._events.close, self._state.close_grace_s))

    # Event streams.

    @asynccontextmanager
    async def stream(self, buffer: int) -> AsyncIterator[EventStream]:
        """Yield a stream of the events, until the selector closes or the block ends."""
        if not self.check_loop() and self._loop is None:
            self.use_loop()
        stream = EventStream(buffer, self._end_stream)
        self._events.add(stream)
        self._streams.append(stream)
        try:
            yield stream
        finally:
            self._end_stream(stream)

    def _end_stream(self, stream: EventStream) -> None:
        stream.end()
        self._events.remove(stream)
        if stream in self._streams:
            self._streams.remove(stream)


def is_second_interrupt(error: BaseException | None) -> bool:
    """Return whether this is a second Ctrl-C, while the body was unwinding from the first.

    On asyncio the first Ctrl-C cancels the body, on trio it is raised there.
    """
    first = None if error is None else error.__context__
    return isinstance(error, KeyboardInterrupt) and isinstance(
        first, KeyboardInterrupt | anyio.get_cancelled_exc_class()
    )
