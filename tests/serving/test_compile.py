"""`compile`, `choose_config`, and the variants of ejKernel's kernels."""

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
    """Computes x * by + cfg.size, so that an output shows the config and the constant."""

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
    """It is traced and compiled in a thread before it is returned, and does not use the selector."""
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


def test_the_first_call_of_a_compiled_kernel_does_not_compile(real_backend):
    """It finds the compiled program, also on the loop's own thread."""
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **facts: compiled.append(event) if "backend_compile" in event else None
    )
    op, execute, x = Affine(), executor(), jnp.ones((3, 5))
    fn = anyio.run(execute.compile, op, x, backend=real_backend)
    del compiled[:]
    fn(x)
    assert not compiled


def test_a_kernel_compiles_for_shapes_with_a_given_config():
    """Shapes are enough, and `cfg` overrides the selector."""
    fn = anyio.run(partial(executor().compile, Affine(), jax.ShapeDtypeStruct((4,), "float32"), cfg=Tile(40)))
    np.testing.assert_array_equal(fn(X), X * 3 + 40)


def test_a_compiled_kernel_prepares_its_arguments():
    """The function takes the arguments that the kernel's user passes."""

    class Prepared(Affine):
        def prepare(self, x, y):
            return (x + y,), {"by": 2}

    fn = anyio.run(executor().compile, Prepared(), X, X)
    np.testing.assert_array_equal(fn(X, X + 1), (2 * X + 1) * 2 + 1)


def test_shapes_are_prepared_by_tracing():
    """A `prepare` that computes needs no arrays; constants and unchanged shapes are returned unchanged."""
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
    """The mesh and its specs belong to the call, and are fixed with the config."""
    mesh, spec = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,)), PartitionSpec("x")
    how = {"method": "shard_map", "mesh": mesh, "in_specs": (spec,), "out_specs": spec}
    fn = anyio.run(partial(executor().compile, Affine(), X, **how))
    np.testing.assert_array_equal(fn(X), X * 3 + 1)


@pytest.mark.parametrize(
    ("value", "problem"),
    [({"w": X, "name": "a"}, "both arrays and constants"), ([1, 2], "a list, which is not hashable")],
)
def test_arguments_that_jit_cannot_take_are_named(value, problem):
    """The error comes before anything is compiled, with a remedy."""
    with pytest.raises(InvalidRequestError, match=f"compile: argument 'by' of 'affine' .*{problem}"):
        anyio.run(partial(executor().compile, Affine(), X, by=value))


def test_compile_raises_the_kernels_own_error(real_backend):
    """An error during tracing is raised unchanged."""

    class Broken(Affine):
        def run(self, x, *, cfg):
            raise ValueError("rank 3, expected 2")

    with pytest.raises(ValueError, match="rank 3"):
        anyio.run(executor().compile, Broken(), X, backend=real_backend)


def test_choose_config_runs_nothing(real_backend):
    """`choose_config` prepares the arguments and returns the chain's config, or an override."""

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
    """A kernel with variants for the CPU and for `shard_map`, a gradient, and a heuristic for the CPU."""

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


def test_the_platforms_variants_of_all_methods_are_used():
    """`run`, `heuristic_cfg`, `fwd_with_residuals` and `vjp` may each have a variant for the platform."""

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
