"""Everything that happens, as values: one frozen dataclass for each kind of event.

Events are handed to sinks on the event loop, in the order in which things happened. A sink is
quick and synchronous; one that raises is reported once and never breaks a selection.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import anyio
import anyio.lowlevel
from anyio.abc import ObjectReceiveStream

from asel.errors import InvalidRequestError
from asel.loop import LoopHandle

if TYPE_CHECKING:
    from asel.keys import CacheKey

__all__ = [
    "AutotuneFailed",
    "AutotuneFinish",
    "AutotuneStart",
    "CacheHit",
    "CandidateEliminated",
    "CandidateFailed",
    "CandidateMeasured",
    "CandidateSkipped",
    "CandidateStart",
    "ClaimWait",
    "Closed",
    "Event",
    "EventStream",
    "FanOut",
    "Heuristics",
    "LateTune",
    "NoAnswer",
    "OutOfRange",
    "OverlayHit",
    "Override",
    "PendingJoin",
    "Persisted",
    "RecordRejected",
    "Sink",
    "Stale",
    "StoreFailed",
    "StoreRecovered",
]

Severity = Literal["debug", "info", "warning", "error"]
logger = logging.getLogger("asel")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something happened to a key between `start` and `end`, seconds on the loop's clock."""

    name: ClassVar[str]
    severity: ClassVar[Severity] = "debug"

    key: CacheKey | None
    start: float
    end: float

    @property
    def op(self) -> str | None:
        return None if self.key is None else self.key.op_id

    @property
    def device(self) -> str | None:
        return None if self.key is None else self.key.device

    def fields(self) -> dict[str, Any]:
        """Return the event's facts by name, the key spelt as ejKernel spells it."""
        facts = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "key"}
        if self.key is None:
            return facts
        return {"device": self.key.device, "op_id": self.key.op_id, "call_key": self.key.call_key, **facts}


@dataclass(frozen=True, slots=True, kw_only=True)
class Override(Event):
    """The caller brought its own config."""

    name: ClassVar[str] = "override"
    cfg: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlayHit(Event):
    """An active `overlay_cache` held the key."""

    name: ClassVar[str] = "overlay_hit"
    cfg: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheHit(Event):
    """Memory or the store had the answer."""

    name: ClassVar[str] = "cache_hit"
    level: Literal["memory", "persistent"]
    cfg: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingJoin(Event):
    """A caller began to wait for a tune that someone else had begun."""

    name: ClassVar[str] = "pending_join"
    tune_id: str
    waiters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AutotuneStart(Event):
    """A tune began. `background`: nobody waits for it yet."""

    name: ClassVar[str] = "autotune_start"
    severity: ClassVar[Severity] = "info"
    tune_id: str
    candidates: int
    objective: str
    background: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateStart(Event):
    """A candidate is about to be compiled."""

    name: ClassVar[str] = "candidate_start"
    tune_id: str
    index: int
    cfg: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateMeasured(Event):
    """A candidate ran."""

    name: ClassVar[str] = "candidate_measured"
    tune_id: str
    index: int
    cfg: Any
    median_s: float
    compile_s: float
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateFailed(Event):
    """A candidate broke, or took too long. `still_busy`: its thread has not come back."""

    name: ClassVar[str] = "candidate_failed"
    severity: ClassVar[Severity] = "warning"
    tune_id: str
    index: int
    cfg: Any
    stage: str
    error_type: str
    message: str
    still_busy: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateEliminated(Event):
    """A candidate was clearly slower than the leader and dropped out of the race."""

    name: ClassVar[str] = "candidate_eliminated"
    tune_id: str
    index: int
    cfg: Any
    round: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateSkipped(Event):
    """A candidate was not tried."""

    name: ClassVar[str] = "candidate_skipped"
    tune_id: str
    index: int
    cfg: Any
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AutotuneFinish(Event):
    """A tune ended with a winner, which is in memory by now."""

    name: ClassVar[str] = "autotune_finish"
    severity: ClassVar[Severity] = "info"
    tune_id: str
    cfg: Any
    measured: int
    failed: int
    skipped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AutotuneFailed(Event):
    """A tune ended without a winner; the key is not tuned again before `retry_at`.

    None there: the tune was broken off by a close or a cancellation, and may begin again at once.
    """

    name: ClassVar[str] = "autotune_failed"
    severity: ClassVar[Severity] = "warning"
    tune_id: str
    error_type: str
    message: str
    retry_at: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Persisted(Event):
    """A tune's result reached the store. `adopted`: another writer was first, and its config counts."""

    name: ClassVar[str] = "persisted"
    tune_id: str
    cfg: Any
    adopted: bool
    conflict: Literal["duplicated_key", "key_out_of_sync"] | None = None
    """Who was first: this very process, or another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heuristics(Event):
    """The kernel's own guess was the answer; `declined` says why nothing better was."""

    name: ClassVar[str] = "heuristics"
    cfg: Any
    declined: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stale(Event):
    """A loaded entry was made from other candidates, another version or objective."""

    name: ClassVar[str] = "stale"
    severity: ClassVar[Severity] = "info"
    cfg: Any
    checksum: str
    expected: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfRange(Event):
    """A dimension lies outside the kernel's declared buckets, so the call has a key of its own."""

    name: ClassVar[str] = "out_of_range"
    severity: ClassVar[Severity] = "warning"
    dimension: str
    size: int
    low: int
    high: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LateTune(Event):
    """A key that would have been tuned turned up after `freeze()`."""

    name: ClassVar[str] = "late_tune"
    severity: ClassVar[Severity] = "warning"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFailed(Event):
    """The store did not answer; its tier declined."""

    name: ClassVar[str] = "store_error"
    severity: ClassVar[Severity] = "warning"
    operation: str
    error_type: str
    message: str

    @classmethod
    def of(cls, key: CacheKey, operation: str, start: float, end: float, error: Exception) -> StoreFailed:
        kind = type(error).__name__
        return cls(key=key, start=start, end=end, operation=operation, error_type=kind, message=str(error))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRecovered(Event):
    """The store works again after it failed for `failing_s` seconds."""

    name: ClassVar[str] = "store_recovered"
    severity: ClassVar[Severity] = "info"
    operation: str
    failing_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRejected(Event):
    """Something in the store could not be used, and counts as a miss."""

    name: ClassVar[str] = "record_rejected"
    severity: ClassVar[Severity] = "warning"
    where: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimWait(Event):
    """A tune waited for another process that was tuning the same key.

    It ended with that one's record, with the claim, or because the wait was over: then both tune.
    """

    name: ClassVar[str] = "claim_wait"
    waited_s: float
    outcome: Literal["record", "held", "timed_out"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NoAnswer(Event):
    """Every tier declined."""

    name: ClassVar[str] = "error"
    severity: ClassVar[Severity] = "error"
    reason: str
    declined: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed(Event):
    """The chain closed. `abandoned` names the candidates whose threads were still busy."""

    name: ClassVar[str] = "closed"
    severity: ClassVar[Severity] = "info"
    cancelled: int
    abandoned: tuple[str, ...]
    unsaved: int = 0
    """The results that never reached the store."""


class Sink(Protocol):
    """Where events go. May also have `wants(kind)`, asked before an event of that kind is made."""

    def emit(self, event: Event) -> None: ...


def _anything(kind: type[Event]) -> bool:
    return True


_Route = tuple[Callable[[type[Event]], bool], Callable[[Event], object]]


class FanOut:
    """Hands each event to every sink, on one loop, and keeps a failing one from hurting the rest.

    `now` is the clock events are stamped with: the loop's, once there is one.
    """

    def __init__(self, sinks: Iterable[Sink] = (), on_event: Callable[[Event], object] | None = None) -> None:
        self._sinks: tuple[Sink, ...] = tuple(sinks)
        self._on_event = on_event
        self._loop: LoopHandle | None = None
        self.now: Callable[[], float] = time.monotonic
        self._reported: set[int] = set()
        self._settle()

    def bind(self, loop: LoopHandle) -> None:
        """Hand events over to this loop from now on, and take the time from it."""
        self._loop = loop
        self.now = loop.now

    def add(self, sink: Sink) -> None:
        self._sinks = (*self._sinks, sink)
        self._settle()

    def remove(self, sink: Sink) -> None:
        self._sinks = tuple(other for other in self._sinks if other is not sink)
        self._settle()

    def _settle(self) -> None:
        routes: list[_Route] = [(getattr(sink, "wants", _anything), sink.emit) for sink in self._sinks]
        if self._on_event is not None:
            routes.append((_anything, self._on_event))
        self.routes = tuple(routes)

    def wants(self, kind: type[Event]) -> bool:
        """Tell whether anyone would look at an event of this kind."""
        for ask, _ in self.routes:
            try:
                if ask(kind):
                    return True
            except Exception:
                self._report(ask, kind.name)
        return False

    def __call__(self, event: Event) -> None:
        """Give an event to the sinks: at once in the loop's thread, soon from any other."""
        loop = self._loop
        if loop is None or loop.is_current() or not loop.post(partial(self._deliver, event)):
            self._deliver(event)

    def _deliver(self, event: Event) -> None:
        for ask, emit in self.routes:
            try:
                if ask(type(event)):
                    emit(event)
            except Exception:
                self._report(emit, event.name)

    def _report(self, culprit: object, name: str) -> None:
        owner = id(getattr(culprit, "__self__", culprit))
        if owner not in self._reported:
            self._reported.add(owner)
            logger.exception("a sink failed on %r; it is kept, and not reported again", name)


class EventStream(ObjectReceiveStream[Event]):
    """The events as they happen, for one reader.

    Holds at most `buffer` of them: when the reader falls behind, the oldest are dropped and counted
    in `dropped`. Ends when the chain closes.
    """

    def __init__(self, buffer: int, on_close: Callable[[EventStream], None]) -> None:
        if buffer < 1:
            raise InvalidRequestError(f"events(buffer={buffer!r}): a stream holds at least one event")
        self._buffer: deque[Event] = deque(maxlen=buffer)
        self._on_close = on_close
        self._arrived = anyio.Event()
        self._ended = self._closed = self._receiving = False
        self.dropped = 0

    def emit(self, event: Event) -> None:
        if self._ended:
            return
        if len(self._buffer) == self._buffer.maxlen:
            self.dropped += 1
        self._buffer.append(event)
        self._arrived.set()

    def end(self) -> None:
        """Let the reader finish what is buffered, and stop."""
        self._ended = True
        self._arrived.set()

    async def receive(self) -> Event:
        if self._closed:
            raise anyio.ClosedResourceError
        if self._receiving:
            raise anyio.BusyResourceError("receiving from")
        self._receiving = True
        try:
            await anyio.lowlevel.checkpoint()
            while not self._buffer:
                if self._ended:
                    raise anyio.EndOfStream
                self._arrived = anyio.Event()
                await self._arrived.wait()
            return self._buffer.popleft()
        finally:
            self._receiving = False

    async def aclose(self) -> None:
        self._closed = True
        self.end()
        self._on_close(self)
        await anyio.lowlevel.checkpoint()
