"""The `Sink` protocol, its optional methods, and the route that contains a sink's failures."""

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
# A sink's own CancelledError would look like a cancellation of the task that emits. These two are the program's.
PROGRAM_EXITS = (KeyboardInterrupt, SystemExit)


class Sink(Protocol):
    """A destination of events: any object with an `emit(event)`.

    It is called from the telemetry thread, in the caller's context, so that no selection waits for it. A sink with
    `on_loop = True` is called on the event loop instead, before the selection returns. It may define `wants`, `watch`
    and `flush` as `BaseSink` has them; to define more of them, inherit from `BaseSink`.
    """

    def emit(self, event: Event) -> None: ...


class BaseSink:
    """A sink's optional parts, with their defaults."""

    on_loop: bool = False
    """Whether it is called on the event loop: for quick sinks that touch objects of the loop."""
    makes_spans: bool = False
    """Whether it leaves a span current, for the sinks after it."""
    counters: AnswerCounters | None = None
    """Counters that count every answer for the sink, which then gets only one in 64 hits from the fast lane."""

    def emit(self, event: Event) -> None:
        """Take an event."""
        raise NotImplementedError

    def emit_at(self, event: Event, epoch_ns: int) -> None:
        """Take an event in the telemetry thread; its clock was at zero `epoch_ns` nanoseconds after 1970 began."""
        self.emit(event)

    def wants(self, kind: type[Event]) -> bool:
        """Tell whether to make events of this kind. Asked by every caller, so it must be quick."""
        return True

    def wants_hit(self) -> bool:
        """Tell the same of one hit from the fast lane, in the caller's context."""
        return self.wants(CacheHit)

    def is_silent(self) -> bool:
        """Tell whether the sink ignores all hits, whatever their context: it is then not asked about each."""
        return False

    def watch(self, loop: LoopHandle, statistics: Callable[[], Any] | None) -> None:
        """Note a selector and the loop it runs in."""

    def observe(self, pipeline: Pipeline) -> None:
        """Note the queue that events come through."""

    def flush(self, timeout_s: float) -> object:
        """Finish the events taken so far, within `timeout_s`; called from a thread when a selector closes."""

    def renew(self) -> None:
        """Begin anew in a forked child."""


class _Adapter(BaseSink):
    """A sink that inherits from nothing. Of a `BaseSink`'s methods it may define the four named here."""

    def __init__(self, sink: Any) -> None:
        names = ("emit", "wants", "watch", "flush")
        vars(self).update({name: getattr(sink, name) for name in names if hasattr(sink, name)})


class Route:
    """The route to one sink. An exception of the sink is reported once and goes no further."""

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
        """Log the exception that the sink has just raised, if it is its first."""
        if not self._failed:
            self._failed = True
            logger.exception("the sink %s failed on %r; it is kept, and not reported again", self.name, what)
