"""Everything that happens, as values: one frozen dataclass for each kind of event.

Sinks get them in the order in which things happened; how, and what becomes of a sink that raises or is slow,
is in `fanout`.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import anyio
import anyio.lowlevel
from anyio.abc import ObjectReceiveStream

from asel.errors import InvalidRequestError
from asel.redaction import redact

if TYPE_CHECKING:
    from asel.keys import CacheKey

__all__ = [
    "Answer",
    "AutotuneFailed",
    "AutotuneFinish",
    "AutotuneStart",
    "Autotuned",
    "CacheHit",
    "CallerLeft",
    "CandidateEliminated",
    "CandidateFailed",
    "CandidateMeasured",
    "CandidateSkipped",
    "CandidateStart",
    "ClaimWait",
    "Closed",
    "Event",
    "EventStream",
    "Heuristics",
    "LateTune",
    "NoAnswer",
    "OutOfRange",
    "OverlayHit",
    "Override",
    "PendingJoin",
    "Persisted",
    "RecordRejected",
    "SheddingStarted",
    "SheddingStopped",
    "Sink",
    "Stale",
    "StoreFailed",
    "StoreRead",
    "StoreRecovered",
    "StoreRetry",
    "WinnerFailed",
]

Severity = Literal["debug", "info", "warning", "error"]
Interval = tuple[float, float]
"""From when to when, on the loop's clock."""
# What the tiers before memory say to every call that the fast lane answers.
_BEFORE_MEMORY = {"override": "no override", "overlay": "no overlay has the key"}


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
class Answer(Event):
    """How a call ended: what the kinds of answers have in common.

    `declined` says why each tier asked before had no answer. `tune_id` is the tune the caller began
    (`began`) or found pending, and `wait_s` how long it waited for it.
    """

    _tier: ClassVar[str]

    declined: Mapping[str, str] = field(default_factory=dict)
    wait_s: float = 0.0
    tune_id: str | None = None
    began: bool = False

    @property
    def tier(self) -> str:
        """The tier that answered; `error` and `left` where none did."""
        return self._tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Override(Answer):
    """The caller brought its own config."""

    name: ClassVar[str] = "override"
    _tier: ClassVar[str] = "override"
    cfg: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlayHit(Answer):
    """An active `overlay_cache` held the key."""

    name: ClassVar[str] = "overlay_hit"
    _tier: ClassVar[str] = "overlay"
    cfg: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheHit(Answer):
    """Memory or the store had the answer."""

    name: ClassVar[str] = "cache_hit"
    level: Literal["memory", "persistent"]
    cfg: Any

    @classmethod
    def from_memory(cls, key: CacheKey, cfg: Any, start: float, end: float) -> CacheHit:
        """Return the event of an answer from the fast lane: what the walk would have emitted."""
        return cls(key=key, start=start, end=end, level="memory", cfg=cfg, declined=dict(_BEFORE_MEMORY))

    @property
    def tier(self) -> str:
        return self.level


@dataclass(frozen=True, slots=True, kw_only=True)
class Autotuned(Answer):
    """The tune that the caller waited for was its answer."""

    name: ClassVar[str] = "autotuned"
    _tier: ClassVar[str] = "autotune"
    cfg: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerLeft(Answer):
    """A caller left without an answer: it was cancelled, or the chain closed."""

    name: ClassVar[str] = "caller_left"
    _tier: ClassVar[str] = "left"
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingJoin(Event):
    """A caller began to wait for a tune that someone else had begun."""

    name: ClassVar[str] = "pending_join"
    tune_id: str
    waiters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AutotuneStart(Event):
    """A tune began. `background`: whoever caused it does not wait for it."""

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
    """A candidate ran. Its steps are told as `(start, end)`: compiling, and from the first sample to the last."""

    name: ClassVar[str] = "candidate_measured"
    tune_id: str
    index: int
    cfg: Any
    median_s: float
    compile_s: float
    samples: int
    compiled: Interval | None = None
    measured: Interval | None = None


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
    compiled: Interval | None = None
    measured: Interval | None = None


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
    margin: float | None = None
    """By how much of the incumbent's time the winner is faster."""
    waiters: int = 0
    """Who is about to get the answer."""


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
class Heuristics(Answer):
    """The kernel's own guess was the answer; `declined` says why nothing better was."""

    name: ClassVar[str] = "heuristics"
    _tier: ClassVar[str] = "heuristics"
    cfg: Any


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
class WinnerFailed(Event):
    """A config that had won a tune failed in a real call, and was withdrawn from memory and the store.

    `tier` is where the call had it from, `instead` what answers in its place: the next best of its tune, or
    None where there is none, and the key is open again.
    """

    name: ClassVar[str] = "winner_failed"
    severity: ClassVar[Severity] = "warning"
    cfg: Any
    tier: str
    instead: Any
    error_type: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRead(Event):
    """The store was asked for a record, and answered."""

    name: ClassVar[str] = "store_read"
    found: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRejected(Event):
    """The store holds something that is no record, or not one for this key; it counts as a miss."""

    name: ClassVar[str] = "record_rejected"
    severity: ClassVar[Severity] = "warning"
    where: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimWait(Event):
    """The right to tune a key was asked for, from a store that other processes share.

    `held`: this process tunes. `record`: another's result came meanwhile. `timed_out`: whoever holds
    the claim is stuck for all one knows, and this process tunes, too.
    """

    name: ClassVar[str] = "claim_wait"
    waited_s: float
    outcome: Literal["held", "record", "timed_out"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRecovered(Event):
    """The store answers again, after `failing_s` seconds in which it did not."""

    name: ClassVar[str] = "store_recovered"
    severity: ClassVar[Severity] = "info"
    operation: str
    failing_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFailed(Event):
    """The store stopped answering; its tier declined. Told once for each outage."""

    name: ClassVar[str] = "store_error"
    severity: ClassVar[Severity] = "warning"
    operation: str
    error_type: str
    message: str

    @classmethod
    def of(cls, key: CacheKey, operation: str, start: float, end: float, error: Exception) -> StoreFailed:
        kind = type(error).__name__
        return cls(key=key, start=start, end=end, operation=operation, error_type=kind, message=redact(error))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRetry(StoreFailed):
    """The store was tried again after a rest, and failed again."""

    name: ClassVar[str] = "store_retry"
    severity: ClassVar[Severity] = "debug"


@dataclass(frozen=True, slots=True, kw_only=True)
class NoAnswer(Answer):
    """Every tier declined, or the tune that was waited for failed and nothing else may answer."""

    name: ClassVar[str] = "error"
    severity: ClassVar[Severity] = "error"
    _tier: ClassVar[str] = "error"
    reason: Literal["no_config", "tune_failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed(Event):
    """The chain closed. `abandoned` names the candidates whose threads were still busy."""

    name: ClassVar[str] = "closed"
    severity: ClassVar[Severity] = "info"
    cancelled: int
    abandoned: tuple[str, ...]
    unsaved: int = 0
    """The results that never reached the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SheddingStarted(Event):
    """More was offered than a thread could tell its sinks: hits are not told one by one for now."""

    name: ClassVar[str] = "shedding_started"
    severity: ClassVar[Severity] = "warning"
    queued: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SheddingStopped(Event):
    """All that happens is told again; `shed` events were not."""

    name: ClassVar[str] = "shedding_stopped"
    severity: ClassVar[Severity] = "warning"
    shed: int


class Sink(Protocol):
    """Where events go. May also have `wants(kind)`, asked before an event of that kind is made.

    A sink is called on the event loop, before the selection returns, for as long as it is quick. One that took over
    10 ms in two of a hundred calls in a row, or over half a second once, is called from a thread of its own
    from then on: in order, each event once, later.

    One with `on_loop = True` touches what belongs to the loop and is never moved: however slow it is, every
    selection waits for it. One with `deferred = True` is called from the telemetry thread from its first
    event on. One with `takes_hits = True` is told of answers from the fast lane by `hit(key, cfg, start)`, without an
    event; that and its `emit` may be called from any thread, and are never moved.

    `watch(loop, statistics)` and `flush(timeout_s)` are called where a sink has them: when a chain gets to
    know its loop, and when it closes.
    """

    def emit(self, event: Event) -> None: ...


class EventStream(ObjectReceiveStream[Event]):
    """The events as they happen, for one reader.

    Holds at most `buffer` of them: when the reader falls behind, the oldest are dropped and counted
    in `dropped`. Ends when the chain closes.
    """

    on_loop = True

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
