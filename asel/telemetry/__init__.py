"""Where events go when nobody says otherwise."""

from __future__ import annotations

from asel.events import Sink
from asel.telemetry.opentelemetry import OpenTelemetrySink
from asel.telemetry.structlog import StructlogSink

__all__ = ["OpenTelemetrySink", "StructlogSink", "default_sinks"]


def default_sinks() -> tuple[Sink, ...]:
    """Return the sinks of a chain that was given none: telemetry is on."""
    return (StructlogSink(), OpenTelemetrySink())
