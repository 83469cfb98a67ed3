"""Event values: one frozen dataclass for each kind of event.

Events are delivered in order, by `dispatcher.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from asel.kernels.keys import CacheKey

__all__ = [
    "Answer",
    "Autotuned",
    "CacheHit",
    "CallerLeft",
    "Closed",
    "Event",
    "Heuristics",
    "Interval",
    "KeyChurn",
    "LateTune",
    "NoAnswer",
    "OutOfRange",
    "OverlayHit",
    "Override",
    "PendingJoin",
    "Severity",
    "SheddingStarted",
    "SheddingStopped",
    "Stale",
]

Severity = Literal["debug", "info", "warning", "error"]
Interval = tuple[float, float]
"""Start and end, in seconds on the loop's clock."""
# The reasons of the tiers before memory, for every call that the fast lane answers.
_BEFORE_MEMORY = {"override": "no override", "overlay": "no overlay has the key"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something happened to a key between `start` and `end`, in seconds on the loop's clock."""

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

    @property
    def call(self) -> str | None:
        """The readable call, `q=bf16[8,1024,128], causal=True`; None if the key has none."""
        return getattr(self.key, "call", None) or None

    def fields(self) -> dict[str, Any]:
        """Return the event's facts by name; those of the key have ejKernel's names."""
        facts = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "key"}
        if self.key is None:
            return facts
        named = {"device": self.key.device, "op_id": self.key.op_id, "call_key": self.key.call_key}
        return {**named, **({} if self.call is None else {"call": self.call}), **facts}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer(Event):
    """A call ended: the base class of all answers.

    `declined` has the reason of each tier that had no answer. `tune_id` is the tune that the caller began, if `began`,
    or joined, and `wait_s` is how long it waited for that tune.
    """

    _tier: ClassVar[str]

    declined: Mapping[str, str] = field(default_factory=dict)
    wait_s: float = 0.0
    tune_id: str | None = None
    began: bool = False

    @property
    def tier(self) -> str:
        """The tier that answered; `error` or `left` if none did."""
        return self._tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Override(Answer):
    """The invocation has its own config."""

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
        """Return the event of an answer from the fast lane, equal to the event of the full tier walk."""
        return cls(key=key, start=start, end=end, level="memory", cfg=cfg, declined=dict(_BEFORE_MEMORY))

    @property
    def tier(self) -> str:
        return self.level


@dataclass(frozen=True, slots=True, kw_only=True)
class Autotuned(Answer):
    """The caller waited for a tune and got its winner."""

    name: ClassVar[str] = "autotuned"
    _tier: ClassVar[str] = "autotune"
    cfg: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerLeft(Answer):
    """The caller was cancelled before it had an answer, or the selector closed."""

    name: ClassVar[str] = "caller_left"
    _tier: ClassVar[str] = "left"
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingJoin(Event):
    """A caller began to wait for a tune that another caller had begun."""

    name: ClassVar[str] = "pending_join"
    tune_id: str
    waiters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Heuristics(Answer):
    """The kernel's heuristic was the answer; `declined` has the reasons of all earlier tiers."""

    name: ClassVar[str] = "heuristics"
    _tier: ClassVar[str] = "heuristics"
    cfg: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Stale(Event):
    """A loaded entry has other candidates, another version or another objective."""

    name: ClassVar[str] = "stale"
    severity: ClassVar[Severity] = "info"
    cfg: Any
    checksum: str
    expected: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfRange(Event):
    """A size is outside the kernel's declared buckets, so the call has its own key."""

    name: ClassVar[str] = "out_of_range"
    severity: ClassVar[Severity] = "warning"
    dimension: str
    size: int
    low: int
    high: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyChurn(Event):
    """An op has `keys` keys that differ in one constant only, the value of `argument`. Emitted once for each op."""

    name: ClassVar[str] = "key_churn"
    severity: ClassVar[Severity] = "warning"
    argument: str
    keys: int
    advice: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LateTune(Event):
    """A key was not tuned because it first appeared after `freeze()`."""

    name: ClassVar[str] = "late_tune"
    severity: ClassVar[Severity] = "warning"


@dataclass(frozen=True, slots=True, kw_only=True)
class NoAnswer(Answer):
    """The caller got no config: every tier declined, or the tune it waited for failed."""

    name: ClassVar[str] = "error"
    severity: ClassVar[Severity] = "error"
    _tier: ClassVar[str] = "error"
    reason: Literal["no_config", "tune_failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed(Event):
    """The selector closed. `abandoned` has the steps whose threads were still busy."""

    name: ClassVar[str] = "closed"
    severity: ClassVar[Severity] = "info"
    cancelled: int
    abandoned: tuple[str, ...]
    unsaved: int = 0
    """The number of results that were not stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SheddingStarted(Event):
    """Events come faster than the telemetry thread delivers them, so hits are dropped."""

    name: ClassVar[str] = "shedding_started"
    severity: ClassVar[Severity] = "warning"
    queued: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SheddingStopped(Event):
    """No more events are dropped; `shed` were since `SheddingStarted`."""

    name: ClassVar[str] = "shedding_stopped"
    severity: ClassVar[Severity] = "warning"
    shed: int
