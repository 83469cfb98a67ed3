"""The steps on a candidate's way: bounded, charged to its tune and, where it runs, alone on the device."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from typing import Any

import anyio

from asel.jobs import TuneJob
from asel.lanes import alone_on
from asel.measure import Trial
from asel.outcomes import Stage
from asel.threads import Busy

__all__ = ["STUCK", "at_work", "lanes", "outcome_of_failing", "step", "timed", "turn"]

STUCK = "an abandoned candidate still occupies the device"


@contextmanager
def timed(job: TuneJob[Any], so_far_s: float = 0.0) -> Iterator[None]:
    """Bound something that is done for a candidate by what is left of its timeout, and charge it to the tune."""
    with job.meter.running(), anyio.fail_after(job.candidate_timeout_s - so_far_s):
        yield


@contextmanager
def step(job: TuneJob[Any], index: int, stage: Stage, so_far_s: float = 0.0) -> Iterator[Callable[[], float]]:
    """The same for a step of its way, noted for those who trace it; gives the seconds it took."""
    start = end = anyio.current_time()
    try:
        with timed(job, so_far_s):
            yield lambda: end - start
    finally:
        end = anyio.current_time()
        job.note_step(index, stage, start, end)


@contextmanager
def outcome_of_failing(job: TuneJob[Any], index: int, start: float, trial: Trial[Any]) -> Iterator[None]:
    """Note why a candidate could not be made ready: one that fails is data, never the end of a tune."""
    try:
        yield
    except (Exception, SystemExit) as error:
        job.fail(index, start, trial.stage, error, trial.left_behind)
    finally:
        job.note_left_behind(trial.left_behind)


def turn(one: Any, job: TuneJob[Any]) -> AbstractAsyncContextManager[Any]:
    """Wait until a measure or a sampler can be asked, and give what is to be asked: waiting is free."""
    wait = getattr(one, "turn", None)
    return nullcontext(one) if wait is None else wait(job.meter.running)


def lanes(job: TuneJob[Any], left_behind: list[Busy]) -> AbstractAsyncContextManager[None]:
    """Hold the devices that the candidates run on, until the threads in `left_behind` have come back as well."""
    return alone_on(job.devices, left_behind, job.candidate_timeout_s)


@asynccontextmanager
async def at_work(job: TuneJob[Any], index: int) -> AsyncIterator[None]:
    """Hold the device, and whatever else the candidate runs on, for one step."""
    runner = job.runners[index]
    async with lanes(job, runner.trial.left_behind), turn(runner.sampler, job):
        if (ready := getattr(runner.sampler, "ready", None)) is not None:
            for again in ready():  # compiled again, where another candidate took its worker along
                with timed(job):
                    await again()
        yield
