"""Names in traces and metrics; dashboards and alerts use no others."""

from __future__ import annotations

from importlib import metadata
from typing import Literal

__all__ = [
    "ATTRIBUTES",
    "DURATION_BUCKETS_S",
    "INSTRUMENTS",
    "METRICS",
    "SPANS",
    "VERSION",
    "log_attribute",
]


def _version() -> str:
    try:
        return metadata.version("asel")
    except metadata.PackageNotFoundError:  # a checkout that was never installed
        return "unknown"


# The version of asel's instrumentation scope. Read at import: it is in a file, and sinks are set up on the event loop.
VERSION = _version()

SPANS = (
    "asel.choose",
    "asel.autotune",
    "asel.candidate",
    "asel.candidate.compile",
    "asel.candidate.measure",
    "asel.store.get",
    "asel.store.put",
    "asel.store.claim",
    "asel.withdraw",
)

# Metric: its labels. Never keys or shapes: their number has no bound.
# `asel.selections` counts every answer; use it for rates. `asel.choose.duration` has only one in 64 of the hits from
# the fast lane, because a histogram costs more than a hit.
METRICS: dict[str, tuple[str, ...]] = {
    "asel.selections": ("asel.op", "asel.tier"),
    "asel.choose.duration": ("asel.op", "asel.tier", "error.type"),
    "asel.wait.duration": ("asel.op",),
    "asel.waiters": ("asel.op",),
    "asel.tunes.pending": ("asel.op",),
    "asel.tune.duration": ("asel.op", "asel.device.kind", "error.type"),
    "asel.candidate.duration": ("asel.op", "asel.stage", "error.type"),
    "asel.store.duration": ("asel.operation", "error.type"),
    "asel.background.queue": (),
    "asel.telemetry.events": (),
    "asel.telemetry.dropped": ("asel.signal", "asel.reason"),
}

# Metric: its instrument and unit, from which its name in Prometheus follows. A unit in braces is not part of that name.
INSTRUMENTS: dict[str, tuple[Literal["counter", "updowncounter", "histogram"], str]] = {
    "asel.selections": ("counter", "{selection}"),
    "asel.choose.duration": ("histogram", "s"),
    "asel.wait.duration": ("histogram", "s"),
    "asel.waiters": ("updowncounter", "{caller}"),
    "asel.tunes.pending": ("updowncounter", "{tune}"),
    "asel.tune.duration": ("histogram", "s"),
    "asel.candidate.duration": ("histogram", "s"),
    "asel.store.duration": ("histogram", "s"),
    "asel.background.queue": ("updowncounter", "{request}"),
    "asel.telemetry.events": ("counter", "{event}"),
    "asel.telemetry.dropped": ("counter", "{item}"),
}

ATTRIBUTES = (
    "asel.adopted",
    "asel.call",
    "asel.candidate.count",
    "asel.candidate.failed",
    "asel.candidate.index",
    "asel.candidate.measured",
    "asel.candidate.skipped",
    "asel.config",
    "asel.declined",
    "asel.device",
    "asel.failed",
    "asel.found",
    "asel.instead",
    "asel.key",
    "asel.margin",
    "asel.median_s",
    "asel.objective",
    "asel.op",
    "asel.outcome",
    "asel.ranked_s",
    "asel.samples",
    "asel.stage",
    "asel.tier",
    "asel.tune.id",
    "asel.wait_s",
    "asel.waiters",
    "asel.winner",
    "error.type",
    "exception.message",
)

# The OTLP attributes of those keys of log entries that are not simply prefixed with `asel.`: the names that spans use,
# and OpenTelemetry's names for errors. Durations keep their unit: unlike a metric, an attribute has no unit of its own.
_LOG_ATTRIBUTES = {
    "call_key": "asel.key",
    "candidates": "asel.candidate.count",
    "cfg": "asel.config",
    "error_type": "error.type",
    "failed": "asel.candidate.failed",
    "index": "asel.candidate.index",
    "measured": "asel.candidate.measured",
    "message": "exception.message",
    "op_id": "asel.op",
    "skipped": "asel.candidate.skipped",
    "tune_id": "asel.tune.id",
    "waited_s": "asel.wait_s",
}


def log_attribute(key: str) -> str:
    """Return the attribute of an OTLP log record for a key of a log entry."""
    return _LOG_ATTRIBUTES.get(key) or f"asel.{key}"


# From a hit to a tune: 1 us to 300 s.
DURATION_BUCKETS_S = (
    1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3,
    1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip
