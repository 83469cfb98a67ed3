"""What telemetry costs, paid later: a bounded queue, and a thread that works a little and rests a lot.

Making a span, rendering a log entry or recording a measurement costs tens of microseconds; putting a
tuple into a queue costs one. A thread that never rests would hold the interpreter while the event loop
wants it, so this one works for a millisecond and rests for four.

Over the queue's ceiling hits are shed, over twice the ceiling the other answers too; what tells of a
tune, a store or an error is never shed. Every event offered is handled, shed and counted, or still queued.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from asel.errors import InvalidRequestError
from asel.events import (
    Answer,
    CacheHit,
    Event,
    NoAnswer,
    OverlayHit,
    Override,
    PendingJoin,
    SheddingStarted,
    SheddingStopped,
    StoreRead,
)
from asel.loop import LoopHandle
from asel.telemetry.tally import Count

__all__ = [
    "Pipeline",
    "PipelineStatistics",
    "Record",
    "Write",
    "epoch_ns",
    "handle",
    "patience",
    "report",
    "shared_pipeline",
    "write_all",
]

logger = logging.getLogger("asel")
_HITS = (CacheHit, Override, OverlayHit)
_NEVER = float("inf")

Write = Callable[[Event, int], object]
"""Tells a destination of an event; the number is when the event's clock was at zero, in nanoseconds since 1970."""
Record = tuple[Any, ...]
"""An event in the queue: who takes it, its context, its clock, and the event; or, for a hit, what makes one."""


@dataclass(frozen=True, slots=True)
class PipelineStatistics:
    """What became of the events that were offered: `emitted`, `shed` (by reason), or still `queued`."""

    emitted: int
    shed: Mapping[str, int]
    queued: int

    @property
    def offered(self) -> int:
        return self.emitted + sum(self.shed.values()) + self.queued


class Teller(Protocol):
    """Whoever offers events, and is told that some were shed."""

    def tell(self, kind: type[Event], **facts: Any) -> None: ...


class Pipeline:
    """A queue of events on their way to sinks, and the thread that takes them there.

    The thread starts with the first event and sleeps when there is none; after `idle_s` of that, where that is
    given, it ends, and the next event starts another. A forked child begins with an empty queue and a thread of
    its own.
    """

    def __init__(
        self,
        *,
        ceiling: int = 65_536,
        work_s: float = 0.001,
        rest_s: float = 0.004,
        idle_s: float | None = None,
        name: str = "asel telemetry",
    ) -> None:
        if ceiling < 1 or work_s <= 0 or rest_s < 0:
            raise InvalidRequestError(
                f"Pipeline(ceiling={ceiling!r}, work_s={work_s!r}, rest_s={rest_s!r}): too little"
            )
        self.ceiling = ceiling
        self._work_s, self._rest_s, self._idle_s = work_s, rest_s, idle_s
        self._name = name
        self._begin_anew()
        _pipelines.add(self)

    def _begin_anew(self) -> None:
        self._queue: deque[Record] = deque()
        self._shed = {"ceiling": Count(), "closed": Count()}
        self._emitted = 0
        self._in_hand = 0
        self._lock = threading.RLock()  # whoever holds it may be interrupted by a finalizer that asks for a config
        self._mail = threading.Event()
        self._thread: threading.Thread | None = None
        self._closed = False
        # The thread ends as soon as it has nothing to do.
        self._dismissed = False
        # True iff the thread waits for mail, or there is none: whoever offers something then has to see to it.
        self._asleep = True
        # Those who wait for the queue to be told, and how many marks of such are in the queue.
        self._flushes: set[threading.Event] = set()
        self._marks = 0
        # Who shed last; when telling, how much had been shed before, and when that was last looked at.
        self._shedder: Teller | None = None
        self._shedding: tuple[Teller, int] | None = None
        self._last_shed = 0

    def offer(self, teller: Teller, record: Record, ceiling: float) -> bool:
        """Queue a record, or shed it where that many are queued already; False if so."""
        if len(self._queue) >= ceiling or self._closed:
            self._shed["closed" if self._closed else "ceiling"].add()
            self._shedder = teller
            return False
        self._queue.append(record)
        if self._asleep:
            self._wake()
        return True

    def _wake(self) -> None:
        with self._lock:
            if self._thread is None:
                self._dismissed = False
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._thread = thread
                _flush_at_exit()
            self._asleep = False
            self._mail.set()

    # In the thread.

    def _run(self) -> None:
        while not self._closed:
            self._work()
            time.sleep(self._pause())
            if not self._queue and self._shedding is None and not self._sleep():
                return
        self._work()

    def _pause(self) -> float:
        # When someone waits, which is at the end, the proportion is the other way round.
        return min(self._work_s, self._rest_s) if self._flushes else self._rest_s

    def _sleep(self) -> bool:
        """Wait for mail; False if there was none for so long that the thread is to end."""
        self._mail.clear()
        self._asleep = True
        if self._queue or self._closed:  # it came before `_asleep` could be seen, so nobody will call
            self._asleep = False
            return True
        return self._mail.wait(0.0 if self._dismissed else self._idle_s) or not self._left()

    def _left(self) -> bool:
        # Under the lock: whoever offers something now has called already, or finds no thread and starts one.
        with self._lock:
            if self._mail.is_set():
                return False
            self._thread = None
            return True

    def _work(self) -> None:
        work_s = max(self._work_s, self._rest_s) if self._flushes else self._work_s
        until = time.perf_counter() + work_s
        while self._queue and time.perf_counter() < until:
            self._in_hand = 1  # before it leaves the queue, so that it always is in one or the other
            try:
                record = self._queue.popleft()
            except IndexError:  # whoever closes was quicker
                self._in_hand = 0
                break
            if len(record) == 1:
                self._in_hand = 0
                self._reached(record[0])
                continue
            try:
                handle(record)
            except BaseException:  # what would end a program must not end this thread
                report(record[0], "an event")
            self._emitted += 1
            self._in_hand = 0
        try:
            self._tell_shedding()
        except BaseException:
            report(self._shedder, "shedding")

    def _reached(self, flush: threading.Event) -> None:
        with self._lock:
            self._marks -= 1
        flush.set()

    def _tell_shedding(self) -> None:
        shed = self._shed["ceiling"].value
        if self._shedding is None and shed > self._last_shed and (tap := self._shedder) is not None:
            self._shedding = (tap, self._last_shed)
            tap.tell(SheddingStarted, queued=len(self._queue))
        elif self._shedding is not None and shed == self._last_shed and len(self._queue) <= self.ceiling // 2:
            tap, before = self._shedding
            self._shedding = None
            tap.tell(SheddingStopped, shed=shed - before)
        self._last_shed = shed

    # From outside.

    @property
    def is_flushed(self) -> bool:
        return not self._queue and not self._in_hand

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait until what is queued now is handled; False if that takes longer. Blocks: not for event loops."""
        if self.is_flushed:
            return True
        if self._thread is None or self._thread is threading.current_thread():
            return False
        done = threading.Event()
        self._flushes.add(done)
        try:
            with self._lock:
                self._marks += 1
                self._queue.append((done,))
            if self._asleep:
                self._wake()
            return done.wait(timeout_s)
        finally:
            self._flushes.discard(done)

    def close(self, timeout_s: float = 5.0) -> bool:
        """Flush, and take no more; what cannot be handled in time is shed, and counted as such."""
        flushed = self.flush(timeout_s)
        self._closed = True
        self._give_up()
        self._mail.set()
        return flushed

    @property
    def is_running(self) -> bool:
        return self._thread is not None

    def end(self, timeout_s: float) -> int:
        """Flush, shed what cannot be handled in time, and let the thread go; return how many were not handled.

        One that the thread has in hand is among them. What is offered later starts a thread again, once
        the one before has come back.
        """
        left = 0 if self.flush(timeout_s) else self._give_up() + self._in_hand
        with self._lock:
            self._dismissed = True
            self._mail.set()
        return left

    def _give_up(self) -> int:
        given_up = 0
        while self._queue:
            try:
                record = self._queue.popleft()
            except IndexError:  # the thread was quicker
                break
            if len(record) > 1:
                self._shed["closed"].add()
                given_up += 1
            else:
                self._reached(record[0])
        return given_up

    def statistics(self) -> PipelineStatistics:
        """Return what became of all that was offered; exact where nothing happens meanwhile."""
        shed = {reason: count.value for reason, count in self._shed.items()}
        return PipelineStatistics(self._emitted, shed, len(self._queue) - self._marks + self._in_hand)


def patience(kind: type[Event]) -> float:
    """Return how many ceilings' worth of events may be queued before one of this kind is shed."""
    if kind in _HITS:
        return 1
    if issubclass(kind, Answer | PendingJoin | StoreRead) and kind is not NoAnswer:
        return 2
    return _NEVER


def handle(record: Record) -> None:
    """Tell those who take it of a record."""
    takers, context, clock, *what = record
    try:
        event = what[0]
        if len(what) > 1:
            key, cfg, start, end = what
            event = CacheHit.from_memory(key, cfg, start, end)
        context.run(write_all, takers, event, epoch_ns(clock))
    except Exception:
        report(takers, "an event")


def write_all(takers: tuple[Write, ...], event: Event, epoch: int) -> None:
    """Tell every taker, in a context of the event's own: whoever makes a span leaves it there for the next."""
    for write in takers:
        try:
            write(event, epoch)
        except Exception:
            report(write, event.name)


_reported: set[int] = set()


def report(culprit: object, name: str) -> None:
    """Log that a sink failed, once for each."""
    owner = id(getattr(culprit, "__self__", culprit))
    if owner not in _reported:
        _reported.add(owner)
        logger.exception("a sink failed on %r; it is kept, and not reported again", name)


def epoch_ns(clock: LoopHandle | None) -> int:
    """Return when a clock was at zero; without a loop, the clock is the system's monotonic one."""
    return time.time_ns() - time.monotonic_ns() if clock is None else clock.epoch_ns()


# ---------------------------------------------------------------------------------------------
# One for the process.

_pipelines: weakref.WeakSet[Pipeline] = weakref.WeakSet()


@functools.cache
def shared_pipeline() -> Pipeline:
    """Return the pipeline of every chain in this process: there is one interpreter to be gentle with."""
    return Pipeline()


@functools.cache
def _flush_at_exit() -> None:
    # Registered with the first event, so that it runs before the SDK's own hooks, which came earlier.
    atexit.register(_flush_all)


def _flush_all() -> None:
    deadline = time.monotonic() + 1.0
    # A slow sink's own comes last, since it may hang. What was let go is not waited for again.
    for pipeline in sorted(_pipelines, key=lambda pipeline: pipeline._idle_s is not None):
        if not pipeline._dismissed and not pipeline.flush(max(0.0, deadline - time.monotonic())):
            left = pipeline.statistics().queued
            logger.warning("the program ended before %d events were told (%s)", left, pipeline._name)


def _after_fork() -> None:
    # The thread stayed in the parent, and with it whatever it was about to do: the parent tells of that.
    for pipeline in list(_pipelines):
        pipeline._begin_anew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
