"""The queue in front of the telemetry thread, which works in short bursts.

Making a span, rendering a log entry or recording a measurement costs tens of microseconds; putting a tuple into a
queue costs one. A thread that never rests would compete with the event loop for the interpreter, so this one works for
a millisecond and rests for four.

Above the queue's ceiling hits are shed, above twice the ceiling other answers too; events of tunes, stores and errors
are never shed. Every event offered is delivered, shed and counted, or still queued.
"""

from __future__ import annotations

import atexit
import functools
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from asel.errors import InvalidRequestError
from asel.events.store_types import StoreRead
from asel.events.types import (
    Answer,
    CacheHit,
    Event,
    NoAnswer,
    OverlayHit,
    Override,
    PendingJoin,
    SheddingStarted,
    SheddingStopped,
)
from asel.runtime.counter import Count
from asel.runtime.fork import renew_after_fork

__all__ = ["Pipeline", "PipelineStatistics", "QueueEntry", "shared_pipeline"]

logger = logging.getLogger("asel")
_HITS = (CacheHit, Override, OverlayHit)
_EXIT_GRACE_S = 1.0

QueueEntry = tuple[Callable[..., object], *tuple[Any, ...]]
"""A queued event: the function that delivers it, and its arguments."""


@dataclass(frozen=True, slots=True)
class PipelineStatistics:
    """Counts of the events offered: `emitted`, `shed` (by reason), or still `queued`."""

    emitted: int
    shed: Mapping[str, int]
    queued: int

    @property
    def offered(self) -> int:
        return self.emitted + sum(self.shed.values()) + self.queued


class Source(Protocol):
    """An object that offers events. In the pipeline's thread, `announce` reports to its sinks that events are shed."""

    def announce(self, kind: type[Event], **facts: Any) -> None: ...


class Pipeline:
    """A queue of events, and the thread that delivers them to sinks.

    The thread starts with the first event and sleeps while there is none. A forked child begins with an empty
    queue and its own thread: the parent delivers the events that were queued.
    """

    def __init__(self, *, ceiling: int = 65_536, work_s: float = 0.001, rest_s: float = 0.004) -> None:
        if ceiling < 1 or work_s <= 0 or rest_s < 0:
            raise InvalidRequestError(
                f"Pipeline(ceiling={ceiling!r}, work_s={work_s!r}, rest_s={rest_s!r}): too little"
            )
        self._ceiling = ceiling
        self._work_s, self._rest_s = work_s, rest_s
        self.renew()
        renew_after_fork(self)
        _pipelines.add(self)

    def renew(self) -> None:
        """Start afresh, with an empty queue and no thread."""
        self._queue: deque[QueueEntry] = deque()
        self._shed = {"ceiling": Count(), "closed": Count()}
        self._emitted = 0
        self._in_hand = 0
        self._lock = threading.RLock()  # its holder may be interrupted by a finalizer that asks for a config
        self._mail = threading.Event()
        self._thread: threading.Thread | None = None
        self._closed = False
        # True iff the thread waits for mail or does not exist: the next `offer` has to wake it.
        self._asleep = True
        # The callers that wait for the queue to drain, and the number of their marks in the queue.
        self._flushes: set[threading.Event] = set()
        self._marks = 0
        # The source of the event that was shed last.
        self._shed_from: Source | None = None
        # While events are shed: the source that announced it, and the number shed before.
        self._shedding: tuple[Source, int] | None = None
        self._shed_at_last_check = 0

    def offer(self, source: Source, kind: type[Event], entry: QueueEntry) -> bool:
        """Queue an event; if the queue has no room for its kind, shed it and return False."""
        queued = len(self._queue)
        if self._closed or (queued >= self._ceiling and not self._has_room_for(kind, queued)):
            self._shed["closed" if self._closed else "ceiling"].add()
            self._shed_from = source
            return False
        self._queue.append(entry)
        if self._asleep:
            self._wake()
        return True

    def _has_room_for(self, kind: type[Event], queued: int) -> bool:
        if kind in _HITS:
            return False
        if issubclass(kind, Answer | PendingJoin | StoreRead) and kind is not NoAnswer:
            return queued < 2 * self._ceiling
        return True

    def _wake(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="asel telemetry", daemon=True)
                self._thread.start()
                _flush_at_exit()
            self._asleep = False
            self._mail.set()

    # In the thread.

    def _run(self) -> None:
        while not self._closed:
            self._work()
            # During a flush, as when a selector closes, work and rest change places.
            time.sleep(min(self._work_s, self._rest_s) if self._flushes else self._rest_s)
            if not self._queue and self._shedding is None:
                self._sleep()
        self._work()

    def _sleep(self) -> None:
        self._mail.clear()
        self._asleep = True
        if self._queue or self._closed:  # offered before `_asleep` was set, so no `offer` will wake the thread
            self._asleep = False
        else:
            self._mail.wait()

    def _work(self) -> None:
        work_s = max(self._work_s, self._rest_s) if self._flushes else self._work_s
        until = time.perf_counter() + work_s
        while self._queue and time.perf_counter() < until:
            self._in_hand = 1  # set before the event leaves the queue, so that it is always counted
            try:
                deliver, *args = self._queue.popleft()
            except IndexError:  # `close` took it first
                self._in_hand = 0
                break
            if deliver == self._set_mark:  # a mark, which is not an event
                self._in_hand = 0
                self._set_mark(*args)
                continue
            try:
                deliver(*args)
            except BaseException:  # a sink's SystemExit must not end this thread
                logger.exception("an event could not be delivered")
            self._emitted += 1
            self._in_hand = 0
        try:
            self._announce_shedding()
        except BaseException:
            logger.exception("an event could not be delivered")

    def _set_mark(self, mark: threading.Event) -> None:
        with self._lock:
            self._marks -= 1
        mark.set()

    def _announce_shedding(self) -> None:
        shed = self._shed["ceiling"].value
        if self._shedding is None and shed > self._shed_at_last_check and (source := self._shed_from) is not None:
            self._shedding = (source, self._shed_at_last_check)
            source.announce(SheddingStarted, queued=len(self._queue))
        elif self._shedding is not None and shed == self._shed_at_last_check and len(self._queue) <= self._ceiling // 2:
            source, before = self._shedding
            self._shedding = None
            source.announce(SheddingStopped, shed=shed - before)
        self._shed_at_last_check = shed

    # From outside.

    @property
    def is_flushed(self) -> bool:
        return not self._queue and not self._in_hand

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait until the events queued now are handled; False after `timeout_s`. Blocks: not for event loops."""
        if self.is_flushed:
            return True
        if self._thread is None or self._thread is threading.current_thread():
            return False
        mark = threading.Event()
        self._flushes.add(mark)
        try:
            with self._lock:
                self._marks += 1
                self._queue.append((self._set_mark, mark))
            if self._asleep:
                self._wake()
            return mark.wait(timeout_s)
        finally:
            self._flushes.discard(mark)

    def close(self, timeout_s: float = 5.0) -> bool:
        """Flush, then refuse further events; events that are not handled in time are shed and counted."""
        flushed = self.flush(timeout_s)
        self._closed = True
        while self._queue:
            try:
                deliver, *args = self._queue.popleft()
            except IndexError:  # the thread took it first
                break
            if deliver == self._set_mark:
                self._set_mark(*args)
            else:
                self._shed["closed"].add()
        self._mail.set()
        return flushed

    def statistics(self) -> PipelineStatistics:
        """Return the counts of all events offered; exact unless events arrive during the call."""
        shed = {reason: count.value for reason, count in self._shed.items()}
        return PipelineStatistics(self._emitted, shed, len(self._queue) - self._marks + self._in_hand)


# ---------------------------------------------------------------------------------------------
# The pipeline of the process.

_pipelines: weakref.WeakSet[Pipeline] = weakref.WeakSet()


@functools.cache
def shared_pipeline() -> Pipeline:
    """Return the pipeline that all selectors of this process share."""
    return Pipeline()


@functools.cache
def _flush_at_exit() -> None:
    # Registered at the first event, after the SDK's own exit hooks, so that it runs before them.
    atexit.register(_flush_all)


def _flush_all() -> None:
    deadline = time.monotonic() + _EXIT_GRACE_S
    for pipeline in list(_pipelines):
        if not pipeline.flush(max(0.0, deadline - time.monotonic())):
            logger.warning("exiting with %d undelivered events", pipeline.statistics().queued)
