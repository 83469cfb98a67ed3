"""Takes samples of a compiled program, which may be compared with its rivals'."""

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


# A sample this long is far above the timer's noise and the cost of dispatching one run.
MIN_SAMPLE_S = 200e-6
_MAX_RUNS = 1000
# A batch shorter than the one is one of three, and than the other one of two: the first of them is cold, and the system
# takes a run away for milliseconds now and then.
_TINY_S = 0.5e-3
_SHORT_S = 2e-3


@dataclass(slots=True)
class Pace:
    """How the runs of a tune's candidates are sampled: all alike, or the best of three would beat the best of two.

    It is that of the fastest, for all that may be its rivals: what is far slower makes twice the runs that it needs.
    """

    runs: int = 1
    """How many make a batch: as many as are well above the timer's noise."""
    batch_s: float = math.inf
    """The best batch that was seen."""

    @property
    def batches(self) -> int:
        """How many make a sample, of which the best counts."""
        return 3 if self.batch_s < _TINY_S else 2 if self.batch_s < _SHORT_S else 1


class Timing:
    """Samples of a compiled program, or of one run as it is: then each is one run.

    The first run is cold, and a sample all the same if it is long enough to be timed at all: a race throws it
    away, or makes do with it where runs are long. The second sample is a batch of runs. From then on, short runs are
    cold again after those of others, and disturbed now and then: a sample is the best of some batches. On a machine
    that others use, the best of a cold and a warm run tells nearly twice as much as the warm one alone.
    """

    def __init__(self, program: Program, timer: Callable[[], float], min_sample_s: float) -> None:
        self.program = program
        self._timer = timer
        self._min_sample_s = min_sample_s
        self._runs = 1  # in a batch, as far as this program alone needs them
        self._taken = 0

    def sample(self) -> float:
        """Return the seconds one run takes; roughly, the first time."""
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
        """Return the number of runs, raised until they take well longer than the timer's noise, and their seconds."""
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
    """Return what it costs to run a compiled program that does nothing, and to wait for it."""
    with jax.transfer_guard("allow"):  # a guard is on what the caller's programs do
        zero, taken = jnp.zeros(()), []
    nothing = jax.jit(lambda x: x).lower(zero).compile()
    for _ in range(20):
        start = time.perf_counter()
        jax.block_until_ready(nothing(zero))  # type: ignore[no-untyped-call]
        taken.append(time.perf_counter() - start)
    return sorted(taken)[len(taken) // 2]
