"""Checks of software, devices and timing."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path

from asel.cli.doctor.findings import Finding, note, ok, problem
from asel.redaction import redact

__all__ = ["devices", "software", "timer_noise"]

# Each extra with a distribution that comes with it.
_EXTRAS = {"otlp": "opentelemetry-exporter-otlp-proto-http", "redis": "coredis", "plots": "matplotlib"}
_ACCELERATORS = {
    "an NVIDIA GPU": (Path("/dev/nvidia0"), "pip install 'jax[cuda12]'"),
    "an AMD GPU": (Path("/dev/kfd"), "install JAX's ROCm plugin"),
    "a TPU": (Path("/dev/accel0"), "pip install 'jax[tpu]'"),
}
# The numbers of candidates, and of samples of a finalist, in a small tune.
_EQUALS, _ROUNDS = 8, 12


def software() -> Iterator[Finding]:
    """Report the installed versions and extras."""
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("asel", "jax", "jaxlib", "opentelemetry-api"))
    yield ok("versions", f"python {platform.python_version()}, {versions}")
    for extra, distribution in _EXTRAS.items():
        try:
            yield ok(f"asel[{extra}]", f"{distribution} {metadata.version(distribution)}")
        except metadata.PackageNotFoundError:
            yield note(f"asel[{extra}]", "not installed", f"pip install 'asel[{extra}]' if you want to use it")


def devices(hardware: Callable[[Path], bool] = Path.exists) -> Iterator[Finding]:
    """Report JAX's devices, with the fingerprints that records carry."""
    from asel.kernels.devices import default_device, device_fingerprint, platform_of

    try:
        import jax

        found, default = jax.devices(), default_device()
    except Exception as error:
        text = f"JAX has no device: {type(error).__name__}: {redact(error)}"
        yield problem("devices", text, "install the JAX that fits this machine, or set JAX_PLATFORMS=cpu")
        return
    counts: dict[str, int] = {}
    for device in found:
        fingerprint = device_fingerprint(device)
        counts[fingerprint] = counts.get(fingerprint, 0) + 1
    for fingerprint, count in counts.items():
        yield ok("device", fingerprint + (f" ({count} of them)" if count > 1 else ""))
    if platform_of(default) != "cpu":
        return
    for name, (path, fix) in _ACCELERATORS.items():
        if hardware(path):
            yield problem("device", f"this machine has {name}, and JAX uses the CPU", fix)


def timer_noise() -> Iterator[Finding]:
    """Time one program as if it were several candidates of a tune, and report the measured differences."""
    from asel.tuning.estimates import MAX_TIE

    try:
        spread, seconds = spread_of_equals(_work())
    except Exception as error:
        text = f"no program could be timed: {type(error).__name__}: {redact(error)}"
        yield problem("timer noise", text, "see `devices` above, and `environment` below")
        return
    text = f"{_EQUALS} equal programs of {seconds * 1e6:.0f} us differ by up to {spread:.1%}"
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    busy = f"; load {load:.1f} on {os.cpu_count()} cores"
    if spread <= MAX_TIE:
        yield ok("timer noise", text + busy)
        return
    text += f", and a tune treats differences above {MAX_TIE:.0%} as real{busy}"
    yield problem(
        "timer noise", text, "stop other programs while you tune, or give the tune cores of its own (taskset)"
    )


def spread_of_equals(run: Callable[[], float]) -> tuple[float, float]:
    """Return the measured difference of equal candidates, as a share of the fastest's time, and that time.

    `run` runs the program once and returns the seconds it took.
    """
    from asel.tuning.estimates import trimmed_mean

    for _ in range(_EQUALS):
        run()
    samples: list[list[float]] = [[] for _ in range(_EQUALS)]
    for _ in range(_ROUNDS):
        for taken in samples:
            taken.append(min(run(), run()))  # as a tune samples short runs
    times: Sequence[float] = sorted(map(trimmed_mean, samples))
    return (times[-1] / times[0] - 1 if times[0] else 0.0), times[0]


def _work() -> Callable[[], float]:
    import jax
    import jax.numpy as jnp

    a = jnp.ones((256, 256))
    program = jax.jit(lambda x: x @ x @ x).lower(a).compile()

    def run() -> float:
        start = time.perf_counter()
        program(a).block_until_ready()
        return time.perf_counter() - start

    return run
