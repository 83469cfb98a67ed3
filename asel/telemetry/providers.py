"""Building the SDK's providers from plans. Only this module and `processors` import OpenTelemetry's SDK."""

from __future__ import annotations

import sys
from typing import Any

from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import ConsoleLogRecordExporter
from opentelemetry.sdk.metrics import (
    AlwaysOffExemplarFilter,
    AlwaysOnExemplarFilter,
    MeterProvider,
    TraceBasedExemplarFilter,
)
from opentelemetry.sdk.metrics.export import ConsoleMetricExporter, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider, sampling
from opentelemetry.sdk.trace.export import ConsoleSpanExporter

from asel.errors import InvalidRequestError
from asel.telemetry.environment import Destination, Plan, Signal
from asel.telemetry.export_queue import ExportQueue
from asel.telemetry.processors import LogQueue, SpanQueue

__all__ = ["make_providers"]

# For each signal: the exporter to the console, and the module and class of the one for OTLP, which is an extra.
_EXPORTERS: dict[Signal, tuple[Any, str, str]] = {
    "traces": (ConsoleSpanExporter, "trace_exporter", "OTLPSpanExporter"),
    "metrics": (ConsoleMetricExporter, "metric_exporter", "OTLPMetricExporter"),
    "logs": (ConsoleLogRecordExporter, "_log_exporter", "OTLPLogExporter"),
}
_FILTERS: dict[str, Any] = {
    "trace_based": TraceBasedExemplarFilter,
    "always_on": AlwaysOnExemplarFilter,
    "always_off": AlwaysOffExemplarFilter,
}


def make_providers(
    service_name: str, plans: list[Plan], made: list[Any], queues: list[ExportQueue[Any]]
) -> dict[Signal, Any]:
    """Return a provider for each plan, without making any of them global.

    Each provider is added to `made` and each queue to `queues` at once, so that the caller can undo a later failure.

    Raises:
        InvalidRequestError: the exporter is not installed.
    """
    resource = Resource.create({"service.name": service_name})
    makers = {"traces": _make_traces, "metrics": _make_metrics, "logs": _make_logs}
    return {plan.signal: makers[plan.signal](resource, plan, made, queues) for plan in plans}


# No provider shuts down at exit by itself: the SDK would wait long for a dead collector. `Telemetry.close` is bounded.


def _make_traces(resource: Resource, plan: Plan, made: list[Any], queues: list[ExportQueue[Any]]) -> TracerProvider:
    provider = TracerProvider(_sampler(plan), resource, shutdown_on_exit=False)
    made.append(provider)
    for destination in plan.destinations:
        processor = SpanQueue(_exporter(plan.signal, destination), plan.limits)
        queues.append(processor.queue)
        provider.add_span_processor(processor)
    return provider


def _sampler(plan: Plan) -> sampling.Sampler:
    match plan.sampler:
        case "always_on":
            return sampling.ALWAYS_ON
        case "always_off":
            return sampling.ALWAYS_OFF
        case "parentbased_always_off":
            return sampling.DEFAULT_OFF
        case "traceidratio":
            return sampling.TraceIdRatioBased(plan.share)
        case "parentbased_traceidratio":
            return sampling.ParentBasedTraceIdRatio(plan.share)
    return sampling.DEFAULT_ON


def _make_metrics(resource: Resource, plan: Plan, made: list[Any], queues: list[ExportQueue[Any]]) -> MeterProvider:
    readers: list[PeriodicExportingMetricReader] = []
    try:
        for destination in plan.destinations:
            exporter = _exporter(plan.signal, destination)
            readers.append(PeriodicExportingMetricReader(exporter, plan.interval_ms, plan.timeout_ms))
        exemplars = _FILTERS[plan.exemplar_filter]()
        provider = MeterProvider(readers, resource, exemplar_filter=exemplars, shutdown_on_exit=False)
    except BaseException:
        for reader in readers:  # each has started a thread
            reader.shutdown()
        raise
    made.append(provider)
    return provider


def _make_logs(resource: Resource, plan: Plan, made: list[Any], queues: list[ExportQueue[Any]]) -> LoggerProvider:
    provider = LoggerProvider(resource, shutdown_on_exit=False)
    made.append(provider)
    for destination in plan.destinations:
        processor = LogQueue(_exporter(plan.signal, destination), plan.limits)
        queues.append(processor.queue)
        provider.add_log_record_processor(processor)
    return provider


def _exporter(signal: Signal, destination: Destination) -> Any:
    console, module_name, kind = _EXPORTERS[signal]
    if destination.kind == "console":
        return console(out=sys.stderr)  # stdout is the program's own
    try:
        module = __import__(f"opentelemetry.exporter.otlp.proto.http.{module_name}", fromlist=[kind])
    except ImportError as error:
        raise InvalidRequestError(
            f"configure: sending {signal} to {destination} needs an exporter; install it with: pip install 'asel[otlp]'"
        ) from error
    return getattr(module, kind)(endpoint=destination.endpoint, headers=destination.headers or None)
