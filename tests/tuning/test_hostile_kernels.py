"""Kernels that hang, run out of memory, donate their inputs or return odd objects: each is one outcome."""

from __future__ import annotations

import threading
import time
from functools import partial

import anyio
import anyio.lowlevel
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.jax_candidates import ONE_BACKEND, PATIENCE_S, chosen_among
from support.tunes import tune_of

from asel import (
    AutotunePolicy,
    ConfigSelectorChain,
    Failed,
    Invocation,
    Measured,
    Skipped,
    Tuner,
    kernel,
)
from asel.testing import RecordingSink
from asel.tuning.state import TuneState


def test_a_candidate_that_asks_for_too_much_memory_is_one_outcome(real_backend):
    """An allocation that fails costs only its own candidate."""

    def run(x, *, cfg):
        return jnp.zeros((1 << 45,), jnp.float32) + x[0] if cfg == "huge" else x + 1

    report, _ = chosen_among(real_backend, ["small", "huge"], run)
    assert report.winner == "small"
    assert isinstance(report.outcomes[1], Failed)


def test_a_candidate_that_fails_at_its_third_sample_cannot_win(real_backend):
    """Two good samples are not enough if the third fails."""
    ran = []

    def fragile(x):
        ran.append(True)
        if len(ran) == 3:
            raise RuntimeError("third time unlucky")
        return x

    def run(x, *, cfg):
        if cfg == "fragile":
            return jax.pure_callback(fragile, x, x)
        return jax.lax.fori_loop(0, 20_000, lambda i, y: jnp.sin(y), x)

    report, _ = chosen_among(real_backend, ["steady", "fragile"], run)
    assert report.winner == "steady"
    assert report.outcomes[1].stage == "measure"


def test_a_candidate_that_hangs_is_abandoned_on_time(real_backend):
    """The others answer while it hangs, and an event reports the thread."""
    release, released = threading.Event(), []

    def run(x, *, cfg):
        if cfg == "hangs":
            released.append(release.wait(PATIENCE_S))
        return x + 1

    try:
        report, sink = chosen_among(real_backend, ["good", "hangs", "late"], run, candidate_timeout_s=1.0)
        assert not released, "it hangs yet"
    finally:
        release.set()
    (failed,) = sink.named("candidate_failed")
    assert failed.end - failed.start >= 1.0
    assert failed.still_busy
    assert failed.error_type == "TimeoutError"
    assert "still busy" in report.outcomes[1].message
    assert report.winner in ("good", "late")
    assert sink.events[-1].abandoned == ("lowering 'hangs'",)


def test_a_candidate_that_loops_in_python_is_stopped_and_does_not_slow_its_rivals(real_backend):
    """An abandoned thread that runs Python would slow the next candidates a hundredfold."""
    stopped = threading.Event()

    def loop():
        while True:
            pass

    def run(x, *, cfg):
        try:
            if cfg == "loops":
                loop()
        finally:
            if cfg == "loops":
                stopped.set()
        return x + cfg.count("o")

    report, sink = chosen_among(real_backend, ["good", "loops", "foo", "o"], run, candidate_timeout_s=2.0)
    assert stopped.is_set()
    (failed,) = sink.named("candidate_failed")
    assert (failed.cfg, failed.still_busy) == ("loops", False)
    assert [type(outcome) for outcome in report.outcomes] == [Measured, Failed, Measured, Measured]
    assert sink.events[-1].abandoned == ()


@pytest.mark.parametrize("what", ["example inputs", "check", "foreign tuner"])
def test_user_code_that_loops_in_python_is_stopped_on_time(real_backend, what):
    """Functions that make inputs or compare outputs, and other tuners, have time limits like candidates."""
    stopped, sink = threading.Event(), RecordingSink()

    def loop():
        while True:
            pass

    def spin(*given):
        try:
            loop()
        finally:
            stopped.set()

    class Foreign:
        autotune = staticmethod(spin)

    async def main():
        op = kernel(op_id="looping", configs=[1, 2], heuristic=1)(lambda x, *, cfg: x * cfg)
        op.example_inputs = spin
        tuner = Foreign() if what == "foreign tuner" else Tuner(1, 1, check=spin if what == "check" else None)
        policy = AutotunePolicy(candidate_timeout_s=1.0, tune_budget_s=1.0 if what == "foreign tuner" else 60.0)
        x = jax.ShapeDtypeStruct((4,), jnp.float32) if what == "example inputs" else jnp.ones(4)
        async with ConfigSelectorChain(policy=policy, tuner=tuner, sinks=[sink], close_grace_s=0.1) as chain:
            assert await chain.choose(Invocation("looping", (x,), {}), op) == 1

    anyio.run(main, backend=real_backend)
    assert stopped.is_set()
    assert sink.events[-1].abandoned == ()


def test_after_a_candidate_hangs_the_measured_ones_answer(real_backend):
    """Its thread keeps the device, so the rest are not tried; the answer comes on time from those already measured."""
    took_s = []
    while len(took_s) < 3 and min(took_s, default=9) >= 0.7:  # on a busy machine, the best of three
        report, sink = hung_as_it_runs(real_backend, threading.Event())
        (failed,), (finish,) = sink.named("candidate_failed"), sink.named("autotune_finish")
        took_s.append(finish.end - failed.measured[0])  # since it began to run
    assert 0.5 <= min(took_s) < 0.7
    assert failed.still_busy
    outcomes = {outcome.cfg: outcome for outcome in report.outcomes}
    assert (outcomes["hangs"].stage, outcomes["hangs"].error_type) == ("measure", "TimeoutError")
    assert isinstance(outcomes[1], Measured), "the incumbent goes first"
    assert isinstance(outcomes[report.winner], Measured)
    untried = {outcome.reason for outcome in report.outcomes if isinstance(outcome, Skipped)}
    assert untried <= {"an abandoned candidate still occupies the device"}


def hung_as_it_runs(backend, release):
    def run(x, *, cfg):
        if cfg == "hangs":
            return jax.pure_callback(lambda value: release.wait(4) and value, x, x)
        return x + cfg

    try:
        return chosen_among(backend, [1, "hangs", 2, 3], run, candidate_timeout_s=0.5)
    finally:
        release.set()


def test_a_candidate_that_hangs_un_jitted_does_not_affect_compiled_ones(real_backend):
    """It is tried after they are measured, and then keeps the device: the next uncompilable one is not tried."""
    release = threading.Event()

    def run(x, *, cfg):
        if isinstance(cfg, str):
            np.asarray(x)  # impossible for a tracer
            assert cfg != "hangs" or release.wait(4)
            return x
        return x + cfg

    try:
        report, _ = chosen_among(real_backend, [1, "hangs", "un-jitted", 2], run, candidate_timeout_s=0.5)
    finally:
        release.set()
    first, hung, untried, last = report.outcomes
    assert isinstance(first, Measured)
    assert isinstance(last, Measured)
    assert (hung.stage, hung.error_type) == ("compile", "TimeoutError")
    assert hung.message.endswith("its thread is still busy")
    assert untried == Skipped("un-jitted", "an abandoned candidate still occupies the device")


def test_outputs_are_compared_with_an_incumbent_that_runs_un_jitted(real_backend):
    """It is tried before any check, though after the others are compiled."""

    def run(x, *, cfg):
        if cfg == "incumbent":
            np.asarray(x)
        return x + 1 if cfg == "wrong" else x

    report, _ = chosen_among(real_backend, ["incumbent", "wrong", "right"], run, check=True)
    assert report.outcomes[0].how == "eager"
    assert report.outcomes[1] == Failed("wrong", "check", "OutputMismatch", "output 0 differs by up to 1")
    assert (report.winner, report.outcomes[2].how) == ("right", "forward")


def test_un_jitted_candidates_run_alone(real_backend):
    """Trying whether a candidate runs is a run, so no other may use the device."""
    at_work, most = [], []

    def run(x, *, cfg):
        np.asarray(x)
        at_work.append(cfg)
        most.append(len(at_work))
        time.sleep(0.01)
        at_work.remove(cfg)
        return x

    async def main():
        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                state = tune_of((1, 2), lambda cfg: partial(run, cfg=cfg), (jnp.ones(3),), {}, device=jax.devices()[0])
                tasks.start_soon(Tuner(1, 1).tune, state)

    anyio.run(main, backend=real_backend)
    assert most
    assert max(most) == 1


@pytest.mark.parametrize("who", ["the same state", "another tune"])
def test_after_a_tune_cancelled_during_a_sample_every_candidate_is_measured(real_backend, who):
    """The interrupted thread soon finishes and is waited for, so no candidate is skipped as if it had hung."""
    running, cancelled = threading.Event(), threading.Event()

    def make_fn(cfg):
        def work(value):
            running.set()
            assert cancelled.wait(PATIENCE_S)
            time.sleep(0.05)
            return value

        return lambda x: jax.pure_callback(work, x, x)

    def state() -> TuneState:
        return tune_of((1, 2, 3), make_fn, (jnp.ones(3),), {}, device=jax.devices()[0])

    async def main():
        first, tuner = state(), Tuner(warmup=0, iters=1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(tuner.tune, first)
            assert await anyio.to_thread.run_sync(running.wait, PATIENCE_S)
            tasks.cancel_scope.cancel()
        assert [busy.alive for busy in first.left_behind] == [True]
        cancelled.set()
        return await tuner.tune(first if who == "the same state" else state())

    report = anyio.run(main, backend=real_backend)
    assert [type(o) for o in report.outcomes] == [Measured] * 3, report.outcomes


@pytest.mark.parametrize("check", [None, True])
def test_a_kernel_that_donates_its_inputs_can_be_sampled_again(real_backend, check):
    """Each sample or check gets its own copy of donated inputs, jitted or not, and the caller's array survives."""
    donating = jax.jit(lambda x: x * 2, donate_argnums=0)

    def run(x, *, cfg):
        if cfg == "eager" and float(x[0]) < 0:  # needs a value, so it cannot be traced
            return x
        return donating(x)

    x = jnp.ones(64)
    report, _ = chosen_among(real_backend, ["jitted", "eager"], run, x, check=check)
    assert [o.how for o in report.outcomes] == ["forward", "eager"]
    assert not x.is_deleted()


def test_an_array_that_is_given_twice_can_be_sampled_again(real_backend):
    """Aliased inputs of a kernel that donates one of them are neither destroyed nor refused."""
    donating = jax.jit(lambda x, y: x * y, donate_argnums=0)
    x = jnp.ones(64)

    async def main():
        return await Tuner(1, 3).measure(lambda pair: donating(pair["a"], pair["b"]), {"a": x, "b": x})

    assert anyio.run(main, backend=real_backend) >= 0
    assert not x.is_deleted()


class Garbage:
    """An object that is not an array, does not compare, and cannot be pickled."""

    __eq__ = None

    def __reduce__(self):
        raise TypeError("not me")


def nested(leaf, depth, width=1):
    for _ in range(depth):
        leaf = {number: [leaf] for number in range(width)}
    return leaf


GARBAGE = {
    "a string": lambda x: "garbage",
    "nothing": lambda x: None,
    "an object": lambda x: Garbage(),
    "objects": lambda x: np.array([Garbage()] * 8, dtype=object),
    "arrays and objects": lambda x: (x, Garbage(), "text", b"bytes", {1, 2}),
    "a function": lambda x: print,
    "a wide structure": lambda x: nested(x, 2, 20),
    "a deep structure": lambda x: nested(x, 200),
}


@pytest.mark.parametrize("real_backend", [ONE_BACKEND])
@pytest.mark.parametrize(("objective", "check"), [("forward", None), ("forward", True), ("forward+backward", None)])
def test_whatever_a_kernel_returns_costs_one_outcome_at_most(real_backend, objective, check):
    """A candidate whose result is not an array is timed or fails; with a check it cannot win."""
    make_fn = {"good": lambda x: x + 1, **GARBAGE, "late": lambda x: x + 1 + 0 * x}.__getitem__
    cfgs = ("good", *GARBAGE, "late")
    state = tune_of(cfgs, make_fn, (jnp.ones(8),), {}, incumbent=0, objective=objective)
    report = anyio.run(Tuner(0, 1, check=check).tune, state, backend=real_backend)
    outcomes = {outcome.cfg: outcome for outcome in report.outcomes}
    assert isinstance(outcomes["good"], Measured)
    assert isinstance(outcomes["late"], Measured)
    assert {type(outcome) for outcome in report.outcomes} <= {Measured, Failed}
    if check:
        assert report.winner in ("good", "late")
        assert {outcomes[cfg].stage for cfg in GARBAGE} <= {"compile", "check"}
