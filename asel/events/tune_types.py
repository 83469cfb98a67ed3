"""Events of a tune: its beginning, its candidates, its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from asel.events.types import Event, Interval, Severity

__all__ = [
    "AutotuneFailed",
    "AutotuneFinish",
    "AutotuneStart",
    "CandidateEliminated",
    "CandidateFailed",
    "CandidateMeasured",
    "CandidateSkipped",
    "CandidateStart",
    "WinnerFailed",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class AutotuneStart(Event):
    """A tune began. If `background`, the caller that began it does not wait for it."""

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
    """A candidate was measured.

    `compiled` has the start and end of each attempt to compile it; a candidate that is tried again after the others
    has two. `measured` is the interval from its first sample to its last.
    """

    name: ClassVar[str] = "candidate_measured"
    tune_id: str
    index: int
    cfg: Any
    median_s: float
    compile_s: float
    samples: int
    ranked_s: float | None = None
    winner: bool = False
    compiled: tuple[Interval, ...] = ()
    measured: Interval | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateFailed(Event):
    """A candidate failed or took too long. If `still_busy`, its thread has not finished."""

    name: ClassVar[str] = "candidate_failed"
    severity: ClassVar[Severity] = "warning"
    tune_id: str
    index: int
    cfg: Any
    stage: str
    error_type: str
    message: str
    still_busy: bool = False
    compiled: tuple[Interval, ...] = ()
    measured: Interval | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateEliminated(Event):
    """A candidate was clearly slower than the leader and left the race."""

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
    """A tune ended with a winner, which is already in memory."""

    name: ClassVar[str] = "autotune_finish"
    severity: ClassVar[Severity] = "info"
    tune_id: str
    cfg: Any
    measured: int
    failed: int
    skipped: int
    margin: float | None = None
    """The share of the incumbent's time that the winner saves."""
    waiters: int = 0
    """The number of callers that waited for this tune."""
    learned_from: int | None = None
    """The number of earlier tunes of the kernel that guided the choice of what to compile; None without any."""
    prediction_error: float | None = None
    """The error of the times they predicted: the root mean square of the log of predicted over measured time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutotuneFailed(Event):
    """A tune ended without a winner; the key is not tuned again before `retry_at`.

    If `retry_at` is None, a close or a cancellation ended the tune, and it may begin again at once.
    """

    name: ClassVar[str] = "autotune_failed"
    severity: ClassVar[Severity] = "warning"
    tune_id: str
    error_type: str
    message: str
    retry_at: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WinnerFailed(Event):
    """A config that had won a tune failed in a real call, and was withdrawn from memory and the store.

    `tier` is the tier that it came from. `instead` is its replacement, the next best config of its tune; if None, the
    key may be tuned again. `evidence` says why the config was blamed rather than the call. The config is a candidate
    again after `retry_after_s` seconds.
    """

    name: ClassVar[str] = "winner_failed"
    severity: ClassVar[Severity] = "warning"
    cfg: Any
    tier: str
    instead: Any
    error_type: str
    message: str
    evidence: str
    retry_after_s: float
