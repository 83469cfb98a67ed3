"""Selecting while JAX traces: tracers are neither measured nor leaked, and the next trace finds the tuned config."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import anyio
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from support.kernels import BEST, GUESS, Bench, Blocks, Toy
from support.paths import TESTS

from asel import (
    ConfigSelectorChain,
    Invocation,
    Tuner,
    autotune_recorded,
    device_fingerprint,
    forward_autotune_only,
    get_invocations,
    kernel,
    overlay_cache,
    policy_override,
)
from asel.kernels.keys import call_key
from asel.testing import ScriptedMeasure, run_in_virtual_time

PATIENCE_S = 10.0  # how long a gate holds before the test is called broken; never reached by a passing one


@pytest.fixture(autouse=True)
def _first_call_was_made():
    """asel reads facts about JAX and the machine at its first call; another test makes that call in a trace."""
    call_key(Invocation("first", (), {}))
    device_fingerprint()


class Model:
    """A function that selects while it is traced, and records the config of each trace."""

    def __init__(self, bench: Bench, **kwargs) -> None:
        self.bench = bench
        self.kernel = Toy()
        self.kwargs = kwargs
        self.traced_with: list[Blocks] = []

    def __call__(self, x):
        cfg = self.bench.chain.choose_nowait(Invocation("toy", (x,), self.kwargs), self.kernel)
        self.traced_with.append(cfg)
        return x * cfg.m


def memory_of(bench: Bench) -> list[Blocks]:
    return [bench.cache.get(*key) for key in bench.cache.keys()]


# ---------------------------------------------------------------------------------------------
# Never measured, always tuned in the end.


@pytest.mark.anyio
async def test_a_traced_call_gets_the_heuristic_and_the_next_trace_the_tuned_config():
    """Under `jax.jit` nothing is measured: the heuristic answers, a tune follows, and the next trace finds it."""
    bench = Bench()
    async with bench.chain as chain:
        model = Model(bench)
        jitted = jax.jit(model)
        x = jnp.ones((8, 128))
        np.testing.assert_array_equal(jitted(x), x * GUESS.m)
        assert model.traced_with == [GUESS]
        assert bench.measure.compiled == [], "nothing is compiled, let alone timed, while JAX traces"
        assert memory_of(bench) == [], "a guess is not an answer to remember"

        await chain.settled()
        assert bench.tunes == 1
        assert memory_of(bench) == [BEST]
        jitted.clear_cache()
        np.testing.assert_array_equal(jitted(x), x * BEST.m)
        assert model.traced_with == [GUESS, BEST]
        assert (await chain.select(Invocation("toy", (x,), {}), model.kernel)).tier == "memory"
    [guessed] = bench.sink.named("heuristics")
    assert guessed.declined["autotune"] == "queued for the background, since this call cannot wait"


def test_a_traced_call_is_tuned_by_running_and_not_by_tracing(real_backend):
    """ejKernel timed the tracing itself, and chose a config that traces fast and runs slowly."""

    def run(x, *, cfg):
        if cfg == "traces fast, runs slowly":
            # Some 40 ms: on a busy machine, either waits for a core for as long as 10.
            return jax.lax.fori_loop(0, 500_000, lambda _, y: jnp.sin(y), x)
        for _ in range(50):
            x = x + 1.0
        return x

    op = kernel(op_id="twofaced", configs=["traces fast, runs slowly", "traces slowly, runs fast"])(run)
    op_inv = lambda x: Invocation("twofaced", (x,), {})  # noqa: E731

    async def main():
        async with ConfigSelectorChain(tuner=Tuner(warmup=1, iters=3), sinks=()) as chain:
            with policy_override(chain, allow_heuristics=False), pytest.raises(RuntimeError, match="cannot wait"):
                jax.jit(lambda x: op(x, cfg=chain.choose_nowait(op_inv(x), op)))(jnp.ones(64))
            await chain.settled()
            return jax.jit(lambda x: chain.choose_nowait(op_inv(x), op) == "traces slowly, runs fast")(jnp.ones(64))

    assert anyio.run(main, backend=real_backend)


@pytest.mark.anyio
async def test_repeated_traces_of_a_key_cause_one_tune():
    """A key that is traced several times before it is tuned is queued once."""
    bench = Bench()
    async with bench.chain as chain:
        model = Model(bench)
        for _ in range(5):
            jax.jit(lambda x: model(x))(jnp.ones((8, 128)))
        await chain.settled()
        jax.jit(lambda x: model(x))(jnp.ones((8, 128)))
    assert model.traced_with == [GUESS] * 5 + [BEST]
    assert bench.tunes == 1


@pytest.mark.anyio
async def test_a_traced_call_and_a_concrete_one_share_their_key():
    """A tracer is identified by its aval, so configs tuned with arrays answer traces, and vice versa."""
    bench = Bench()
    async with bench.chain as chain:
        model, x = Model(bench), jnp.ones((8, 128), jnp.bfloat16)
        assert await chain.choose(Invocation("toy", (x,), {}), model.kernel) == BEST
        jax.jit(model)(x)
    assert model.traced_with == [BEST]
    assert bench.tunes == 1
    assert get_invocations(device_fingerprint()) == {}, "what is known need not be recorded"


@pytest.mark.anyio
@pytest.mark.parametrize("policy", [{"allow_autotune": False}, {"cache_miss_fallback": "heuristics"}])
async def test_a_policy_that_forbids_tuning_applies_while_tracing(policy):
    """A trace begins no tune that its policy forbids, but the call is recorded for a batch."""
    bench = Bench(allow=policy)
    async with bench.chain as chain:
        model = Model(bench)
        jax.jit(model)(jnp.ones((8, 128)))
        await chain.settled()
    assert model.traced_with == [GUESS]
    assert bench.tunes == 0
    assert len(get_invocations(device_fingerprint())["toy@v1"]) == 1


@pytest.mark.anyio
async def test_a_frozen_chain_reports_traced_calls_it_would_have_tuned():
    """After `freeze()` a trace of a new key gets the heuristic, with a `late_tune` event."""
    bench = Bench()
    async with bench.chain as chain:
        chain.freeze()
        model = Model(bench)
        jax.jit(model)(jnp.ones((8, 128)))
        await chain.settled()
    assert (model.traced_with, bench.tunes) == ([GUESS], 0)
    assert len(bench.sink.named("late_tune")) == 1


# ---------------------------------------------------------------------------------------------
# Under every transformation.


def over_one_device(axis_type):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(axis_type,))
    return mesh, NamedSharding(mesh, PartitionSpec("x"))


def in_scan(fn):
    return lambda x: jax.lax.scan(lambda carry, row: (carry, fn(row)), 0, x)[1]


def in_shard_map(fn):
    mesh, sharding = over_one_device(AxisType.Auto)
    return jax.shard_map(fn, mesh=mesh, in_specs=sharding.spec, out_specs=sharding.spec)


def summed(fn):
    return lambda x: fn(x).sum()


TRANSFORMATIONS = {
    # How the model is wrapped, and the shape it then sees of an argument of shape (4, 8, 128).
    "jit": (jax.jit, (4, 8, 128)),
    "vmap": (jax.vmap, (8, 128)),
    "vmap of vmap": (lambda fn: jax.vmap(jax.vmap(fn)), (128,)),
    "grad": (lambda fn: jax.grad(summed(fn)), (4, 8, 128)),
    "jit of grad": (lambda fn: jax.jit(jax.grad(summed(fn))), (4, 8, 128)),
    "vmap of grad": (lambda fn: jax.vmap(jax.grad(summed(fn))), (8, 128)),
    "grad of vmap": (lambda fn: jax.grad(summed(jax.vmap(fn))), (8, 128)),
    "jvp": (lambda fn: lambda x: jax.jvp(fn, (x,), (x,)), (4, 8, 128)),
    "scan": (in_scan, (8, 128)),
    "checkpoint": (lambda fn: jax.grad(summed(jax.checkpoint(fn))), (4, 8, 128)),
    "eval_shape": (lambda fn: lambda x: jax.eval_shape(fn, x), (4, 8, 128)),
    "make_jaxpr": (jax.make_jaxpr, (4, 8, 128)),
    "linearize": (lambda fn: lambda x: jax.linearize(fn, x)[0], (4, 8, 128)),
    "shard_map": (in_shard_map, (4, 8, 128)),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_selecting_works_under_every_transformation(name):
    """The key depends on the arguments that the kernel sees, and no tracer outlives its trace."""
    transform, shape = TRANSFORMATIONS[name]
    bench, x = Bench(), jnp.ones((4, 8, 128))

    async def main():
        async with bench.chain as chain:
            first, second = Model(bench), Model(bench)
            second.kernel = first.kernel
            with jax.checking_leaks():
                transform(first)(x)
            assert set(first.traced_with) == {GUESS}
            assert bench.measure.compiled == []

            await chain.settled()
            assert bench.tunes == 1
            seen = Invocation("toy", (jnp.ones(shape),), {})
            assert (await chain.select(seen, first.kernel)).tier == "memory", "tuned for the shape the kernel sees"
            with jax.checking_leaks():
                transform(second)(x)
            assert set(second.traced_with) == {BEST}

    run_in_virtual_time(main)


@pytest.mark.anyio
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
async def test_selecting_works_with_sharded_arguments(axis_type):
    """Arguments on a mesh, with automatic or explicit axes, get the heuristic, are tuned, and hit memory."""
    _, sharding = over_one_device(axis_type)
    bench, x = Bench(), jax.device_put(jnp.ones((8, 128)), sharding)
    async with bench.chain as chain:
        model = Model(bench)
        jitted = jax.jit(model)
        jitted(x)
        await chain.settled()
        jitted.clear_cache()
        jitted(x)
    assert model.traced_with == [GUESS, BEST]


_TWO_DEVICES = """
import sys
sys.path[:0] = sys.argv[1:]
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from asel import Invocation
from asel.kernels.keys import call_key
from asel.testing import run_in_virtual_time
from support.kernels import Bench
from test_tracing import Model

async def main(axis_type):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(axis_type,))
    x = jax.device_put(jnp.ones((8, 128)), NamedSharding(mesh, PartitionSpec("x")))
    bench = Bench()
    async with bench.chain as chain:
        model = Model(bench)
        jitted = jax.jit(model)
        jitted(x)
        await chain.settled()
        jitted.clear_cache()
        jitted(x)
    print(axis_type.name, [cfg.m for cfg in model.traced_with])

assert len(jax.devices()) == 2
call_key(Invocation("first", (), {}))
for axis_type in (AxisType.Auto, AxisType.Explicit):
    run_in_virtual_time(main, axis_type)
"""


@pytest.mark.timeout(60)  # another process loads JAX
def test_selecting_works_with_arguments_spread_over_devices(monkeypatch):
    """Arguments over two devices get the heuristic, are tuned, and hit memory."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    command = [sys.executable, "-c", _TWO_DEVICES, str(TESTS), str(Path(__file__).parent)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=55, check=False)
    assert (ran.stdout, ran.returncode) == ("Auto [1, 3]\nExplicit [1, 3]\n", 0), ran.stderr


def test_a_call_with_a_random_key_is_tuned_after_its_trace(real_backend):
    """PRNG keys are arguments like any other: a traced dropout is tuned with a synthesised key."""

    @kernel(op_id="dropout", configs=[1, 2], heuristic=1)
    def dropout(key, x, *, cfg):
        return x * jax.random.bernoulli(key, 0.5, x.shape) * cfg

    def model(chain, key, x):
        return dropout(key, x, cfg=chain.choose_nowait(Invocation("dropout", (key, x), {}), dropout))

    async def main():
        key, x = jax.random.key(0), jnp.ones(8)
        async with ConfigSelectorChain(tuner=Tuner(warmup=0, iters=1), sinks=()) as chain:
            jax.jit(lambda key, x: model(chain, key, x))(key, x)
            await chain.settled()
            return await chain.select(Invocation("dropout", (key, x), {}), dropout)

    assert anyio.run(main, backend=real_backend).tier == "memory"


_FIRST_CALL = """
import anyio, jax, jax.numpy as jnp
from asel import ConfigSelectorChain, Invocation, kernel

@kernel(op_id="double", configs=[2], heuristic=2)
def double(x, *, cfg):
    return x * cfg

async def main():
    chain = ConfigSelectorChain(sinks=())
    x = jnp.ones(3)
    print(jax.jit(lambda x: double(x, cfg=chain.choose_nowait(Invocation("double", (x,), {}), double)))(x))
    print((await chain.select(Invocation("double", (x,), {}), double)).cfg)

anyio.run(main)
"""


@pytest.mark.timeout(60)  # another process loads JAX
def test_the_first_selection_of_a_process_may_be_in_a_trace():
    """Facts that asel reads from JAX at its first call are correct even if that call is traced."""
    ran = subprocess.run([sys.executable, "-c", _FIRST_CALL], capture_output=True, text=True, timeout=55, check=False)
    assert (ran.stdout, ran.returncode) == ("[2. 2. 2.]\n2\n", 0), ran.stderr


# ---------------------------------------------------------------------------------------------
# What is recorded.


@pytest.mark.anyio
async def test_traced_calls_are_recorded_with_shapes():
    """The registry holds a traced call with shapes in the place of tracers and everything else as it was."""
    bench = Bench()
    async with bench.chain:
        model = Model(bench)
        weak = jnp.asarray(2.0)  # a Python number's array is weakly typed
        mask = np.ones((2,), bool)

        def traced(x, w, scale):
            kwargs = {"params": {"w": w, "names": ["a", None]}, "causal": True, "scale": scale, "mask": mask}
            inv = Invocation("toy", (x,), kwargs)
            bench.chain.choose_nowait(inv, model.kernel)
            return call_key(inv, model.kernel)

        keys = []
        with jax.checking_leaks():
            jax.jit(lambda *args: keys.append(traced(*args)))(
                jnp.ones((8, 128)), jnp.ones((4,), jnp.bfloat16), jax.lax.stop_gradient(weak)
            )
    recorded = get_invocations(device_fingerprint())
    [(recorded_kernel, args, kwargs)] = recorded["toy@v1"].values()
    assert list(recorded) == ["toy@v1"]
    assert list(recorded["toy@v1"]) == keys
    assert recorded_kernel is model.kernel
    assert args == (jax.ShapeDtypeStruct((8, 128), jnp.float32),)
    assert kwargs["params"] == {"w": jax.ShapeDtypeStruct((4,), jnp.bfloat16), "names": ["a", None]}
    assert kwargs["causal"] is True
    assert kwargs["mask"] is mask
    assert (kwargs["scale"].shape, kwargs["scale"].weak_type) == ((), weak.weak_type)
    leaves = jax.tree_util.tree_leaves((args, kwargs))
    assert not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)


@pytest.mark.anyio
async def test_each_traced_shape_is_recorded_once():
    """The registry has one entry for each key, however often it was traced."""
    bench = Bench(allow={"allow_autotune": False})
    async with bench.chain:
        model = Model(bench)
        for size in (8, 16, 8):
            jax.jit(lambda x: model(x))(jnp.ones((size, 128)))
    shapes = [args[0].shape for _, args, _ in get_invocations(device_fingerprint())["toy@v1"].values()]
    assert sorted(shapes) == [(8, 128), (16, 128)]


@pytest.mark.anyio
async def test_recorded_calls_can_be_tuned_in_a_batch():
    """A model is traced once without tuning; the batch then tunes what it recorded, and the next trace has it all."""
    bench = Bench()
    model = Model(bench)
    jitted = jax.jit(model)
    for size in (8, 16):  # the chain is not open, so nothing is tuned in the background
        jitted(jnp.ones((size, 128)))
    assert (model.traced_with, bench.tunes) == ([GUESS, GUESS], 0)

    async with bench.chain as chain:
        summary = await autotune_recorded(chain)
        assert (list(summary.chosen.values()), summary.failed) == ([BEST, BEST], [])
        jitted.clear_cache()
        for size in (8, 16):
            jitted(jnp.ones((size, 128)))
    assert model.traced_with[2:] == [BEST, BEST]


# ---------------------------------------------------------------------------------------------
# Scopes do not disturb JAX.


@pytest.mark.anyio
@pytest.mark.parametrize(
    "scope",
    [
        lambda chain: overlay_cache({("dev", "toy@v1", "key"): BEST}),
        lambda chain: policy_override(chain, allow_autotune=False),
        lambda chain: forward_autotune_only(),
    ],
    ids=["overlay_cache", "policy_override", "forward_autotune_only"],
)
async def test_entering_a_scope_retraces_nothing(scope):
    """A scope does not invalidate JAX's compiled functions, neither inside it nor after it."""
    bench, traces = Bench(), []

    @jax.jit
    def unrelated(x):
        traces.append(1)
        return x + 1

    async with bench.chain as chain:
        x, model = jnp.ones((8, 128)), Model(bench)
        selecting = jax.jit(model)
        unrelated(x), selecting(x)
        for _ in range(3):
            with scope(chain):
                unrelated(x), selecting(x)
                with scope(chain):
                    unrelated(x), selecting(x)
            unrelated(x), selecting(x)
    assert len(traces) == 1
    assert len(model.traced_with) == 1


@pytest.mark.anyio
async def test_an_overlay_answers_while_tracing():
    """An overlay that is open while JAX traces decides what is traced, and no tune begins for it."""
    bench = Bench()
    async with bench.chain as chain:
        model, x, pinned = Model(bench), jnp.ones((8, 128)), Blocks(7)
        key = (await chain.explain(Invocation("toy", (x,), {}), model.kernel)).key
        with overlay_cache({key: pinned}):
            np.testing.assert_array_equal(jax.jit(model)(x), x * 7)
        await chain.settled()
    assert model.traced_with == [pinned]
    assert bench.tunes == 0
    assert bench.sink.names.count("overlay_hit") == 1


# ---------------------------------------------------------------------------------------------
# From other threads.


class Gated(ScriptedMeasure):
    """A measure that waits for a gate."""

    def __init__(self, costs) -> None:
        super().__init__(costs)
        self.gate = anyio.Event()

    async def compile(self, trial):
        await self.gate.wait()
        return await super().compile(trial)


def test_threads_that_trace_share_one_tune(real_backend):
    """Threads that trace while the loop runs get the heuristic, the loop tunes once, and then they get the winner."""
    workers, sink_threads = 6, []

    async def in_threads(model: Model) -> list[Blocks]:
        together = threading.Barrier(workers)

        def trace() -> None:
            together.wait(PATIENCE_S)
            jax.jit(lambda x: model(x))(jnp.ones((8, 128)))

        async with anyio.create_task_group() as tasks:
            for _ in range(workers):
                tasks.start_soon(anyio.to_thread.run_sync, trace)
        answers, model.traced_with = model.traced_with, []
        return answers

    async def main():
        measure = Gated({Blocks(1): 0.003, Blocks(2): 0.002, Blocks(3): 0.001})
        bench = Bench(
            tuner=Tuner(warmup=0, iters=1, measure=measure),
            on_event=lambda event: sink_threads.append(threading.get_ident()),
        )
        async with bench.chain as chain:
            model = Model(bench)
            assert await in_threads(model) == [GUESS] * workers
            measure.gate.set()
            await chain.settled()
            assert await in_threads(model) == [BEST] * workers
            assert bench.tunes == 1
        assert set(sink_threads) == {threading.get_ident()}, "sinks are called on the loop alone"

    anyio.run(main, backend=real_backend)


def test_a_trace_in_a_thread_is_tuned_with_that_threads_settings(real_backend):
    """JAX's settings are per thread: a call traced in double precision is tuned in double precision."""
    seen = []

    @kernel(op_id="double", configs=[1, 2], heuristic=1)
    def op(x, *, cfg):
        seen.append((threading.current_thread().name, x.dtype))
        return x * cfg

    def trace(chain) -> None:
        with jax.enable_x64(True):
            jax.eval_shape(
                lambda x: chain.choose_nowait(Invocation("double", (x,), {}), op) and x, np.ones(3, np.float64)
            )

    async def main():
        async with ConfigSelectorChain(tuner=Tuner(warmup=0, iters=1), sinks=()) as chain:
            await anyio.to_thread.run_sync(trace, chain)
            await chain.settled()

    anyio.run(main, backend=real_backend)
    assert {dtype for name, dtype in seen if name.startswith("asel")} == {np.dtype("float64")}


def test_a_candidate_that_selects_while_it_is_compiled_gets_the_heuristic(real_backend):
    """A kernel that uses other kernels does not deadlock its own tune: the inner one is tuned afterwards."""
    inner_cfgs = []

    @kernel(op_id="inner", configs=[1, 2], heuristic=1)
    def inner(x, *, cfg):
        return x + cfg

    async def main():
        async with ConfigSelectorChain(tuner=Tuner(warmup=0, iters=1), sinks=()) as chain:

            @kernel(op_id="outer", configs=[1, 2], heuristic=1)
            def outer(x, *, cfg):
                inner_cfgs.append(chain.choose_nowait(Invocation("inner", (x,), {}), inner))
                return inner(x, cfg=inner_cfgs[-1]) * cfg

            x = jnp.ones(8)
            with anyio.fail_after(PATIENCE_S):
                chosen = await chain.select(Invocation("outer", (x,), {}), outer)
                await chain.settled()
            assert chosen.tier == "autotune"
            assert inner_cfgs[0] == 1
            assert (await chain.select(Invocation("inner", (x,), {}), inner)).tier == "memory"

    anyio.run(main, backend=real_backend)
