"""The `Sink` protocol, its optional methods, and routes, which contain the failures of sinks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from asel.events.types import CacheHit, Event

if TYPE_CHECKING:
    from asel.events.counters import AnswerCounters
    from asel.events.pipeline import Pipeline
    from asel.runtime.loop import LoopHandle

__all__ = ["PROGRAM_EXITS", "BaseSink", "Route", "Sink"]

logger = logging.getLogger("asel")
# The only exceptions that pass through: a sink's own CancelledError must not look like the emitting task's.
PROGRAM_EXITS = (KeyboardInterrupt, SystemExit)


class Sink(Protocol):
    """A destination of events: any object with an `emit(event)`.

    It is called from the telemetry thread, in the caller's context, so that no selection waits for it. A sink with
    `on_loop = True` is called on the event loop instead, before the selection returns. A sink may also define `wants`,
    `watch` and `flush`, as `BaseSink` does; to define any other method of `BaseSink`, inherit from it.
    """

    def emit(self, event: Event) -> None: ...


class BaseSink:
    """The optional attributes and methods of sinks, with their defaults."""

    on_loop: bool = False
    """Whether to call the sink on the event loop. For quick sinks that touch objects of the loop."""
    makes_spans: bool = False
    """Whether the sink leaves its span current for other sinks. Such sinks are called first."""
    counters: AnswerCounters | None = None
    """If set, these count every answer, and the sink is offered only one in 64 hits from the fast lane."""

    def emit(self, event: Event) -> None:
        """Handle an event."""
        raise NotImplementedError

    def emit_at(self, event: Event, epoch_ns: int) -> None:
        """Handle an event in the telemetry thread; `epoch_ns` is the Unix time, in nanoseconds, of its clock's zero."""
        self.emit(event)

    def wants(self, kind: type[Event]) -> bool:
        """Return whether to make events of this kind. Every selection calls this, so it must be quick."""
        return True

    def wants_hit(self) -> bool:
        """Return whether to make the event of one hit from the fast lane. Called in the caller's context."""
        return self.wants(CacheHit)

    def is_silent(self) -> bool:
        """Return whether the sink ignores all hits in any context; then `wants_hit` is not called for each."""
        return False

    def watch(self, loop: LoopHandle, statistics: Callable[[], Any] | None) -> None:
        """Receive the loop and the statistics of a selector that uses this sink."""

    def observe(self, pipeline: Pipeline) -> None:
        """Receive the queue that events come through."""

    def flush(self, timeout_s: float) -> object:
        """Finish the events received so far, within `timeout_s`. Called from a thread when a selector closes."""

    def renew(self) -> None:
        """Start afresh in a forked child."""


class _Adapter(BaseSink):
    """Gives a sink that inherits from nothing the other methods of `BaseSink`."""

    def __init__(self, sink: Any) -> None:
        names = ("emit", "wants", "watch", "flush")
        vars(self).update({name: getattr(sink, name) for name in names if hasattr(sink, name)})


class Route:
    """The calls to one sink. The first exception of the sink is logged; none goes any further."""

    __slots__ = ("_failed", "given", "name", "sink")

    def __init__(self, given: Any, name: str | None = None) -> None:
        self.given = given
        self.sink: BaseSink = given if isinstance(given, BaseSink) else _Adapter(given)
        self.name = name or type(given).__name__
        self._failed = False

    def wants(self, kind: type[Event]) -> bool:
        return bool(self.call(kind.name, self.sink.wants, kind))

    def emit(self, event: Event) -> None:
        self.call(event.name, self.sink.emit, event)

    def write(self, event: Event, epoch_ns: int) -> None:
        self.call(event.name, self.sink.emit_at, event, epoch_ns)

    @property
    def has_flush(self) -> bool:
        return getattr(self.sink.flush, "__func__", None) is not BaseSink.flush

    def flush(self, timeout_s: float) -> None:
        self.call("flush", self.sink.flush, timeout_s)

    def call(self, what: str, method: Callable[..., Any], *args: Any) -> Any:
        """Call one of the sink's methods; None if it raises."""
        try:
            return method(*args)
        except PROGRAM_EXITS:
            raise
        except BaseException:
            self.report(what)
            return None

    def report(self, what: str) -> None:
        """Log the exception being handled, if it is the sink's first."""
        if not self._failed:
            self._failed = True
            logger.exception("the sink %s failed on %r; it is kept, and not reported again", self.name, what)
