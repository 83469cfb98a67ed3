"""Takes the samples that a strategy plans, and notes what becomes of them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import anyio

from asel.board import Board
from asel.events import CandidateEliminated, Interval
from asel.jobs import TuneJob
from asel.lanes import LaneStuck
from asel.steps import at_work, lanes, step, timed
from asel.strategies import Drop, Step
from asel.threads import Busy

__all__ = ["follow"]

# Samples are taken in one go if they take no longer than this: so often is a budget looked at.
_SERIES_S = 20e-3
# Nor a greater part than this of what one of them may take, since that is what all of them may then.
_SERIES_PART = 0.1


@dataclass(frozen=True, slots=True)
class _Taken:
    """A sample: what one run took and what it took in all, or why it failed."""

    index: int
    seconds: float = 0.0
    taken_s: float = 0.0
    during: Interval | None = None
    error: BaseException | None = None


async def follow(job: TuneJob[Any], board: Board, plan: Iterator[Step]) -> None:
    """Do what is planned, until the plan or the budget ends.

    Raises:
        LaneStuck: a candidate that was left behind keeps the device.
    """
    first, ahead = None, deque[_Taken]()
    for planned in plan:
        index = planned.index
        if first is None or first not in job.runners:  # the one before has failed
            first = index
        if isinstance(planned, Drop):
            board.drop(index, planned.round, planned.best)
            job.tell(CandidateEliminated, index, job.runners[index].started, round=planned.round)
            continue
        if ahead and ahead[0].index != index:  # it does not keep to what it said was next
            _note_all(job, board, ahead)
        if not ahead:
            if job.is_broke and (board.measured or board.warmups.get(first) or index != first):
                break  # the best so far wins; until there is one, the first that runs has one run
            ahead.extend(await _take(job, [index, *planned.then]))
        _note(job, board, ahead.popleft())
    _note_all(job, board, ahead)


async def _take(job: TuneJob[Any], wanted: Sequence[int]) -> Sequence[_Taken]:
    """Take a sample of the first, and in one go of as many after it as can be."""
    series = _series(job, wanted)
    return await _take_all(job, series) if len(series) > 1 else [await _take_one(job, wanted[0])]


def _series(job: TuneJob[Any], wanted: Sequence[int]) -> list[int]:
    """Return how far samples can be taken in one go: of those that were sampled before, and are quick."""
    bench = job.runners[wanted[0]].bench
    left_s = min(_SERIES_S, _SERIES_PART * job.candidate_timeout_s)
    series = list[int]()
    for index in wanted:
        runner = job.runners.get(index)
        if bench is None or runner is None or runner.bench is not bench or runner.expected_s > left_s:
            break
        left_s -= runner.expected_s
        series.append(index)
    return series


async def _take_one(job: TuneJob[Any], index: int) -> _Taken:
    runner = job.runners[index]
    try:
        async with at_work(job, index):
            with step(job, index, "measure") as taken_s:
                seconds = await runner.sampler()
            return _Taken(index, seconds, taken_s())
    except LaneStuck:
        raise
    except (Exception, SystemExit) as error:  # one failing candidate is data, never the end of a tune
        return _Taken(index, error=error)
    finally:
        job.note_left_behind(runner.trial.left_behind)


async def _take_all(job: TuneJob[Any], series: Sequence[int]) -> Sequence[_Taken]:
    """Take a sample of each, up to the first that fails."""
    runners = [job.runners[index] for index in series]
    bench, samples, left_behind = runners[0].bench, list[tuple[float, float]](), list[Busy]()
    assert bench is not None
    failure: BaseException | None = None
    start = anyio.current_time()
    try:
        async with lanes(job, left_behind):
            start = anyio.current_time()
            with timed(job):
                await bench.series([runner.sampler for runner in runners], samples, left_behind)
    except LaneStuck:
        raise
    except (Exception, SystemExit) as error:
        failure = error
    finally:
        job.note_left_behind(left_behind)
    during = start, anyio.current_time()
    come = len(series) if failure is None else min(len(samples), len(series) - 1)
    taken = [_Taken(index, *samples[place], during) for place, index in enumerate(series[:come])]
    if failure is not None:
        runners[come].trial.left_behind += left_behind
        taken.append(_Taken(series[come], during=during, error=failure))
    return taken


def _note_all(job: TuneJob[Any], board: Board, ahead: deque[_Taken]) -> None:
    """Note samples that were taken for nothing: they are as good as any, and one that failed has failed."""
    while ahead:
        if (taken := ahead.popleft()).index in job.runners:
            _note(job, board, taken)


def _note(job: TuneJob[Any], board: Board, taken: _Taken) -> None:
    index, runner, error, seconds = taken.index, job.runners[taken.index], taken.error, 0.0
    if taken.during is not None:
        job.note_step(index, "measure", *taken.during)
    try:
        seconds = _checked(taken.seconds)
    except Exception as garbage:
        error = garbage
    if error is None:
        runner.note_sample(taken.taken_s)
        board.record(index, seconds, taken.taken_s)
    else:
        board.remove(index)
        job.fail(index, runner.started, "measure", error, runner.trial.left_behind)
        job.let_out(index)


def _checked(seconds: float) -> float:
    if not 0 <= seconds < math.inf:
        raise ValueError(f"the measure returned {seconds!r}, which is not a duration")
    return float(seconds)
