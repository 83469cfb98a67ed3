"""A bounded queue with priorities, in front of an exporter.

The SDK's batch processors drop the oldest item of a full queue, whatever it is, and asel cannot see how many. With a
slow collector that loses most tunes, because thousands of hits surround each. This queue drops hits first, and counts.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from enum import IntEnum
from typing import Any, Generic, Literal, TypeVar

from asel.redaction import redact
from asel.telemetry.environment import Limits

__all__ = ["DROP_REASONS", "ExportQueue", "Rank", "dropped_exports"]

logger = logging.getLogger("asel")
T = TypeVar("T")

Reason = Literal["queue_full", "export_failed", "closed"]
DROP_REASONS: tuple[Reason, ...] = ("queue_full", "export_failed", "closed")

# Attempts to send a vital item. With the exporter's timeout of 10 s and the queue's delay of 5 s, this covers a
# collector's restart of about a minute; a batch that the collector refuses for good still leaves the queue.
_MAX_ATTEMPTS = 5
# How many traces with a vital span are remembered; the least recent is forgotten first.
_MAX_TRACES = 4096


class Rank(IntEnum):
    """Priorities, lowest first. Each has a queue of its own, `share` times the configured size.

    A `COMPANION` is any other item in the trace of a vital one, so that a trace with a tune is kept whole.
    """

    HIT = 0
    ORDINARY = 1
    COMPANION = 2
    VITAL = 3

    @property
    def share(self) -> int:
        return (1, 2, 4, 16)[self]


class _Queued(Generic[T]):
    __slots__ = ("attempts_left", "item", "trace")

    def __init__(self, item: T, trace: int, attempts: int) -> None:
        self.item, self.trace, self.attempts_left = item, trace, attempts


class ExportQueue(Generic[T]):
    """Sends items in batches from its own thread, which starts with the first item.

    A full rank drops its oldest item. Vital items are sent first, and sent again if that fails. `send` returns whether
    the batch arrived.
    """

    def __init__(self, signal: str, send: Callable[[list[T]], bool], limits: Limits) -> None:
        self.signal = signal
        self._send, self._limits = send, limits
        self._begin()
        for reason in DROP_REASONS:
            _drops[signal, reason] += 0  # a series that starts at zero shows its first increase
        _queues.add(self)

    def _begin(self) -> None:
        self._ranks: dict[Rank, deque[_Queued[T]]] = {rank: deque() for rank in Rank}
        self._traces: OrderedDict[int, None] = OrderedDict()
        # Re-entrant: a finalizer may end a span while this thread holds the lock.
        self._changed = threading.Condition(threading.RLock())
        self._due = threading.Event()
        self._hurry = threading.Event()
        self._waiting = 0
        self._in_flight = 0
        # Items lost so far, and that number when the current run of losses began; None while there is none.
        self.lost = 0
        self._lost_before: int | None = None
        self._thread: threading.Thread | None = None
        self._closed = self._abandoned = False

    def put(self, item: T, rank: Rank, trace: int = 0) -> None:
        """Queue an item; if its rank is full, drop the oldest one there."""
        with self._changed:
            if self._closed:
                self._drop(1, "closed")
                return
            attempts = _MAX_ATTEMPTS if rank is Rank.VITAL else 1
            is_first = self._append(self._rank_in_trace(rank, trace), _Queued(item, trace, attempts))
            self._start()
            if len(self) >= self._limits.batch_size:
                self._due.set()
        if is_first:
            self._warn_drops_began()

    def __len__(self) -> int:
        return sum(map(len, self._ranks.values()))

    def _rank_in_trace(self, rank: Rank, trace: int) -> Rank:
        if rank is Rank.VITAL and trace:
            self._traces[trace] = None
            self._traces.move_to_end(trace)
            if len(self._traces) > _MAX_TRACES:
                self._traces.popitem(last=False)
        return Rank.COMPANION if rank < Rank.COMPANION and trace in self._traces else rank

    def _append(self, rank: Rank, queued: _Queued[T]) -> bool:
        queue, is_first = self._ranks[rank], False
        if len(queue) >= rank.share * self._limits.queue_size:
            oldest = queue.popleft()
            # A vital span of its trace may have arrived since it was queued.
            better = self._rank_in_trace(rank, oldest.trace)
            is_first = self._drop(1, "queue_full") if better is rank else self._append(better, oldest)
        queue.append(queued)
        return is_first

    def _drop(self, number: int, reason: Reason) -> bool:
        """Count a loss; return whether it is the first since the queue was last empty."""
        with _drops_lock:
            _drops[self.signal, reason] += number
        is_first = self._lost_before is None
        if is_first:
            self._lost_before = self.lost
        self.lost += number
        return is_first

    def _warn_drops_began(self) -> None:
        logger.warning(
            "the collector is not keeping up with %s; dropping hits first, tunes and errors last "
            "(asel.telemetry.dropped has the count)",
            self.plural,
        )

    # In the thread.

    def _start(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=f"asel telemetry: {self.signal}", daemon=True)
            # Too many threads, or the interpreter is exiting: the item stays queued and the next one tries again.
            with suppress(RuntimeError):
                thread.start()
                self._thread = thread

    def _run(self) -> None:
        while not self._is_over():
            self._due.wait(self._limits.delay_s)
            self._due.clear()
            self._send_due()

    def _is_over(self) -> bool:
        with self._changed:
            return self._closed and not len(self)

    def _send_due(self) -> None:
        enough = 1  # the delay has passed, or a flush is waiting
        while len(self) >= enough:
            if not self._send_batch():
                self._hurry.wait(self._limits.delay_s)  # let a failing collector recover
            enough = 1 if self._waiting else self._limits.batch_size
        with self._changed:
            if len(self) or self._lost_before is None:
                return
            lost, self._lost_before = self.lost - self._lost_before, None
        logger.warning("the queue of %s is empty again; %d were dropped", self.plural, lost)

    def _send_batch(self) -> bool:
        with self._changed:
            batch = list(self._take(self._limits.batch_size))
            self._in_flight = len(batch)
        try:
            arrived = self._send([queued.item for queued in batch])
        except Exception as error:  # an exporter's error must not end the thread
            logger.warning("sending %s failed: %s: %s", self.plural, type(error).__name__, redact(error))
            arrived = False
        is_first = False
        with self._changed:
            if not arrived and not self._abandoned:
                is_first = self._requeue_vital(batch)
            self._in_flight = 0
            self._changed.notify_all()
        if is_first:
            self._warn_drops_began()
        return arrived

    def _take(self, number: int) -> Iterator[_Queued[T]]:
        for rank in sorted(Rank, reverse=True):
            queue = self._ranks[rank]
            while queue and number:
                number -= 1
                queued = queue.popleft()
                queued.attempts_left -= 1
                yield queued

    def _requeue_vital(self, batch: list[_Queued[T]]) -> bool:
        retried = [queued for queued in batch if queued.attempts_left]
        room = Rank.VITAL.share * self._limits.queue_size - len(self._ranks[Rank.VITAL])
        retried = retried[max(0, len(retried) - room) :]
        self._ranks[Rank.VITAL].extendleft(reversed(retried))
        lost = len(batch) - len(retried)
        return self._drop(lost, "export_failed") if lost else False

    # From outside.

    @property
    def plural(self) -> str:
        """The name of its items, for messages."""
        return "spans" if self.signal == "traces" else "log records"

    def flush(self, timeout_s: float) -> bool:
        """Send everything queued; return False if that takes longer or an item was lost."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            lost = self.lost
            self._waiting += 1
            self._hurry.set()
            self._due.set()
            try:
                while (len(self) or self._in_flight) and not self._abandoned:
                    left = deadline - time.monotonic()
                    if left <= 0 or self._thread is None:
                        return False
                    self._changed.wait(left)
                return self.lost == lost
            finally:
                self._waiting -= 1
                if not self._waiting and not self._closed:
                    self._hurry.clear()

    def close(self, timeout_s: float) -> bool:
        """Refuse new items and send the queued ones; return False if that takes longer or an item was lost."""
        with self._changed:
            self._closed = True
        flushed = self.flush(timeout_s)
        self.abandon()
        if flushed and self._thread is not None:
            self._thread.join(1.0)  # the queue is empty, so the thread is about to end
        return flushed

    def abandon(self) -> None:
        """Refuse new items and drop the queued ones. A batch in flight counts as lost, though it may still arrive."""
        with self._changed:
            if self._abandoned:
                return
            self._closed = self._abandoned = True
            left = len(self) + self._in_flight
            for queue in self._ranks.values():
                queue.clear()
            if left:
                self._drop(left, "closed")
                self._lost_before = None  # the caller reports it
            self._hurry.set()
            self._due.set()
            self._changed.notify_all()


# For the whole process: the metric that reports them outlives each queue.
_drops: Counter[tuple[str, str]] = Counter()
# Re-entrant for the same reason as a queue's own lock.
_drops_lock = threading.RLock()
_queues: weakref.WeakSet[ExportQueue[Any]] = weakref.WeakSet()


def dropped_exports() -> Mapping[tuple[str, str], int]:
    """Return how many spans and log records were dropped, by signal and reason, since this process began."""
    return dict(_drops)


def _after_fork() -> None:
    # The parent's thread sends the queued items. The child has neither that thread nor a right to the locks it held.
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
