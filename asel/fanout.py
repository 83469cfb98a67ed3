"""From what happens to whoever listens: each event goes to every sink, and no sink hurts another."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from asel.events import CacheHit, Event, Sink
from asel.loop import LoopHandle

if TYPE_CHECKING:
    from asel.keys import CacheKey

__all__ = ["FanOut"]

logger = logging.getLogger("asel")


def _anything(kind: type[Event]) -> bool:
    return True


_Route = tuple[Callable[[type[Event]], bool], Callable[[Event], object]]
_SLOW_S = 0.1


class FanOut:
    """Hands each event to every sink, on one loop, and keeps a failing one from hurting the rest.

    `now` is the clock events are stamped with: the loop's, once there is one. `listening`: there is
    a sink at all. `hit(key, cfg, start)` tells of an answer from the fast lane. `statistics` is handed to
    the sinks that watch.
    """

    def __init__(
        self,
        sinks: Iterable[Sink] = (),
        on_event: Callable[[Event], object] | None = None,
        statistics: Callable[[], Any] | None = None,
    ) -> None:
        self._sinks: tuple[Sink, ...] = tuple(sinks)
        self._on_event = on_event
        self._statistics = statistics
        self._loop: LoopHandle | None = None
        self.now: Callable[[], float] = time.monotonic
        self._reported: set[int] = set()
        self._settle()

    def bind(self, loop: LoopHandle) -> None:
        """Hand events over to this loop from now on, and take the time from it."""
        if self._loop is not None and self._loop.native is loop.native and self._loop.is_current():
            return
        self._loop = loop
        self.now = loop.now
        for watch in self._having("watch"):
            self._guard(watch, "watch", loop, self._statistics)

    def add(self, sink: Sink) -> None:
        self._sinks = (*self._sinks, sink)
        self._settle()

    def remove(self, sink: Sink) -> None:
        self._sinks = tuple(other for other in self._sinks if other is not sink)
        self._settle()

    def _settle(self) -> None:
        taps: list[Any] = [sink for sink in self._sinks if getattr(sink, "takes_hits", False) is True]
        others = [sink for sink in self._sinks if sink not in taps]
        self._hits: tuple[Callable[[CacheKey, Any, float], object], ...] = tuple(tap.hit for tap in taps)
        self._taps: tuple[_Route, ...] = tuple((getattr(tap, "wants", _anything), tap.emit) for tap in taps)
        routes: list[_Route] = [(getattr(sink, "wants", _anything), sink.emit) for sink in others]
        if self._on_event is not None:
            routes.append((_anything, self._on_event))
        self._routes = tuple(routes)
        self.listening = bool(taps or routes)
        # Most chains have one tap that never raises, and nothing else.
        alone = len(taps) == 1 and not routes and getattr(taps[0], "never_raises", False)
        self.hit = self._hits[0] if alone else self._tell_hit

    def wants(self, kind: type[Event]) -> bool:
        """Tell whether anyone would look at an event of this kind."""
        return _any_wants(self._taps, kind, self._report) or _any_wants(self._routes, kind, self._report)

    def _tell_hit(self, key: CacheKey, cfg: Any, start: float) -> None:
        for hit in self._hits:
            try:
                hit(key, cfg, start)
            except Exception:
                self._report(hit, CacheHit.name)
        if self._routes and _any_wants(self._routes, CacheHit, self._report):
            self._hand_over(CacheHit.from_memory(key, cfg, start, self.now()))

    def __call__(self, event: Event) -> None:
        """Give an event to the sinks: at once in the loop's thread, soon from any other."""
        for ask, emit in self._taps:
            self._give(event, ask, emit)
        if self._routes:
            self._hand_over(event)

    def _hand_over(self, event: Event) -> None:
        loop = self._loop
        if loop is None or loop.is_current() or not loop.post(partial(self._deliver, event)):
            self._deliver(event)

    def _deliver(self, event: Event) -> None:
        for ask, emit in self._routes:
            start = time.perf_counter()
            self._give(event, ask, emit)
            if time.perf_counter() - start > _SLOW_S and self._first_of(emit):
                logger.warning(
                    "a sink was slow on %r and held up the event loop; give it `deferred = True`", event.name
                )

    def _give(self, event: Event, ask: Callable[[type[Event]], bool], emit: Callable[[Event], object]) -> None:
        try:
            if ask(type(event)):
                emit(event)
        except Exception:
            self._report(emit, event.name)

    def flush(self, timeout_s: float) -> None:
        """Have every sink finish what it was given, within a bound; blocks, so never on the loop."""
        deadline = time.monotonic() + timeout_s
        for flush in self._having("flush"):
            self._guard(flush, "flush", max(0.0, deadline - time.monotonic()))

    @property
    def is_flushed(self) -> bool:
        return all(getattr(sink, "is_flushed", not hasattr(sink, "flush")) for sink in self._sinks)

    def _having(self, method: str) -> list[Callable[..., object]]:
        return [getattr(sink, method) for sink in self._sinks if hasattr(sink, method)]

    def _guard(self, method: Callable[..., object], name: str, *args: Any) -> None:
        try:
            method(*args)
        except Exception:
            self._report(method, name)

    def _report(self, culprit: object, name: str) -> None:
        if self._first_of(culprit):
            logger.exception("a sink failed on %r; it is kept, and not reported again", name)

    def _first_of(self, culprit: object) -> bool:
        owner = id(getattr(culprit, "__self__", culprit))
        first = owner not in self._reported
        self._reported.add(owner)
        return first


def _any_wants(routes: tuple[_Route, ...], kind: type[Event], report: Callable[[object, str], None]) -> bool:
    for ask, _ in routes:
        try:
            if ask(kind):
                return True
        except Exception:
            report(ask, kind.name)
    return False
