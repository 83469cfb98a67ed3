"""Compiling and timing one candidate with JAX: real arrays, real threads, real time."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import namedtuple
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import anyio
import anyio.lowlevel
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from asel import (
    AutotunePolicy,
    ConfigSelectorChain,
    Failed,
    Invocation,
    Kernel,
    Measured,
    Skipped,
    Tuner,
    TuningError,
    device_fingerprint,
    forward_autotune_only,
    kernel,
)
from asel.benchmark import (
    LEAST_SAMPLE_S,
    JaxMeasure,
    Program,
    Timing,
    _fingerprint,
    abstract,
    concrete,
    dispatch_overhead_s,
)
from asel.devices import current_settings
from asel.jobs import TuneJob
from asel.keys import call_key
from asel.measure import Trial
from asel.testing import RecordingSink

PATIENCE_S = 10.0  # how long a gate holds before the test is called broken; never reached by a passing one


@pytest.fixture(autouse=True)
def _first_call_is_behind_us():
    """Asel learns of JAX and of the machine at its first call; what that costs the loop is a test of its own."""
    call_key(Invocation("first", (), {}))
    device_fingerprint()


# What a candidate is compiled with does not depend on the loop; tests of that run on one.
ONE_BACKEND = "asyncio"


def measure(backend, fn, *args, objective="forward", **kwargs) -> float:
    """Compile `fn` as a candidate, and take one sample of it."""

    async def main() -> float:
        sample = await JaxMeasure().compile(Trial(None, fn, args, kwargs, objective=objective))
        return await sample()

    return anyio.run(main, backend=backend)


def seen_by_candidate(backend, *args, **kwargs):
    """Return the arguments as the candidate gets them while it is compiled."""
    seen = []

    def fn(*args, **kwargs):
        seen.append((args, kwargs))
        return jnp.zeros(())

    measure(backend, fn, *args, **kwargs)
    return seen[-1]


def is_parameter(value) -> bool:
    return isinstance(value, jax.core.Tracer)


# ---------------------------------------------------------------------------------------------
# What is a parameter, and what a constant.

Pair = namedtuple("Pair", ["left", "right"])


@partial(jax.tree_util.register_dataclass, data_fields=["weights"], meta_fields=["name"])
@dataclass
class Layer:
    weights: jax.Array
    name: str = "dense"


@dataclass(frozen=True)
class Mask:
    """Nothing JAX knows: a leaf, whatever is in it."""

    window: int
    offsets: tuple[int, ...] = field(default=(1, 2))


@pytest.mark.parametrize(
    "constant",
    [
        "causal",
        3,
        2.5,
        True,
        1j,
        b"bytes",
        jnp.bfloat16,
        np.dtype("float32"),
        jnp.tanh,
        partial(jnp.sum, axis=0),
        Mask(128),
        frozenset({"a"}),
        np.float32(1.5),
        np.array(["left", "right"]),
        np.array([None, Mask(1)], dtype=object),
        np.array(["2026-01-01"], dtype="datetime64[D]"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_whatever_is_not_an_array_is_a_constant(constant):
    """Strings, numbers, dtypes, callables and unknown objects reach the candidate as the very objects they are."""
    (positional, nested), kwargs = seen_by_candidate(ONE_BACKEND, constant, [constant, (constant,)], named=constant)
    for value in (positional, nested[0], nested[1][0], kwargs["named"]):
        assert value is constant


@pytest.mark.parametrize("dtype", ["float32", "int8", "bool", "complex64", "bfloat16", "float8_e4m3fn", "uint4"])
@pytest.mark.parametrize("make", [jnp.zeros, lambda shape, dtype: np.zeros(shape, jnp.dtype(dtype))], ids=["jax", "np"])
def test_arrays_are_parameters(make, dtype):
    """Arrays of any numeric dtype, JAX's or NumPy's, are traced: a compiler must not fold their values away."""
    (value,), _ = seen_by_candidate(ONE_BACKEND, make((2, 3), dtype))
    assert is_parameter(value)
    assert (value.shape, value.dtype) == ((2, 3), jnp.dtype(dtype))


def test_random_keys_are_parameters(real_backend):
    """Typed PRNG keys are arrays like any other."""
    (key,), _ = seen_by_candidate(real_backend, jax.random.key(0))
    assert is_parameter(key)
    assert jnp.issubdtype(key.dtype, jax.dtypes.prng_key)


def test_containers_keep_their_form(real_backend):
    """Nested containers and registered pytrees arrive as what they were, array leaves traced and the rest untouched."""
    x = jnp.ones((4,))
    (tree, pair, layer), kwargs = seen_by_candidate(
        real_backend,
        {"w": x, "mode": "fast", "parts": [x, (1, x, None)]},
        Pair(x, "right"),
        Layer(x, "embedding"),
        options={"dtype": jnp.float32, "bias": x},
    )
    assert list(tree) == ["mode", "parts", "w"]
    assert is_parameter(tree["w"])
    assert is_parameter(tree["parts"][0])
    assert (tree["mode"], tree["parts"][1][0], tree["parts"][1][2]) == ("fast", 1, None)
    assert is_parameter(tree["parts"][1][1])
    assert type(pair) is Pair
    assert (is_parameter(pair.left), pair.right) == (True, "right")
    assert type(layer) is Layer
    assert (is_parameter(layer.weights), layer.name) == (True, "embedding")
    assert kwargs["options"]["dtype"] is jnp.float32
    assert is_parameter(kwargs["options"]["bias"])


def test_a_candidate_without_arrays_can_be_measured(real_backend):
    """A candidate may make its own arrays."""
    assert measure(real_backend, lambda n: jnp.ones((n,)), 3) >= 0


# ---------------------------------------------------------------------------------------------
# Zeros in the place of shapes.


def values_computed_with(backend, *args) -> list[np.ndarray]:
    """Return the values the compiled candidate runs with."""
    got = []

    def fn(*arrays):
        return jax.pure_callback(
            lambda *values: got.append([np.asarray(value) for value in values]) or np.float32(0),
            jax.ShapeDtypeStruct((), jnp.float32),
            *arrays,
        )

    measure(backend, fn, *args)
    return got[-1]


@pytest.mark.parametrize("dtype", ["float32", "int8", "bool", "complex64", "bfloat16", "float8_e5m2"])
def test_shapes_become_zeros(dtype):
    """Where the arguments are only shapes, the candidate runs on zeros of the same shape and dtype."""
    x = jnp.arange(6, dtype=jnp.float32).reshape(2, 3)
    shape, array = values_computed_with(ONE_BACKEND, jax.ShapeDtypeStruct((3, 2), jnp.dtype(dtype)), x)
    assert (shape.shape, shape.dtype) == ((3, 2), jnp.dtype(dtype))
    assert not shape.any()
    np.testing.assert_array_equal(array, x)  # real arrays keep their values


def test_shapes_keep_their_sharding():
    """Zeros lie where the shape says, or else on the tune's device."""
    [device, *_] = jax.devices()
    mesh = jax.sharding.Mesh(np.array([device]), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    assert concrete(jax.ShapeDtypeStruct((4,), jnp.float32, sharding=sharding)).sharding == sharding
    placed = concrete(jax.ShapeDtypeStruct((4,), jnp.float32), device)
    assert placed.devices() == {device}
    assert placed.committed


def test_shapes_keep_their_weak_type(real_backend):
    """A weakly typed scalar stays one: otherwise a bfloat16 kernel would be timed in float32."""
    (weak, strong), _ = seen_by_candidate(
        real_backend,
        jax.ShapeDtypeStruct((), jnp.float32, weak_type=True),
        jax.ShapeDtypeStruct((), jnp.float32, weak_type=False),
    )
    assert (weak.dtype, weak.weak_type) == (jnp.float32, True)
    assert (strong.dtype, strong.weak_type) == (jnp.float32, False)


def test_shapes_of_random_keys_become_keys(real_backend):
    """A call that was recorded with a PRNG key can be measured: a key takes the place of its shape."""
    key = jax.random.key(0)
    drawn = []

    def dropout(key, x):
        drawn.append(key.dtype)
        return x * jax.random.bernoulli(key, 0.5, x.shape)

    assert measure(real_backend, dropout, jax.ShapeDtypeStruct(key.shape, key.dtype), jnp.ones(3)) >= 0
    assert drawn == [key.dtype]


def test_tracers_are_forgotten():
    """`abstract` keeps of a tracer what may outlive its trace, and leaves everything else as it is."""
    kept = []
    jax.jit(lambda x: kept.append(abstract(x)) or x)(jnp.ones((2, 3), jnp.bfloat16))
    jax.jit(lambda x: kept.append(abstract(x)) or x)(1.0)
    array, text = jnp.ones(3), "causal"
    assert kept == [
        jax.ShapeDtypeStruct((2, 3), jnp.bfloat16),
        jax.ShapeDtypeStruct((), jnp.float32, weak_type=True),
    ]
    assert kept[1].weak_type
    assert abstract(array) is concrete(array) is array
    assert abstract(text) is concrete(text) is text


# ---------------------------------------------------------------------------------------------
# The caller's surroundings.


MESH = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))


def x64() -> bool:
    return jax.config.jax_enable_x64


def matmul_precision() -> str | None:
    return jax.config.jax_default_matmul_precision


def default_device():
    return jax.config.jax_default_device


SETTINGS = [
    pytest.param(lambda: jax.enable_x64(True), x64, id="x64"),
    pytest.param(lambda: jax.default_matmul_precision("highest"), matmul_precision, id="matmul precision"),
    pytest.param(lambda: jax.default_device(jax.devices()[0]), default_device, id="default device"),
    pytest.param(lambda: jax.set_mesh(MESH), jax.sharding.get_abstract_mesh, id="mesh"),
]


@pytest.mark.parametrize(("entered", "read"), SETTINGS)
@pytest.mark.parametrize("way", ["chain", "measure", "autotune"])
def test_the_callers_settings_hold_in_the_thread(way, entered, read, real_backend):
    """JAX keeps its settings per thread: the caller's are in force where a candidate is compiled, whoever asked."""
    seen = []

    def fn(x, cfg=None):
        seen.append(read())
        return x + 1

    async def main():
        x = np.ones(3, np.float32)
        tuner = Tuner(warmup=0, iters=1)
        before = read()
        with entered():
            inside = read()
            if way == "chain":
                async with ConfigSelectorChain(tuner=tuner, sinks=()) as chain:
                    op = kernel(op_id="settings", configs=[1], heuristic=1)(fn)
                    assert (await chain.select(Invocation("settings", (x,), {}), op)).tier == "autotune"
            elif way == "measure":
                await tuner.measure(fn, x)
            else:
                await tuner.autotune(lambda cfg: fn, (x,), {}, [1])
        assert before != inside
        assert set(seen) == {inside}

    anyio.run(main, backend=real_backend)


def test_what_a_candidate_leaves_set_is_not_the_next_ones(real_backend):
    """A mesh set for good in a thread is gone when that thread does its next step, whoever's it is."""
    seen = []

    def fn(cfg):
        def run(x):
            seen.append((cfg, threading.current_thread(), jax.sharding.get_abstract_mesh().axis_names))
            if cfg == "sets" and float(x[0]):  # which needs its value, so it is run as it is
                jax.set_mesh(MESH)
            return x

        return run

    anyio.run(Tuner(1, 2).autotune, fn, (jnp.ones(3),), {}, ["sets", "next"], backend=real_backend)
    assert {cfg for cfg, _, _ in seen} == {"sets", "next"}
    assert len({thread for _, thread, _ in seen}) == 1
    assert {names for _, _, names in seen} == {()}


def test_samples_are_taken_with_the_settings_they_were_compiled_with(real_backend):
    """A double precision candidate compiles and runs in double precision, though the thread's default is single."""
    seen = []

    async def main():
        async with ConfigSelectorChain(tuner=Tuner(warmup=1, iters=2), sinks=()) as chain:
            op = kernel(op_id="double", configs=[1, 2], heuristic=1)(lambda x, *, cfg: seen.append(x.dtype) or x * cfg)
            with jax.enable_x64(True):
                selection = await chain.select(Invocation("double", (np.ones(3, np.float64),), {}), op)
        assert [type(outcome) for outcome in selection.report.outcomes] == [Measured, Measured]

    anyio.run(main, backend=real_backend)
    assert set(seen) == {np.dtype("float64")}


@pytest.mark.parametrize("way", ["forward", "forward+backward", "eager"])
def test_the_callers_settings_hold_at_every_step(way):
    """What is lowered, compiled, run and computed for a check is so with the settings of the call, step by step."""
    seen, objective = [], "forward" if way == "eager" else way

    def fn(x):
        seen.append(("called", x64()))
        return x * float(x[0]) if way == "eager" else x * 2

    with jax.enable_x64(True):
        trial = Trial("wide", fn, (np.ones(3, np.float64),), {}, objective=objective, settings=current_settings())
    program = Program(trial)
    if (lowered := program._lowered) is not None:
        program._lowered = SimpleNamespace(compile=lambda: seen.append(("compiled", x64())) or lowered.compile())
    program.compile()
    program.run(1, time.perf_counter)
    (output,) = program.outputs()
    assert program.how == way
    assert output.dtype == np.float64
    assert {wide for _, wide in seen} == {True}
    assert ("compiled", True) in seen or way == "eager"


def test_a_candidate_is_built_in_a_thread_with_the_callers_settings(real_backend):
    """`make_fn` is the candidate's own code: it is not run on the event loop, and makes what its caller would."""
    built = []

    def make_fn(cfg):
        built.append((threading.current_thread() is threading.main_thread(), x64()))
        return lambda x: x * cfg

    async def main():
        with jax.enable_x64(True):
            await Tuner(0, 1).autotune(make_fn, (jnp.ones(3),), {}, [1.0, 2.0])

    anyio.run(main, backend=real_backend)
    assert built == [(False, True)] * 2


def test_context_variables_follow_the_candidate(real_backend):
    """A candidate sees the context variables of the caller whose tune it is."""
    request, seen = ContextVar("request", default="nobody's"), []

    def fn(x):
        seen.append(request.get())
        return x

    async def main():
        request.set("the caller's")
        await Tuner(warmup=0, iters=1).measure(fn, jnp.ones(3))

    anyio.run(main, backend=real_backend)
    assert set(seen) == {"the caller's"}


# ---------------------------------------------------------------------------------------------
# Forward and backward.


def spied():
    """Return an identity that notes the dtype of every gradient that flows back through it."""
    gradients = []

    @jax.custom_vjp
    def identity(x):
        return x

    def backward(_, gradient):
        gradients.append(gradient.dtype)
        return (gradient,)

    identity.defvjp(lambda x: (x, None), backward)
    return identity, gradients


@pytest.mark.parametrize("make", [jnp.ones, lambda shape, dtype: np.ones(shape, jnp.dtype(dtype))], ids=["jax", "np"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "complex64"])
def test_the_backward_pass_is_timed_for_every_inexact_dtype(dtype, make):
    """Whatever has a gradient is differentiated, the small and the complex floats included."""
    identity, gradients = spied()
    assert measure(ONE_BACKEND, identity, make((2, 3), dtype), objective="forward+backward") >= 0
    assert set(gradients) == {jnp.dtype(dtype)}


def test_forward_alone_does_not_differentiate(real_backend):
    """The forward objective times the forward pass."""
    identity, gradients = spied()
    measure(real_backend, identity, jnp.ones(3))
    assert gradients == []


@pytest.mark.parametrize("dtype", ["int32", "bool", "uint8"])
def test_integer_inputs_alone_are_timed_forward(dtype):
    """Where no input has a gradient there is no backward pass to time, and the forward pass has to do."""
    identity, gradients = spied()
    assert measure(ONE_BACKEND, identity, jnp.ones((3,), dtype), objective="forward+backward") >= 0
    assert gradients == []


def test_integers_ride_along(real_backend):
    """Inputs without a gradient pass through a backward timing as they are."""
    identity, gradients = spied()

    def gather(table, rows, scale):
        assert scale == 2
        return identity(table)[rows] * scale

    assert measure(real_backend, gather, jnp.ones((4, 3)), jnp.array([0, 2]), 2, objective="forward+backward") >= 0
    assert set(gradients) == {jnp.dtype("float32")}


@pytest.mark.parametrize(
    "wrap",
    [
        lambda y: {"out": y, "lse": y.sum()},
        lambda y: (y, jnp.argmax(y), None),
        lambda y: [y.astype(jnp.complex64), y.astype(jnp.bfloat16)],
        lambda y: (y, jax.random.key(0)),
        lambda y: (y, 1.0, 2),
    ],
    ids=["dict", "integer output", "mixed dtypes", "random key", "Python numbers"],
)
def test_any_outputs_can_be_differentiated(wrap):
    """The gradient is of every inexact output; the others, of whatever kind, do not stand in the way."""
    identity, gradients = spied()
    assert measure(ONE_BACKEND, lambda x: wrap(identity(x)), jnp.ones(3), objective="forward+backward") >= 0
    assert set(gradients) == {jnp.dtype("float32")}


def test_the_backward_pass_is_whole():
    """It is by every inexact input and of every inexact output, both parts of a complex one; and the outputs are kept.

    A gradient that nobody asks for, or an output that nobody gets, is dead code to the compiler.
    """

    def fn(x, rows, y):
        return {"first": 2 * x, "second": 3 * y, "third": jax.lax.complex(5 * x, 7 * y), "rows": rows + 1}

    x, rows = jnp.ones(3), jnp.arange(3)
    program = Program(Trial("whole", fn, (x, rows, x), {}, objective="forward+backward"))
    program.compile()
    (_, outputs), gradients = program._executable(x, rows, x)
    assert program.how == "forward+backward"
    assert [set(np.asarray(gradient).tolist()) for gradient in gradients] == [{2.0 + 5.0}, {3.0 + 7.0}]
    for output, expected in zip(outputs, jax.tree_util.tree_leaves(fn(x, rows, x)), strict=True):
        np.testing.assert_array_equal(output, expected)


def test_a_candidate_without_a_gradient_is_timed_forward(real_backend):
    """Where a kernel cannot be differentiated its forward time counts, as with ejKernel."""

    def until_large(x):
        return jax.lax.while_loop(lambda y: y.sum() < 100, lambda y: y * 2, x)

    assert measure(real_backend, until_large, jnp.ones(3), objective="forward+backward") >= 0


def test_the_policy_decides_what_is_timed(real_backend):
    """`validate_backward` times both passes, and `forward_autotune_only` takes that back for the current task."""
    identity, gradients = spied()
    op = kernel(op_id="spied", configs=[1, 2], heuristic=1)(lambda x, *, cfg: identity(x) * cfg)

    async def main():
        policy = AutotunePolicy(validate_backward=True)
        async with ConfigSelectorChain(policy=policy, tuner=Tuner(warmup=0, iters=1), sinks=()) as chain:
            inv = Invocation("spied", (jnp.ones(3),), {})
            with forward_autotune_only():
                forward = await chain.select(inv, op)
            assert (forward.report.objective, gradients) == ("forward", [])
            both = await chain.select(inv, op)
            assert (both.tier, both.report.objective) == ("autotune", "forward+backward")
            assert set(gradients) == {jnp.dtype("float32")}

    anyio.run(main, backend=real_backend)


# ---------------------------------------------------------------------------------------------
# A tuner on its own.


def spin(rounds: int):
    """Return a function that takes time in proportion to `rounds`, and compiles in the same time for all."""
    return lambda x: jax.lax.fori_loop(0, rounds, lambda _, y: jnp.sin(y) + 1.0, x)


def test_measure_works_alone(real_backend):
    """`Tuner.measure` needs no chain: seconds in, and more of them for more work."""

    async def main():
        x = jnp.ones(64)
        return await Tuner().measure(spin(1), x), await Tuner().measure(spin(20_000), x)

    short, long = anyio.run(main, backend=real_backend)
    assert 0 < short < long


def test_autotune_works_alone(real_backend):
    """`Tuner.autotune` needs no chain: the candidate that does the least work wins."""

    async def main():
        return await Tuner().autotune(spin, (jnp.ones(64),), {}, [20_000, 1, 10_000])

    assert anyio.run(main, backend=real_backend) == 1


def test_the_timer_can_be_given(real_backend):
    """Durations come from the timer that was given: its readings, around one run each."""
    ticks = iter([60.0, 100.0, 200.0, 201.0, 300.0, 303.0, 400.0, 402.0])

    async def main():
        return await Tuner(warmup=1, iters=3, measure=JaxMeasure(timer=lambda: next(ticks))).measure(
            spin(1), jnp.ones(3)
        )

    assert anyio.run(main, backend=real_backend) == 2.0


def test_the_clock_stops_when_the_outputs_are_there(real_backend):
    """A sample includes the computation and not just its dispatch, which JAX returns from long before."""

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
    """A run is over when the last of its outputs is there, not the first."""
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


def test_what_cannot_be_measured_says_why(real_backend):
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
        job = TuneJob(("exits", "stays"), make_fn, (jnp.ones(3),), {})
        return await Tuner(warmup=0, iters=1).tune(job)

    report = anyio.run(main, backend=real_backend)
    assert report.winner == "stays"
    assert isinstance(report.outcomes[0], Failed)
    assert (report.outcomes[0].stage, report.outcomes[0].error_type) == ("compile", "RuntimeError")
    assert "SystemExit: 3" in report.outcomes[0].message


@pytest.mark.parametrize(("trouble", "error_type"), [("raises", "LookupError"), ("hangs", "TimeoutError")])
def test_a_candidate_that_cannot_be_built_is_one_outcome(real_backend, trouble, error_type):
    """Whether `make_fn` raises or never returns, the stage is "build" and the others are measured."""
    release = threading.Event()

    def make_fn(cfg):
        if cfg == "raises":
            raise LookupError("no such tile")
        if cfg == "hangs":
            release.wait(PATIENCE_S)
        return lambda x: x

    job = TuneJob((trouble, "good"), make_fn, (jnp.ones(3),), {}, candidate_timeout_s=0.5 if trouble == "hangs" else 9)
    try:
        report = anyio.run(Tuner(0, 1).tune, job, backend=real_backend)
    finally:
        release.set()
    assert (report.winner, report.outcomes[0].stage, report.outcomes[0].error_type) == ("good", "build", error_type)
    assert [busy.what for busy in job.left_behind] == (["lowering 'hangs'"] if trouble == "hangs" else [])


def test_an_error_without_words_is_one_outcome(real_backend):
    """An exception whose message raises is a Failed outcome like any other, and harms nobody."""

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


# ---------------------------------------------------------------------------------------------
# The loop.


@pytest.mark.parametrize("stage", ["compile", "measure"])
def test_the_loop_takes_turns_while_a_candidate_is_slow(stage, real_backend):
    """Compiling and running happen off the event loop: a heartbeat beats while a candidate stands still."""
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


def test_the_first_selection_of_a_process_does_not_block_the_loop():
    """Whatever asel has to learn of JAX and of the machine, it does not learn by reading files on the event loop."""
    ran = subprocess.run([sys.executable, "-c", _FIRST_CALL], capture_output=True, text=True, timeout=18, check=False)
    assert (ran.stdout, ran.returncode) == ("autotune\n", 0), ran.stderr


def test_a_tune_of_real_candidates_keeps_every_outcome(real_backend):
    """From a chain to the device and back: the fastest real candidate wins, and a broken one is an outcome."""

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


# ---------------------------------------------------------------------------------------------
# What must survive, and what must hold.


def chosen_among(backend, configs, run, x=None, *, check=None, **policy):
    """Tune real candidates in threads; return the report and what was told."""
    sink = RecordingSink()

    async def main():
        op = kernel(op_id="survivor", configs=configs, heuristic=configs[0])(run)
        async with ConfigSelectorChain(
            policy=AutotunePolicy(**policy), tuner=Tuner(1, 2, check=check), sinks=[sink], close_grace_s=0.1
        ) as chain:
            args = (jnp.ones(64) if x is None else x,)
            return (await chain.select(Invocation("survivor", args, {}), op)).report

    return anyio.run(main, backend=backend), sink


def test_a_candidate_that_asks_for_too_much_memory_is_one_outcome(real_backend):
    """What the allocator refuses costs its candidate and nobody else."""

    def run(x, *, cfg):
        return jnp.zeros((1 << 45,), jnp.float32) + x[0] if cfg == "huge" else x + 1

    report, _ = chosen_among(real_backend, ["small", "huge"], run)
    assert report.winner == "small"
    assert isinstance(report.outcomes[1], Failed)


def test_a_candidate_that_fails_at_its_third_sample_cannot_win(real_backend):
    """Two good samples do not make a winner of what breaks at the third."""
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
    """Half a second allowed, four taken: the answer comes from the others, and an event tells of the thread."""
    release = threading.Event()

    def run(x, *, cfg):
        if cfg == "hangs":
            release.wait(4)
        return x + 1

    took_s = []
    try:
        while len(took_s) < 3 and min(took_s, default=9) >= 0.7:  # on a busy machine, the best of three
            report, sink = chosen_among(real_backend, ["good", "hangs", "late"], run, candidate_timeout_s=0.5)
            (start,), (finish,) = sink.named("autotune_start"), sink.named("autotune_finish")
            took_s.append(finish.end - start.start)
    finally:
        release.set()
    (failed,) = sink.named("candidate_failed")
    assert 0.5 <= min(took_s) < 0.7
    assert failed.still_busy
    assert failed.error_type == "TimeoutError"
    assert "still busy" in report.outcomes[1].message
    assert report.winner in ("good", "late")
    assert sink.events[-1].abandoned == ("lowering 'hangs'",)


def test_a_candidate_that_hangs_as_it_runs_leaves_those_before_it(real_backend):
    """Its thread keeps the device, so the rest are not tried; the answer comes, on time, from what was measured."""
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


def test_a_candidate_that_hangs_un_jitted_leaves_those_that_are_compiled(real_backend):
    """It has its turn when they are measured, and the device from then on: the next one of its kind is not tried."""
    release = threading.Event()

    def run(x, *, cfg):
        if isinstance(cfg, str):
            np.asarray(x)  # which no tracer can be made
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


def test_outputs_are_held_against_the_incumbents_also_where_that_runs_un_jitted(real_backend):
    """It is tried before anyone is checked, though not before they are compiled."""

    def run(x, *, cfg):
        if cfg == "incumbent":
            np.asarray(x)
        return x + 1 if cfg == "wrong" else x

    report, _ = chosen_among(real_backend, ["incumbent", "wrong", "right"], run, check=True)
    assert report.outcomes[0].how == "eager"
    assert report.outcomes[1] == Failed("wrong", "check", "OutputMismatch", "output 0 differs by up to 1")
    assert (report.winner, report.outcomes[2].how) == ("right", "forward")


def test_un_jitted_candidates_run_alone(real_backend):
    """Finding out whether one runs is a run: nobody else is on the device meanwhile."""
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
                job = TuneJob((1, 2), lambda cfg: partial(run, cfg=cfg), (jnp.ones(3),), {}, device=jax.devices()[0])
                tasks.start_soon(Tuner(1, 1).tune, job)

    anyio.run(main, backend=real_backend)
    assert most
    assert max(most) == 1


@pytest.mark.parametrize("who", ["the same job", "another tune"])
def test_after_a_tune_was_cancelled_in_the_middle_of_a_sample_all_are_measured(real_backend, who):
    """Its thread is back in a moment, and is waited for: nobody is skipped as if it had hung."""
    running, cancelled = threading.Event(), threading.Event()

    def make_fn(cfg):
        def work(value):
            running.set()
            assert cancelled.wait(PATIENCE_S)
            time.sleep(0.05)
            return value

        return lambda x: jax.pure_callback(work, x, x)

    def job() -> TuneJob:
        return TuneJob((1, 2, 3), make_fn, (jnp.ones(3),), {}, device=jax.devices()[0])

    async def main():
        first, tuner = job(), Tuner(warmup=0, iters=1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(tuner.tune, first)
            assert await anyio.to_thread.run_sync(running.wait, PATIENCE_S)
            tasks.cancel_scope.cancel()
        assert [busy.alive for busy in first.left_behind] == [True]
        cancelled.set()
        return await tuner.tune(first if who == "the same job" else job())

    report = anyio.run(main, backend=real_backend)
    assert [type(o) for o in report.outcomes] == [Measured] * 3, report.outcomes


@pytest.mark.parametrize("check", [None, True])
def test_a_kernel_that_donates_its_inputs_can_be_sampled_again(real_backend, check):
    """What a sample or a check destroys is there for the next, jitted or not, and the caller's array is unharmed."""
    donating = jax.jit(lambda x: x * 2, donate_argnums=0)

    def run(x, *, cfg):
        if cfg == "eager" and float(x[0]) < 0:  # asks for a value, so it cannot be traced
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


@pytest.mark.parametrize("direction", ["host_to_device", "device_to_device", "device_to_host"])
def test_transfer_guards_hold_in_the_thread(real_backend, direction):
    """A caller that forbids implicit transfers forbids them to its candidates, whichever way they go."""
    seen = []

    def fn(x):
        seen.append(getattr(jax.config, f"jax_transfer_guard_{direction}"))
        return x

    async def main():
        with jax.transfer_guard("disallow"):
            await Tuner(0, 1).measure(fn, jax.device_put(np.ones(3)))

    anyio.run(main, backend=real_backend)
    assert set(seen) == {"disallow"}


@contextmanager
def guard_of_the_process():
    jax.config.update("jax_transfer_guard", "disallow")
    try:
        yield
    finally:
        jax.config.update("jax_transfer_guard", None)


@pytest.mark.parametrize("guard", [lambda: jax.transfer_guard("disallow"), guard_of_the_process], ids=["own", "global"])
@pytest.mark.parametrize("given", ["an array", "a NumPy array", "a shape", "a weak shape"])
def test_a_transfer_guard_fails_nobody(guard, given):
    """What asel itself moves, to time or to check a candidate, is not what the caller has forbidden."""
    x = np.ones(64, np.float32)
    ways = {"adds": "forward+backward", "eager": "eager"}
    if given == "an array":
        x = jax.device_put(x)
    elif given == "a NumPy array":
        del ways["adds"]  # which cannot be called with one under this guard, by anyone
    else:
        x = jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=given == "a weak shape")

    def run(x, *, cfg):
        if cfg == "eager" and is_parameter(x):
            raise TypeError("needs values")
        return x + x if cfg == "adds" else x * x

    dispatch_overhead_s.cache_clear()  # it too is found out under a guard, if this is the first tune
    with guard():
        check = {"check": lambda expected, actual: True}
        report, _ = chosen_among(ONE_BACKEND, list(ways), run, x, validate_backward=True, **check)
    assert {outcome.cfg: outcome.how for outcome in report.outcomes} == ways


def test_outputs_come_to_the_host_whatever_is_forbidden():
    """It is asel that wants them there: the guard is on what the kernel does, and off for what is done to check it."""
    guards = []

    class Output:
        def __array__(self, dtype=None, copy=None):
            guards.append(("moved", jax.config.jax_transfer_guard_device_to_host))
            return np.ones(3)

    def fn(x):
        guards.append(("called", jax.config.jax_transfer_guard_device_to_host))
        return Output()

    x = jnp.ones(3)
    with jax.transfer_guard("disallow"):
        program = Program(Trial("guarded", fn, (x,), {}, settings=current_settings()))
    guards.clear()
    program.outputs()
    assert guards == [("called", "disallow"), ("moved", "allow")]


def test_shapes_become_what_the_kernel_makes_of_them(real_backend):
    """`example_inputs` stands in for zeros where a kernel's time depends on its values."""
    seen = []

    class Sparse(Kernel):
        op_id = "sparse"

        def run(self, x, *, scale, cfg):
            return jax.pure_callback(lambda v: seen.append(float(v[0])) or v, x, x)

        def heuristic_cfg(self, inv):
            return 1

        def example_inputs(self, inv):
            (x,) = inv.args
            return (jnp.full(x.shape, 7.0, x.dtype),), {"scale": 2}

    async def main():
        async with ConfigSelectorChain(tuner=Tuner(0, 1), sinks=()) as chain:
            inv = Invocation("sparse", (jax.ShapeDtypeStruct((3,), jnp.float32),), {"scale": 2})
            return (await chain.select(inv, Sparse())).tier

    assert anyio.run(main, backend=real_backend) == "autotune"
    assert set(seen) == {7.0}


def test_example_inputs_are_made_with_the_callers_settings(real_backend):
    """They stand in for the caller's own arrays, so they are as wide as those would be, and made off the loop."""
    made, seen = [], []

    class Wide(Kernel):
        op_id = "wide"

        def run(self, x, *, cfg):
            seen.append(x.dtype)
            return x + cfg

        def heuristic_cfg(self, inv):
            return 1

        def example_inputs(self, inv):
            made.append((threading.current_thread() is threading.main_thread(), x64()))
            return (jnp.ones(inv.args[0].shape),), {}

    async def main():
        async with ConfigSelectorChain(tuner=Tuner(0, 1), sinks=()) as chain:
            with jax.enable_x64(True):
                inv = Invocation("wide", (jax.ShapeDtypeStruct((3,), jnp.float64),), {})
                return (await chain.select(inv, Wide())).tier

    assert anyio.run(main, backend=real_backend) == "autotune"
    assert made == [(False, True)]
    assert set(seen) == {np.dtype("float64")}


def timed_by_script(run_s, shared=None):
    """Return the timing of a program whose runs take `run_s()`, and the batches it is run in."""
    program, batches = Program(Trial("scripted", spin(1), (jnp.ones(64),), {}, shared=shared)), []
    program.compile()
    program.run = lambda times, timer: batches.append(times) or sum(run_s() for _ in range(times))
    return Timing(program, time.perf_counter, LEAST_SAMPLE_S), batches


def test_a_kernel_of_microseconds_is_run_many_times_in_a_sample():
    """Very short runs are repeated until a batch is well above the timer's noise."""
    timing, batches = timed_by_script(lambda: 1e-6)
    assert timing.sample() == timing.sample() == pytest.approx(1e-6)
    batches.clear()
    timing.sample()
    assert min(batches) * 1e-6 >= LEAST_SAMPLE_S
    assert len(batches) == 3


@pytest.mark.parametrize(
    ("tick_s", "dispatch_s", "least_s"), [(1e-9, 1e-6, LEAST_SAMPLE_S), (1e-4, 1e-6, 1e-2), (1e-9, 1e-3, 1e-2)]
)
def test_a_sample_is_far_above_what_the_machine_adds(monkeypatch, tick_s, dispatch_s, least_s):
    """Runs are repeated until they take a hundred ticks of the timer and ten times what dispatching one costs."""
    clock_info = time.get_clock_info
    coarse = SimpleNamespace(resolution=tick_s)
    monkeypatch.setattr(time, "get_clock_info", lambda name: coarse if name == "perf_counter" else clock_info(name))
    monkeypatch.setattr("asel.benchmark.dispatch_overhead_s", lambda: dispatch_s)
    sampler = anyio.run(JaxMeasure().compile, Trial("short", spin(1), (jnp.ones(64),), {}), backend=ONE_BACKEND)
    timing, batches = sampler.timing, []
    timing.program.run = lambda times, timer: batches.append(times) or times * 1e-4
    assert timing.sample() == timing.sample() == pytest.approx(1e-4)
    assert least_s <= batches[-1] * 1e-4 <= 2 * least_s


def test_a_long_run_is_a_sample_even_the_first():
    """What takes long is not run again to be warm: its one-off costs are a small part of it."""
    timing, batches = timed_by_script(lambda: 0.5)
    assert timing.sample() == timing.sample() == 0.5
    assert batches == [1, 1]


def test_a_first_run_that_is_long_for_once_counts_once():
    """The run that finds its caches cold may take very long; what comes after it is measured as what it is."""
    runs = iter([0.5, *[1e-3] * 50])
    timing, _ = timed_by_script(lambda: next(runs))
    assert timing.sample() == 0.5
    assert timing.sample() == timing.sample() == 1e-3


def test_a_batch_that_the_system_takes_away_does_not_count():
    """A sample of tiny runs is the best of three batches, one of short ones the best of two."""
    runs = iter([4e-4, 4e-4, 5e-4, 30e-3, 4e-4])
    timing, batches = timed_by_script(lambda: next(runs))
    assert timing.sample() == timing.sample() == timing.sample() == 4e-4
    assert batches == [1] * 5  # a cold one that is thrown away by the race, one, and three of which the first is cold
    runs = iter([1e-3, 1e-3, 1.1e-3, 30e-3])
    timing, batches = timed_by_script(lambda: next(runs))
    assert [timing.sample() for _ in range(3)] == [1e-3, 1e-3, 1.1e-3]
    assert batches == [1] * 4


def test_a_run_that_was_slow_once_is_sampled_like_the_others():
    """How a candidate is sampled depends on the best run, so none is timed cold for having been disturbed."""
    runs = iter([1e-3, 1e-3, 9e-3, 4e-3, 7e-3, 1e-3])
    timing, batches = timed_by_script(lambda: next(runs))
    assert [timing.sample() for _ in range(4)] == [1e-3, 1e-3, 4e-3, 1e-3]
    assert batches == [1] * 6  # one cold, one, and then two each


def test_the_candidates_of_a_tune_are_sampled_alike():
    """The best of three is lower than the best of two, so a lucky run of one candidate changes how all are sampled."""
    shared = {}
    lucky, other = timed_by_script(lambda: 4e-4, shared), timed_by_script(lambda: 9e-4, shared)
    for timing, _ in (other, other, other, lucky, lucky, other, lucky):
        timing.sample()
    assert len(other[1]) == 1 + 1 + 2 + 3
    assert len(lucky[1]) == 1 + 1 + 3


def test_the_candidates_of_a_tune_are_repeated_alike():
    """A mean of ten runs scatters less than one of five, so rivals make as many as the fastest needs to be timed."""
    shared = {}
    fast, rival, slow = (timed_by_script(lambda run_s=run_s: run_s, shared) for run_s in (2e-5, 3e-5, 4e-3))
    for timing, _ in (slow, slow, rival, rival, fast, fast, rival, fast, slow):
        timing.sample()
    assert set(rival[1][-3:]) == set(fast[1][-3:])
    assert fast[1][-1] >= 10
    assert slow[1] == [1, 1, 2, 2, 2], "what is no rival is not run for seconds"


def test_a_batch_that_was_late_once_is_no_measure_of_the_next():
    """How many runs a candidate needs is found out again where the first answer was that of a disturbed moment."""
    runs = iter([1e-6, 5e-3, *[1e-6] * 5000])
    timing, batches = timed_by_script(lambda: next(runs))
    for _ in range(3):
        timing.sample()
    assert batches[-1] * 1e-6 >= LEAST_SAMPLE_S


def test_short_kernels_are_told_apart(real_backend):
    """Sixty times the work is slower, however short it is."""
    make = lambda n: lambda x: jax.lax.fori_loop(0, n, lambda i, y: jnp.sin(y), x)  # noqa: E731
    winners = {anyio.run(Tuner().autotune, make, (jnp.ones(64),), {}, [200, 1], backend=real_backend) for _ in range(5)}
    assert winners == {1}


def test_programs_that_call_the_host_are_never_aliases(real_backend):
    """What a callback calls is not in a program's text, so two that differ in nothing else are still two."""

    def run(x, *, cfg):
        return jax.pure_callback(lambda value: value + cfg, x, x)

    report, _ = chosen_among(real_backend, [1, 2], run)
    assert [o.alias_of for o in report.outcomes] == [None, None]


def lowered_with(fn, objective="forward", *, size=3) -> str:
    return Program(Trial("lowered", fn, (jnp.ones(size),), {}, objective=objective)).fingerprint


def test_a_program_is_the_same_whatever_its_parts_are_called():
    """Equal bodies under the names of different functions are one program; in another order they are two."""

    def jitted(name, scale):
        def body(x):
            return jnp.sin(x) * scale

        body.__name__ = name
        return jax.jit(body)

    def composed(first, second):
        return lambda x: second(first(x))

    one = lowered_with(composed(jitted("some", 2.0), jitted("other", 3.0)))
    assert lowered_with(composed(jitted("any", 2.0), jitted("more", 3.0))) == one
    assert lowered_with(composed(jitted("other", 2.0), jitted("some", 3.0))) == one
    assert lowered_with(composed(jitted("some", 3.0), jitted("other", 2.0))) != one


def test_programs_that_differ_in_a_name_from_outside_are_two():
    """What a custom call calls is no part of the program, so its name tells two programs apart."""

    def calls(target):
        return lambda x: jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    assert lowered_with(calls("one")) == lowered_with(calls("one")) != lowered_with(calls("another"))


def test_programs_that_are_timed_in_different_ways_are_two():
    """A text is timed forward or both ways: the fingerprint says which, so that neither has the other's samples."""
    lowered = jax.jit(spin(1)).lower(jnp.ones(3))
    assert _fingerprint("forward", lowered) == _fingerprint("forward", lowered)
    assert _fingerprint("forward", lowered) != _fingerprint("forward+backward", lowered)
    assert lowered_with(spin(1)) != lowered_with(spin(1), "forward+backward")


def test_large_constants_are_not_read_to_find_aliases():
    """They make megabytes of text: it takes longer to read than the program to compile, and holds the interpreter."""

    def adding(values):
        return lambda x: x + values

    few, many = np.arange(8.0), np.arange(1e5)
    assert lowered_with(adding(few), size=8) == lowered_with(adding(few.copy()), size=8) is not None
    assert lowered_with(adding(few), size=8) != lowered_with(adding(few + 1), size=8)
    assert lowered_with(adding(many), size=100_000) is None


@pytest.mark.parametrize("error", [None, ValueError("no"), LookupError("no"), NotImplementedError("no")], ids=repr)
def test_what_cannot_be_differentiated_says_how_it_was_timed(error):
    """Whatever a gradient raises, the kernel is timed forward, and its outcome says so."""

    @jax.custom_vjp
    def identity(x):
        return x

    def backward(_, gradient):
        if error is not None:
            raise error
        return (gradient,)

    identity.defvjp(lambda x: (x, None), backward)
    report, _ = chosen_among(ONE_BACKEND, [1, 2], lambda x, *, cfg: identity(x) * cfg, validate_backward=True)
    assert [o.how for o in report.outcomes] == ["forward+backward" if error is None else "forward"] * 2
    assert ("timed forward" in str(report)) == (error is not None)


def test_what_has_no_gradient_is_timed_forward_and_whole(real_backend):
    """Without an inexact output there is no backward pass, and the forward pass must not be optimised away."""

    def run(x, *, cfg):
        return jax.lax.fori_loop(0, cfg, lambda i, order: jnp.argsort(x + order), jnp.arange(x.shape[0]))

    report, _ = chosen_among(real_backend, [1, 300], run, validate_backward=True)
    assert [o.how for o in report.outcomes] == ["forward", "forward"]
    assert report.winner == 1
    assert report.outcomes[1].median_s > 5 * report.outcomes[0].median_s


@pytest.mark.parametrize("needs", ["a boolean index", "an index", "to wait", "no tracer"])
def test_whatever_needs_values_is_timed_as_it_is(real_backend, needs):
    """A kernel that cannot be traced, for whatever reason, is run un-jitted, and says so."""

    def run(x, *, cfg):
        match needs:
            case "a boolean index":
                return x[x > 0] * cfg
            case "an index":
                return x * [1.0, 2.0][jnp.int32(x[0])]
            case "to wait":
                return x.block_until_ready() * cfg
        if is_parameter(x):
            raise LookupError("not while tracing")
        return x * cfg

    report, _ = chosen_among(real_backend, [1, 2], run)
    assert [o.how for o in report.outcomes] == ["eager", "eager"]


def test_what_raises_both_ways_has_failed_as_it_was_traced(real_backend):
    """Un-jitted is how a kernel is timed that runs that way; where it does not, the first error is the telling one."""

    def run(x, *, cfg):
        if cfg == "broken":
            raise LookupError("no such tile") if is_parameter(x) else ValueError("and not like this either")
        return x + 1

    report, _ = chosen_among(real_backend, ["good", "broken"], run)
    assert report.outcomes[1] == Failed("broken", "compile", "LookupError", "no such tile")


class Garbage:
    """An object that is no array, does not compare, and cannot be pickled."""

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
    """What is no array is timed as it is, or fails; the others are measured, and a check keeps it from winning."""
    make_fn = {"good": lambda x: x + 1, **GARBAGE, "late": lambda x: x + 1 + 0 * x}.__getitem__
    cfgs = ("good", *GARBAGE, "late")
    job = TuneJob(cfgs, make_fn, (jnp.ones(8),), {}, incumbent=0, objective=objective)
    report = anyio.run(Tuner(0, 1, check=check).tune, job, backend=real_backend)
    outcomes = {outcome.cfg: outcome for outcome in report.outcomes}
    assert isinstance(outcomes["good"], Measured)
    assert isinstance(outcomes["late"], Measured)
    assert {type(outcome) for outcome in report.outcomes} <= {Measured, Failed}
    if check:
        assert report.winner in ("good", "late")
        assert {outcomes[cfg].stage for cfg in GARBAGE} <= {"compile", "check"}


# ---------------------------------------------------------------------------------------------
# Arguments that their caller donates while they are being measured with.


def donate(array):
    jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    assert array.is_deleted()


@kernel(op_id="donated", configs=[1, 2, 3], heuristic=1)
def scaled(x, *, cfg):
    return x * cfg


@pytest.mark.parametrize(
    "allowed", [{"cache_miss_fallback": "background"}, {"wait_s": 0.001}], ids=["background", "wait"]
)
def test_a_caller_that_goes_on_and_donates_its_arguments_harms_no_tune(real_backend, allowed):
    """It has its guess and no need of them any more; the tune goes on with zeros in their place."""

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
def test_a_program_runs_with_zeros_in_the_place_of_what_was_donated(when):
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
    """The first were computed with what it held: zeros would make every other candidate a wrong one."""
    x, shared = jnp.ones(8), {}
    first, second = compiled(lambda x: x * 2, x, shared), compiled(lambda x: x + x, x, shared)
    assert first.outputs()[0].tolist() == [2.0] * 8
    donate(x)
    if who_notices == "a sample":
        first.run(1, time.perf_counter)
    for program in (second, first):
        with pytest.raises(RuntimeError, match="donated by its caller"):
            program.outputs()


def test_outputs_are_compared_where_the_donation_came_before_the_first():
    """All are computed with the same zeros then."""
    x, shared = jnp.ones(8), {}
    first, second = compiled(lambda x: x + 2, x, shared), compiled(lambda x: x + 3, x, shared)
    donate(x)
    assert first.outputs()[0].tolist() == [2.0] * 8
    assert second.outputs()[0].tolist() == [3.0] * 8


def test_what_runs_un_jitted_is_tried_with_zeros_where_an_argument_was_donated():
    """Its caller's donation is not its failure."""
    x, shared = jnp.ones(8), {}
    program = Program(Trial(1, lambda x: jnp.asarray(np.asarray(x)), (x,), {}, jax.devices()[0], shared=shared))
    donate(x)
    program.compile()
    assert (program.how, program.run(1, time.perf_counter) > 0) == ("eager", True)


def test_an_error_that_is_no_donation_is_the_candidates_own():
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
