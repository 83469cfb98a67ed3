"""What a tune reports in the end, and what the next one takes from that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

from asel.board import Board, level
from asel.devices import environment
from asel.errors import TuningError
from asel.events import CandidateMeasured
from asel.jobs import TuneJob, by_way
from asel.kernel import Cfg
from asel.keys import Objective, config_form
from asel.outcomes import Failed, Measured, Outcome, Skipped, TuneReport

__all__ = ["earlier_best", "report_on", "sentence", "timings_in"]


def timings_in(
    reports: Iterable[TuneReport[Cfg]], candidates: Sequence[Cfg], objective: Objective, software: Mapping[str, str]
) -> dict[int, Measured[Cfg]]:
    """Return what earlier tunes with the same software and objective measured of these candidates."""
    found: dict[Any, Measured[Cfg]] = {}
    for report in reports:
        if report.environment == software and report.objective == objective:
            found.update({config_form(o.cfg): o for o in report.outcomes if isinstance(o, Measured) and o.samples_s})
    forms = map(config_form, candidates) if found else ()
    return {i: found[form] for i, form in enumerate(forms) if form in found}


def sentence(failed: Failed[Any]) -> str:
    return f"{failed.error_type} in the {failed.stage} stage: {failed.message}"


def report_on(job: TuneJob[Cfg]) -> TuneReport[Cfg]:
    """Settle every candidate's outcome and name the winner."""
    board = job.board
    comparable = _comparable(job)
    comparable += _reuse(job, comparable)
    for index, runner in job.runners.items():
        if index not in job.outcomes:
            assert board is not None
            samples = tuple(board.samples[index])
            job.outcomes[index] = Measured(
                job.candidates[index],
                board.median(index),
                samples,
                runner.compile_s,
                how=runner.how,
                eliminated=board.dropped.get(index),
                measure_s=runner.measure_s,
            )
            facts = {"median_s": board.median(index), "compile_s": runner.compile_s, "samples": len(samples)}
            if (measured := job.steps.get((index, "measure"))) is not None:
                facts["end"] = measured[1]  # others were sampled since
            job.tell(CandidateMeasured, index, runner.started, **facts, **job.times(index))
    for index, first in job.aliases.items():
        _settle_alias(job, index, first)
    for index in range(len(job.candidates)):
        if index not in job.outcomes:
            job.skip(index, "a group of higher priority had a success")
    outcomes = tuple(job.outcomes[i] for i in range(len(job.candidates)))
    if board is None or not comparable:
        raise _all_failed(job, outcomes)
    # A report is kept for long; an exception would keep all that its traceback refers to.
    outcomes = tuple(replace(o, error=None) if isinstance(o, Failed) else o for o in outcomes)
    board.enter(comparable)
    winner, leader = board.winner(), board.leader()
    incumbent = job.incumbent if job.incumbent in comparable else None
    return TuneReport(
        key=job.key,
        winner=job.candidates[winner],
        outcomes=outcomes,
        seconds=job.seconds,
        environment=environment(job.device),
        tune_id=job.id,
        checksum=job.checksum,
        objective=job.objective,
        incumbent=None if job.incumbent is None else job.candidates[job.incumbent],
        noise=board.noise(leader, winner),
        margin=_margin(board, winner, incumbent),
        tune_budget_s=_limit(job.tune_budget_s),
        candidate_timeout_s=_limit(job.candidate_timeout_s),
    )


def _limit(seconds: float) -> float | None:
    return seconds if isfinite(seconds) else None  # JSON knows no infinity


def _margin(board: Board, winner: int, incumbent: int | None) -> float:
    if incumbent is None or board.level(incumbent) == 0:
        return 0.0
    return 1 - board.level(winner) / board.level(incumbent)


def earlier_best(job: TuneJob[Any]) -> float | None:
    """Return the best of the earlier timings that may win, as a part of the incumbent's of then."""
    those = [one for i in _reused(job) if _out_as_then(job, one := job.known[i]) is None]
    # None where the timer saw nothing of the incumbent: it is no yardstick, and all are measured anew.
    parts = [level(one.samples_s) / then_s for one in those if (then_s := _yardstick_s(job, one)) > 0]
    return min(parts, default=None)


def _reuse(job: TuneJob[Cfg], comparable: list[int]) -> list[int]:
    """Put earlier timings on the board, in today's terms; return those that may win, as the incumbent may."""
    board, incumbent = job.board, job.incumbent
    if board is None or incumbent is None or not board.samples.get(incumbent):
        return []
    reused = _reused(job)
    outs = {index: _out_as_then(job, job.known[index]) for index in reused}
    today_s = board.level(incumbent)
    for index, out in outs.items():
        earlier = job.known[index]
        ratio = today_s / _yardstick_s(job, earlier)
        if out is not None:
            board.dropped[index] = out
        board.samples[index] = [seconds * ratio for seconds in earlier.samples_s]
        job.outcomes[index] = replace(
            earlier,
            cfg=job.candidates[index],
            median_s=earlier.median_s * ratio,
            samples_s=tuple(board.samples[index]),
            compile_s=0.0,
            measure_s=0.0,
            eliminated=out,
            alias_of=None,
            reused=True,
        )
    return reused if incumbent in comparable else []


def _reused(job: TuneJob[Any]) -> list[int]:
    return [i for i in job.reused if i not in job.outcomes]


def _rounds(earlier: Measured[Any]) -> int | None:
    """Return in how many rounds a candidate was that dropped out; None: in all, or in those of another tune."""
    return None if earlier.eliminated is None or earlier.reused else len(earlier.samples_s)


def _yardstick_s(job: TuneJob[Any], earlier: Measured[Any]) -> float:
    """Return the incumbent's level of then, in the rounds that a candidate was in: later ones are calmer or busier."""
    assert job.incumbent is not None
    then = job.known[job.incumbent].samples_s
    return level(then[: _rounds(earlier)]) or level(then)


def _out_as_then(job: TuneJob[Any], earlier: Measured[Any]) -> int | None:
    """Return the round in which a candidate dropped out then, if one that was faster in its rounds is here today."""
    if earlier.eliminated is None:
        return None
    lasted = [one.samples_s for i in _reused(job) if (one := job.known[i]).eliminated is None]
    assert job.incumbent is not None
    rivals = [*lasted, job.known[job.incumbent].samples_s]
    faster = any(level(samples[: _rounds(earlier)]) < level(earlier.samples_s) for samples in rivals)
    return earlier.eliminated if faster else None


def _comparable(job: TuneJob[Any]) -> list[int]:
    """Return the measured candidates that were timed in the best way any was: only they may win."""
    measured = [] if job.board is None else [i for i in job.runners if job.board.samples.get(i)]
    return next(iter(by_way(job, measured)), [])


def _settle_alias(job: TuneJob[Cfg], index: int, first: int) -> None:
    """Give a candidate the outcome of the one whose program it has."""
    if index in job.outcomes:
        return
    cfg, original = job.candidates[index], job.outcomes.get(first)
    if isinstance(original, Measured):
        job.outcomes[index] = Measured(
            cfg,
            original.median_s,
            original.samples_s,
            0.0,
            how=original.how,
            eliminated=original.eliminated,
            alias_of=original.cfg,
        )
    elif isinstance(original, Failed):
        job.outcomes[index] = Failed(cfg, original.stage, original.error_type, original.message, original.error)
    else:
        job.outcomes[index] = Skipped(cfg, f"its program is that of {job.candidates[first]!r}, which was not measured")


def _all_failed(job: TuneJob[Any], outcomes: Sequence[Outcome[Any]]) -> TuningError:
    failed = [outcome for outcome in outcomes if isinstance(outcome, Failed)]
    causes = [outcome.error for outcome in failed if outcome.error is not None]
    first = f" The first: {sentence(failed[0])}." if failed else ""
    op = job.key.op_id or "the function"
    error = TuningError(
        f"none of the {len(outcomes)} candidates of {op!r} could be measured: {len(failed)} failed, "
        f"{len(outcomes) - len(failed)} were skipped.{first}",
        key=job.key,
        outcomes=outcomes,
    )
    error.__cause__ = ExceptionGroup("what the candidates raised", causes) if causes else None
    return error
