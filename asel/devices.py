"""What hardware and software an answer belongs to."""

from __future__ import annotations

import functools
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

__all__ = [
    "Settings",
    "current_settings",
    "default_device",
    "device_fingerprint",
    "environment",
    "platform_of",
    "real_mesh",
    "settings_held",
    "with_settings",
]

T = TypeVar("T")

# The vector extensions that change which block sizes win, widest first within a family.
_VECTOR_FEATURES = ("amx_tile", "avx512_bf16", "avx512f", "avx2", "avx", "sse4_2", "sve2", "sve", "asimd", "neon")


class Settings(NamedTuple):
    """The caller's JAX settings that change what a kernel compiles to.

    JAX keeps them per thread, so a tune re-enters them in the threads it works in.
    """

    x64: bool
    matmul_precision: str | None
    default_device: Any
    guards: tuple[Any, Any, Any] = (None, None, None)
    """Transfer guards: host to device, device to device, device to host."""
    mesh: Any = None
    """What `jax.set_mesh` has set; where it was read while tracing, an abstract one."""


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
    return Settings(config.jax_enable_x64, precision, device, guards, _current_mesh())


def _current_mesh() -> Any:
    import jax

    mesh: Any
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError:  # while tracing, only its shape is told
        mesh = jax.sharding.get_abstract_mesh()
    # Within `shard_map` each device has its own part, and no mesh can be set.
    return None if mesh.empty or jax.sharding.AxisType.Manual in mesh.axis_types else mesh


def real_mesh(mesh: Any) -> Any:
    """Return a mesh over devices of this process: itself, or one of an abstract mesh's form."""
    import jax
    import numpy as np

    if isinstance(mesh, jax.sharding.Mesh):
        return mesh
    devices = np.array(jax.devices()[: mesh.size]).reshape(mesh.axis_sizes)
    return jax.sharding.Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


@contextmanager
def settings_held(settings: Settings | None) -> Iterator[None]:
    """Hold a caller's settings in the current thread."""
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
            # None too: whoever had the thread before may have set one, and `jax.set_mesh` alone does not end.
            no_mesh = jax.sharding.Mesh(np.empty((), dtype=object), ())
            stack.enter_context(jax.set_mesh(no_mesh if settings.mesh is None else real_mesh(settings.mesh)))
        yield


def with_settings(settings: Settings | None, work: Callable[[], T]) -> T:
    """Return what `work` returns, done with a caller's settings."""
    with settings_held(settings):
        return work()


def default_device() -> Any:
    """Return the device JAX would place a new array on."""
    import jax

    config: Any = jax.config
    chosen = config.jax_default_device
    if chosen is None:
        return jax.local_devices()[0]
    return jax.local_devices(backend=chosen)[0] if isinstance(chosen, str) else chosen


def device_fingerprint(dev: Any = None) -> str:
    """Return text that is equal for equal hardware: `kind|platform version`.

    JAX calls every CPU "cpu", so for those the model, the cores this process may use and the
    vector features stand in for the kind. Without `dev`, the default device is meant.
    """
    return _fingerprint(default_device() if dev is None else dev)


@functools.lru_cache(maxsize=1024)
def _fingerprint(dev: Any) -> str:
    kind = str(getattr(dev, "device_kind", None) or getattr(dev, "platform", "unknown"))
    if kind == "cpu":
        kind = f"cpu {HOST_CPU}"
    return "|".join(field.replace("\\", "\\\\").replace("|", "\\|") for field in (kind, _platform_version(dev)))


def _read_cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def describe_cpu(cpuinfo: str, cores: int) -> str:
    """Return `model, cores, vector features` from the text of Linux's /proc/cpuinfo.

    Elsewhere the text is empty and what Python knows of the processor has to do.
    """
    facts: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        name, colon, value = line.partition(":")
        if colon:
            facts.setdefault(name.strip().lower(), value.strip())
    model = facts.get("model name") or " ".join(
        facts[part] for part in ("cpu implementer", "cpu part", "cpu variant") if part in facts
    )
    # Cloud machines share one model name over several generations; the family tells them apart.
    stepping = "/".join(facts[part] for part in ("cpu family", "model", "stepping") if part in facts)
    flags = set((facts.get("flags") or facts.get("features") or "").split())
    features = [feature for feature in _VECTOR_FEATURES if feature in flags]
    described = [re.sub(r"\s+", " ", model) or platform.processor() or platform.machine()]
    described += [stepping] if stepping else []
    return ", ".join([*described, f"{cores} cores", "+".join(features) or platform.machine()])


def _usable_cores() -> int:
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# Read at import: the first selection may come on an event loop, where no file is read.
HOST_CPU = describe_cpu(_read_cpuinfo(), _usable_cores())


def platform_of(dev: Any) -> str:
    """Return `gpu`, `tpu`, `cpu`, or the platform's own name: what method variants are named after."""
    name = str(getattr(dev, "platform", "unknown")).lower()
    return "gpu" if name in ("gpu", "cuda", "rocm") else name


def environment(dev: Any) -> dict[str, str]:
    """Return the software a measurement was made with."""
    import jax
    import jaxlib.version

    return {"jax": jax.__version__, "jaxlib": jaxlib.version.__version__, "platform_version": _platform_version(dev)}


def _platform_version(dev: Any) -> str:
    return " ".join(str(getattr(getattr(dev, "client", None), "platform_version", "")).split())
