"""Which candidates are timed forward and backward, and which only forward or eagerly."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.jax_candidates import ONE_BACKEND, chosen_among, is_parameter, measure

from asel import (
    AutotunePolicy,
    ConfigSelectorChain,
    Failed,
    Invocation,
    Tuner,
    forward_autotune_only,
    kernel,
)
from asel.tuning.measure import Trial
from asel.tuning.program import Program


def spied():
    """Return an identity function that records the dtype of every gradient through it."""
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
    """Every dtype with a gradient is differentiated, including narrow and complex floats."""
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
    """If no input has a gradient there is no backward pass, so the forward pass is timed."""
    identity, gradients = spied()
    assert measure(ONE_BACKEND, identity, jnp.ones((3,), dtype), objective="forward+backward") >= 0
    assert gradients == []


def test_integer_inputs_pass_through_a_backward_timing(real_backend):
    """Inputs without a gradient are unchanged in a backward timing."""
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
    """The gradient is of every inexact output; outputs of other types are allowed."""
    identity, gradients = spied()
    assert measure(ONE_BACKEND, lambda x: wrap(identity(x)), jnp.ones(3), objective="forward+backward") >= 0
    assert set(gradients) == {jnp.dtype("float32")}


def test_the_backward_pass_is_complete():
    """By every inexact input, of every inexact output, real and imaginary; and the outputs are computed, too.

    An unused gradient or output is dead code to the compiler.
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
    """If a kernel cannot be differentiated its forward time counts, as with ejKernel."""

    def until_large(x):
        return jax.lax.while_loop(lambda y: y.sum() < 100, lambda y: y * 2, x)

    assert measure(real_backend, until_large, jnp.ones(3), objective="forward+backward") >= 0


def test_the_policy_decides_what_is_timed(real_backend):
    """`validate_backward` times both passes, and `forward_autotune_only` disables that for the current task."""
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


@pytest.mark.parametrize("error", [None, ValueError("no"), LookupError("no"), NotImplementedError("no")], ids=repr)
def test_a_candidate_without_gradient_says_how_it_was_timed(error):
    """Whatever the gradient raises, the kernel is timed forward, and its outcome says so."""

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


def test_the_forward_pass_of_a_candidate_without_gradient_is_complete(real_backend):
    """Without an inexact output there is no backward pass, and the forward pass must not be optimised away."""

    def run(x, *, cfg):
        return jax.lax.fori_loop(0, cfg, lambda i, order: jnp.argsort(x + order), jnp.arange(x.shape[0]))

    report, _ = chosen_among(real_backend, [1, 300], run, validate_backward=True)
    assert [o.how for o in report.outcomes] == ["forward", "forward"]
    assert report.winner == 1
    assert report.outcomes[1].median_s > 5 * report.outcomes[0].median_s


@pytest.mark.parametrize("needs", ["a boolean index", "an index", "to wait", "no tracer"])
def test_a_kernel_that_needs_values_is_timed_eagerly(real_backend, needs):
    """A kernel that cannot be traced, for any reason, is run un-jitted, and its outcome says so."""

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


def test_a_candidate_that_fails_traced_and_eager_reports_the_traced_error(real_backend):
    """If a kernel runs neither traced nor eagerly, the error of the trace explains more."""

    def run(x, *, cfg):
        if cfg == "broken":
            raise LookupError("no such tile") if is_parameter(x) else ValueError("and not like this either")
        return x + 1

    report, _ = chosen_among(real_backend, ["good", "broken"], run)
    assert report.outcomes[1] == Failed("broken", "compile", "LookupError", "no such tile")
