"""The steps of a candidate: bounded by its timeout, charged to its tune and, while it runs, alone on the device."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any

import anyio

from asel.runtime.loop import is_failure
from asel.runtime.threads import AbandonedThread
from asel.tuning.device_lock import alone_on
from asel.tuning.measure import Trial
from asel.tuning.outcomes import Stage
from asel.tuning.state import TuneState

__all__ = ["STUCK", "alone_on_devices", "is_outcome", "outcome_of_failing", "ready_to_run", "step", "timed"]

STUCK = "an abandoned candidate still occupies the device"


@contextmanager
def timed(state: TuneState[Any], so_far_s: float = 0.0) -> Iterator[None]:
    """Bound the block by the rest of the candidate's timeout, and charge it to the tune."""
    with state.budget.running(), anyio.fail_after(state.request.candidate_timeout_s - so_far_s):
        yield


@contextmanager
def step(state: TuneState[Any], index: int, stage: Stage, so_far_s: float = 0.0) -> Iterator[Callable[[], float]]:
    """Do the same, and record the step for traces. Yields a function that returns its duration."""
    start = end = anyio.current_time()
    try:
        with timed(state, so_far_s):
            yield lambda: end - start
    finally:
        end = anyio.current_time()
        state.note_step(index, stage, start, end)


@contextmanager
def outcome_of_failing(state: TuneState[Any], index: int, start: float, trial: Trial[Any]) -> Iterator[None]:
    """Record a failure inside the block as the candidate's outcome; it does not end the tune."""
    try:
        yield
    except BaseException as error:
        if not is_outcome(error):
            raise
        state.fail(index, start, trial.stage, error, trial.left_behind)
    finally:
        state.note_left_behind(trial.left_behind)


def is_outcome(error: BaseException) -> bool:
    """Return whether an exception is a candidate's outcome. Even SystemExit ends only the candidate."""
    return isinstance(error, SystemExit) or is_failure(error)


def alone_on_devices(state: TuneState[Any], left_behind: list[AbandonedThread]) -> AbstractAsyncContextManager[None]:
    """Hold the devices that the candidates run on, until the threads in `left_behind` have finished as well."""
    return alone_on(
        state.devices, left_behind, state.request.candidate_timeout_s, across_processes=state.runs_on_device
    )


@asynccontextmanager
async def ready_to_run(state: TuneState[Any], index: int) -> AsyncIterator[None]:
    """Hold the devices, and the candidate's worker if it has one, for one step."""
    runner = state.runners[index]
    async with alone_on_devices(state, runner.trial.left_behind), runner.sampler.turn(state.budget.running):
        for again in runner.sampler.ready():  # compile it again, if its worker died with another candidate
            with timed(state):
                await again()
        yield
