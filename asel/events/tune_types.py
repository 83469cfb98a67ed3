"""Events of a tune: its beginning, its candidates, its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from asel.events.types import Event, Interval, Severity

if TYPE_CHECKING:
    pass

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
    """A tune began. `background`: the caller that caused it does not wait for it."""

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
    """A candidate ran. `compiled` has `(start, end)` of each step of compiling it: one that is tried again
    after the others has two. `measured` goes from its first sample to its last.
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
    """A candidate failed, or took too long. `still_busy`: its thread has not come back."""

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
    """The part of the incumbent's time that the winner saves."""
    waiters: int = 0
    """The number of callers that are about to get the answer."""
    learned_from: int | None = None
    """How many earlier tunes of the kernel guided the choice of what to compile; None if none did."""
    prediction_error: float | None = None
    """The error of their predicted times: the root mean square of the logarithms of the ratios."""


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

    `tier` is the tier that gave it to the call. `instead` is the config that answers in its place, the next best of its
    tune; if None, the key may be tuned again. `evidence` says why the config was blamed and not the call.
    After `retry_after_s` seconds it is a candidate again.
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
