"""Which parts of a call are parameters of the compiled program, which are constants, and which become zeros."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.jax_candidates import ONE_BACKEND, is_parameter, measure, seen_by_candidate

from asel import Invocation
from asel.kernels.binding import placed_shapes
from asel.tuning.arrays import abstract, concrete

Pair = namedtuple("Pair", ["left", "right"])


@partial(jax.tree_util.register_dataclass, data_fields=["weights"], meta_fields=["name"])
@dataclass
class Layer:
    weights: jax.Array
    name: str = "dense"


@dataclass(frozen=True)
class Mask:
    """An object unknown to JAX, so it is a leaf."""

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
        np.str_("left"),
        np.datetime64("2026-01-01"),
        np.array(["left", "right"]),
        np.array([None, Mask(1)], dtype=object),
        np.array(["2026-01-01"], dtype="datetime64[D]"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_arguments_other_than_arrays_are_constants(constant):
    """Strings, numbers, dtypes, callables and unknown objects reach the candidate unchanged."""
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


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64", "bool", "complex64", "bfloat16"])
def test_numpy_scalars_are_parameters(dtype):
    """As for `jax.jit`: a step count of type `np.int32` compiles once."""
    (value,), kwargs = seen_by_candidate(ONE_BACKEND, jnp.dtype(dtype).type(1), named=jnp.dtype(dtype).type(0))
    assert is_parameter(value)
    assert is_parameter(kwargs["named"])
    assert (value.shape, value.dtype) == ((), jax.dtypes.canonicalize_dtype(dtype))


def test_random_keys_are_parameters(real_backend):
    """Typed PRNG keys are arrays like any other."""
    (key,), _ = seen_by_candidate(real_backend, jax.random.key(0))
    assert is_parameter(key)
    assert jnp.issubdtype(key.dtype, jax.dtypes.prng_key)


def test_containers_keep_their_form(real_backend):
    """Nested containers and registered pytrees keep their structure, with traced arrays and other leaves unchanged."""
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
    """If the arguments are only shapes, the candidate runs on zeros of the same shape and dtype."""
    x = jnp.arange(6, dtype=jnp.float32).reshape(2, 3)
    shape, array = values_computed_with(ONE_BACKEND, jax.ShapeDtypeStruct((3, 2), jnp.dtype(dtype)), x)
    assert (shape.shape, shape.dtype) == ((3, 2), jnp.dtype(dtype))
    assert not shape.any()
    np.testing.assert_array_equal(array, x)  # real arrays keep their values


def test_shapes_keep_their_sharding():
    """Zeros are placed by the shape's sharding, or else on the tune's device."""
    [device, *_] = jax.devices()
    mesh = jax.sharding.Mesh(np.array([device]), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    assert concrete(jax.ShapeDtypeStruct((4,), jnp.float32, sharding=sharding)).sharding == sharding
    placed = concrete(jax.ShapeDtypeStruct((4,), jnp.float32), device)
    assert placed.devices() == {device}
    assert placed.committed


def test_shapes_of_a_mapped_call_are_placed_by_its_specs():
    """Shapes are placed on the devices of its mesh, replicated if the spec does not fit; arrays stay in place."""
    mesh, spec = jax.sharding.AbstractMesh((2,), ("d",)), jax.sharding.PartitionSpec

    def placed(in_specs, *args, **kwargs):
        inv = Invocation("any", args, kwargs, method="shard_map", mesh=mesh, in_specs=in_specs, out_specs=spec())
        return jax.tree.map(lambda leaf: getattr(getattr(leaf, "sharding", None), "spec", leaf), placed_shapes(inv))

    even, odd, array = jax.ShapeDtypeStruct((4, 2), "float32"), jax.ShapeDtypeStruct((3,), "float32"), np.ones(2)
    by_row, each = spec("d"), spec()
    assert placed((by_row, None, each), even, odd, array) == ((by_row, each, array), {})
    assert placed([by_row, by_row], {"a": even, "b": odd}, None) == (({"a": by_row, "b": each}, None), {})
    assert placed(by_row, even, 3, x=even) == ((by_row, 3), {"x": each})
    assert placed((by_row,), even, even) == ((each, each), {})
    inv = Invocation("any", (even,), {"x": odd})
    assert placed_shapes(inv) == ((even,), {"x": odd})


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
    """A call that was recorded with a PRNG key can be measured: a key replaces its shape."""
    key = jax.random.key(0)
    drawn = []

    def dropout(key, x):
        drawn.append(key.dtype)
        return x * jax.random.bernoulli(key, 0.5, x.shape)

    assert measure(real_backend, dropout, jax.ShapeDtypeStruct(key.shape, key.dtype), jnp.ones(3)) >= 0
    assert drawn == [key.dtype]


def test_tracers_are_forgotten():
    """`abstract` turns a tracer into a shape, which may outlive the trace, and returns any other leaf unchanged."""
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
