"""Environment variables that affect asel."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from asel.cli.doctor.findings import Finding, note, ok, problem
from asel.redaction import redact

__all__ = ["variables"]

_PREFIXES = ("ASEL_", "JAX_", "XLA_", "OTEL_", "CUDA_VISIBLE_", "TF_CPP_")
_SECRET = ("HEADERS", "TOKEN", "PASSWORD", "SECRET", "KEY")
_TRUE = ("1", "true", "yes", "on")
_MAX_CHARS = 160


def variables(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Report every variable that is set, and explain those that slow tuning down or turn it off."""
    names = sorted(name for name, value in environment.items() if name.startswith(_PREFIXES) and value.strip())
    for name in names:
        value = environment[name].strip()
        text = f"{name}={_shown(name, value)}"
        if name == "ASEL_AUTOTUNE" and value.lower() in ("off", "0", "false", "no"):
            yield note("environment", f"{text}: nothing is tuned", "unset it to tune")
        elif name == "JAX_DISABLE_JIT" and value.lower() in _TRUE:
            fix = "unset JAX_DISABLE_JIT: candidates would be timed uncompiled"
            yield problem("environment", text, fix)
        elif name in ("JAX_DEBUG_NANS", "JAX_DEBUG_INFS") and value.lower() in _TRUE:
            yield note("environment", f"{text}: JAX checks every result", f"unset {name} while you tune")
        else:
            yield ok("environment", text)
    if not names:
        yield ok("environment", f"no variable that starts with {', '.join(_PREFIXES[:4])} is set")


def _shown(name: str, value: str) -> str:
    if any(word in name for word in _SECRET):
        return "***"
    shown = redact(value)
    return shown if len(shown) <= _MAX_CHARS else f"{shown[:_MAX_CHARS]}..."
