"""Takes samples of a compiled program that can be compared with its rivals' samples."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from asel.tuning.program import Program

__all__ = ["MIN_SAMPLE_S", "Pace", "Timing", "dispatch_overhead_s"]


# A batch of runs this long is far above the timer's noise and the cost of dispatching a run.
MIN_SAMPLE_S = 200e-6
_MAX_RUNS = 1000
# A sample is the best of three tiny batches, or of two short ones: the first batch is cold, and the system interrupts a
# run for milliseconds now and then.
_TINY_S = 0.5e-3
_SHORT_S = 2e-3


@dataclass(slots=True)
class Pace:
    """How a tune's candidates are sampled: all in the same way, or the best of three would beat the best of two.

    The fastest candidate sets the pace. A much slower one makes at most twice the runs that it needs itself.
    """

    runs: int = 1
    """The number of runs in a batch, so that a batch is well above the timer's noise."""
    batch_s: float = math.inf
    """The shortest batch so far."""

    @property
    def batches(self) -> int:
        """The number of batches in a sample, of which the best counts."""
        return 3 if self.batch_s < _TINY_S else 2 if self.batch_s < _SHORT_S else 1


class Timing:
    """Takes samples of a program. A sample of an uncompiled program is a single run.

    The first sample is one cold run, if that is long enough to be timed: a race discards it, or uses it if runs are
    long. The second sample is one batch of runs. Later samples are the best of several batches, because short runs are
    cold after other candidates' runs, and disturbed now and then. On a busy machine, the best of a cold and a warm
    batch carries nearly twice the information of the warm one alone.
    """

    def __init__(self, program: Program, timer: Callable[[], float], min_sample_s: float) -> None:
        self.program = program
        self._timer = timer
        self._min_sample_s = min_sample_s
        self._runs = 1  # in a batch, as this program alone needs
        self._taken = 0

    def sample(self) -> float:
        """Return the seconds that one run takes; the first time, a rough value."""
        self._taken += 1
        if self.program.how == "eager":
            return self._run(1)
        if self._taken == 1 and (cold_s := self._run(1)) >= self._min_s():
            return cold_s
        pace = self.program.pace
        asked = min(pace.runs, 2 * self._runs) if self._taken > 2 else 1
        runs, batch_s = self._batch(asked)
        if runs > asked:
            self._runs = runs
        if self._taken > 2:
            batch_s = min([batch_s, *(self._run(runs) for _ in range(pace.batches - 1))])
        pace.runs, pace.batch_s = max(pace.runs, runs), min(pace.batch_s, batch_s)
        return batch_s / runs

    def _batch(self, runs: int) -> tuple[int, float]:
        """Run a batch, enlarged until it is well above the timer's noise. Return its number of runs and its seconds."""
        taken = self._run(runs)
        while 0 < taken < self._min_s() and runs < _MAX_RUNS:
            runs = min(_MAX_RUNS, max(runs + 1, math.ceil(1.2 * runs * self._min_s() / taken)))
            taken = self._run(runs)
        return runs, taken

    def _run(self, times: int) -> float:
        return self.program.run(times, self._timer)

    def _min_s(self) -> float:
        return max(self._min_sample_s, 10 * dispatch_overhead_s())


@functools.cache
def dispatch_overhead_s() -> float:
    """Return the seconds that it takes to run an empty compiled program and to wait for it."""
    with jax.transfer_guard("allow"):  # guards are for the caller's own transfers
        zero, taken = jnp.zeros(()), []
    nothing = jax.jit(lambda x: x).lower(zero).compile()
    for _ in range(20):
        start = time.perf_counter()
        jax.block_until_ready(nothing(zero))  # type: ignore[no-untyped-call]
        taken.append(time.perf_counter() - start)
    return sorted(taken)[len(taken) // 2]
