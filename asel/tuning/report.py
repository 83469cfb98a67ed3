"""Makes the report at the end of a tune, and takes reusable timings from earlier reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

from asel.errors import TuningError
from asel.events import CandidateMeasured
from asel.kernels.candidates import config_form
from asel.kernels.devices import environment
from asel.kernels.kernel import Cfg
from asel.tuning.groups import is_tried
from asel.tuning.outcomes import Failed, Measured, Outcome, Skipped, TuneReport
from asel.tuning.request import TuneRequest
from asel.tuning.scoreboard import Scoreboard
from asel.tuning.state import Runner, TuneState

__all__ = ["failure_text", "reasons_of", "recorded_timings", "report_on"]

_MAX_REASONS = 3


def recorded_timings(state: TuneState[Cfg]) -> dict[int, Measured[Cfg]]:
    """Return the earlier timings that this tune reuses.

    They come from tunes with the same software and objective whose winner is tried again now: the candidates that it
    beat then are not the best now, either.
    """
    request = state.request
    if not state.reports:
        return {}
    software, forms = environment(request.device), [config_form(cfg) for cfg in request.candidates]
    tried = {form for index, form in enumerate(forms) if is_tried(state, index)}
    found: dict[Any, Measured[Cfg]] = {}
    winners = set()
    for report in state.reports:
        is_comparable = report.environment == software and report.objective == request.objective
        if is_comparable and (winner := config_form(report.winner)) in tried:
            found.update({config_form(o.cfg): o for o in report.outcomes if isinstance(o, Measured) and o.samples_s})
            winners.add(winner)
    return {i: found[form] for i, form in enumerate(forms) if form in found and form not in winners}


def reasons_of(failed: Sequence[Failed[Any]]) -> str:
    """Return the reasons why candidates failed, the most frequent first."""
    reasons = Counter(map(failure_text, failed)).most_common()
    shown = [f"{number} of them: {reason}" for reason, number in reasons[:_MAX_REASONS]]
    if (more := len(reasons) - len(shown)) > 0:
        shown.append(f"and {more} other errors")
    return "; ".join(shown)


def failure_text(failed: Failed[Any]) -> str:
    return f"{failed.error_type} in the {failed.stage} stage: {failed.message}"


def report_on(state: TuneState[Cfg]) -> TuneReport[Cfg]:
    """Settle every candidate's outcome and name the winner."""
    request, board = state.request, state.board
    comparable = _comparable(state)
    winner = None
    if board is not None and comparable:
        board.enter(comparable)
        winner = board.winner()
    for index, runner in state.runners.items():
        if index not in state.outcomes:
            assert board is not None
            _settle_measured(state, board, index, runner, winner, is_comparable=index in comparable)
    for index, first in state.aliases.items():
        _settle_alias(state, index, first)
    for index, earlier in state.recorded.items():
        if index not in state.outcomes:
            cfg = request.candidates[index]
            state.settle(index, replace(earlier, cfg=cfg, compile_s=0.0, measure_s=0.0, reused=True))
    for index in range(len(request.candidates)):
        if index not in state.outcomes:
            state.skip(index, "a group of higher priority had a success")
    outcomes = tuple(state.outcomes[i] for i in range(len(request.candidates)))
    if board is None or winner is None:
        raise _all_failed(request, outcomes)
    # Reports live long, and an exception would keep everything alive that its traceback refers to.
    outcomes = tuple(replace(o, error=None) if isinstance(o, Failed) else o for o in outcomes)
    incumbent = request.incumbent if request.incumbent in comparable else None
    return TuneReport(
        key=request.key,
        winner=request.candidates[winner],
        outcomes=outcomes,
        seconds=state.seconds,
        environment=environment(request.device),
        tune_id=request.id,
        checksum=request.checksum,
        objective=request.objective,
        incumbent=None if request.incumbent is None else request.candidates[request.incumbent],
        noise=board.noise(),
        margin=_margin(board, winner, incumbent),
        tune_budget_s=_limit(state.budget.limit_s),
        candidate_timeout_s=_limit(request.candidate_timeout_s),
        learned_from=board.learned_from,
        prediction_error=board.prediction_error,
    )


def _settle_measured(
    state: TuneState[Cfg], board: Scoreboard, index: int, runner: Runner, winner: int | None, *, is_comparable: bool
) -> None:
    samples = tuple(board.samples[index])
    ranked_s = board.time_beside(index if winner is None or not is_comparable else winner, index)
    outcome = Measured(
        state.request.candidates[index],
        board.median(index),
        samples,
        runner.compile_s,
        how=runner.how,
        eliminated=board.dropped.get(index),
        measure_s=runner.measure_s,
        predicted_s=board.predicted.get(index),
        ranked_s=ranked_s,
    )
    state.settle(index, outcome)
    facts: dict[str, Any] = {"median_s": board.median(index), "ranked_s": ranked_s}
    facts |= {"compile_s": runner.compile_s, "samples": len(samples), "winner": index == winner}
    times = state.times(index)
    if (measured := times["measured"]) is not None:
        facts["end"] = measured[1]  # other candidates were sampled after it
    state.emit(CandidateMeasured, index, runner.started, **facts, **times)


def _limit(seconds: float) -> float | None:
    return seconds if isfinite(seconds) else None  # JSON has no infinity


def _margin(board: Scoreboard, winner: int, incumbent: int | None) -> float:
    if incumbent is None or board.time_beside(winner, incumbent) == 0:
        return 0.0
    return 1 - board.trimmed_mean(winner) / board.time_beside(winner, incumbent)


def _comparable(state: TuneState[Any]) -> list[int]:
    """Return the measured candidates in the best timing mode of any: only they may win."""
    board = state.board
    measured = [] if board is None else [i for i in state.runners if board.samples.get(i)]
    return next(iter(state.by_timing_mode(measured)), [])


def _settle_alias(state: TuneState[Cfg], index: int, first: int) -> None:
    """Give a candidate the outcome of the candidate with the same program."""
    if index in state.outcomes:
        return
    cfg, original = state.request.candidates[index], state.outcomes.get(first)
    if isinstance(original, Measured):
        outcome: Outcome[Cfg] = Measured(
            cfg,
            original.median_s,
            original.samples_s,
            0.0,
            how=original.how,
            eliminated=original.eliminated,
            alias_of=original.cfg,
            ranked_s=original.ranked_s,
        )
    elif isinstance(original, Failed):
        outcome = Failed(cfg, original.stage, original.error_type, original.message, original.error)
    else:
        twin = state.request.candidates[first]
        outcome = Skipped(cfg, f"its program is that of {twin!r}, which was not measured")
    state.settle(index, outcome)


def _all_failed(request: TuneRequest[Any], outcomes: Sequence[Outcome[Any]]) -> TuningError:
    failed = [outcome for outcome in outcomes if isinstance(outcome, Failed)]
    causes = [outcome.error for outcome in failed if outcome.error is not None]
    why = f" {reasons_of(failed)}." if failed else ""
    op = request.key.op_id or "the function"
    error = TuningError(
        f"none of the {len(outcomes)} candidates of {op!r} could be measured: {len(failed)} failed, "
        f"{len(outcomes) - len(failed)} were skipped.{why}",
        key=request.key,
        outcomes=outcomes,
    )
    error.__cause__ = ExceptionGroup("what the candidates raised", causes) if causes else None
    return error
