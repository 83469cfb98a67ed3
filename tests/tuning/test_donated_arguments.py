"""Arguments that their caller donates while they are being measured with."""

from __future__ import annotations

import time

import anyio
import anyio.lowlevel
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from asel import (
    AutotunePolicy,
    ConfigSelectorChain,
    Invocation,
    Measured,
    Tuner,
    kernel,
)
from asel.tuning.jax_measure import JaxMeasure
from asel.tuning.measure import Trial
from asel.tuning.program import Program


def donate(array):
    jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    assert array.is_deleted()


@kernel(op_id="donated", configs=[1, 2, 3], heuristic=1)
def scaled(x, *, cfg):
    return x * cfg


@pytest.mark.parametrize(
    "allowed", [{"cache_miss_fallback": "background"}, {"wait_s": 0.001}], ids=["background", "wait"]
)
def test_a_caller_may_donate_its_arguments_during_a_tune(real_backend, allowed):
    """It has its heuristic and no more need of them; the tune goes on with zeros in their place."""

    async def main():
        async with ConfigSelectorChain(policy=AutotunePolicy(**allowed), sinks=()) as chain:
            x = jnp.ones((64, 64))
            assert (await chain.select(Invocation("donated", (x,), {}), scaled)).tier == "heuristics"
            donate(x)
            await chain.settled()
            return await chain.select(Invocation("donated", (jnp.ones((64, 64)),), {}), scaled)

    selection = anyio.run(main, backend=real_backend)
    assert selection.tier == "memory"
    assert [type(outcome) for outcome in selection.report.outcomes] == [Measured] * 3


@pytest.mark.parametrize("when", ["before it is lowered", "before it is compiled", "between two samples"])
def test_zeros_replace_donated_arguments(when):
    """Of the same type and in the same place, for every candidate that shares them."""
    x, kept, shared = jax.device_put(jnp.ones(8), jax.devices()[0]), jnp.ones(8), {}
    weak = jnp.asarray(2.5)
    for step in ("before it is lowered", "before it is compiled", "between two samples"):
        if step == when:
            donate(x)
            donate(weak)
        if step == "before it is lowered":
            trial = Trial(1, lambda x, y, z: x * y * z, (x, kept, weak), {}, jax.devices()[0], shared=shared)
            program = Program(trial)
        elif step == "before it is compiled":
            program.compile()
            assert program.run(1, time.perf_counter) > 0
    assert program.run(2, time.perf_counter) > 0
    zeros, same, weakly = shared["arrays"]
    assert same is kept
    assert (zeros.committed, zeros.sharding, zeros.tolist()) == (x.committed, x.sharding, [0.0] * 8)
    assert (weakly.weak_type, weakly.dtype, weakly.tolist()) == (True, weak.dtype, 0.0)


def compiled(fn, x, shared) -> Program:
    program = Program(Trial(1, fn, (x,), {}, jax.devices()[0], shared=shared))
    program.compile()
    return program


@pytest.mark.parametrize("who_notices", ["the next to be compared", "a sample"])
def test_outputs_are_not_compared_with_those_from_before_a_donation(who_notices):
    """The first outputs were computed with the original values: with zeros, every other candidate would look wrong."""
    x, shared = jnp.ones(8), {}
    first, second = compiled(lambda x: x * 2, x, shared), compiled(lambda x: x + x, x, shared)
    assert first.outputs()[0].tolist() == [2.0] * 8
    donate(x)
    if who_notices == "a sample":
        first.run(1, time.perf_counter)
    for program in (second, first):
        with pytest.raises(RuntimeError, match="donated by its caller"):
            program.outputs()


def test_outputs_are_compared_if_the_donation_came_before_the_first():
    """Then all are computed with the same zeros."""
    x, shared = jnp.ones(8), {}
    first, second = compiled(lambda x: x + 2, x, shared), compiled(lambda x: x + 3, x, shared)
    donate(x)
    assert first.outputs()[0].tolist() == [2.0] * 8
    assert second.outputs()[0].tolist() == [3.0] * 8


def test_nan_computed_from_zeros_for_a_donated_argument_disqualifies_no_candidate(real_backend):
    """The incumbent ran with the original values: that it had no NaN says nothing about zeros."""
    x, times = jnp.ones(8), []

    def timer():
        times.append(time.perf_counter())
        if len(times) == 2:  # the incumbent has run
            donate(x)
        return times[-1]

    async def main():
        op = kernel(op_id="normalised", configs=[1, 2, 3], heuristic=1)(lambda x, *, cfg: cfg * x / x.sum())
        tuner = Tuner(1, 1, measure=JaxMeasure(timer=timer), strategy="exhaustive")
        async with ConfigSelectorChain(tuner=tuner, sinks=()) as chain:
            return (await chain.select(Invocation("normalised", (x,), {}), op)).report

    report = anyio.run(main, backend=real_backend)
    assert [type(outcome) for outcome in report.outcomes] == [Measured] * 3


def test_an_eager_candidate_is_tried_with_zeros_for_a_donated_argument():
    """Its caller's donation is not its failure."""
    x, shared = jnp.ones(8), {}
    program = Program(Trial(1, lambda x: jnp.asarray(np.asarray(x)), (x,), {}, jax.devices()[0], shared=shared))
    donate(x)
    program.compile()
    assert (program.how, program.run(1, time.perf_counter) > 0) == ("eager", True)


def test_an_error_other_than_a_donation_is_the_candidates_own():
    """Nothing is run a second time for it."""
    runs = []

    def fail(x):
        runs.append(x)
        raise RuntimeError("on purpose")

    program = Program(Trial(1, lambda x: x * 2, (jnp.ones(8),), {}, jax.devices()[0]))
    program.compile()
    program._executable = fail
    with pytest.raises(RuntimeError, match="on purpose"):
        program.run(1, time.perf_counter)
    assert len(runs) == 1
