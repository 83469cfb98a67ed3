"""Hands each event to every sink, so that no sink harms another.

Sinks are called from the telemetry thread; those with `on_loop = True` and the callback `on_event` are called on the
event loop. Every selection waits for the latter, so a slow one is named in a warning: one that takes over 10 ms twice
within a hundred calls, or over half a second once. A single pause of the garbage collector, or a first call that opens
a file, is not enough.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any

from asel.events.deferred_sinks import DeferredSinks
from asel.events.pipeline import Pipeline, shared_pipeline
from asel.events.sinks import BaseSink, Route, Sink
from asel.events.types import CacheHit, Event
from asel.runtime.loop import LoopHandle

if TYPE_CHECKING:
    from asel.kernels.keys import CacheKey

__all__ = ["Dispatcher"]

logger = logging.getLogger("asel")
_SLOW_S = 0.01
_SLOW_WITHIN_CALLS = 100
_FAR_TOO_SLOW_S = 0.5


class _Callback(BaseSink):
    on_loop = True

    def __init__(self, on_event: Callable[[Event], object]) -> None:
        self.emit = on_event  # type: ignore[method-assign,assignment]


class _TimedRoute(Route):
    """A route to a sink that is called on the event loop. It warns once if the sink is slow."""

    __slots__ = ("_calls", "_slow_at", "_warned")

    def __init__(self, given: Any, name: str | None = None) -> None:
        super().__init__(given, name)
        self._calls = 0
        self._slow_at = -_SLOW_WITHIN_CALLS
        self._warned = False

    @classmethod
    def to_callback(cls, on_event: Callable[[Event], object]) -> _TimedRoute:
        return cls(_Callback(on_event), getattr(on_event, "__qualname__", type(on_event).__name__))

    def emit(self, event: Event) -> None:
        start = perf_counter()
        super().emit(event)
        self._calls += 1
        if (took_s := perf_counter() - start) > _SLOW_S:
            self._note_slow_call(took_s)

    def _note_slow_call(self, took_s: float) -> None:
        again = took_s > _FAR_TOO_SLOW_S or self._calls - self._slow_at < _SLOW_WITHIN_CALLS
        self._slow_at = self._calls
        if not again or self._warned:
            return
        self._warned = True
        advice = (
            "pass an object with an `emit(event)` in `sinks`, which is called from the telemetry thread"
            if isinstance(self.given, _Callback)
            else "without `on_loop = True` it would be called from the telemetry thread"
        )
        logger.warning(
            "%s held up the event loop for %.3f s, and every selection waits for it: make it quicker, or %s",
            f"on_event={self.name}" if isinstance(self.given, _Callback) else f"the sink {self.name}",
            took_s,
            advice,
        )


class Dispatcher:
    """Hands each event to every sink.

    `now` is the clock of event times: the loop's clock, once there is a loop. `listening` is True iff there is a sink.
    `hit(key, cfg, start)` takes an answer from the fast lane. `statistics` is passed to the `watch` method of every
    sink. `DeferredSinks` among the sinks keep their own pipeline.
    """

    def __init__(
        self,
        sinks: Iterable[Sink | DeferredSinks] = (),
        on_event: Callable[[Event], object] | None = None,
        statistics: Callable[[], Any] | None = None,
        pipeline: Pipeline | None = None,
    ) -> None:
        self._statistics = statistics
        self._loop: LoopHandle | None = None
        self.now: Callable[[], float] = monotonic
        deferred, others = [], list[Sink]()
        self._inline: tuple[_TimedRoute, ...] = ()
        for sink in sinks:
            if isinstance(sink, DeferredSinks):
                deferred.append(sink)
            elif getattr(sink, "on_loop", False) is True:
                self._inline += (_TimedRoute(sink),)
            else:
                others.append(sink)
        if others:
            deferred.append(DeferredSinks(others, shared_pipeline() if pipeline is None else pipeline))
        self._deferred = tuple(deferred)
        if on_event is not None:
            self._inline += (_TimedRoute.to_callback(on_event),)
        self._arrange()

    def _arrange(self) -> None:
        self.listening = bool(self._deferred or self._inline)
        # Most selectors have the default sinks and nothing else.
        self.hit: Callable[[CacheKey, Any, float], object]
        self.hit = self._deferred[0].hit if len(self._deferred) == 1 and not self._inline else self._hit

    def bind(self, loop: LoopHandle) -> None:
        """Call the sinks of the loop in this loop from now on, and use its clock."""
        if self._loop is not None and self._loop.native is loop.native and self._loop.is_current():
            return
        self._loop = loop
        self.now = loop.now
        for deferred in self._deferred:
            deferred.watch(loop, self._statistics)
        for route in self._inline:
            route.call("watch", route.sink.watch, loop, self._statistics)

    def add(self, sink: Sink) -> None:
        """Add a sink that is called on the loop."""
        self._inline = (*self._inline, _TimedRoute(sink))
        self._arrange()

    def remove(self, sink: Sink) -> None:
        self._inline = tuple(route for route in self._inline if route.given is not sink)
        self._arrange()

    def wants(self, kind: type[Event]) -> bool:
        """Return whether any sink wants events of this kind."""
        return any(deferred.wants(kind) for deferred in self._deferred) or self._loop_wants(kind)

    def _loop_wants(self, kind: type[Event]) -> bool:
        return any(route.wants(kind) for route in self._inline)

    def _hit(self, key: CacheKey, cfg: Any, start: float) -> None:
        for deferred in self._deferred:
            deferred.hit(key, cfg, start)
        if self._inline and self._loop_wants(CacheHit):
            self._call_on_loop(CacheHit.from_memory(key, cfg, start, self.now()))

    def __call__(self, event: Event) -> None:
        """Hand an event to the sinks. From another thread, sinks of the loop get it soon rather than at once."""
        for deferred in self._deferred:
            deferred.emit(event)
        if self._inline:
            self._call_on_loop(event)

    def _call_on_loop(self, event: Event) -> None:
        loop = self._loop
        if loop is None or loop.is_current() or not loop.post(partial(self._deliver, event)):
            self._deliver(event)

    def _deliver(self, event: Event) -> None:
        for route in self._inline:
            if route.wants(type(event)):
                route.emit(event)

    @property
    def is_flushed(self) -> bool:
        """True iff closing has nothing to wait for."""
        return all(deferred.is_flushed for deferred in self._deferred) and not any(r.has_flush for r in self._inline)

    def close(self, timeout_s: float) -> None:
        """Wait until every sink has finished its events, `timeout_s` at most. Blocks, so never call it on the loop."""
        deadline = monotonic() + timeout_s
        for route in self._inline:
            route.flush(max(0.0, deadline - monotonic()))
        for deferred in self._deferred:
            if undelivered := deferred.flush(max(0.0, deadline - monotonic())):
                logger.warning(
                    "closed with %d undelivered events: the sinks (%s) did not take them in close_grace_s=%g",
                    undelivered,
                    ", ".join(route.name for route in deferred.routes),
                    timeout_s,
                )
