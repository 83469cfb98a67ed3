"""The sinks of a selector that are called from the telemetry thread."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

from asel.events.pipeline import Pipeline, QueueEntry
from asel.events.sinks import PROGRAM_EXITS, Route, Sink
from asel.events.types import Answer, CacheHit, Event
from asel.runtime.fork import renew_after_fork
from asel.runtime.loop import LoopHandle

if TYPE_CHECKING:
    from asel.kernels.keys import CacheKey

__all__ = ["DeferredSinks", "listen_again"]

# Sinks with counters are offered one hit in 64, and silent sinks are asked again that often.
_EVERY_64TH = 63
_Writers = tuple[Callable[[Event, int], object], ...]


class DeferredSinks:
    """Hands events to its sinks through a pipeline; without one, at once.

    Sinks are called in the event's own context, so they see the caller's span and structlog's context variables.

    While all of them are silent, hits are only counted. Their silence is checked again with every 64th hit of an op,
    with every other event that one of them wants, and by `listen_again`.
    """

    def __init__(self, sinks: Iterable[Sink], pipeline: Pipeline | None) -> None:
        # Sinks that make spans come first: measurements and log entries refer to the current span.
        self.routes = tuple(sorted(map(Route, sinks), key=lambda route: not route.sink.makes_spans))
        self._pipeline = pipeline
        self._clock: LoopHandle | None = None
        self._now: Callable[[], float] = time.monotonic
        askers = [(1 << place, route.sink.wants_hit, route) for place, route in enumerate(self.routes)]
        self._askers = tuple(asker for asker in askers if asker[-1].sink.counters is None)
        self._askers_when_timed = tuple(asker for asker in askers if asker[-1].sink.counters is not None)
        self._counters = tuple(route.sink.counters for route in self.routes if route.sink.counters is not None)
        self._is_silent = False
        self._writers: dict[int, _Writers] = {}
        for route in self.routes:
            if pipeline is not None:
                route.call("observe", route.sink.observe, pipeline)
        _all_deferred.add(self)
        renew_after_fork(self)

    def renew(self) -> None:
        """Start afresh in a forked child: the parent finishes its own events."""
        for route in self.routes:
            route.call("renew", route.sink.renew)

    def wants(self, kind: type[Event]) -> bool:
        """Return whether any sink wants or counts events of this kind."""
        return (bool(self._counters) and issubclass(kind, Answer)) or any(route.wants(kind) for route in self.routes)

    def hit(self, key: CacheKey, cfg: Any, start: float) -> None:
        """Handle an answer from the fast lane: count it now, and queue it for the sinks that want it."""
        nth = 1
        for counters in self._counters:
            nth = counters.hits[key[1]]()
        if self._is_silent and nth & _EVERY_64TH:
            return
        timed = not nth & _EVERY_64TH
        if timed:
            self._check_silence()
        takers = 0
        for bit, wants_hit, route in self._askers + self._askers_when_timed if timed else self._askers:
            try:
                if wants_hit():
                    takers |= bit
            except PROGRAM_EXITS:
                raise
            except BaseException:
                route.report(CacheHit.name)
        if takers:
            writers = self._writers_of(takers)
            entry = (_deliver_hit, writers, copy_context(), self._clock, key, cfg, start, self._now())
            self._hand_over(CacheHit, entry)

    def _writers_of(self, takers: int) -> _Writers:
        """Return the sinks whose bits are set; equal bits give one tuple, since many hits may be queued."""
        if takers not in self._writers:
            writers = tuple(route.write for place, route in enumerate(self.routes) if takers & 1 << place)
            self._writers[takers] = writers
        return self._writers[takers]

    def _check_silence(self) -> None:
        """Ask the sinks again whether they are silent."""
        # Without counters there would be no 64th hit, so the sinks would never be asked again.
        self._is_silent = bool(self._counters) and all(
            route.call("is_silent", route.sink.is_silent) for route in self.routes if route.sink.counters is None
        )

    def emit(self, event: Event) -> None:
        """Queue an event for the sinks that want its kind."""
        kind = type(event)
        if isinstance(event, Answer) and event.key is not None and event.tier != "left":
            for counters in self._counters:
                counters.add(event.key.op_id, event.tier)
        writers = tuple(route.write for route in self.routes if route.wants(kind))
        if writers:
            if self._is_silent:
                self._check_silence()
            self._hand_over(kind, (_deliver, writers, copy_context(), self._clock, event))

    def _hand_over(self, kind: type[Event], entry: QueueEntry) -> None:
        if self._pipeline is not None:
            self._pipeline.offer(self, kind, entry)
        else:
            deliver, *args = entry
            deliver(*args)

    def announce(self, kind: type[Event], **facts: Any) -> None:
        """Deliver an event about the telemetry itself."""
        now = self._now()
        event = kind(key=None, start=now, end=now, **facts)
        writers = tuple(route.write for route in self.routes if route.wants(kind))
        _deliver(writers, copy_context(), self._clock, event)

    def watch(self, loop: LoopHandle, statistics: Callable[[], Any] | None) -> None:
        """Take event times from this loop's clock, and pass a selector's statistics to the sinks."""
        self._clock, self._now = loop, loop.now
        for route in self.routes:
            route.call("watch", route.sink.watch, loop, statistics)
        self._check_silence()

    @property
    def is_flushed(self) -> bool:
        """True iff `flush` has nothing to wait for."""
        delivered = self._pipeline is None or self._pipeline.is_flushed
        return delivered and not any(route.has_flush for route in self.routes)

    def flush(self, timeout_s: float) -> int:
        """Wait until all events emitted so far are handled; return the number left after `timeout_s`."""
        until = time.monotonic() + timeout_s
        late = self._pipeline is not None and not self._pipeline.flush(timeout_s)
        for route in self.routes:
            route.flush(max(0.0, until - time.monotonic()))
        return self._pipeline.statistics().queued if late and self._pipeline is not None else 0


def _deliver_hit(
    writers: _Writers, context: Any, clock: LoopHandle | None, key: CacheKey, cfg: Any, start: float, end: float
) -> None:
    _deliver(writers, context, clock, CacheHit.from_memory(key, cfg, start, end))


def _deliver(writers: _Writers, context: Any, clock: LoopHandle | None, event: Event) -> None:
    context.run(_write_all, writers, event, _epoch_ns(clock))


def _write_all(writers: _Writers, event: Event, epoch_ns: int) -> None:
    # Runs in the event's own context: a sink that makes a span leaves it there for the next sink.
    for write in writers:
        write(event, epoch_ns)


def _epoch_ns(clock: LoopHandle | None) -> int:
    """Return the Unix time of a clock's zero; without a loop, of the system's monotonic clock."""
    return time.time_ns() - time.monotonic_ns() if clock is None else clock.epoch_ns()


_all_deferred: weakref.WeakSet[DeferredSinks] = weakref.WeakSet()


def listen_again() -> None:
    """Ask all deferred sinks about each hit again: telemetry was set up, so they may not be silent any more."""
    for sinks in list(_all_deferred):
        sinks._is_silent = False
