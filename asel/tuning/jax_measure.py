"""Compiles and times one candidate with JAX, off the event loop."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from asel.runtime.threads import AbandonedThread, run_in_thread
from asel.tuning.measure import BaseMeasure, BaseSampler, Lowered, Sampler, Trial
from asel.tuning.output_check import Outputs
from asel.tuning.program import Program
from asel.tuning.runnable import Runnable
from asel.tuning.timing import MIN_SAMPLE_S, Timing

__all__ = ["JaxMeasure"]

logger = logging.getLogger("asel")


class JaxMeasure(BaseMeasure):
    """Times a candidate as `jax.jit` would run it.

    Array leaves of the arguments are parameters of the compiled function; everything else is a constant. Tracers and
    shapes become zeros of the same shape, dtype and sharding. A kernel that cannot be differentiated is timed forward,
    and one that cannot be traced is timed without `jit`; the sampler's `how` says which. A run shorter than
    `min_sample_s` is repeated within a sample.
    """

    runs_on_device = True

    def __init__(self, *, timer: Callable[[], float] = time.perf_counter, min_sample_s: float = MIN_SAMPLE_S) -> None:
        self._timer = timer
        self._min_sample_s = max(min_sample_s, 100 * time.get_clock_info("perf_counter").resolution)

    async def lower(self, trial: Trial[Any]) -> Lowered:
        step = _in_thread(trial)
        program = await step(f"lowering {trial.cfg!r}", partial(Program, trial))

        async def compile() -> Sampler:
            await step(f"compiling {trial.cfg!r}", program.compile)
            return _InThread(self, trial, Timing(program, self._timer, self._min_sample_s))

        return Lowered(program.fingerprint, compile, program.release, runs=program.how == "eager")

    async def compile(self, trial: Trial[Any]) -> Sampler:
        return await (await self.lower(trial)).compile()

    async def series(
        self, samplers: Sequence[_InThread], taken: list[tuple[float, float]], left_behind: list[AbandonedThread]
    ) -> None:
        """Take a series of samples in one thread, as a `Bench` does."""

        def work() -> None:
            for sampler in samplers:
                if left_behind:
                    return
                start = time.perf_counter()
                seconds = sampler.timing.sample()
                if not left_behind:
                    taken.append((seconds, time.perf_counter() - start))

        def what() -> str:
            return samplers[min(len(taken), len(samplers) - 1)].what

        await run_in_thread(what, work, grace_s=samplers[0].trial.grace_s, left_behind=left_behind, stops=True)


def _in_thread(trial: Trial[Any]) -> Callable[..., Any]:
    return partial(run_in_thread, grace_s=trial.grace_s, left_behind=trial.left_behind, stops=True)


class _InThread(BaseSampler):
    """A compiled candidate, sampled in threads of this process."""

    def __init__(self, bench: JaxMeasure, trial: Trial[Any], timing: Timing) -> None:
        self.how = timing.program.how
        self.bench = bench
        self.trial = trial
        self.timing = timing
        self.what = f"measuring {trial.cfg!r}"
        self._step = _in_thread(trial)

    async def __call__(self) -> float:
        seconds: float = await self._step(self.what, self.timing.sample)
        self.nan_outputs = self.timing.program.nan_outputs
        return seconds

    async def runnable(self) -> Runnable:
        runnable: Runnable = await self._step(f"making {self.trial.cfg!r} ready to run", self.timing.program.runnable)
        return runnable

    async def outputs(self) -> Outputs:
        outputs: Outputs = await self._step(f"checking, {self.what}", self.timing.program.outputs)
        return outputs

    def release(self) -> None:
        self.timing.program.release()
