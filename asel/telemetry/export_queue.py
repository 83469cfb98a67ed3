"""A bounded queue with priorities, in front of an exporter.

The SDK's batch processors drop the oldest item of a full queue, of any kind, without a count that asel can read.
With a slow collector that loses most tunes, since there are thousands of hits for each tune. This queue drops hits
first, and counts every loss.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum, IntEnum
from typing import Any, Generic, Literal, TypeVar

from asel.redaction import redact
from asel.telemetry.environment import Limits

__all__ = ["DROP_REASONS", "ExportQueue", "Outcome", "Rank", "dropped_exports"]

logger = logging.getLogger("asel")
T = TypeVar("T")

Reason = Literal["queue_full", "export_failed", "closed"]
DROP_REASONS: tuple[Reason, ...] = ("queue_full", "export_failed", "closed")

# Traces with a vital span that are remembered; the least recent is forgotten first.
_MAX_TRACES = 4096


class Rank(IntEnum):
    """Priorities, lowest first. Each has its own queue.

    A `COMPANION` is an item in the same trace as a vital item: traces with a tune are kept whole.
    """

    HIT = 0
    ORDINARY = 1
    COMPANION = 2
    VITAL = 3


# The bound of each rank's queue, as a multiple of the configured size.
_SHARES = (1, 2, 4, 16)


class Outcome(Enum):
    """The outcome of sending a batch."""

    ARRIVED = "arrived"
    UNREACHED = "the collector cannot be reached or is not ready"
    UNANSWERED = "the collector does not answer in time"
    """The batch may have arrived."""
    REFUSED = "the collector refuses them"


# The total cost of failures after which a vital item is dropped. Five attempts to reach the collector, with the
# exporter's timeout of 10 s and the queue's delay of 5 s, cover its restart of about a minute. A slow collector gets an
# item at most three times, since it may have accepted each. A refusal is final.
_PATIENCE = 5
_COSTS = {Outcome.UNREACHED: 1, Outcome.UNANSWERED: 2, Outcome.REFUSED: _PATIENCE}


class _Queued(Generic[T]):
    __slots__ = ("epoch", "item", "patience", "trace")

    def __init__(self, item: T, trace: int, patience: int, epoch: int) -> None:
        self.item, self.trace, self.patience, self.epoch = item, trace, patience, epoch


class _Flush:
    """A caller that waits for the items of an epoch and of all earlier epochs."""

    __slots__ = ("epoch", "left", "lost")

    def __init__(self, epoch: int, left: int) -> None:
        self.epoch, self.left, self.lost = epoch, left, 0


class ExportQueue(Generic[T]):
    """Sends items in batches from its own thread, which starts with the first item.

    A full rank drops its oldest item. Vital items are sent first, and sent again unless the collector refuses them.
    """

    def __init__(self, signal: str, send: Callable[[list[T]], Outcome], limits: Limits) -> None:
        self.signal = signal
        self._send, self._limits = send, limits
        self._bounds = tuple(share * limits.queue_size for share in _SHARES)
        self._begin()
        for reason in DROP_REASONS:
            _drops[signal, reason] += 0  # Prometheus sees the first increase only of a series that starts at zero
        _queues.add(self)

    def _begin(self) -> None:
        self._ranks: tuple[deque[_Queued[T]], ...] = tuple(deque() for _ in Rank)
        self._length = 0
        self._traces: OrderedDict[int, None] = OrderedDict()
        # Re-entrant: a finalizer may end a span while this thread holds the lock.
        self._lock = threading.RLock()
        self._flushed = threading.Condition(self._lock)
        self._due = threading.Event()
        self._hurry = threading.Event()
        # Each flush begins an epoch, so that it does not wait for later items.
        self._epoch = 0
        self._flushes: list[_Flush] = []
        self._in_flight: list[_Queued[T]] = []
        # Items lost so far, and that number at the start of the current run of losses, if there is one.
        self.lost = 0
        self._lost_before: int | None = None
        self._thread: threading.Thread | None = None
        self._closed = self._abandoned = False

    def put(self, item: T, rank: Rank, trace: int = 0) -> None:
        """Queue an item; if its rank is full, drop the oldest one there."""
        is_first = False
        with self._lock:
            queued = _Queued(item, trace, _PATIENCE if rank is Rank.VITAL else 1, self._epoch)
            if self._closed:
                self._lose([queued], "closed")
                return
            rank = self._rank_in_trace(rank, trace)
            queue = self._ranks[rank]
            if len(queue) < self._bounds[rank]:
                queue.append(queued)
            else:
                is_first = self._append(rank, queued)
            self._length += 1
            if self._thread is None:
                self._start()
            if self._length >= self._limits.batch_size and not self._due.is_set():
                self._due.set()
        if is_first:
            self._warn_drops_began("the collector is not keeping up; hits go first, tunes and errors last")

    def __len__(self) -> int:
        return self._length

    def _rank_in_trace(self, rank: Rank, trace: int) -> Rank:
        if rank is Rank.VITAL and trace:
            self._traces[trace] = None
            self._traces.move_to_end(trace)
            if len(self._traces) > _MAX_TRACES:
                self._traces.popitem(last=False)
        return Rank.COMPANION if rank < Rank.COMPANION and trace in self._traces else rank

    def _append(self, rank: Rank, queued: _Queued[T]) -> bool:
        queue, is_first = self._ranks[rank], False
        if len(queue) >= self._bounds[rank]:
            oldest = queue.popleft()
            # A vital span of the item's trace may have arrived since the item was queued.
            better = self._rank_in_trace(rank, oldest.trace)
            if better is rank:
                self._length -= 1
                is_first = self._lose([oldest], "queue_full")
            else:
                is_first = self._append(better, oldest)
        queue.append(queued)
        return is_first

    def _lose(self, items: Sequence[_Queued[T]], reason: Reason) -> bool:
        """Count lost items; return whether they are the first of a run, which ends when the queue is empty."""
        with _drops_lock:
            _drops[self.signal, reason] += len(items)
        for flush in self._flushes:
            flush.lost += sum(queued.epoch <= flush.epoch for queued in items)
        is_first = self._lost_before is None and reason != "closed"
        if is_first:
            self._lost_before = self.lost
        self.lost += len(items)
        if self._flushes:
            self._leave(items)
        return is_first

    def _leave(self, items: Sequence[_Queued[T]]) -> None:
        for flush in self._flushes:
            flush.left -= sum(queued.epoch <= flush.epoch for queued in items)
        self._flushed.notify_all()

    def _warn_drops_began(self, why: str) -> None:
        logger.warning("dropping %s: %s (asel.telemetry.dropped has the count)", self.plural, why)

    # In the thread.

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name=f"asel telemetry: {self.signal}", daemon=True)
        # Too many threads, or the interpreter is exiting: the item stays queued, and the next `put` tries again.
        with suppress(RuntimeError):
            thread.start()
            self._thread = thread

    def _run(self) -> None:
        while not self._is_over():
            self._due.wait(self._limits.delay_s)
            self._due.clear()
            self._send_due()

    def _is_over(self) -> bool:
        with self._lock:
            return self._closed and not self._length

    def _send_due(self) -> None:
        enough = 1  # the delay has passed, or a flush is waiting
        while self._length >= enough:
            if not self._send_batch():
                self._hurry.wait(self._limits.delay_s)  # let a failing collector recover
            enough = 1 if self._flushes else self._limits.batch_size

    def _send_batch(self) -> bool:
        with self._lock:
            batch = self._in_flight = list(self._take(self._limits.batch_size))
        why = ""
        try:
            outcome = self._send([queued.item for queued in batch])
        except BaseException as error:  # no exception of an exporter, not even SystemExit, may end the thread
            outcome, why = Outcome.UNREACHED, f"{type(error).__name__}: {redact(error)}"
        lost = None
        with self._lock:
            if self._in_flight is not batch:
                return outcome is Outcome.ARRIVED  # the queue was abandoned meanwhile, which counted the items
            self._in_flight = []
            if outcome is not Outcome.ARRIVED:
                is_first = self._requeue_vital(batch, outcome)
            else:
                self._leave(batch)
                if not self._length and self._lost_before is not None:
                    lost, self._lost_before = self.lost - self._lost_before, None
        if outcome is not Outcome.ARRIVED and is_first:
            self._warn_drops_began(why or outcome.value)
        elif why:
            logger.warning("sending %s failed: %s", self.plural, why)
        if lost:
            logger.warning("the queue of %s is empty again; %d were dropped", self.plural, lost)
        return outcome is Outcome.ARRIVED

    def _take(self, number: int) -> Iterator[_Queued[T]]:
        for queue in reversed(self._ranks):
            while queue and number:
                number -= 1
                self._length -= 1
                yield queue.popleft()

    def _requeue_vital(self, batch: list[_Queued[T]], outcome: Outcome) -> bool:
        for queued in batch:
            queued.patience -= _COSTS[outcome]
        vital = self._ranks[Rank.VITAL]
        room = self._bounds[Rank.VITAL] - len(vital)
        retried = [queued for queued in batch if queued.patience > 0]
        retried = retried[max(0, len(retried) - room) :]
        vital.extendleft(reversed(retried))
        self._length += len(retried)
        kept = set(map(id, retried))
        lost = [queued for queued in batch if id(queued) not in kept]
        return self._lose(lost, "export_failed") if lost else False

    # From outside.

    @property
    def plural(self) -> str:
        """The name of its items, for messages."""
        return "spans" if self.signal == "traces" else "log records"

    def flush(self, timeout_s: float) -> bool:
        """Send everything queued before the call; return False if that takes longer or an item was lost."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            flush = _Flush(self._epoch, self._length + len(self._in_flight))
            self._flushes.append(flush)
            self._epoch += 1
            self._hurry.set()
            self._due.set()
            try:
                while flush.left > 0 and not self._abandoned:
                    left = deadline - time.monotonic()
                    if left <= 0 or self._thread is None:
                        return False
                    self._flushed.wait(min(left, threading.TIMEOUT_MAX))
                return not flush.lost
            finally:
                self._flushes.remove(flush)
                if not self._flushes and not self._closed:
                    self._hurry.clear()

    def close(self, timeout_s: float) -> bool:
        """Refuse new items and send the queued ones; return False if that takes longer or an item was lost."""
        with self._lock:
            self._closed = True
        flushed = self.flush(timeout_s)
        self.abandon()
        if flushed:
            self.join(1.0)  # the queue is empty, so the thread is about to end
        return flushed

    def abandon(self) -> None:
        """Refuse new items and drop queued items. A batch in flight counts as lost, though it may still arrive."""
        with self._lock:
            if self._abandoned:
                return
            self._closed = self._abandoned = True
            dropped = 0 if self._lost_before is None else self.lost - self._lost_before
            left = [*self._in_flight, *self._take(self._length)]
            self._in_flight = []
            self._lose(left, "closed")
            self._hurry.set()
            self._due.set()
            self._flushed.notify_all()
        if dropped:
            logger.warning("%d %s were dropped before telemetry was closed", dropped, self.plural)
        if left:
            logger.warning("telemetry was closed with %d %s unsent", len(left), self.plural)

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the thread of a closed queue to end."""
        if self._thread is not None:
            self._thread.join(timeout_s)


# For the whole process, because the metric outlives each queue.
_drops: Counter[tuple[str, str]] = Counter()
# Re-entrant for the same reason as a queue's own lock.
_drops_lock = threading.RLock()
_queues: weakref.WeakSet[ExportQueue[Any]] = weakref.WeakSet()


def dropped_exports() -> Mapping[tuple[str, str], int]:
    """Return the numbers of spans and log records that this process has dropped, by signal and reason."""
    return dict(_drops)


def _after_fork() -> None:
    # The parent sends the queued items. The child has no copy of the thread, and its copies of the locks are unusable.
    global _drops_lock
    _drops_lock = threading.RLock()
    for address in list(_drops):
        _drops[address] = 0
    for queue in list(_queues):
        closed = queue._closed
        queue._begin()
        queue._closed = queue._abandoned = closed


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
