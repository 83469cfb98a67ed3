"""Sinks that turn events into spans, measurements and log entries, and `configure`, which sets up their exporters."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from asel.events import Sink
from asel.events.deferred_sinks import DeferredSinks
from asel.events.pipeline import Pipeline, PipelineStatistics, shared_pipeline
from asel.telemetry.logs import StructlogSink
from asel.telemetry.metrics import MetricsSink
from asel.telemetry.spans import OpenTelemetrySink

if TYPE_CHECKING:
    from asel.telemetry.configuration import Telemetry, configure

__all__ = [
    "DeferredSinks",
    "MetricsSink",
    "OpenTelemetrySink",
    "Pipeline",
    "PipelineStatistics",
    "StructlogSink",
    "Telemetry",
    "configure",
    "default_sinks",
    "shared_pipeline",
]


@functools.cache
def default_sinks() -> tuple[Sink, ...]:
    """Return the sinks of a selector without sinks of its own: telemetry is on by default."""
    return (OpenTelemetrySink(), MetricsSink(), StructlogSink())


def __getattr__(name: str) -> Any:
    if name in ("Telemetry", "configure"):  # need structlog, which takes long to import
        from asel.telemetry import configuration

        globals()[name] = getattr(configuration, name)
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
