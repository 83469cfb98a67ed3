"""The hardware and software for which a measurement is valid."""

from __future__ import annotations

import functools
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

__all__ = ["ENVIRONMENT_NAMES", "default_device", "device_fingerprint", "environment", "platform_of"]


# The vector extensions that change which block sizes win, widest first within a family.
_VECTOR_FEATURES = ("amx_tile", "avx512_bf16", "avx512f", "avx2", "avx", "sse4_2", "sve2", "sve", "asimd", "neon")


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

    JAX calls every CPU "cpu". For those, the kind is the model, the number of cores this process may use and the vector
    features. `dev` defaults to the default device.
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

    On other systems that text is empty, and Python's name for the processor is used.
    """
    facts: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        name, colon, value = line.partition(":")
        if colon:
            facts.setdefault(name.strip().lower(), value.strip())
    model = facts.get("model name") or " ".join(
        facts[part] for part in ("cpu implementer", "cpu part", "cpu variant") if part in facts
    )
    # In clouds, several generations have one model name; family and stepping distinguish them.
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


# Read at import: the first selection may run on an event loop, where no file may be read.
HOST_CPU = describe_cpu(_read_cpuinfo(), _usable_cores())


def platform_of(dev: Any) -> str:
    """Return `gpu`, `tpu`, `cpu` or the platform's own name. Method variants are named after it."""
    name = str(getattr(dev, "platform", "unknown")).lower()
    return "gpu" if name in ("gpu", "cuda", "rocm") else name


ENVIRONMENT_NAMES = ("jax", "jaxlib", "platform_version")


def environment(dev: Any = None) -> dict[str, str]:
    """Return the versions of the software that measurements are made with. `dev` defaults to the default device."""
    import jax
    import jaxlib.version

    version = _platform_version(default_device() if dev is None else dev)
    return dict(zip(ENVIRONMENT_NAMES, (jax.__version__, jaxlib.version.__version__, version), strict=True))


def _platform_version(dev: Any) -> str:
    return " ".join(str(getattr(getattr(dev, "client", None), "platform_version", "")).split())
