"""Takes the samples that a strategy asks for, and records times and failures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio

from asel.events import Interval
from asel.runtime.threads import AbandonedThread, run_in_thread
from asel.tuning.candidate_steps import STUCK, alone_on_devices, is_outcome, ready_to_run, step, timed
from asel.tuning.device_lock import DeviceStuck
from asel.tuning.outcomes import Stage
from asel.tuning.output_check import Check, OutputMismatch
from asel.tuning.scoreboard import Scoreboard
from asel.tuning.state import TuneState

__all__ = ["check_outputs", "take_round"]

# The longest series of samples without a return to the event loop, where the budget is checked.
_SERIES_S = 20e-3
# A series also takes at most this share of the candidate timeout, because the timeout then bounds the whole series.
_SERIES_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class _Taken:
    """A sample: the seconds of one run and of the whole sample, or the error."""

    index: int
    seconds: float = 0.0
    taken_s: float = 0.0
    during: Interval | None = None
    error: BaseException | None = None


async def take_round(state: TuneState[Any], board: Scoreboard, indices: Sequence[int]) -> bool:
    """Sample each of these candidates once, if it is compiled; return whether time is left for more.

    Raises:
        DeviceStuck: an abandoned candidate keeps the device.
    """
    left = list(indices)
    while left := [index for index in left if index in state.runners]:
        if state.budget.is_spent and board.has_run():
            return False  # but not before one candidate has run, so that there is a winner
        series = _series(state, left)
        taken = await _take_all(state, series) if len(series) > 1 else [await _take_one(state, left[0])]
        for one in taken:
            _record(state, board, one)
        left = left[len(taken) :]
        await state.rest(sum(one.taken_s for one in taken))
    return True


def _series(state: TuneState[Any], wanted: Sequence[int]) -> list[int]:
    """Return the longest series at the head of `wanted`: quick candidates that were sampled before, on one bench."""
    bench = state.runners[wanted[0]].bench
    left_s = min(_SERIES_S, _SERIES_SHARE * state.request.candidate_timeout_s)
    series = list[int]()
    for index in wanted:
        runner = state.runners[index]
        if bench is None or runner.bench is not bench or runner.expected_s > left_s:
            break
        left_s -= runner.expected_s
        series.append(index)
    return series


async def _take_one(state: TuneState[Any], index: int) -> _Taken:
    runner = state.runners[index]
    try:
        async with ready_to_run(state, index):
            with step(state, index, "measure") as taken_s:
                seconds = await runner.sampler()
            return _Taken(index, seconds, taken_s())
    except DeviceStuck:
        raise
    except BaseException as error:  # a failing candidate is an outcome, and does not end the tune
        if not is_outcome(error):
            raise
        return _Taken(index, error=error)
    finally:
        state.note_left_behind(runner.trial.left_behind)


async def _take_all(state: TuneState[Any], series: Sequence[int]) -> Sequence[_Taken]:
    """Take one sample of each candidate, until one fails."""
    runners = [state.runners[index] for index in series]
    bench, samples, left_behind = runners[0].bench, list[tuple[float, float]](), list[AbandonedThread]()
    assert bench is not None
    failure: BaseException | None = None
    start = anyio.current_time()
    try:
        async with alone_on_devices(state, left_behind):
            start = anyio.current_time()
            with timed(state):
                await bench.series([runner.sampler for runner in runners], samples, left_behind)
    except DeviceStuck:
        raise
    except BaseException as error:
        if not is_outcome(error):
            raise
        failure = error
    finally:
        state.note_left_behind(left_behind)
    during = start, anyio.current_time()
    completed = len(series) if failure is None else min(len(samples), len(series) - 1)
    taken = [_Taken(index, *samples[place], during) for place, index in enumerate(series[:completed])]
    if failure is not None:
        runners[completed].trial.left_behind += left_behind
        taken.append(_Taken(series[completed], during=during, error=failure))
    return taken


def _record(state: TuneState[Any], board: Scoreboard, taken: _Taken) -> None:
    index, runner, error, seconds = taken.index, state.runners[taken.index], taken.error, 0.0
    stage: Stage = "measure"
    if taken.during is not None:
        state.note_step(index, "measure", *taken.during)
    try:
        seconds = _checked(taken.seconds)
    except Exception as invalid:
        error = invalid
    if error is None and not runner.sampled:
        try:
            state.refuse_new_nan(index)
        except OutputMismatch as mismatch:
            error, stage = mismatch, "check"
    if error is None:
        runner.note_sample(taken.taken_s)
        board.record(index, seconds, taken.taken_s)
    else:
        state.fail(index, runner.started, stage, error, runner.trial.left_behind)
        state.retire(index)


def _checked(seconds: float) -> float:
    if not 0 <= seconds < math.inf:
        raise ValueError(f"the measure returned {seconds!r}, which is not a duration")
    return float(seconds)


async def check_outputs(check: Check, state: TuneState[Any]) -> None:
    """Compare the outputs of new candidates with those of the incumbent, or else of the first candidate that runs."""
    new = [index for index, runner in state.runners.items() if not runner.is_checked]
    for index in sorted(new, key=lambda i: i != state.request.incumbent):
        runner = state.runners[index]
        if state.budget.is_spent and state.expected.are_known:
            state.skip(index, f"the tune's budget of {state.budget.limit_s:g} s was spent before it was checked")
            state.retire(index)
            continue
        comparing: list[AbandonedThread] = []
        try:
            async with ready_to_run(state, index):
                with step(state, index, "check"):
                    outputs = await runner.sampler.outputs()
            with step(state, index, "check"):  # the comparison runs on the host, with a timeout of its own
                compare = partial(state.expected.compare, outputs, check)
                what = f"comparing the outputs of {state.request.candidates[index]!r}"
                await run_in_thread(what, compare, grace_s=state.request.grace_s, left_behind=comparing, stops=True)
            runner.is_checked = True
        except DeviceStuck:
            state.skip(index, f"{STUCK}, so it was not checked")
            state.retire(index)
        except BaseException as error:  # a failing candidate is an outcome, and does not end the tune
            if not is_outcome(error):
                raise
            state.fail(index, runner.started, "check", error, [*runner.trial.left_behind, *comparing])
            state.retire(index)
        finally:
            state.note_left_behind([*runner.trial.left_behind, *comparing])
