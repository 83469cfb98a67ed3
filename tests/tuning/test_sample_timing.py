"""The number of runs in a sample: many for short kernels, to distinguish them, and one for long ones."""

from __future__ import annotations

import time
from types import SimpleNamespace

import anyio
import anyio.lowlevel
import jax
import jax.numpy as jnp
import pytest
from support.jax_candidates import ONE_BACKEND, spin

from asel import (
    Tuner,
)
from asel.tuning.jax_measure import JaxMeasure
from asel.tuning.measure import Trial
from asel.tuning.program import Program
from asel.tuning.timing import MIN_SAMPLE_S, Timing


def timed_by_script(run_s, shared=None):
    """Return the timing of a program whose runs take `run_s()`, and a list of its batches."""
    program, batches = Program(Trial("scripted", spin(1), (jnp.ones(64),), {}, shared=shared)), []
    program.compile()
    program.run = lambda times, timer: batches.append(times) or sum(run_s() for _ in range(times))
    return Timing(program, time.perf_counter, MIN_SAMPLE_S), batches


def test_a_kernel_of_microseconds_is_run_many_times_in_a_sample():
    """Very short runs are repeated until a batch is well above the timer's noise."""
    timing, batches = timed_by_script(lambda: 1e-6)
    assert timing.sample() == timing.sample() == pytest.approx(1e-6)
    batches.clear()
    timing.sample()
    assert min(batches) * 1e-6 >= MIN_SAMPLE_S
    assert len(batches) == 3


@pytest.mark.parametrize(
    ("tick_s", "dispatch_s", "least_s"), [(1e-9, 1e-6, MIN_SAMPLE_S), (1e-4, 1e-6, 1e-2), (1e-9, 1e-3, 1e-2)]
)
def test_a_sample_is_far_above_the_overhead_of_the_machine(monkeypatch, tick_s, dispatch_s, least_s):
    """Runs are repeated until they take a hundred ticks of the timer and ten times what dispatching one costs."""
    clock_info = time.get_clock_info
    coarse = SimpleNamespace(resolution=tick_s)
    monkeypatch.setattr(time, "get_clock_info", lambda name: coarse if name == "perf_counter" else clock_info(name))
    monkeypatch.setattr("asel.tuning.timing.dispatch_overhead_s", lambda: dispatch_s)
    sampler = anyio.run(JaxMeasure().compile, Trial("short", spin(1), (jnp.ones(64),), {}), backend=ONE_BACKEND)
    timing, batches = sampler.timing, []
    timing.program.run = lambda times, timer: batches.append(times) or times * 1e-4
    assert timing.sample() == timing.sample() == pytest.approx(1e-4)
    assert least_s <= batches[-1] * 1e-4 <= 2 * least_s


def test_a_long_run_is_a_sample_even_the_first():
    """A long run is not repeated to be warm: its one-off costs are a small part of it."""
    timing, batches = timed_by_script(lambda: 0.5)
    assert timing.sample() == timing.sample() == 0.5
    assert batches == [1, 1]


def test_a_long_cold_run_does_not_decide_how_later_samples_are_taken():
    """A run with cold caches may take very long; later samples depend on the warm runs."""
    runs = iter([0.5, *[1e-3] * 50])
    timing, _ = timed_by_script(lambda: next(runs))
    assert timing.sample() == 0.5
    assert timing.sample() == timing.sample() == 1e-3


def test_an_interrupted_batch_does_not_count():
    """A sample of tiny runs is the best of three batches, one of short ones the best of two."""
    runs = iter([4e-4, 4e-4, 5e-4, 30e-3, 4e-4])
    timing, batches = timed_by_script(lambda: next(runs))
    assert timing.sample() == timing.sample() == timing.sample() == 4e-4
    assert batches == [1] * 5  # a cold run, one batch, and three batches of which the first is cold
    runs = iter([1e-3, 1e-3, 1.1e-3, 30e-3])
    timing, batches = timed_by_script(lambda: next(runs))
    assert [timing.sample() for _ in range(3)] == [1e-3, 1e-3, 1.1e-3]
    assert batches == [1] * 4


def test_a_run_that_was_slow_once_is_sampled_like_the_others():
    """How a candidate is sampled depends on the best run, so none is timed cold for having been disturbed."""
    runs = iter([1e-3, 1e-3, 9e-3, 4e-3, 7e-3, 1e-3])
    timing, batches = timed_by_script(lambda: next(runs))
    assert [timing.sample() for _ in range(4)] == [1e-3, 1e-3, 4e-3, 1e-3]
    assert batches == [1] * 6  # a cold run, one batch, and then two each


def test_all_candidates_of_a_tune_take_the_best_of_equally_many_batches():
    """The best of three is lower than the best of two, so a lucky run of one candidate changes how all are sampled."""
    shared = {}
    lucky, other = timed_by_script(lambda: 4e-4, shared), timed_by_script(lambda: 9e-4, shared)
    for timing, _ in (other, other, other, lucky, lucky, other, lucky):
        timing.sample()
    assert len(other[1]) == 1 + 1 + 2 + 3
    assert len(lucky[1]) == 1 + 1 + 3


def test_all_candidates_of_a_tune_are_repeated_equally_often():
    """A mean of ten runs varies less than one of five, so rivals make as many runs as the fastest needs."""
    shared = {}
    fast, rival, slow = (timed_by_script(lambda run_s=run_s: run_s, shared) for run_s in (2e-5, 3e-5, 4e-3))
    for timing, _ in (slow, slow, rival, rival, fast, fast, rival, fast, slow):
        timing.sample()
    assert set(rival[1][-3:]) == set(fast[1][-3:])
    assert fast[1][-1] >= 10
    assert slow[1] == [1, 1, 2, 2, 2], "a candidate that cannot win is not run for seconds"


def test_a_late_batch_does_not_set_the_length_of_the_next():
    """The number of runs is found again if the first batch was disturbed."""
    runs = iter([1e-6, 5e-3, *[1e-6] * 5000])
    timing, batches = timed_by_script(lambda: next(runs))
    for _ in range(3):
        timing.sample()
    assert batches[-1] * 1e-6 >= MIN_SAMPLE_S


def test_short_kernels_are_distinguished(real_backend):
    """Sixty times the work is slower, even in very short runs."""
    make = lambda n: lambda x: jax.lax.fori_loop(0, n, lambda i, y: jnp.sin(y), x)  # noqa: E731
    winners = {anyio.run(Tuner().autotune, make, (jnp.ones(64),), {}, [200, 1], backend=real_backend) for _ in range(5)}
    assert winners == {1}
