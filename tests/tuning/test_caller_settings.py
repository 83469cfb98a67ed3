"""Candidates are built, compiled and run with their caller's JAX settings."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import SimpleNamespace

import anyio
import anyio.lowlevel
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.jax_candidates import ONE_BACKEND, chosen_among, is_parameter

from asel import (
    ConfigSelectorChain,
    Invocation,
    Kernel,
    Measured,
    Tuner,
    kernel,
)
from asel.runtime import threads
from asel.runtime.jax_settings import current_settings
from asel.tuning import state
from asel.tuning.measure import Trial
from asel.tuning.program import Program
from asel.tuning.timing import dispatch_overhead_s

MESH = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))


def x64() -> bool:
    return jax.config.jax_enable_x64


def matmul_precision() -> str | None:
    return jax.config.jax_default_matmul_precision


def default_device():
    return jax.config.jax_default_device


def can_constrain() -> bool:
    """A bare `PartitionSpec` needs the mesh of a `with mesh:` block."""
    try:
        jax.make_jaxpr(partial(jax.lax.with_sharding_constraint, shardings=jax.sharding.PartitionSpec("x")))(np.ones(3))
    except RuntimeError:
        return False
    return True


SETTINGS = [
    pytest.param(lambda: jax.enable_x64(True), x64, id="x64"),
    pytest.param(lambda: jax.default_matmul_precision("highest"), matmul_precision, id="matmul precision"),
    pytest.param(lambda: jax.default_device(jax.devices()[0]), default_device, id="default device"),
    pytest.param(lambda: jax.set_mesh(MESH), jax.sharding.get_abstract_mesh, id="mesh"),
    pytest.param(lambda: MESH, can_constrain, id="mesh entered"),
]


@pytest.mark.filterwarnings("ignore:.with mesh.. context manager:DeprecationWarning")
@pytest.mark.parametrize(("entered", "read"), SETTINGS)
@pytest.mark.parametrize("way", ["chain", "measure", "autotune"])
def test_the_callers_settings_hold_in_the_thread(way, entered, read, real_backend):
    """JAX keeps its settings per thread: the caller's apply in the thread that compiles its candidates."""
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


def test_settings_that_a_candidate_leaves_behind_do_not_reach_the_next(real_backend, monkeypatch):
    """A mesh that a candidate sets in a thread is gone in that thread's next step, of this tune or another."""
    # One thread does all steps: none is idle from earlier tests, and none is started to release candidates.
    monkeypatch.setattr(threads, "_pool", threads._ThreadPool(patience_s=20))
    monkeypatch.setattr(state, "leave_to_thread", lambda what, work: None)
    seen = []

    def fn(cfg):
        def run(x):
            seen.append((cfg, threading.current_thread(), jax.sharding.get_abstract_mesh().axis_names))
            if cfg == "sets" and float(x[0]):  # needs a value, so it cannot be traced
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
    """Lowering, compiling, running and checking each use the settings of the call."""
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
    """`make_fn` is the candidate's own code: it runs off the event loop, with its caller's settings."""
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
    """A candidate sees the context variables of the caller that began the tune."""
    request, seen = ContextVar("request", default="nobody's"), []

    def fn(x):
        seen.append(request.get())
        return x

    async def main():
        request.set("the caller's")
        await Tuner(warmup=0, iters=1).measure(fn, jnp.ones(3))

    anyio.run(main, backend=real_backend)
    assert set(seen) == {"the caller's"}


@pytest.mark.parametrize("direction", ["host_to_device", "device_to_device", "device_to_host"])
def test_transfer_guards_hold_in_the_thread(real_backend, direction):
    """A caller that forbids implicit transfers forbids them to its candidates, in every direction."""
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
def test_a_transfer_guard_fails_no_candidate(guard, given):
    """The guard does not apply to transfers by which asel times or checks a candidate."""
    x = np.ones(64, np.float32)
    ways = {"adds": "forward+backward", "eager": "eager"}
    if given == "an array":
        x = jax.device_put(x)
    elif given == "a NumPy array":
        del ways["adds"]  # this guard forbids every call of it
    else:
        x = jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=given == "a weak shape")

    def run(x, *, cfg):
        if cfg == "eager" and is_parameter(x):
            raise TypeError("needs values")
        return x + x if cfg == "adds" else x * x

    dispatch_overhead_s.cache_clear()  # in a first tune it is measured under the guard, too
    with guard():
        check = {"check": lambda expected, actual: True}
        report, _ = chosen_among(ONE_BACKEND, list(ways), run, x, validate_backward=True, **check)
    assert {outcome.cfg: outcome.how for outcome in report.outcomes} == ways


def test_transfer_guards_do_not_apply_to_reading_outputs():
    """The guard applies to the kernel, and not to the transfers of asel's own check."""
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


def test_shapes_become_the_kernels_example_inputs(real_backend):
    """`example_inputs` replaces zeros for kernels whose time depends on values."""
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
    """They replace the caller's arrays, so they have the same precision; and they are made off the loop."""
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
