"""The events of a whole tune: its start, its result, its failure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asel.errors import TuningError
from asel.events import AutotuneFailed, AutotuneFinish, AutotuneStart
from asel.events.dispatcher import Dispatcher
from asel.selection.cache_entries import Done
from asel.tuning.outcomes import Failed, Measured, Skipped

if TYPE_CHECKING:
    from asel.selection.shared_tunes import Tune

__all__ = ["emit_failed", "emit_finish", "emit_start", "error_type_of"]


def emit_start(events: Dispatcher, tune: Tune[Any]) -> None:
    """Emit `autotune_start`, once, even if another caller continues the tune."""
    if tune.has_started:
        return
    tune.has_started = True
    request = tune.request
    events(
        AutotuneStart(
            key=request.key,
            start=tune.started,
            end=tune.started,
            tune_id=tune.id,
            candidates=len(request.candidates),
            objective=request.objective,
            background=tune.background,
        )
    )


def emit_finish(events: Dispatcher, tune: Tune[Any], done: Done[Any]) -> None:
    outcomes = list(tune.state.outcomes.values())
    events(
        AutotuneFinish(
            key=tune.request.key,
            start=tune.started,
            end=events.now(),
            tune_id=tune.id,
            cfg=done.cfg,
            measured=sum(isinstance(outcome, Measured) for outcome in outcomes),
            failed=sum(isinstance(outcome, Failed) for outcome in outcomes),
            skipped=sum(isinstance(outcome, Skipped) for outcome in outcomes),
            margin=None if done.provenance.report is None else done.provenance.report.margin,
            waiters=tune.waiters,
            learned_from=len(getattr(done.provenance.report, "learned_from", ())) or None,
            prediction_error=getattr(done.provenance.report, "prediction_error", None),
        )
    )


def emit_failed(
    events: Dispatcher, tune: Tune[Any], error_type: str, message: str, retry_at: float | None = None
) -> None:
    """Emit `autotune_failed`. Without `retry_at`, the next call may begin the tune again."""
    events(
        AutotuneFailed(
            key=tune.request.key,
            start=tune.started,
            end=events.now(),
            tune_id=tune.id,
            error_type=error_type,
            message=message,
            retry_at=retry_at,
        )
    )


def error_type_of(error: TuningError) -> str:
    """Return the type of error behind a failed tune: its cause, or the type that all failed candidates share."""
    cause = error.__cause__
    if cause is not None and not isinstance(cause, ExceptionGroup):
        return type(cause).__name__
    kinds = {outcome.error_type for outcome in error.outcomes if isinstance(outcome, Failed)}
    return kinds.pop() if len(kinds) == 1 else type(error).__name__
