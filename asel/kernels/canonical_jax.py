"""The canonical forms of JAX's own values, made from their structure rather than their `repr`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from asel.kernels.canonical_arrays import dtype_name, jax_array_form
from asel.kernels.canonical_functions import class_form, name_of

if TYPE_CHECKING:
    from asel.kernels.canonical import Canon, Canonicaliser

__all__ = ["aval_form", "dims", "flatten_node", "is_from_jax", "jax_form", "sharding_form"]


def is_from_jax(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] in ("jax", "jaxlib")


def jax_form(self: Canonicaliser, value: Any, path: str) -> Canon | None:
    """Return the form of a value of one of JAX's types; None if it has none."""
    import jax
    from jax.sharding import AbstractMesh, Mesh, PartitionSpec, Sharding

    if isinstance(value, jax.core.Tracer):
        self.traced = True
        return ("traced", *aval_form(value.aval))
    if isinstance(value, jax.Array):
        return jax_array_form(value, path)
    if isinstance(value, jax.ShapeDtypeStruct):
        sharding = None if value.sharding is None else sharding_form(value.sharding)
        return ("shape", dims(value.shape), dtype_name(value.dtype), int(value.weak_type), sharding or ())
    if isinstance(value, PartitionSpec):
        return _spec_form(value)
    if isinstance(value, Mesh | AbstractMesh):
        return _mesh_form(value)
    if isinstance(value, Sharding):
        return sharding_form(value)
    if isinstance(value, jax.Device):
        return ("device", value.platform, value.device_kind)
    if isinstance(value, jax.tree_util.PyTreeDef):
        return ("structure", _structure(self, value, path))
    if type(value).__name__ == "ExtendNameStackContextManager":  # jax.named_scope, as a decorator captures it
        return ("scope", str(value.name))
    if callable(value) and hasattr(value, "__wrapped__"):
        # A wrapper such as jit or custom_vjp counts by its function and its public attributes.
        attributes = [name for name in getattr(value, "__dict__", ()) if not name.startswith("_")]
        return ("jax function", name_of(type(value)), self.fields(value, ("__wrapped__", *sorted(attributes)), path))
    return None


def _structure(self: Canonicaliser, treedef: Any, path: str) -> Canon:
    if (node := treedef.node_data()) is None:
        return ("leaf",)
    kind, static = node
    children = tuple(_structure(self, child, path) for child in treedef.children())
    return (class_form(self, kind, path), self.form(static, f"{path} (static fields)"), children)


def aval_form(aval: Any) -> Canon:
    """Return the facts in an abstract value: shape, dtype, weak type and explicit sharding."""
    sharding: Any = getattr(aval, "sharding", None)
    spec: Canon = ()
    is_placed = sharding is not None and not sharding.mesh.empty
    if is_placed and any(part is not None for part in _partitions(sharding.spec)):
        spec = sharding_form(sharding)
    return (dims(aval.shape), dtype_name(aval.dtype), int(getattr(aval, "weak_type", False)), spec)


def dims(shape: Iterable[Any]) -> tuple[Any, ...]:
    """Return a shape as Python integers, and symbolic dimensions as strings."""
    return tuple(int(n) if hasattr(n, "__index__") else str(n) for n in shape)


# ---------------------------------------------------------------------------------------------
# Shardings.


def sharding_form(sharding: Any) -> Canon:
    """Return the form of a sharding, which does not depend on how its spec is spelt."""
    import jax

    if isinstance(sharding, jax.sharding.NamedSharding):
        return ("named sharding", _mesh_form(sharding.mesh), _spec_form(sharding.spec), sharding.memory_kind or "")
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):
        return ("single device", sharding.memory_kind or "")
    ranks = _ranks(device.id for device in sharding._device_assignment)
    return ("sharding", name_of(type(sharding)), ranks, str(getattr(sharding, "_hlo_sharding", "")))


def _mesh_form(mesh: Any) -> Canon:
    import jax

    placed = _ranks(d.id for d in mesh.devices.flat) if isinstance(mesh, jax.sharding.Mesh) else ()
    return (
        "mesh",
        tuple((str(name), size) for name, size in mesh.shape.items()),
        tuple(map(str, mesh.axis_types)),
        placed,
    )


def _ranks(ids: Iterable[int]) -> tuple[int, ...]:
    # Ranks instead of ids, so that a replica on devices 4-7 shares configs with one on devices 0-3.
    listed = list(ids)
    rank = {device: i for i, device in enumerate(sorted(set(listed)))}
    return tuple(rank[device] for device in listed)


def _spec_form(spec: Any) -> Canon:
    """Return the form of a spec in its shortest spelling: `P("x", None)` and `P(("x",))` become `P("x")`."""
    parts = [_part_form(part) for part in _partitions(spec)]
    while parts and parts[-1] == ("none",):
        parts.pop()
    return ("spec", tuple(parts), tuple(sorted(map(str, spec.unreduced))), tuple(sorted(map(str, spec.reduced))))


def _part_form(part: Any) -> Canon:
    import jax

    if part is None:
        return ("none",)
    if part is jax.sharding.PartitionSpec.UNCONSTRAINED:
        return ("unconstrained",)
    return ("axes", *map(str, part)) if isinstance(part, tuple) else ("axes", str(part))


def _partitions(spec: Any) -> tuple[Any, ...]:
    # Before JAX 0.10 a spec had no such attribute; since then, some specs cannot be iterated.
    return spec.partitions if hasattr(spec, "partitions") else tuple(spec)


# ---------------------------------------------------------------------------------------------
# Pytrees.


def flatten_node(value: Any) -> tuple[list[tuple[str, Any]], Any] | None:
    """Return a pytree node's children, each with the step to it, and its static part; None for a leaf.

    An object registered as static is a leaf, too: its static part would be the object itself.
    """
    tree_util = sys.modules.get("jax.tree_util")  # nothing is registered with JAX before it is imported
    if tree_util is None or value is None:
        return None
    try:
        flat = tree_util.default_registry.flatten_one_level_with_keys(value)
    except (TypeError, ValueError):  # keys that cannot be sorted: not a tree to JAX either
        return None
    if flat is None or flat[1] is value:
        return None
    names = getattr(value, "_fields", None) if isinstance(value, tuple) else None
    steps = [f".{name}" for name in names] if names else [_step(key) for key, _ in flat[0]]
    return list(zip(steps, (child for _, child in flat[0]), strict=True)), flat[1]


def _step(key: Any) -> str:
    import jax

    return f"[{key.key}]" if isinstance(key, jax.tree_util.FlattenedIndexKey) else str(key)
