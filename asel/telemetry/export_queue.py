"""The queue in front of an exporter: bounded, and short of hits before it is short of tunes.

The SDK's own batch processors drop the oldest item of a full queue, whatever it is, and count nothing. Behind a slow
collector that is most tunes, since each has thousands of hits around it. This queue drops by rank, and counts.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum
from typing import Any, Generic, Literal, TypeVar

from asel.redaction import redact
from asel.telemetry.environment import Limits

__all__ = ["DROP_REASONS", "ExportQueue", "Rank", "dropped_exports"]

logger = logging.getLogger("asel")
T = TypeVar("T")

Reason = Literal["queue_full", "export_failed", "closed"]
DROP_REASONS: tuple[Reason, ...] = ("queue_full", "export_failed", "closed")

# How often something vital is sent before it is given up. With the exporter's timeout of 10 s and the queue's delay of
# 5 s, a collector may be away for a minute; and a batch that it refuses for good does not stay for ever.
_MAX_ATTEMPTS = 5
# Traces remembered for having something vital.
_MAX_TRACES = 4096


class Rank(IntEnum):
    """What is dropped first, and how much of it a queue holds as a multiple of its size.

    `COMPANION` is whatever belongs to the trace of something vital: a trace with a tune in it is kept whole.
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
    """Sends items in batches from a thread of its own; the thread starts with the first item.

    Each rank has its own bound, and drops its own oldest. What is vital is sent first, and sent again if that fails.
    `send` returns whether the batch arrived.
    """

    def __init__(self, signal: str, send: Callable[[list[T]], bool], limits: Limits) -> None:
        self.signal = signal
        self._send, self._limits = send, limits
        self._begin()
        for reason in DROP_REASONS:
            _drops[signal, reason] += 0  # so that zero is reported, too
        _queues.add(self)

    def _begin(self) -> None:
        self._ranks: dict[Rank, deque[_Queued[T]]] = {rank: deque() for rank in Rank}
        self._traces: OrderedDict[int, None] = OrderedDict()
        # Re-entrant: a finalizer may end a span while this thread holds the lock.
        self._changed = threading.Condition(threading.RLock())
        self._due = threading.Event()
        self._hurry = threading.Event()
        self._waiting = 0
        self._in_hand = 0
        # All that was lost; and all that had been when the present run of losses began, if there is one.
        self.lost = 0
        self._lost_before: int | None = None
        self._thread: threading.Thread | None = None
        self._closed = self._given_up = False

    def put(self, item: T, rank: Rank, trace: int = 0) -> None:
        """Queue an item, dropping another of its rank if there is no room."""
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
            self._tell_drops_began()

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
            # Its trace may have turned out to be worth keeping since it was queued.
            better = self._rank_in_trace(rank, oldest.trace)
            is_first = self._drop(1, "queue_full") if better is rank else self._append(better, oldest)
        queue.append(queued)
        return is_first

    def _drop(self, number: int, reason: Reason) -> bool:
        """Count what is lost; return whether it is the first loss since the queue was last empty."""
        with _drops_lock:
            _drops[self.signal, reason] += number
        is_first = self._lost_before is None
        if is_first:
            self._lost_before = self.lost
        self.lost += number
        return is_first

    def _tell_drops_began(self) -> None:
        logger.warning(
            "the collector does not take %s as fast as they are made, or not at all: hits are dropped first, then the "
            "rest, tunes and errors last; asel.telemetry.dropped counts them",
            self.plural,
        )

    # In the thread.

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"asel telemetry: {self.signal}", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while not self._is_over():
            self._due.wait(self._limits.delay_s)
            self._due.clear()
            self._send_what_is_due()

    def _is_over(self) -> bool:
        with self._changed:
            return self._closed and not len(self)

    def _send_what_is_due(self) -> None:
        enough = 1  # the delay is over, or someone waits
        while len(self) >= enough:
            if not self._send_batch():
                self._hurry.wait(self._limits.delay_s)  # a collector that fails is given a rest
            enough = 1 if self._waiting else self._limits.batch_size
        with self._changed:
            if len(self) or self._lost_before is None:
                return
            lost, self._lost_before = self.lost - self._lost_before, None
        logger.warning("the queue of %s is empty again; %d were dropped", self.plural, lost)

    def _send_batch(self) -> bool:
        with self._changed:
            batch = list(self._take(self._limits.batch_size))
            self._in_hand = len(batch)
        try:
            arrived = self._send([queued.item for queued in batch])
        except Exception as error:  # whatever an exporter raises must not end the thread
            logger.warning("sending %s failed: %s: %s", self.plural, type(error).__name__, redact(error))
            arrived = False
        is_first = False
        with self._changed:
            if not arrived and not self._given_up:
                is_first = self._keep_what_is_vital(batch)
            self._in_hand = 0
            self._changed.notify_all()
        if is_first:
            self._tell_drops_began()
        return arrived

    def _take(self, number: int) -> Iterator[_Queued[T]]:
        for rank in sorted(Rank, reverse=True):
            queue = self._ranks[rank]
            while queue and number:
                number -= 1
                queued = queue.popleft()
                queued.attempts_left -= 1
                yield queued

    def _keep_what_is_vital(self, batch: list[_Queued[T]]) -> bool:
        again = [queued for queued in batch if queued.attempts_left]
        room = Rank.VITAL.share * self._limits.queue_size - len(self._ranks[Rank.VITAL])
        again = again[max(0, len(again) - room) :]
        self._ranks[Rank.VITAL].extendleft(reversed(again))
        lost = len(batch) - len(again)
        return self._drop(lost, "export_failed") if lost else False

    # From outside.

    @property
    def plural(self) -> str:
        """What its items are called."""
        return "spans" if self.signal == "traces" else "log records"

    def flush(self, timeout_s: float) -> bool:
        """Send what is queued; False if that takes longer, or something was lost on the way."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            lost = self.lost
            self._waiting += 1
            self._hurry.set()
            self._due.set()
            try:
                while (len(self) or self._in_hand) and not self._given_up:
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
        """Take no more, and send what is queued; False if some of it was not sent in time."""
        with self._changed:
            self._closed = True
        flushed = self.flush(timeout_s)
        self.give_up()
        if flushed and self._thread is not None:
            self._thread.join(1.0)  # it has nothing to do any more
        return flushed

    def give_up(self) -> None:
        """Take no more, and drop what is queued or being sent: a batch on its way counts as lost, and may arrive."""
        with self._changed:
            if self._given_up:
                return
            self._closed = self._given_up = True
            left = len(self) + self._in_hand
            for queue in self._ranks.values():
                queue.clear()
            if left:
                self._drop(left, "closed")
                self._lost_before = None  # whoever closes it says so
            self._hurry.set()
            self._due.set()
            self._changed.notify_all()


# Of the whole process, since the metric that reports them outlives the queues.
_drops: Counter[tuple[str, str]] = Counter()
_drops_lock = threading.Lock()
_queues: weakref.WeakSet[ExportQueue[Any]] = weakref.WeakSet()


def dropped_exports() -> Mapping[tuple[str, str], int]:
    """Return how many spans and log records were dropped, by signal and reason, since this process began."""
    return dict(_drops)


def _after_fork() -> None:
    # The parent sends what is queued; its thread, and whatever lock it held, are not here.
    global _drops_lock
    _drops_lock = threading.Lock()
    for address in list(_drops):
        _drops[address] = 0
    for queue in list(_queues):
        queue._begin()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
