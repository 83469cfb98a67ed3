"""Output checks: which outputs count as different, on which inputs; and NaN even without a check."""

from __future__ import annotations

import anyio
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support import hostile
from support.kernels import Bench

from asel import Invocation, Kernel, OutputCheck, Tuner, kernel
from asel.tuning.arrays import random_inputs
from asel.tuning.measure import Trial
from asel.tuning.outcomes import Failed, Measured
from asel.tuning.output_check import Outputs
from asel.tuning.program import Program


def tuned(configs, run, *args, backend="asyncio", example_inputs=None, check=True, strategy="exhaustive", **options):
    """Tune real candidates, the first of them the incumbent; return the report."""

    async def main():
        op = run if isinstance(run, Kernel) else kernel(op_id="checked", configs=configs, heuristic=configs[0])(run)
        if example_inputs is not None:
            op.example_inputs = example_inputs
        tuner = Tuner(1, 1, check=check, strategy=strategy, **options)
        async with Bench(tuner=tuner).chain as chain:
            return (await chain.select(Invocation("checked", args, {}), op)).report

    return anyio.run(main, backend=backend)


def message(report, index=1):
    outcome = report.outcomes[index]
    assert isinstance(outcome, Failed), outcome
    assert (outcome.stage, outcome.error_type) == ("check", "OutputMismatch")
    return outcome.message


# Which outputs are different.


def test_a_wrong_integer_cannot_win(real_backend):
    """Integers are compared exactly: an argmax that is off by one is another answer."""

    def run(x, *, cfg):
        return jnp.argmax(x) + cfg

    report = tuned([0, 1], run, jnp.arange(20_503.0), backend=real_backend)
    assert message(report) == "output 0 differs by up to 1"
    assert report.winner == 0


@pytest.mark.parametrize(
    ("wanted", "got", "wrong"),
    [
        (np.array([20_502]), np.array([20_503]), "output 0 differs by up to 1"),
        (np.array([True, False]), np.array([True, True]), "output 0 differs by up to 1"),
        (np.array([2**63 - 1]), np.array([-(2**63)]), "output 0 differs by up to 1.84e+19"),
        (np.array([7], ml_dtypes.int4), np.array([6], ml_dtypes.int4), "output 0 differs by up to 1"),
        (np.array([7, 7]), np.array([7, 7]), None),
        (np.ones(2, np.float32), np.ones(2, ml_dtypes.bfloat16), "output 0 has dtype bfloat16 in the place of float32"),
        (np.ones(2, np.float32), np.ones(2, np.int32), "output 0 has dtype int32 in the place of float32"),
        (np.ones(2), np.full(2, 1 + 1e-9), None),
        (np.ones(2), np.full(2, 1 + 1e-5), "output 0 differs by up to 1e-05"),
        (np.ones(2, np.float32), np.full(2, 1 + 1e-4, np.float32), None),
        (np.ones(2, np.float32), np.full(2, 1.01, np.float32), "output 0 differs by up to 0.01"),
        (np.ones(2, ml_dtypes.bfloat16), np.full(2, 1.01, ml_dtypes.bfloat16), None),
        (np.ones(2, ml_dtypes.bfloat16), np.full(2, 1.125, ml_dtypes.bfloat16), "output 0 differs by up to 0.125"),
        (np.array([1e30, 0.0], np.float32), np.array([1e30, 1.0], np.float32), None),
        (np.zeros(2, np.float32), np.array([0, 1e-5], np.float32), "output 0 differs by up to 1e-05"),
        (np.zeros(2, np.float32), np.array([0, 1e-7], np.float32), None),
    ],
)
def test_values_are_compared_by_the_rules_of_their_dtype(wanted, got, wrong):
    """Exactly if nothing is rounded, otherwise within the rounding of the dtype; another dtype is a difference."""
    assert OutputCheck()([wanted], [got]) == wrong


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"])
@pytest.mark.parametrize(
    "values", [np.ones(8), np.array([-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0])], ids=["ones", "mixed"]
)
def test_a_narrow_float_wrong_by_a_factor_is_refused(dtype, values):
    """In every dtype, twice the right number and zero are wrong."""
    right = values.astype(dtype)
    for factor in (0, 2, -1):
        wrong = (values * factor).astype(dtype)
        assert OutputCheck()([right], [wrong]).startswith("output 0 differs by up to")
    assert OutputCheck()([right], [right]) is None


def test_outputs_of_another_structure_are_different():
    """A dict is not a tuple, even if both hold the same arrays."""
    one = np.ones(2)
    assert "PyTreeDef((*, *))" in OutputCheck()(
        Outputs([one, one], "PyTreeDef({'a': *, 'b': *})"), Outputs([one, one], "PyTreeDef((*, *))")
    )

    def run(x, *, cfg):
        return {"tuple": (x, x), "list": [x, x], "dict": {"a": x, "b": x}}[cfg]

    report = tuned(["tuple", "list", "dict"], run, jnp.ones(4))
    assert "in the place of PyTreeDef((*, *))" in message(report, 1)
    assert "in the place of PyTreeDef((*, *))" in message(report, 2)


def test_a_candidate_that_returns_another_dtype_cannot_win(real_backend):
    """The dtype that a caller gets must not depend on which candidate was fastest."""

    def run(x, *, cfg):
        return x.astype(cfg)

    report = tuned(["float32", "bfloat16", "int32"], run, jnp.ones(4), backend=real_backend)
    assert message(report, 1) == "output 0 has dtype bfloat16 in the place of float32"
    assert message(report, 2) == "output 0 has dtype int32 in the place of float32"


def test_a_weakly_typed_output_is_of_another_type():
    """The caller's next computation would have another dtype."""

    def run(x, *, cfg):
        return x if cfg == "strong" else jnp.broadcast_to(jnp.asarray(1.0), x.shape)

    report = tuned(["strong", "weak"], run, jnp.ones(4))
    assert message(report) == "output 0 is of type weak float32 in the place of float32"


def test_the_numbers_of_a_random_key_are_not_a_key():
    """Functions that accept one refuse the other."""

    def run(key, *, cfg):
        return key if cfg == "key" else jax.random.key_data(key)

    report = tuned(["key", "numbers"], run, jax.random.key(3))
    assert message(report) == "output 0 is of type uint32 in the place of key<fry>"


@jax.tree_util.register_static
class Fresh:
    """Is equal to every other instance, and has its address in its `repr`."""

    def __eq__(self, other):
        return isinstance(other, Fresh)

    def __hash__(self):
        return 0


def test_addresses_in_static_parts_of_an_output_do_not_count():
    """The address in a default `repr` is not a difference of structure."""
    kept = []  # so that all have different addresses

    def run(x, *, cfg):
        kept.append(Fresh())
        return x * cfg / cfg, kept[-1]

    report = tuned([1, 2], run, jnp.ones(4))
    assert len(kept) > 1
    assert [type(outcome) for outcome in report.outcomes] == [Measured] * 2


def test_no_candidate_passes_if_all_expected_outputs_are_nan():
    """Nothing can be compared, so the incumbent wins, and the report has the reason."""

    def run(x, *, cfg):
        return jnp.cumsum(jnp.log(x))[-1:] * cfg

    report = tuned([1, 2], run, jax.ShapeDtypeStruct((1000,), jnp.float32))
    assert report.winner == 1
    assert message(report) == (
        "all outputs are nan, so nothing can be compared; give the kernel example_inputs that have a result"
    )
    assert OutputCheck()([np.array([np.nan, 1.0])], [np.array([np.nan, 1.0])]) is None


def test_an_un_jitted_candidate_has_the_dtypes_that_jax_would_give():
    """A Python float or a NumPy double from a kernel that cannot be traced is a float32, as everywhere in JAX."""

    def run(x, *, cfg):
        if cfg == "python":
            return float(x.sum())
        return np.float64(np.asarray(x).sum()) if cfg == "numpy" else x.sum()

    report = tuned(["jax", "python", "numpy"], run, jnp.ones(4))
    assert [type(outcome) for outcome in report.outcomes] == [Measured] * 3


# The inputs of a check.


def test_a_call_with_only_shapes_is_checked_on_random_inputs(real_backend):
    """Given zeros, a candidate that is wrong by a factor would pass."""

    def run(x, y, *, cfg):
        return x * y * cfg

    shape = jax.ShapeDtypeStruct((8,), jnp.float32)
    report = tuned([1.0, 2.0], run, shape, shape, backend=real_backend)
    assert message(report).startswith("output 0 differs by up to")


def test_integers_are_random_too():
    """This detects a candidate that is wrong for indices other than zero."""

    def run(table, rows, *, cfg):
        return table[rows * cfg]

    shapes = jax.ShapeDtypeStruct((16, 4), jnp.float32), jax.ShapeDtypeStruct((8,), jnp.int32)
    assert message(tuned([1, 0], run, *shapes)).startswith("output 0 differs by up to")


@pytest.mark.timeout(60)  # a worker process loads JAX
@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_checks_use_random_inputs_for_donated_arguments(isolation):
    """A background tune may begin after its caller has donated the arguments."""
    x = jnp.ones(8)
    x.delete()
    report = tuned([1, 2], hostile.different, x, isolation=isolation)
    assert message(report).startswith("output 0 differs by up to")


@pytest.mark.parametrize("when", ["before it is lowered", "before it is compared"])
def test_arguments_donated_during_a_checked_tune_become_random(when):
    """With zeros in its place, later comparisons would detect nothing."""
    x, shared = jnp.ones(8), {"checked": True}
    if when == "before it is lowered":
        x.delete()
    program = Program(Trial(1, lambda x: x * 2, (x,), {}, jax.devices()[0], shared=shared))
    program.compile()
    if when == "before it is compared":
        x.delete()
    assert len(set(program.outputs()[0].tolist())) == 8


def test_random_keys_are_random_too():
    """This detects a candidate that uses its own key, most likely that of seed zero."""

    def run(key, *, cfg):
        return jax.random.normal(key if cfg == "given" else jax.random.key(0), (4,))

    shape = jax.ShapeDtypeStruct((), jax.random.key(0).dtype)
    assert message(tuned(["given", "own"], run, shape)).startswith("output 0 differs by up to")
    key = jax.random.key(5)
    key.delete()
    assert message(tuned(["given", "own"], run, key)).startswith("output 0 differs by up to")


def test_outputs_are_checked_on_the_kernels_example_inputs():
    """The kernel knows which inputs are valid."""

    def run(x, *, cfg):
        return jnp.where(x > 100, x * cfg, x)

    shape = jax.ShapeDtypeStruct((8,), jnp.float32)
    report = tuned([1.0, 2.0], run, shape, example_inputs=lambda inv: (jnp.full(8, 200.0),))
    assert message(report) == "output 0 differs by up to 200"


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float8_e4m3fn", "complex64", "int32", "int8", "uint8", "bool"]
)
def test_random_inputs_have_the_right_type_and_are_the_same_each_time(dtype):
    """They are seeded, so that tunes repeat; and their values differ, in every dtype."""
    shapes = (jax.ShapeDtypeStruct((4, 33), dtype), 3, jnp.ones(2)), {"y": jax.ShapeDtypeStruct((5,), dtype)}
    (args, kwargs), (again, _) = random_inputs(*shapes), random_inputs(*shapes)
    assert (args[0].shape, args[0].dtype, kwargs["y"].shape) == ((4, 33), dtype, (5,))
    assert (args[1], args[2].tolist()) == (3, [1.0, 1.0])
    first = np.asarray(args[0]).astype("complex64")
    assert len(np.unique(first)) > 1
    assert np.isfinite(first).all()
    np.testing.assert_array_equal(first, np.asarray(again[0]).astype("complex64"))
    if dtype in ("int32", "int8", "uint8"):
        assert set(np.unique(first.real)) <= {0, 1, 2, 3}  # valid indices into the smallest dimension


def test_random_inputs_keep_their_sharding_and_their_weak_type():
    """They have all properties of the caller's arrays that JAX compiles for."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    placed = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=sharding)
    weak = jax.ShapeDtypeStruct((), jnp.float32, weak_type=True)
    (one, other), _ = random_inputs((placed, weak), {})
    assert one.sharding == sharding
    assert other.weak_type
    assert not one.weak_type


# NaN in any case.


@pytest.mark.parametrize("check", [None, False])
@pytest.mark.parametrize("strategy", ["exhaustive", "race"])
def test_nan_where_the_incumbent_has_none_cannot_win(real_backend, check, strategy):
    """Even without a check: a block that reads out of range may quickly yield NaN."""

    def run(x, *, cfg):
        if cfg == "nan":
            return {"a": x, "b": x.at[3].set(jnp.nan)}
        return {"a": x, "b": jax.lax.fori_loop(0, 1000, lambda i, y: jnp.sin(y), x)}

    report = tuned(["slow", "nan"], run, jnp.ones(64), backend=real_backend, check=check, strategy=strategy)
    assert report.winner == "slow"
    assert message(report) == "output 1 has nan, and the incumbent's has none"


def test_nan_that_the_incumbent_has_too_is_the_kernels_own():
    """Masked rows may be NaN with every config; a candidate without that NaN is not wrong, either."""

    def run(x, *, cfg):
        return x / x if cfg != "finite" else jnp.where(x == 0, 0.0, 1.0)

    report = tuned(["incumbent", "finite", "same but other"], run, jnp.zeros(8), check=None)
    assert not any(isinstance(outcome, Failed) for outcome in report.outcomes)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn", "complex64", "float64"])
def test_nan_is_seen_in_every_dtype(dtype):
    """Narrow types are scanned by their bits, with the same result."""
    with jax.enable_x64(dtype == "float64"):

        def run(x, *, cfg):
            return jnp.where(jnp.arange(1000) == 999, jnp.asarray(jnp.nan).astype(x.dtype), x) if cfg == "nan" else -x

        report = tuned(["fine", "nan"], run, jnp.ones(1000, dtype), check=None)
    assert message(report) == "output 0 has nan, and the incumbent's has none"


def test_nan_in_a_gradient_counts():
    """Gradients are checked for NaN if they are timed."""

    @jax.custom_vjp
    def bad(x):
        return x

    bad.defvjp(lambda x: (x, None), lambda _, g: (g * jnp.nan,))

    async def main():
        op = kernel(op_id="g", configs=["fine", "nan"], heuristic="fine")(
            lambda x, *, cfg: bad(x) if cfg == "nan" else x
        )
        async with Bench(tuner=Tuner(1, 1), allow={"validate_backward": True}).chain as chain:
            return (await chain.select(Invocation("g", (jnp.ones(4),), {}), op)).report

    assert "has nan" in message(anyio.run(main))
