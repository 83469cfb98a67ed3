"""A thread's JAX settings that change what a kernel compiles to: captured at the call, re-entered in worker threads."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, TypeVar

__all__ = ["Settings", "current_settings", "real_mesh", "settings_held", "with_settings"]


T = TypeVar("T")


class Settings(NamedTuple):
    """The caller's JAX settings that change what a kernel compiles to.

    JAX keeps them per thread, so a tune re-enters them in its worker threads.
    """

    x64: bool
    matmul_precision: str | None
    default_device: Any
    guards: tuple[Any, Any, Any] = (None, None, None)
    """Transfer guards: host to device, device to device, device to host."""
    mesh: Any = None
    """The mesh that `jax.set_mesh` has set; an abstract one if it was read while tracing."""
    others: tuple[tuple[str, Any], ...] = ()
    """All other settings, by the name of the context manager in `jax` that sets them."""
    entered_meshes: tuple[Any, ...] = ()
    """The meshes of the caller's open `with mesh:` blocks, the outermost first."""

    @property
    def has_mesh(self) -> bool:
        """Whether there is a mesh, by `jax.set_mesh` or `with mesh:`."""
        return self.mesh is not None or bool(self.entered_meshes)


# Settings with a field of their own, and one that is meant to fail in other threads.
_EXCLUDED = frozenset(
    {
        "enable_x64",
        "default_matmul_precision",
        "default_device",
        "transfer_guard_host_to_device",
        "transfer_guard_device_to_device",
        "transfer_guard_device_to_host",
        "thread_guard",
    }
)


def current_settings() -> Settings:
    """Return the settings of the calling thread."""
    import jax

    config: Any = jax.config
    guards = (
        config.jax_transfer_guard_host_to_device,
        config.jax_transfer_guard_device_to_device,
        config.jax_transfer_guard_device_to_host,
    )
    precision, device = config.jax_default_matmul_precision, config.jax_default_device
    mesh, others = _current_mesh(), _other_settings()
    return Settings(config.jax_enable_x64, precision, device, guards, mesh, others, _entered_meshes())


@functools.cache
def _other_setters() -> dict[str, Any]:
    """Return JAX's context managers for thread-local settings, such as dtype promotion."""
    import jax

    names = (name for name in dir(jax) if name not in _EXCLUDED and not name.startswith("_"))
    found = {name: getattr(jax, name) for name in names}
    return {
        name: setter
        for name, setter in found.items()
        if callable(setter)
        and not isinstance(setter, type)
        and hasattr(setter, "value")
        and hasattr(setter, "get_global")
    }


def _other_settings() -> tuple[tuple[str, Any], ...]:
    setters = _other_setters().items()
    return tuple((name, setter.value) for name, setter in setters if setter.value != setter.get_global())


def _entered_meshes() -> tuple[Any, ...]:
    """Return the meshes of open `with mesh:` blocks, which JAX has no public way to read."""
    setting = getattr(sys.modules.get("jax._src.config"), "mesh_context_manager", None)
    return getattr(setting, "value", ())


def _current_mesh() -> Any:
    import jax

    mesh: Any
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError:  # while tracing, only its shape is known
        mesh = jax.sharding.get_abstract_mesh()
    # Within `shard_map`, no mesh can be set.
    return None if mesh.empty or jax.sharding.AxisType.Manual in mesh.axis_types else mesh


def real_mesh(mesh: Any) -> Any:
    """Return a mesh of devices for an abstract mesh; a real mesh is returned unchanged."""
    import jax
    import numpy as np

    if isinstance(mesh, jax.sharding.Mesh):
        return mesh
    devices = np.array(jax.devices()[: mesh.size]).reshape(mesh.axis_sizes)
    return jax.sharding.Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


@contextmanager
def settings_held(settings: Settings | None) -> Iterator[None]:
    """Apply a caller's settings to the current thread inside the block."""
    import jax
    import numpy as np

    with ExitStack() as stack:
        if settings is not None:
            stack.enter_context(jax.enable_x64(settings.x64))
            stack.enter_context(jax.default_matmul_precision(settings.matmul_precision))
            stack.enter_context(jax.default_device(settings.default_device))
            stack.enter_context(jax.transfer_guard_host_to_device(settings.guards[0]))
            stack.enter_context(jax.transfer_guard_device_to_device(settings.guards[1]))
            stack.enter_context(jax.transfer_guard_device_to_host(settings.guards[2]))
            for name, value in settings.others:
                stack.enter_context(_other_setters()[name](value))
            no_mesh = jax.sharding.Mesh(np.empty((), dtype=object), ())
            had_mesh = not jax.sharding.get_mesh().empty
            # Entered even without a mesh, so that a mesh that the block sets and does not reset is gone afterwards.
            mesh = jax.set_mesh(no_mesh if settings.mesh is None else real_mesh(settings.mesh))
            stack.push(mesh)
            if settings.mesh is None and not had_mesh:
                # `jit` distinguishes an empty mesh from no mesh, and would trace again in the caller's thread.
                mesh.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            if settings.entered_meshes != _entered_meshes():  # `jit` would trace again if they were entered twice
                for entered in settings.entered_meshes:
                    stack.enter_context(entered)
        yield


def with_settings(settings: Settings | None, work: Callable[[], T]) -> T:
    """Return the result of `work`, run with a caller's settings."""
    with settings_held(settings):
        return work()
