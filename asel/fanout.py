"""From what happens to whoever listens: each event goes to every sink, and no sink hurts another.

A sink is called on the event loop for as long as it is quick. One that raises is reported once, and kept.
One that is slow is called from a thread of its own from then on: over 10 ms in two of a hundred calls in a row,
or over half a second once. So neither a pause of the garbage collector nor a first call that opens a file
moves a sink, and one that sleeps in every call delays two selections.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any, Protocol

from asel.events import CacheHit, Event, Sink
from asel.loop import LoopHandle

if TYPE_CHECKING:
    from asel.keys import CacheKey

__all__ = ["Elsewhere", "FanOut"]

logger = logging.getLogger("asel")
_SLOW_S = 0.01
_SLOW_WITHIN_CALLS = 100
_FAR_TOO_SLOW_S = 0.5

Ask = Callable[[type[Event]], bool]
Emit = Callable[[Event], object]


class Elsewhere(Protocol):
    """A thread that tells one sink of events; `telemetry.aside` has the real one."""

    name: str

    @property
    def shed(self) -> int: ...
    @property
    def is_over(self) -> bool: ...
    def emit(self, event: Event) -> None: ...
    def end(self, timeout_s: float) -> int: ...


class _Route:
    """The way to one sink, and how it did on it. `ask` is None where the sink takes every kind."""

    __slots__ = ("ask", "calls", "emit", "named", "on_loop", "slow_at", "target")

    def __init__(self, target: Any, ask: Ask | None, emit: Emit) -> None:
        self.target = target
        self.ask, self.emit = ask, emit
        # A callback is often a sink's method.
        self.on_loop = True in (getattr(it, "on_loop", False) for it in (target, getattr(target, "__self__", None)))
        self.named = False
        self.calls = 0
        self.slow_at = -_SLOW_WITHIN_CALLS

    @classmethod
    def to(cls, sink: Any) -> _Route:
        return cls(sink, getattr(sink, "wants", None), sink.emit)

    @property
    def name(self) -> str:
        name: str = getattr(self.target, "__qualname__", type(self.target).__name__)
        return name

    def is_slow_again(self, took_s: float) -> bool:
        again = took_s > _FAR_TOO_SLOW_S or self.calls - self.slow_at < _SLOW_WITHIN_CALLS
        self.slow_at = self.calls
        return again


class FanOut:
    """Hands each event to every sink, on one loop, and keeps a failing or slow one from hurting the rest.

    `now` is the clock events are stamped with: the loop's, once there is one. `listening`: there is
    a sink at all. `hit(key, cfg, start)` tells of an answer from the fast lane. `statistics` is handed to
    the sinks that watch. `aside(name, give, now)` makes the thread that a slow sink moves to; without it,
    such a sink stays and is named.
    """

    def __init__(
        self,
        sinks: Iterable[Sink] = (),
        on_event: Callable[[Event], object] | None = None,
        statistics: Callable[[], Any] | None = None,
        aside: Callable[[str, Emit, Callable[[], float]], Elsewhere] | None = None,
    ) -> None:
        self._sinks: tuple[Sink, ...] = tuple(sinks)
        self._callback = None if on_event is None else _Route(on_event, None, on_event)
        self._statistics = statistics
        self._aside = aside
        self._asides: dict[_Route, Elsewhere] = {}
        self._loop: LoopHandle | None = None
        self.now: Callable[[], float] = monotonic
        self._reported: set[int] = set()
        self._known: dict[int, _Route] = {}
        self._settle()

    def bind(self, loop: LoopHandle) -> None:
        """Hand events over to this loop from now on, and take the time from it."""
        if self._loop is not None and self._loop.native is loop.native and self._loop.is_current():
            return
        self._loop = loop
        self.now = loop.now
        for watch in self._having("watch", self._sinks):
            self._guard(watch, "watch", loop, self._statistics)

    def add(self, sink: Sink) -> None:
        self._sinks = (*self._sinks, sink)
        self._settle()

    def remove(self, sink: Sink) -> None:
        self._sinks = tuple(other for other in self._sinks if other is not sink)
        self._settle()

    def _settle(self) -> None:
        # How a sink did is remembered while others come and go.
        self._known = {id(sink): self._known.get(id(sink)) or _Route.to(sink) for sink in self._sinks}
        taps: list[Any] = [sink for sink in self._sinks if getattr(sink, "takes_hits", False) is True]
        others = [sink for sink in self._sinks if sink not in taps]
        self._hits: tuple[Callable[[CacheKey, Any, float], object], ...] = tuple(tap.hit for tap in taps)
        self._taps = tuple(self._known[id(tap)] for tap in taps)
        routes = [self._known[id(sink)] for sink in others]
        self._routes = tuple(routes if self._callback is None else [*routes, self._callback])
        self.listening = bool(self._taps or self._routes)
        # Most chains have one tap that never raises, and nothing else.
        alone = len(taps) == 1 and not self._routes and getattr(taps[0], "never_raises", False)
        self.hit = self._hits[0] if alone else self._tell_hit

    def wants(self, kind: type[Event]) -> bool:
        """Tell whether anyone would look at an event of this kind."""
        for tap in self._taps:
            try:
                if tap.ask is None or tap.ask(kind):
                    return True
            except Exception:
                self._report(tap.ask, kind.name)
        return self._any_route_wants(kind)

    def _any_route_wants(self, kind: type[Event]) -> bool:
        for route in self._routes:
            if (ask := route.ask) is None:
                return True
            start, wants = perf_counter(), False
            try:
                wants = ask(kind)
            except Exception:
                self._report(ask, kind.name)
            if (took_s := perf_counter() - start) > _SLOW_S:
                self._was_slow(route, took_s)
            if wants:
                return True
        return False

    def _tell_hit(self, key: CacheKey, cfg: Any, start: float) -> None:
        for hit in self._hits:
            try:
                hit(key, cfg, start)
            except Exception:
                self._report(hit, CacheHit.name)
        if self._routes and self._any_route_wants(CacheHit):
            self._hand_over(CacheHit.from_memory(key, cfg, start, self.now()))

    def __call__(self, event: Event) -> None:
        """Give an event to the sinks: at once in the loop's thread, soon from any other."""
        for tap in self._taps:
            self._give(tap.ask, tap.emit, event)
        if self._routes:
            self._hand_over(event)

    def _hand_over(self, event: Event) -> None:
        loop = self._loop
        if loop is None or loop.is_current() or not loop.post(partial(self._deliver, event)):
            self._deliver(event)

    def _deliver(self, event: Event) -> None:
        for route in self._routes:
            start = perf_counter()
            self._give(route.ask, route.emit, event)
            route.calls += 1
            if (took_s := perf_counter() - start) > _SLOW_S:
                self._was_slow(route, took_s)

    def _give(self, ask: Ask | None, emit: Emit, event: Event) -> None:
        try:
            if ask is None or ask(type(event)):
                emit(event)
        except Exception:
            self._report(emit, event.name)

    def _was_slow(self, route: _Route, took_s: float) -> None:
        if not route.is_slow_again(took_s):
            return
        if route in self._asides:
            route.ask = None  # all that was left of it on the loop; its thread asks, too
            return
        if self._aside is None or route.on_loop:
            advice = "it stays there, so make it quicker"
        else:
            give = partial(self._give, route.ask, route.emit)
            # Without a loop, two threads may find a sink slow at once: they get the same.
            moved = self._asides.setdefault(route, self._aside(route.name, give, lambda: self.now()))
            route.emit = moved.emit
            advice = "it is called from a thread of its own from now on, unless it says `on_loop = True`"
        if not route.named:
            route.named = True
            logger.warning("the sink %s held up the event loop for %.3f s: %s", route.name, took_s, advice)

    def close(self, timeout_s: float) -> None:
        """Have every sink finish what it was given, within a bound; blocks, so never on the loop.

        What a slow sink has not been told by then is dropped, and it is said how much that is.
        """
        deadline = monotonic() + timeout_s
        sinks, moved = self._sinks, {id(route.target) for route in list(self._asides)}
        # Slow sinks come last, and work meanwhile: one that hangs uses the time up for whoever comes after it.
        self._flush((sink for sink in sinks if id(sink) not in moved), deadline)
        for aside in list(self._asides.values()):
            if left := aside.end(max(0.0, deadline - monotonic())):
                logger.warning(
                    "the chain closed before the slow sink %s was told of the last %d events (earlier, %d hits and "
                    "other answers were dropped): make it quicker, or give it longer than close_grace_s=%g",
                    aside.name,
                    left,
                    aside.shed,
                    timeout_s,
                )
        self._flush((sink for sink in sinks if id(sink) in moved), deadline)

    def _flush(self, sinks: Iterable[Sink], deadline: float) -> None:
        for flush in self._having("flush", sinks):
            self._guard(flush, "flush", max(0.0, deadline - monotonic()))

    @property
    def is_over(self) -> bool:
        """True iff closing has nothing to wait for."""
        flushed = all(getattr(sink, "is_flushed", not hasattr(sink, "flush")) for sink in self._sinks)
        return flushed and all(aside.is_over for aside in self._asides.values())

    def _having(self, method: str, sinks: Iterable[Sink]) -> list[Callable[..., object]]:
        return [getattr(sink, method) for sink in sinks if hasattr(sink, method)]

    def _guard(self, method: Callable[..., object], name: str, *args: Any) -> None:
        try:
            method(*args)
        except Exception:
            self._report(method, name)

    def _report(self, culprit: object, name: str) -> None:
        owner = id(getattr(culprit, "__self__", culprit))
        if owner not in self._reported:
            self._reported.add(owner)
            logger.exception("a sink failed on %r; it is kept, and not reported again", name)
