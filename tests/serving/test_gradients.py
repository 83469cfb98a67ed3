"""Kernels with a gradient of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import anyio
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from asel import AutotunePolicy, ConfigSelectorChain, Executor, Invocation, Kernel, Tuner, kernel
from asel.kernels.gradients import differentiable


class Scale(Kernel):
    """Computes x * y; its own gradient is a hundred times the true one, so that a test sees which was used."""

    op_id = "scale"

    def run(self, x, y, *, cfg):
        return x * y

    def fwd_with_residuals(self, x, y, *, cfg):
        return x * y, (x, y)

    def vjp(self, residuals, dy, x, y, *, cfg):
        x, y = residuals
        return 100 * dy * y, 100 * dy * x

    def heuristic_cfg(self, inv):
        return 1

    def candidate_cfgs(self, inv):
        return [1, 2]


def executor(**chain):
    return Executor(ConfigSelectorChain(policy=AutotunePolicy(allow_autotune=False), sinks=(), **chain))


X, Y = jnp.arange(4.0), jnp.full(4, 2.0)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, lambda f: jax.jit(jax.jit(f))], ids=["eager", "jit", "jit^2"])
def test_a_kernel_is_differentiated_by_its_own_vjp(wrap):
    """A kernel's own gradient takes precedence over autodiff."""
    execute = executor()
    grad = wrap(jax.grad(lambda x, y: execute.nowait(Scale(), x, y).sum(), argnums=(0, 1)))
    dx, dy = grad(X, Y)
    np.testing.assert_allclose(dx, 100 * Y)
    np.testing.assert_allclose(dy, 100 * X)


def test_arguments_passed_by_keyword_have_their_gradients():
    """A gradient does not depend on how the arguments are passed."""
    execute, kern = executor(), Scale()
    for loss in (
        lambda x, y: execute.nowait(kern, x, y=y).sum(),
        lambda x, y: execute.nowait(kern, y=y, x=x).sum(),
    ):
        dx, dy = jax.grad(loss, argnums=(0, 1))(X, Y)
        np.testing.assert_allclose(dx, 100 * Y)
        np.testing.assert_allclose(dy, 100 * X)


def test_the_gradient_of_a_jitted_function_is_the_kernels_own():
    """`grad` outside `jit` uses the same rule as `grad` inside it."""
    execute = executor()
    step = jax.jit(lambda x: execute.nowait(Scale(), x, Y).sum())
    np.testing.assert_allclose(jax.grad(step)(X), 100 * Y)
    value, grad = jax.jit(jax.value_and_grad(step))(X)
    np.testing.assert_allclose(value, (X * Y).sum())
    np.testing.assert_allclose(grad, 100 * Y)


def test_a_gradient_is_mapped_over_a_batch():
    """vmap of a gradient, and the gradient of a vmap, use the kernel's rule row by row."""
    execute, kern = executor(), Scale()
    batch = jnp.stack([X, X + 1, X + 2])
    per_row = jax.vmap(jax.grad(lambda x: execute.nowait(kern, x, Y).sum()))(batch)
    of_all = jax.grad(lambda xs: jax.vmap(lambda x: execute.nowait(kern, x, Y))(xs).sum())(batch)
    np.testing.assert_allclose(per_row, jnp.broadcast_to(100 * Y, batch.shape))
    np.testing.assert_allclose(of_all, per_row)


_MAPPED = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
sys.path.insert(0, {tests!r})
from serving.test_gradients import Scale, executor

mesh = Mesh(np.array(jax.devices()), ("d",))
assert mesh.size == 2
execute, kern = executor(), Scale()
x, y = jnp.arange(8.0), jnp.arange(4.0)
for check_vma in (False, True):
    def loss(x, y):
        how = dict(method="shard_map", mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"), check_vma=check_vma)
        return execute.nowait(kern, x, y, **how).sum()

    for grad in (jax.grad(loss, argnums=(0, 1)), jax.jit(jax.grad(loss, argnums=(0, 1)))):
        dx, dy = grad(x, y)
        np.testing.assert_allclose(dx, 100 * jnp.concatenate([y, y]))
        np.testing.assert_allclose(dy, 100 * (x[:4] + x[4:]))
print("both agree")
"""


@pytest.mark.timeout(90)
def test_a_gradient_is_taken_within_shard_map():
    """Each device runs the kernel's rule on its own part; replicated arguments get the sum of the gradients."""
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    code = _MAPPED.format(tests=str(Path(__file__).parents[1]))
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.stdout == "both agree\n", done.stderr


def test_a_variant_of_the_platform_or_the_context_is_used():
    """The most specific variant of each method is used, as for `run`."""

    class OnCpu(Scale):
        def vjp_cpu(self, residuals, dy, x, y, *, cfg):
            return 7 * dy, None

        def vjp_shard_map_cpu(self, residuals, dy, x, y, *, cfg):
            return 9 * dy, None

    execute, kern = executor(), OnCpu()
    np.testing.assert_allclose(jax.grad(lambda x: execute.nowait(kern, x, Y).sum())(X), jnp.full(4, 7.0))
    how = {
        "method": "shard_map",
        "mesh": Mesh(np.array(jax.devices()[:1]), ("d",)),
        "in_specs": (P("d"), P("d")),
        "out_specs": P("d"),
    }
    np.testing.assert_allclose(jax.grad(lambda x: execute.nowait(kern, x, Y, **how).sum())(X), jnp.full(4, 9.0))


class Trees(Kernel):
    """Takes a dict of weights, an integer index, and no mask; its residuals are not only arrays."""

    op_id = "trees"

    def heuristic_cfg(self, inv):
        return {"block": 8}

    def run(self, weights, index, mask=None, *, bias=None, cfg):
        out = weights["a"] * 2 + weights["b"]
        return {"out": out, "index": index + 1}

    def fwd_with_residuals(self, weights, index, mask=None, *, bias=None, cfg):
        out = self.run(weights, index, mask, bias=bias, cfg=cfg)
        return out, {"weights": weights, "cfg": cfg, "name": "residual", "times": 3}

    def vjp(self, residuals, dy, weights, index, mask=None, *, bias=None, cfg):
        assert residuals["cfg"] == cfg
        assert residuals["name"] == "residual"
        assert type(residuals["times"]) is int
        return {"a": dy["out"] * residuals["times"], "b": None}, jnp.zeros_like(index), None


@pytest.mark.parametrize("jit", [False, True])
def test_residuals_cotangents_and_gradients_are_pytrees(jit):
    """None means zero anywhere; integers have no gradient; residuals need not be arrays."""
    execute, kern = executor(), Trees()
    weights = {"a": X, "b": Y}

    def loss(weights, index, bias):
        out = execute.nowait(kern, weights, index, None, bias=bias)
        return out["out"].sum() + out["index"].astype(float).sum()

    grad = jax.grad(loss, argnums=(0, 2))
    found, of_bias = (jax.jit(grad) if jit else grad)(weights, jnp.arange(3), X)
    np.testing.assert_allclose(found["a"], jnp.full(4, 3.0))
    np.testing.assert_allclose(found["b"], jnp.zeros(4))
    np.testing.assert_allclose(of_bias, jnp.zeros(4))  # a keyword-only argument has none, as in ejKernel
    (of_index,) = jax.grad(loss, argnums=(1,), allow_int=True)(weights, jnp.arange(3), X)
    assert of_index.dtype == jax.dtypes.float0


def declared_as_documented(self, residuals, y, dy, *args, cfg, **kwargs):
    return dy * y, None


def declared_with_other_names(self, res, out, dout, *args, cfg, **kwargs):
    return dout * out, None


def declared_by_their_number(self, kept, first, second, a, b, cfg):
    return second * first, None


def declared_as_called(self, residuals, dy, *args, cfg, **kwargs):
    return dy * args[0] * args[1], None


def declared_as_called_by_number(self, kept, first, a, b, scale=1.0, *, cfg):
    return first * a * b * scale, None


VJPS = [
    declared_as_documented,
    declared_with_other_names,
    declared_by_their_number,
    declared_as_called,
    declared_as_called_by_number,
]


@pytest.mark.parametrize("declared", VJPS)
def test_a_vjp_that_is_declared_with_the_outputs_gets_them(declared):
    """ejKernel documents `vjp(residuals, y, dy, ...)` but calls `vjp(residuals, dy, ...)`: either works."""

    class Declared(Scale):
        vjp = declared

    execute = executor()
    np.testing.assert_allclose(jax.grad(lambda x: execute.nowait(Declared(), x, Y).sum())(X), X * Y)


@pytest.mark.parametrize("wrong", [lambda dy: {"x": dy}, lambda dy: (dy,), lambda dy: (dy, dy, dy), lambda dy: None])
def test_a_vjp_without_a_gradient_for_each_argument_is_refused(wrong):
    """A missing gradient does not count as zero."""

    class Wrong(Scale):
        def vjp(self, residuals, dy, x, y, *, cfg):
            return wrong(dy)

    execute = executor()
    with pytest.raises(TypeError, match="one gradient for each of the 2 arguments"):
        jax.grad(lambda x: execute.nowait(Wrong(), x, Y).sum())(X)


def test_one_gradient_for_a_dict_of_arguments_is_refused():
    """A gradient has its argument's structure."""

    class Flat(Trees):
        def vjp(self, residuals, dy, weights, index, mask=None, *, bias=None, cfg):
            return dy["out"], None, None

    execute = executor()
    with pytest.raises(TypeError, match="that has 2 arrays"):
        jax.grad(lambda w: execute.nowait(Flat(), w, jnp.arange(3), None)["out"].sum())({"a": X, "b": Y})


@pytest.mark.parametrize("missing", ["fwd_with_residuals", "vjp"])
def test_one_of_the_two_gradient_methods_is_not_enough(missing):
    """Autodiff differentiates a kernel that has only one of the methods."""
    half = type("Half", (Scale,), {missing: None})()
    execute = executor()
    np.testing.assert_allclose(jax.grad(lambda x: execute.nowait(half, x, Y).sum())(X), Y)


def _double(x, block):
    def body(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2

    spec = pl.BlockSpec((block,), lambda i: (i,))
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(
        body, grid=(x.size // block,), in_specs=[spec], out_specs=spec, out_shape=shape, interpret=True
    )(x)


class PallasDouble(Kernel):
    """A kernel in Pallas; autodiff is never asked, since its rule is given."""

    op_id = "pallas_double"

    def run(self, x, *, cfg):
        return _double(x, cfg)

    def fwd_with_residuals(self, x, *, cfg):
        return _double(x, cfg), ()

    def vjp(self, residuals, dy, x, *, cfg):
        return (_double(dy, cfg),)

    def heuristic_cfg(self, inv):
        return 4

    def candidate_cfgs(self, inv):
        return [2, 4]


def test_a_pallas_kernel_is_tuned_forward_and_backward():
    """`validate_backward` measures the kernel's own gradient, which then has the tuned config."""

    async def main():
        policy = AutotunePolicy(validate_backward=True)
        async with ConfigSelectorChain(policy=policy, tuner=Tuner(warmup=1, iters=1), sinks=()) as chain:
            x, kern = jnp.arange(8.0), PallasDouble()
            selection = await chain.select(Invocation("pallas_double", (x,), {}), kern)
            execute = Executor(chain)
            grad = jax.jit(jax.grad(lambda x: execute.nowait(kern, x).sum()))(x)
            return selection, grad

    selection, grad = anyio.run(main)
    assert selection.tier == "autotune"
    assert {outcome.how for outcome in selection.report.outcomes} == {"forward+backward"}
    np.testing.assert_allclose(grad, jnp.full(8, 2.0))


class Undifferentiable(Scale):
    """A `run` that autodiff cannot differentiate."""

    op_id = "undifferentiable"

    def run(self, x, y, *, cfg):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(np.multiply, shape, x, y, vmap_method="sequential")


def test_a_kernel_with_its_own_gradient_is_measured_backward_without_autodiff():
    """Its own gradient is enough to tune it forward and backward."""

    async def main():
        policy = AutotunePolicy(validate_backward=True)
        async with ConfigSelectorChain(policy=policy, tuner=Tuner(warmup=1, iters=1), sinks=()) as chain:
            selection = await chain.select(Invocation("undifferentiable", (X, Y), {}), Undifferentiable())
            return {outcome.how for outcome in selection.report.outcomes}

    assert anyio.run(main) == {"forward+backward"}


@pytest.mark.anyio
async def test_awaited_calls_of_a_kernel_with_a_gradient_run():
    """Outside of a trace there is nothing to differentiate, and `run` is called."""
    execute = executor()
    np.testing.assert_allclose(await execute(Scale(), X, Y), X * Y)
    np.testing.assert_allclose(await execute(Scale(), X, Y), X * Y)


def test_a_kernel_with_a_gradient_that_jax_cannot_trace_runs():
    """Without tracers among the arguments, only the kernel's `run` is called."""
    seen = []
    out = differentiable(lambda x, *, cfg: seen.append(type(x)) or x, None, None, 1, np.arange(3.0))
    assert seen == [np.ndarray]
    np.testing.assert_allclose(out, np.arange(3.0))


def test_a_kernel_from_a_decorator_has_autodiffs_gradient():
    """A function has no gradient of its own, so JAX derives it."""

    @kernel(op_id="square", configs=[1, 2], heuristic=1)
    def square(x, *, cfg):
        return x * x

    execute = executor()
    np.testing.assert_allclose(jax.grad(lambda x: execute.nowait(square, x).sum())(X), 2 * X)
