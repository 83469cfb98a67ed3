"""Where events go: spans, measurements and log entries, made in a thread so that no caller pays for them."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from asel.events import Sink
from asel.telemetry.metrics import MetricsSink
from asel.telemetry.opentelemetry import OpenTelemetrySink
from asel.telemetry.pipeline import Pipeline, PipelineStatistics, shared_pipeline
from asel.telemetry.setup import Telemetry, configure
from asel.telemetry.structlog import StructlogSink
from asel.telemetry.tap import Tap

__all__ = [
    "MetricsSink",
    "OpenTelemetrySink",
    "Pipeline",
    "PipelineStatistics",
    "StructlogSink",
    "Tap",
    "Telemetry",
    "configure",
    "default_sinks",
    "gathered",
    "shared_pipeline",
]


@functools.cache
def default_sinks() -> tuple[Sink, ...]:
    """Return the sinks of a chain that was given none: telemetry is on."""
    return (OpenTelemetrySink(), MetricsSink(), StructlogSink())


def gathered(sinks: Iterable[Sink], pipeline: Pipeline | None = None) -> tuple[Sink, ...]:
    """Return sinks as a chain uses them: those that take their time behind one tap, in the place of the first.

    They say so with `deferred = True`, as asel's own do.
    """
    given = tuple(sinks)
    slow = [sink for sink in given if getattr(sink, "deferred", False) is True]
    if not slow:
        return given
    tap = Tap(slow, shared_pipeline() if pipeline is None else pipeline)
    return (tap, *(sink for sink in given if sink not in slow))
