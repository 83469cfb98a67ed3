"""The parts of a key besides the arguments: JAX settings that change the program, and `shard_map` options."""

from __future__ import annotations

import operator
import sys
import types
from typing import Any

from asel.kernels.canonical import Canon, canonical

__all__ = ["DEFAULT_PRNG", "call_form", "default_device_setting", "jax_state", "settings_form"]

DEFAULT_PRNG = "threefry2x32"
"""JAX's default random number generator."""


class JaxState:
    """JAX's types and settings, looked up at the first call: importing asel does not import JAX."""

    # Slots of one object: Python 3.11 reads those several times faster than attributes of a class.
    __slots__ = (
        "array",
        "default_device",
        "entered_meshes",
        "is_committed",
        "known",
        "matmul_precision",
        "mesh",
        "no_mesh",
        "prng_impl",
        "sharding_of",
        "single_device",
        "threefry_partitionable",
        "x64",
    )

    def __init__(self) -> None:
        self.known = False
        self.array: Any = None
        self.sharding_of: Any = None
        self.single_device: Any = None
        self.is_committed: Any = None
        self.x64: Any = None
        self.matmul_precision: Any = None
        self.default_device: Any = None
        self.prng_impl: Any = None
        self.threefry_partitionable: Any = None
        self.mesh: Any = None
        self.no_mesh: Any = None
        self.entered_meshes: Any = None

    def learn(self) -> None:
        import jax

        # These context managers have their setting as `value`; reading it from jax.config takes three times as long.
        self.x64, self.matmul_precision = jax.enable_x64, jax.default_matmul_precision
        self.default_device = jax.default_device
        self.prng_impl, self.threefry_partitionable = jax.default_prng_impl, jax.threefry_partitionable
        # The abstract mesh: it is available while JAX traces, and equal for replicas on other devices.
        self.mesh = _mesh_setting()
        self.entered_meshes = _entered_meshes_setting()
        kind = jax.sharding.SingleDeviceSharding
        self.single_device = kind if hasattr(kind, "_device") else None
        self.known = True

    def learn_array(self, kind: type) -> None:
        """Store the type of JAX's arrays, taken from the first array seen: making one here could block."""
        self.array = kind
        self.sharding_of = _getter(kind, "sharding")
        self.is_committed = _getter(kind, "committed")


def _getter(kind: type, name: str) -> Any:
    """Return a function that reads an array's property, by the private C++ getter if this version of JAX has it."""
    return getattr(getattr(kind, f"_{name}", None), "fget", None) or operator.attrgetter(name)


jax_state = JaxState()


def _mesh_setting() -> Any:
    """Return an object whose `value` is the current mesh; None or an empty mesh means that none is set.

    `get_abstract_mesh` wraps such an object in Python, and takes as long as reading all other settings together.
    """
    for module in ("jax._src.mesh", "jax._src.config"):  # since JAX 0.12, and before
        setting = getattr(sys.modules.get(module), "abstract_mesh_context_manager", None)
        if hasattr(setting, "value"):
            return setting
    return _PublicMeshSetting()


class _PublicMeshSetting:
    @property
    def value(self) -> Any:
        import jax

        return jax.sharding.get_abstract_mesh()


def _entered_meshes_setting() -> Any:
    """Return an object whose `value` has the meshes of the open `with mesh:` blocks, the innermost last."""
    setting = getattr(sys.modules.get("jax._src.config"), "mesh_context_manager", None)
    return setting if hasattr(setting, "value") else _NO_MESHES


_NO_MESHES = types.SimpleNamespace(value=())


def call_form(inv: Any) -> Canon:
    return (
        "call",
        inv.method,
        canonical(inv.mesh, "mesh"),
        canonical(inv.in_specs, "in_specs"),
        canonical(inv.out_specs, "out_specs"),
        int(inv.check_vma),
        canonical(inv.batch_axes, "batch_axes"),
    )


def settings_form() -> Canon:
    """Return the calling thread's settings that are part of every key: x64, default matmul precision, and its mesh.

    The random number generator counts unless it is JAX's default. Manual axes of the mesh do not count: within
    `shard_map`, each device works on its own part.
    """
    if not jax_state.known:
        jax_state.learn()
    settings: Canon = (int(jax_state.x64.value), jax_state.matmul_precision.value)
    random = (jax_state.prng_impl.value, int(jax_state.threefry_partitionable.value))
    if random != (DEFAULT_PRNG, 1):
        settings = (*settings, ("random", *random))
    if entered := jax_state.entered_meshes.value:
        settings = (*settings, ("entered mesh", tuple(entered[-1].shape.items())))
    mesh = jax_state.mesh.value
    if mesh is None:
        return settings
    kinds = zip(mesh.axis_names, mesh.axis_sizes, (kind.name for kind in mesh.axis_types), strict=True)
    axes = tuple(axis for axis in kinds if axis[2] != "Manual")
    return (*settings, ("mesh", axes)) if axes else settings


def default_device_setting() -> Any:
    """Return the calling thread's `jax_default_device` setting."""
    if not jax_state.known:
        jax_state.learn()
    return jax_state.default_device.value
