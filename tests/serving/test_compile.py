"""A config baked into a plain jitted function; a config without a run; what ejKernel's users rely on."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial

import anyio
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from asel import AutotunePolicy, ConfigCache, ConfigSelectorChain, Executor, InvalidRequestError, Kernel


@dataclass(frozen=True)
class Tile:
    size: int


class Affine(Kernel):
    """x * by + cfg.size, so that an output says which config and which constant it was made with."""

    op_id = "affine"

    def __init__(self) -> None:
        super().__init__()
        self.traced = []

    def run(self, x, *, by=3, cfg):
        self.traced.append(threading.current_thread() is threading.main_thread())
        assert isinstance(by, int)
        return x * by + cfg.size

    def heuristic_cfg(self, inv):
        return Tile(1)

    def candidate_cfgs(self, inv):
        return [Tile(1), Tile(2)]


def executor(**policy):
    policy = AutotunePolicy(**{"cache_miss_fallback": "heuristics", **policy})
    return Executor(ConfigSelectorChain(ConfigCache(), policy, sinks=()))


X = jnp.arange(4.0)


def test_a_compiled_kernel_is_a_plain_jitted_function(real_backend):
    """It is traced and compiled in a thread before it is returned, and asks nobody when it is called."""
    op, execute = Affine(), executor()
    fn = anyio.run(partial(execute.compile, op, X, by=5), backend=real_backend)
    assert op.traced == [False]
    execute.selector.choose_nowait = execute.selector.select = None
    np.testing.assert_array_equal(fn(X, by=5), X * 5 + 1)
    assert op.traced == [False]
    np.testing.assert_array_equal(fn(X, by=7), X * 7 + 1)  # a constant of the program, so it is traced again
    np.testing.assert_array_equal(jax.jit(jax.vmap(partial(fn, by=5)))(X[None]), X[None] * 5 + 1)
    np.testing.assert_array_equal(jax.grad(lambda x: fn(x, by=5).sum())(X), np.full(4, 5.0))
    assert "lower" in dir(fn)


def test_what_was_compiled_is_not_compiled_again_by_its_first_call(real_backend):
    """The awaited compile is the one that the call finds, on the loop's own thread."""
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **facts: compiled.append(event) if "backend_compile" in event else None
    )
    op, execute, x = Affine(), executor(), jnp.ones((3, 5))
    fn = anyio.run(execute.compile, op, x, backend=real_backend)
    del compiled[:]
    fn(x)
    assert not compiled


def test_a_kernel_compiles_for_shapes_with_a_config_of_its_own():
    """Nothing but shapes is needed, and `cfg` overrides what would be chosen."""
    fn = anyio.run(partial(executor().compile, Affine(), jax.ShapeDtypeStruct((4,), "float32"), cfg=Tile(40)))
    np.testing.assert_array_equal(fn(X), X * 3 + 40)


def test_a_compiled_kernel_prepares_its_arguments():
    """The function takes what the kernel's user passes."""

    class Prepared(Affine):
        def prepare(self, x, y):
            return (x + y,), {"by": 2}

    fn = anyio.run(executor().compile, Prepared(), X, X)
    np.testing.assert_array_equal(fn(X, X + 1), (2 * X + 1) * 2 + 1)


def test_shapes_are_prepared_by_tracing():
    """A `prepare` that computes needs no arrays, and returns constants and shapes that it leaves alone as they are."""
    seen = []

    class Prepared(Affine):
        def prepare(self, x, y):
            return (x + y[0], y), {"by": 2}

        def run(self, x, y, *, cfg, by):
            return x * by + y[1]

        def heuristic_cfg(self, inv):
            seen.append(inv)
            return Tile(1)

    shape, execute, op = jax.ShapeDtypeStruct((4,), "float32"), executor(), Prepared()
    for _ in range(2):  # it was quick the first time
        fn = anyio.run(execute.compile, op, shape, [X, shape])
    np.testing.assert_array_equal(fn(X, [X, X]), 5 * X)
    (x, (first, second)), kwargs = seen[0].args, seen[0].kwargs
    assert (x.shape, x.dtype, kwargs) == ((4,), np.float32, {"by": 2})
    assert first is X
    assert second is shape


def test_a_kernel_compiles_under_shard_map():
    """The mesh and its specs are the call's, and are baked in with the config."""
    mesh, spec = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,)), PartitionSpec("x")
    how = {"method": "shard_map", "mesh": mesh, "in_specs": (spec,), "out_specs": spec}
    fn = anyio.run(partial(executor().compile, Affine(), X, **how))
    np.testing.assert_array_equal(fn(X), X * 3 + 1)


@pytest.mark.parametrize(
    ("value", "problem"),
    [({"w": X, "name": "a"}, "both arrays and constants"), ([1, 2], "a list, which is not hashable")],
)
def test_arguments_that_jit_cannot_take_are_named(value, problem):
    """Before anything is compiled, and with the way out."""
    with pytest.raises(InvalidRequestError, match=f"compile: argument 'by' of 'affine' .*{problem}"):
        anyio.run(partial(executor().compile, Affine(), X, by=value))


def test_what_a_kernel_raises_when_it_is_traced_is_raised_by_compile(real_backend):
    """The error is the kernel's own."""

    class Broken(Affine):
        def run(self, x, *, cfg):
            raise ValueError("rank 3, expected 2")

    with pytest.raises(ValueError, match="rank 3"):
        anyio.run(executor().compile, Broken(), X, backend=real_backend)


def test_a_config_is_chosen_and_nothing_is_run(real_backend):
    """`choose_config` prepares the arguments, asks the chain and returns the config; an override is one, too."""

    class Prepared(Affine):
        def prepare(self, n):
            return (jnp.zeros(n),), {}

        def heuristic_cfg(self, inv):
            return Tile(inv.args[0].size)

    async def main():
        execute, op = executor(), Prepared()
        assert await execute.choose_config(op, 6) == Tile(6)
        assert await execute.choose_config(op, 6, cfg=Tile(9)) == Tile(9)
        assert not op.traced

    anyio.run(main, backend=real_backend)


# ---------------------------------------------------------------------------------------------
# What the users of ejKernel's executor rely on, from its documentation.


class Variants(Affine):
    """A kernel with a form for the CPU and one for `shard_map`, a gradient, and a heuristic for the CPU."""

    op_id = "variants"

    def run_cpu(self, x, *, by=3, cfg):
        return super().run(x, by=by, cfg=cfg) + 1000

    def run_gpu(self, x, *, by=3, cfg):
        raise AssertionError("there is no GPU here")

    def run_shard_map_cpu(self, x, *, by=3, cfg):
        return super().run(x, by=by, cfg=cfg) + 2000

    def heuristic_cfg_cpu(self, inv):
        return Tile(8)

    def fwd_with_residuals_cpu(self, x, *, by=3, cfg):
        return self.run_cpu(x, by=by, cfg=cfg), (x, cfg)

    def vjp_cpu(self, residuals, dy, x, *, by=3, cfg):
        assert residuals[1] == cfg
        return (dy * 100 * by,)


def test_the_platforms_variants_are_chosen_with_run_and_differentiated():
    """`run`, `heuristic_cfg`, `fwd_with_residuals` and `vjp` each in the form for this platform."""

    async def main():
        execute, op = executor(), Variants()
        assert await execute.choose_config(op, X) == Tile(8)
        np.testing.assert_array_equal(await execute(op, X), X * 3 + 1008)
        np.testing.assert_array_equal(await execute(op, X, cfg=Tile(4)), X * 3 + 1004)
        compiled = await execute.compile(op, X)
        np.testing.assert_array_equal(compiled(X), X * 3 + 1008)
        for fn in (lambda x: execute.nowait(op, x), compiled):
            for transform in (jax.grad, lambda f: jax.jit(jax.grad(f)), lambda f: jax.grad(jax.jit(f))):
                np.testing.assert_array_equal(transform(lambda x, fn=fn: fn(x).sum())(X), np.full(4, 300.0))

    anyio.run(main)
