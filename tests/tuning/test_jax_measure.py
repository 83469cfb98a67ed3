"""JAX's measure on its own, and its effect on the event loop."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import anyio
import anyio.lowlevel
import jax
import jax.numpy as jnp
import pytest
from support.jax_candidates import PATIENCE_S, chosen_among, spin
from support.tunes import tune_of

from asel import (
    ConfigSelectorChain,
    Failed,
    Invocation,
    Measured,
    Tuner,
    TuningError,
    kernel,
)
from asel.tuning.jax_measure import JaxMeasure
from asel.tuning.measure import Trial
from asel.tuning.program import Program


def test_measure_works_without_a_selector(real_backend):
    """`Tuner.measure` returns seconds, and more of them for more work."""

    async def main():
        x = jnp.ones(64)
        return await Tuner().measure(spin(1), x), await Tuner().measure(spin(20_000), x)

    short, long = anyio.run(main, backend=real_backend)
    assert 0 < short < long


def test_autotune_works_without_a_selector(real_backend):
    """`Tuner.autotune` returns the candidate that does the least work."""

    async def main():
        return await Tuner().autotune(spin, (jnp.ones(64),), {}, [20_000, 1, 10_000])

    assert anyio.run(main, backend=real_backend) == 1


def test_the_timer_can_be_given(real_backend):
    """Durations are differences of the given timer's readings, around one run each."""
    ticks = iter([60.0, 100.0, 200.0, 201.0, 300.0, 303.0, 400.0, 402.0])

    async def main():
        return await Tuner(warmup=1, iters=3, measure=JaxMeasure(timer=lambda: next(ticks))).measure(
            spin(1), jnp.ones(3)
        )

    assert anyio.run(main, backend=real_backend) == 2.0


def test_the_clock_stops_when_the_outputs_are_there(real_backend):
    """A sample includes the computation, and not just its dispatch, which returns early in JAX."""

    def fn(x):
        return x @ x @ x @ x

    x = jnp.ones((800, 800))
    sampled_s = anyio.run(Tuner(warmup=1, iters=3).measure, fn, x, backend=real_backend)
    compiled, whole_s = jax.jit(fn).lower(x).compile(), []
    for _ in range(5):
        start = time.perf_counter()
        compiled(x).block_until_ready()
        whole_s.append(time.perf_counter() - start)
    # Dispatching takes a hundredth of the whole; a quarter leaves room for a busy machine.
    assert sampled_s > min(whole_s) / 4


def test_every_output_is_waited_for():
    """A run ends when its last output is ready, not the first."""
    waited = []

    class Output:
        def __init__(self, name):
            self._name = name

        def block_until_ready(self):
            waited.append(self._name)

    program = Program(Trial("many", spin(1), (jnp.ones(3),), {}))
    program._executable = lambda x: {"first": Output("first"), "others": [Output("second"), Output("third")]}
    program.run(2, lambda: waited.append("timer") or 0.0)
    assert waited == ["timer", *["first", "second", "third"] * 2, "timer"]


def test_a_sample_is_one_run(real_backend):
    """The timer is read before and after each run, with nothing else in between."""
    order = []

    def fn(x):
        return jax.pure_callback(lambda value: order.append("ran") or value, x, x)

    async def main():
        ticks = iter(range(10))
        measure = JaxMeasure(timer=lambda: order.append("timer") or float(next(ticks)))
        await Tuner(warmup=0, iters=2, measure=measure).measure(fn, jnp.ones(3))

    anyio.run(main, backend=real_backend)
    assert order == ["timer", "ran", "timer"] * 2


def test_measuring_a_broken_function_says_why(real_backend):
    """A function that breaks while it is compiled is a TuningError with the stage and the function's own error."""
    error = LookupError("no such tile")

    def fn(x):
        raise error

    with pytest.raises(TuningError, match="LookupError in the compile stage: no such tile") as caught:
        anyio.run(Tuner().measure, fn, jnp.ones(3), backend=real_backend)
    assert caught.value.__cause__ is error


def test_a_candidate_that_exits_is_only_a_failed_candidate(real_backend):
    """A candidate that calls `sys.exit` ends itself; the tune and the program go on."""

    def make_fn(cfg):
        def fn(x):
            if cfg == "exits":
                raise SystemExit(3)
            return x

        return fn

    async def main():
        state = tune_of(("exits", "stays"), make_fn, (jnp.ones(3),), {})
        return await Tuner(warmup=0, iters=1).tune(state)

    report = anyio.run(main, backend=real_backend)
    assert report.winner == "stays"
    assert isinstance(report.outcomes[0], Failed)
    assert (report.outcomes[0].stage, report.outcomes[0].error_type) == ("compile", "RuntimeError")
    assert "SystemExit: 3" in report.outcomes[0].message


@pytest.mark.parametrize(("trouble", "error_type"), [("raises", "LookupError"), ("hangs", "TimeoutError")])
def test_a_candidate_that_cannot_be_built_is_one_outcome(real_backend, trouble, error_type):
    """If `make_fn` raises or never returns, the stage is "build" and the others are measured."""
    release = threading.Event()

    def make_fn(cfg):
        if cfg == "raises":
            raise LookupError("no such tile")
        if cfg == "hangs":
            release.wait(PATIENCE_S)
        return lambda x: x

    state = tune_of(
        (trouble, "good"), make_fn, (jnp.ones(3),), {}, candidate_timeout_s=0.5 if trouble == "hangs" else 9
    )
    try:
        report = anyio.run(Tuner(0, 1).tune, state, backend=real_backend)
    finally:
        release.set()
    assert (report.winner, report.outcomes[0].stage, report.outcomes[0].error_type) == ("good", "build", error_type)
    assert [busy.what for busy in state.left_behind] == (["lowering 'hangs'"] if trouble == "hangs" else [])


def test_an_error_whose_message_raises_is_one_outcome(real_backend):
    """An exception whose message raises is a Failed outcome like any other."""

    class Mute(Exception):
        def __str__(self):
            raise ValueError("no words")

    def run(x, *, cfg):
        if cfg == "mute":
            raise Mute
        return x + cfg

    report, sink = chosen_among(real_backend, [1, "mute", 2], run)
    assert [type(outcome) for outcome in report.outcomes] == [Measured, Failed, Measured]
    assert (report.outcomes[1].stage, report.outcomes[1].error_type) == ("compile", "Mute")
    assert report.outcomes[1].message == "(its message raised ValueError)"
    assert [event.error_type for event in sink.named("candidate_failed")] == ["Mute"]


@pytest.mark.parametrize("stage", ["compile", "measure"])
def test_the_loop_runs_while_a_candidate_is_slow(stage, real_backend):
    """Compiling and running happen off the event loop: a heartbeat goes on while a candidate blocks."""
    entered, gate, opened = threading.Event(), threading.Event(), []

    def stand_still() -> None:
        entered.set()
        opened.append(gate.wait(PATIENCE_S))

    def fn(x):
        if stage == "compile":
            stand_still()
            return x
        return jax.pure_callback(lambda value: stand_still() or value, x, x)

    async def heartbeat() -> None:
        await anyio.to_thread.run_sync(entered.wait, PATIENCE_S)
        for _ in range(10):
            await anyio.lowlevel.checkpoint()  # ten turns of the loop, all of them while the candidate waits
        gate.set()

    async def main():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(heartbeat)
            async with ConfigSelectorChain(tuner=Tuner(warmup=0, iters=1), sinks=()) as chain:
                op = kernel(op_id="slow", configs=[1], heuristic=1)(lambda x, *, cfg: fn(x))
                selection = await chain.select(Invocation("slow", (jnp.ones(3),), {}), op)
        assert selection.tier == "autotune"

    anyio.run(main, backend=real_backend)
    assert set(opened) == {True}, "the loop had no turn before the candidate lost its patience"


_FIRST_CALL = """
import os, anyio, jax, jax.numpy as jnp
from blockbuster import blockbuster_ctx
from asel import ConfigSelectorChain, Invocation, Tuner, kernel

@kernel(op_id="double", configs=[2], heuristic=2)
def double(x, *, cfg):
    return x * cfg

async def main():
    async with ConfigSelectorChain(tuner=Tuner(warmup=0, iters=1)) as chain:
        return (await chain.select(Invocation("double", (x,), {}), double)).tier

x = jnp.ones(3)
with blockbuster_ctx(scanned_modules=["asel"]):
    tier = anyio.run(main)
print(tier, flush=True)
os._exit(0)  # blockbuster alone crashes an interpreter with buffered streams as it comes down
"""


@pytest.mark.timeout(60)  # another process loads JAX
def test_the_first_selection_of_a_process_does_not_block_the_loop():
    """asel never reads files on the event loop to find out about JAX or the machine."""
    ran = subprocess.run([sys.executable, "-c", _FIRST_CALL], capture_output=True, text=True, timeout=55, check=False)
    assert (ran.stdout, ran.returncode) == ("autotune\n", 0), ran.stderr


def test_a_tune_of_real_candidates_keeps_every_outcome(real_backend):
    """From the selector to the device and back: the fastest real candidate wins, and a broken one is an outcome."""

    def run(x, *, cfg):
        if cfg == "broken":
            return x @ jnp.ones((7, 7))
        return spin(cfg)(x)

    async def main():
        async with ConfigSelectorChain(tuner=Tuner(), sinks=()) as chain:
            op = kernel(op_id="real", configs=[20_000, "broken", 1], heuristic=20_000)(run)
            return await chain.select(Invocation("real", (jnp.ones(64),), {}), op)

    selection = anyio.run(main, backend=real_backend)
    assert (selection.cfg, selection.tier) == (1, "autotune")
    slow, broken, fast = selection.report.outcomes
    assert isinstance(slow, Measured)
    assert isinstance(fast, Measured)
    assert fast.median_s < slow.median_s
    assert (broken.stage, broken.error_type) == ("compile", "TypeError")
    assert selection.report.environment["jax"] == jax.__version__
