"""The event stream of one reader."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import anyio
import anyio.lowlevel
from anyio.abc import ObjectReceiveStream

from asel.errors import InvalidRequestError
from asel.events.sinks import BaseSink
from asel.events.types import Event
from asel.runtime.loop import LoopHandle

__all__ = ["EventStream"]


class EventStream(BaseSink, ObjectReceiveStream[Event]):
    """A bounded stream of events for one reader.

    It holds at most `buffer` events: if the reader falls behind, the oldest are dropped and counted in `dropped`. It
    ends when the selector closes.
    """

    on_loop = True

    def __init__(self, buffer: int, on_close: Callable[[EventStream], None]) -> None:
        if buffer < 1:
            raise InvalidRequestError(f"events(buffer={buffer!r}): a stream holds at least one event")
        self._buffer: deque[Event] = deque(maxlen=buffer)
        self._on_close = on_close
        self._loop = LoopHandle()
        self._arrived = anyio.Event()
        self._ended = self._closed = self._receiving = False
        self.dropped = 0

    def emit(self, event: Event) -> None:
        if self._ended:
            return
        if len(self._buffer) == self._buffer.maxlen:
            self.dropped += 1
        self._buffer.append(event)
        self._wake()

    def end(self) -> None:
        """End the stream after the buffered events."""
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        # A selector without `async with` may be used in several loops, so events may come from another one.
        if self._loop.is_current():
            self._arrived.set()
        else:
            self._loop.post(lambda: self._arrived.set())

    async def receive(self) -> Event:
        if self._closed:
            raise anyio.ClosedResourceError
        if self._receiving:
            raise anyio.BusyResourceError("receiving from")
        self._receiving = True
        try:
            await anyio.lowlevel.checkpoint()
            while not self._buffer:
                if self._ended:
                    raise anyio.EndOfStream
                self._arrived = anyio.Event()
                await self._arrived.wait()
            return self._buffer.popleft()
        finally:
            self._receiving = False

    async def aclose(self) -> None:
        self._closed = True
        self.end()
        self._on_close(self)
        await anyio.lowlevel.checkpoint()
