"""Arrays to measure with: zeros and random arrays for shapes, copies of arguments, outputs on the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from asel.kernels.canonical_jax import aval_form
from asel.runtime.jax_settings import Settings, real_mesh
from asel.tuning.runnable import is_array

__all__ = [
    "abstract",
    "concrete",
    "copies_of",
    "dtype_text",
    "has_nan",
    "is_deleted",
    "on_host",
    "place_of_shapes",
    "random_inputs",
    "weak_zeros",
]


def on_host(leaf: Any) -> Any:
    """Return an output as a NumPy array.

    Raises:
        TypeError: it is not an array of numbers.
    """
    with jax.transfer_guard("allow"):  # guards are for the caller's own transfers
        is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        array = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
    if array.dtype.hasobject:
        raise TypeError(f"an output is of type {type(leaf).__name__}, which is not an array")
    if not isinstance(leaf, jax.Array) and array.dtype.kind in "biufc":  # the dtype that JAX would return
        array = array.astype(jax.dtypes.canonicalize_dtype(array.dtype))
    return array


# For narrow floats: the integer type of that size, and the bits of infinity. Without the sign, larger bits are NaN.
_INFINITE_BITS = {"bfloat16": ("uint16", 0x7F80), "float16": ("uint16", 0x7C00)}
_has_nan_on_device = jax.jit(lambda array: jnp.isnan(array).any())


def has_nan(leaf: Any) -> bool:
    """Return whether an output contains NaN; False if that cannot be determined."""
    if not isinstance(leaf, jax.Array | np.ndarray | np.inexact | float | complex):
        return False
    if isinstance(leaf, jax.Array):
        if not jnp.issubdtype(leaf.dtype, jnp.inexact) or not leaf.is_fully_addressable:
            return False
        devices: set[Any] = leaf.sharding.device_set
        if any(device.platform != "cpu" for device in devices):
            return bool(_has_nan_on_device(leaf))  # computed on the device, so that only one number is transferred
    with jax.transfer_guard("allow"):
        array = np.asarray(leaf)
    if not array.size or array.dtype.hasobject or not jnp.issubdtype(array.dtype, jnp.inexact):
        return False
    if (narrow := _INFINITE_BITS.get(array.dtype.name)) is not None:  # NumPy computes with these one element at a time
        kind, infinite = narrow
        bits = array.view(kind) & np.array(0x7FFF, kind)
        return bool(bits.max() > infinite)
    if array.dtype.kind == "f":
        return bool(np.isnan(array.min()))  # the minimum is NaN if any element is, and needs no temporary array
    return bool(np.isnan(array).any())


def copies_of(arrays: list[Any]) -> list[Any]:
    """Return copies of the caller's arrays, for kernels whose own `jit` may donate its inputs."""
    with jax.transfer_guard("allow"):
        return jax.block_until_ready([jnp.copy(array) for array in arrays])  # type: ignore[no-untyped-call, no-any-return]


def concrete(leaf: Any, device: Any = None) -> Any:
    """Return an array: `leaf` itself, or zeros in the place of a shape."""
    leaf = abstract(leaf)
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    with jax.transfer_guard("allow"):  # guards are for the caller's own transfers
        return _placed(
            weak_zeros(leaf.shape, leaf.dtype) if leaf.weak_type else jnp.zeros(leaf.shape, leaf.dtype), leaf, device
        )


def _placed(array: jax.Array, shape: jax.ShapeDtypeStruct, device: Any) -> jax.Array:
    """Return an array placed as the shape's sharding says, or else on `device`."""
    place = device if shape.sharding is None else _on_real_devices(shape.sharding)
    return array if place is None else jax.device_put(array, place)


def place_of_shapes(device: Any, settings: Settings | None) -> Any:
    """Return the device for shapes without a sharding; None under a mesh, where JAX decides."""
    return device if settings is None or not settings.has_mesh else None


def random_inputs(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], device: Any = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments with random arrays in the place of shapes, the same each time.

    Integers are smaller than every dimension of any argument, so that they are valid indices.
    """
    leaves, structure = jax.tree_util.tree_flatten((tuple(args), dict(kwargs)))
    leaves = [abstract(leaf) for leaf in leaves]
    sizes = [size for leaf in leaves if is_array(leaf) for size in leaf.shape if size > 1]
    rng, below = np.random.default_rng(0), min([*sizes, 8])
    with jax.transfer_guard("allow"):  # guards are for the caller's own transfers
        filled = [_filled(leaf, device, rng, below) for leaf in leaves]
    made: tuple[tuple[Any, ...], dict[str, Any]] = jax.tree_util.tree_unflatten(structure, filled)
    return made


def _filled(leaf: Any, device: Any, rng: np.random.Generator, below: int) -> Any:
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return _random_keys(leaf, device, rng)
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
    if leaf.weak_type:  # only arrays made from Python numbers have weak types
        whole = jnp.issubdtype(dtype, jnp.integer) or dtype.kind == "b"
        number = int(rng.integers(1, below)) if whole else float(rng.uniform(0.5, 2))
        kind = {"b": bool, "c": complex}.get(dtype.kind, type(number))
        return _placed(jnp.broadcast_to(jnp.asarray(kind(number)), leaf.shape), leaf, device)
    if dtype.kind == "b":
        values: Any = rng.integers(0, 2, leaf.shape, np.uint8)
    elif jnp.issubdtype(dtype, jnp.integer):
        values = rng.integers(0, min(below, 1 + int(jnp.iinfo(dtype).max)), leaf.shape)  # type: ignore[no-untyped-call]
    else:
        values = rng.standard_normal(leaf.shape, np.float32)
        if jnp.issubdtype(dtype, jnp.complexfloating):
            values = values + 1j * rng.standard_normal(leaf.shape, np.float32)
    return _placed(jnp.asarray(values.astype(dtype)), leaf, device)


def _random_keys(shape: jax.ShapeDtypeStruct, device: Any, rng: np.random.Generator) -> Any:
    """Return random keys rather than the key of seed 0, which a candidate may use itself."""
    zeros = concrete(shape, device)
    if not jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
        return zeros
    data = rng.integers(0, 1 << 32, jax.random.key_data(zeros).shape, np.uint32)
    return _placed(jax.random.wrap_key_data(jnp.asarray(data), impl=jax.random.key_impl(zeros)), shape, device)


def weak_zeros(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Return zeros of a weak type, which only arrays made from Python numbers have."""
    number = {"f": 0.0, "c": 0j}.get(np.dtype(dtype).kind, 0)
    return jnp.broadcast_to(jnp.asarray(number), shape)


def _on_real_devices(sharding: Any) -> Any:
    """Return a sharding; if its mesh is abstract, the same over devices of this process."""
    if not isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh):
        return sharding
    return jax.sharding.NamedSharding(real_mesh(sharding.mesh), sharding.spec)


def abstract(leaf: Any) -> Any:
    """Return the shape of a tracer, which must not outlive its trace, or of a donated array; else `leaf` itself."""
    if is_deleted(leaf):
        sharding = leaf.sharding if leaf.committed else None
        weak_type = getattr(leaf, "weak_type", False)  # random keys have no such attribute
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=weak_type)  # type: ignore[no-untyped-call]
    if not isinstance(leaf, jax.core.Tracer):
        return leaf
    aval: Any = leaf.aval
    sharding = aval.sharding if aval_form(aval)[3] else None
    weak_type = getattr(aval, "weak_type", False)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=weak_type)  # type: ignore[no-untyped-call]


def is_deleted(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.is_deleted()


def dtype_text(leaf: Any) -> str | None:
    """Return an array's dtype as JAX has it, with weak types and key types; None if it is not a `jax.Array`."""
    if not isinstance(leaf, jax.Array):
        return None
    return f"weak {leaf.dtype}" if getattr(leaf, "weak_type", False) else str(leaf.dtype)  # keys have no weak_type
