"""Where a chain's events leave it for the sinks that take their time."""

from __future__ import annotations

import functools
import os
import time
import weakref
from collections.abc import Callable, Iterable
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

from asel.events import Answer, CacheHit, Event, Sink
from asel.loop import LoopHandle
from asel.telemetry.pipeline import Pipeline, Record, Write, epoch_ns, handle, patience, report, write_all
from asel.telemetry.tally import Tally

if TYPE_CHECKING:
    from asel.keys import CacheKey

__all__ = ["Tap"]

# Of the hits, one in 64 is timed.
_TIMED_MASK = 63


class Tap:
    """A sink that hands events to others through a pipeline; without one, at once.

    Its sinks are called in the event's own context, so they see the caller's span and structlog's
    context variables. One that has `emit_at(event, epoch_ns)` is given that, any other `emit(event)`.
    """

    takes_hits = True
    never_raises = True

    def __init__(self, sinks: Iterable[Sink], pipeline: Pipeline | None) -> None:
        # Spans before the rest: measurements and log entries refer to them.
        self.sinks = tuple(sorted(sinks, key=lambda sink: not getattr(sink, "makes_spans", False)))
        self._pipeline = pipeline
        self._clock: LoopHandle | None = None
        self._now: Callable[[], float] = time.monotonic
        self._routes = tuple((_wants(sink), _writer(sink)) for sink in self.sinks)
        # A sink that counts is asked about hits only now and then.
        counting = [sink for sink in self.sinks if hasattr(sink, "tally")]
        bits = [(1 << place, _wants_hit(sink)) for place, sink in enumerate(self.sinks)]
        self._hit_routes = tuple(bit for bit, sink in zip(bits, self.sinks, strict=True) if sink not in counting)
        self._hit_timers = tuple(bit for bit, sink in zip(bits, self.sinks, strict=True) if sink in counting)
        self._sets: dict[int, tuple[Write, ...]] = {}
        self._tallies: tuple[Tally, ...] = tuple(sink.tally for sink in counting)
        for sink in self.sinks:
            if pipeline is not None and hasattr(sink, "observe"):
                sink.observe(pipeline)
        _taps.add(self)

    def wants(self, kind: type[Event]) -> bool:
        """Tell whether anyone looks at events of this kind, or counts them."""
        return (bool(self._tallies) and issubclass(kind, Answer)) or any(wants(kind) for wants, _ in self._routes)

    def hit(self, key: CacheKey, cfg: Any, start: float) -> None:
        """Tell of an answer from the fast lane: counted here, all else later."""
        try:
            nth = 1
            for tally in self._tallies:
                nth = tally.hits[key[1]]()
            takers = 0
            for bit, wants in self._hit_routes:
                if wants():
                    takers |= bit
            if nth & _TIMED_MASK == 0:
                for bit, wants in self._hit_timers:
                    if wants():
                        takers |= bit
            if takers:
                record = (self._writers(takers), copy_context(), self._clock, key, cfg, start, self._now())
                self._hand_on(record, CacheHit)
        except Exception:
            report(self, CacheHit.name)

    def _writers(self, takers: int) -> tuple[Write, ...]:
        """Return those whose bits are set: the same tuple each time, since the collector counts what is queued."""
        known = self._sets.get(takers)
        if known is None:
            known = tuple(write for place, (_, write) in enumerate(self._routes) if takers & 1 << place)
            self._sets[takers] = known
        return known

    def emit(self, event: Event) -> None:
        kind = type(event)
        if isinstance(event, Answer) and event.key is not None and event.tier != "left":
            for tally in self._tallies:
                tally.add(event.key.op_id, event.tier)
        takers = tuple(write for wants, write in self._routes if wants(kind))
        if takers:
            self._hand_on((takers, copy_context(), self._clock, event), kind)

    def _hand_on(self, record: Record, kind: type[Event]) -> None:
        if self._pipeline is None:
            handle(record)
        else:
            self._pipeline.offer(self, record, self._pipeline.ceiling * patience(kind))

    def tell(self, kind: type[Event], **facts: Any) -> None:
        """Tell the sinks of something that happened to the telemetry itself."""
        now = self._now()
        event = kind(key=None, start=now, end=now, **facts)
        takers = tuple(write for wants, write in self._routes if wants(kind))
        copy_context().run(write_all, takers, event, epoch_ns(self._clock))

    def watch(self, loop: LoopHandle, statistics: Callable[[], Any] | None) -> None:
        """Take times for the loop's, and let sinks that measure look at a chain."""
        self._clock, self._now = loop, loop.now
        for sink in self.sinks:
            if hasattr(sink, "watch"):
                sink.watch(loop, statistics)

    @property
    def is_flushed(self) -> bool:
        return self._pipeline is None or self._pipeline.is_flushed

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait until all that was emitted so far is handled; False if that takes longer."""
        return self._pipeline is None or self._pipeline.flush(timeout_s)


def _wants(sink: Any) -> Callable[[type[Event]], bool]:
    wants: Callable[[type[Event]], bool] = getattr(sink, "wants", lambda kind: True)
    return wants


def _wants_hit(sink: Any) -> Callable[[], bool]:
    wants_hit: Callable[[], bool] = getattr(sink, "wants_hit", functools.partial(_wants(sink), CacheHit))
    return wants_hit


def _writer(sink: Any) -> Write:
    write: Write | None = getattr(sink, "emit_at", None)
    return write or (lambda event, epoch_ns: sink.emit(event))


_taps: weakref.WeakSet[Tap] = weakref.WeakSet()


def _after_fork() -> None:
    for sink in {id(sink): sink for tap in list(_taps) for sink in tap.sinks}.values():
        if hasattr(sink, "after_fork"):
            sink.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
