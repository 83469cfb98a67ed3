"""Arrays to measure with: shapes filled in, copies of what may be donated, outputs on the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from asel.kernels.canonical_jax import aval_form
from asel.runtime.jax_settings import Settings, real_mesh
from asel.tuning.runnable import is_array

__all__ = ["abstract", "concrete", "has_nan", "place_of_shapes", "random_inputs", "weak_zeros"]


def _on_host(leaf: Any) -> Any:
    with jax.transfer_guard("allow"):  # it is us who want it there
        is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        array = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
    if array.dtype.hasobject:
        raise TypeError(f"an output is of type {type(leaf).__name__}, which is not an array")
    if not isinstance(leaf, jax.Array) and array.dtype.kind in "biufc":  # as JAX would have returned it
        array = array.astype(jax.dtypes.canonicalize_dtype(array.dtype))
    return array


# The integer that a narrow float has the bits of, without its sign, where it is infinite: above that, it is NaN.
_INFINITE_BITS = {"bfloat16": ("uint16", 0x7F80), "float16": ("uint16", 0x7C00)}
_has_nan_on_device = jax.jit(lambda array: jnp.isnan(array).any())


def has_nan(leaf: Any) -> bool:
    """Tell whether an output contains NaN; False if that cannot be determined."""
    if not isinstance(leaf, jax.Array | np.ndarray | np.inexact | float | complex):
        return False
    if isinstance(leaf, jax.Array):
        if not jnp.issubdtype(leaf.dtype, jnp.inexact) or not leaf.is_fully_addressable:
            return False
        devices: set[Any] = leaf.sharding.device_set
        if any(device.platform != "cpu" for device in devices):
            return bool(_has_nan_on_device(leaf))  # it is read where it is: one number is brought to the host
    with jax.transfer_guard("allow"):
        array = np.asarray(leaf)
    if not array.size or array.dtype.hasobject or not jnp.issubdtype(array.dtype, jnp.inexact):
        return False
    if (narrow := _INFINITE_BITS.get(array.dtype.name)) is not None:  # which NumPy computes with one by one
        kind, infinite = narrow
        bits = array.view(kind) & np.array(0x7FFF, kind)
        return bool(bits.max() > infinite)
    if array.dtype.kind == "f":
        return bool(np.isnan(array.min()))  # a NaN is the least of anything, and nothing is copied to find it
    return bool(np.isnan(array).any())


def _copies(arrays: list[Any]) -> list[Any]:
    """Return copies to run un-jitted with: a kernel's own jit may donate its inputs, and they are the caller's."""
    with jax.transfer_guard("allow"):
        return jax.block_until_ready([jnp.copy(array) for array in arrays])  # type: ignore[no-untyped-call, no-any-return]


def concrete(leaf: Any, device: Any = None) -> Any:
    """Return an array that can be computed with: `leaf` itself, or zeros in the place of a shape."""
    leaf = abstract(leaf)
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    with jax.transfer_guard("allow"):  # a guard is on what the caller's programs do
        return _placed(
            weak_zeros(leaf.shape, leaf.dtype) if leaf.weak_type else jnp.zeros(leaf.shape, leaf.dtype), leaf, device
        )


def _placed(array: jax.Array, shape: jax.ShapeDtypeStruct, device: Any) -> jax.Array:
    """Return an array where a shape says that it belongs, else on `device`."""
    place = device if shape.sharding is None else _on_real_devices(shape.sharding)
    return array if place is None else jax.device_put(array, place)


def place_of_shapes(device: Any, settings: Settings | None) -> Any:
    """Return where a shape of unknown place belongs. Under a mesh that is JAX's to say, as for the caller's arrays."""
    return device if settings is None or not settings.has_mesh else None


def random_inputs(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], device: Any = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments with random arrays in the place of shapes, the same each time.

    Integers are below the smallest dimension of any argument, so that they are valid indices into all of them.
    """
    leaves, structure = jax.tree_util.tree_flatten((tuple(args), dict(kwargs)))
    leaves = [abstract(leaf) for leaf in leaves]
    sizes = [size for leaf in leaves if is_array(leaf) for size in leaf.shape if size > 1]
    rng, below = np.random.default_rng(0), min([*sizes, 8])
    with jax.transfer_guard("allow"):  # a guard is on what the caller's programs do
        filled = [_filled(leaf, device, rng, below) for leaf in leaves]
    made: tuple[tuple[Any, ...], dict[str, Any]] = jax.tree_util.tree_unflatten(structure, filled)
    return made


def _filled(leaf: Any, device: Any, rng: np.random.Generator, below: int) -> Any:
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return _random_keys(leaf, device, rng)
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
    if leaf.weak_type:  # only Python's own numbers have such types
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
    """Return random keys: a candidate that draws from a key of its own may well have chosen that of zero."""
    zeros = concrete(shape, device)
    if not jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
        return zeros
    data = rng.integers(0, 1 << 32, jax.random.key_data(zeros).shape, np.uint32)
    return _placed(jax.random.wrap_key_data(jnp.asarray(data), impl=jax.random.key_impl(zeros)), shape, device)


def weak_zeros(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Return zeros whose type gives way to others: only Python's own numbers have such, and what is made of them."""
    number = {"f": 0.0, "c": 0j}.get(np.dtype(dtype).kind, 0)
    return jnp.broadcast_to(jnp.asarray(number), shape)


def _on_real_devices(sharding: Any) -> Any:
    """Return a sharding as it is, or over devices of this process where its mesh is abstract."""
    if not isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh):
        return sharding
    return jax.sharding.NamedSharding(real_mesh(sharding.mesh), sharding.spec)


def abstract(leaf: Any) -> Any:
    """Return `leaf`, or its shape if it is a tracer, which must not outlive its trace, or was donated."""
    if _is_deleted(leaf):
        sharding = leaf.sharding if leaf.committed else None
        weak_type = getattr(leaf, "weak_type", False)  # which random keys have none of
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=weak_type)  # type: ignore[no-untyped-call]
    if not isinstance(leaf, jax.core.Tracer):
        return leaf
    aval: Any = leaf.aval
    sharding = aval.sharding if aval_form(aval)[3] else None
    weak_type = getattr(aval, "weak_type", False)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=weak_type)  # type: ignore[no-untyped-call]


def _is_deleted(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.is_deleted()


def _type_of(leaf: Any) -> str | None:
    """Return what NumPy does not tell of an array's type: whether it gives way to others, and what keys are for."""
    if not isinstance(leaf, jax.Array):
        return None
    return f"weak {leaf.dtype}" if getattr(leaf, "weak_type", False) else str(leaf.dtype)  # random keys do not say
