"""Builds the SDK's providers from plans. Only this module and `processors` import OpenTelemetry's SDK."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from inspect import signature
from typing import Any

from opentelemetry.metrics import NoOpMeterProvider
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
from asel.telemetry.connections import Connection
from asel.telemetry.environment import Destination, Limits, Plan, Signal
from asel.telemetry.export_queue import ExportQueue
from asel.telemetry.global_providers import GLOBAL_PROVIDERS
from asel.telemetry.processors import LogQueue, SpanQueue

__all__ = ["make_providers"]

# For each signal: the console exporter, and the module and class of the OTLP exporter, which is an extra.
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
    service_name: str, plans: list[Plan], made: dict[Signal, Any], queues: list[ExportQueue[Any]]
) -> None:
    """Make a provider for each plan, without making any of them global.

    Each provider is added to `made` and each queue to `queues` immediately, so that the caller can undo them after a
    failure.

    Raises:
        InvalidRequestError: the exporter is not installed, or its credential provider does not work.
    """
    resource = Resource.create({"service.name": service_name})
    planned = {plan.signal: plan for plan in plans}
    # Metrics first: the other providers report their own metrics there. Otherwise they would get the global
    # provider, which would set the one that OTEL_PYTHON_METER_PROVIDER names.
    if "metrics" in planned:
        made["metrics"] = _make_metrics(resource, planned["metrics"])
    meters = made.get("metrics") or GLOBAL_PROVIDERS["metrics"].current or NoOpMeterProvider()
    if "traces" in planned:
        plan = planned["traces"]
        traces = TracerProvider(_sampler(plan), resource, shutdown_on_exit=False, **_accepted(TracerProvider, meters))
        made["traces"] = traces
        for destination in plan.destinations:
            spans = SpanQueue(*_queue_arguments(plan, destination, meters))
            queues.append(spans.queue)
            traces.add_span_processor(spans)
    if "logs" in planned:
        plan = planned["logs"]
        logs = LoggerProvider(resource, shutdown_on_exit=False, **_accepted(LoggerProvider, meters))
        made["logs"] = logs
        for destination in plan.destinations:
            records = LogQueue(*_queue_arguments(plan, destination, meters))
            queues.append(records.queue)
            logs.add_log_record_processor(records)


# No provider shuts down by itself at exit: the SDK would wait long for a dead collector. `Telemetry.close` is bounded.


def _accepted(kind: Callable[..., Any], meters: Any) -> dict[str, Any]:
    """Return the option for the provider of an object's own metrics, which older SDKs do not have."""
    return {"meter_provider": meters} if "meter_provider" in signature(kind).parameters else {}


def _queue_arguments(plan: Plan, destination: Destination, meters: Any) -> tuple[Any, Limits, Connection | None]:
    exporter, connection = _exporter(plan.signal, destination, meters)
    return exporter, plan.limits, connection


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


def _make_metrics(resource: Resource, plan: Plan) -> MeterProvider:
    readers: list[PeriodicExportingMetricReader] = []
    try:
        for destination in plan.destinations:
            exporter, _ = _exporter(plan.signal, destination, NoOpMeterProvider())
            readers.append(PeriodicExportingMetricReader(exporter, plan.interval_ms, plan.timeout_ms))
        exemplars = _FILTERS[plan.exemplar_filter]()
        return MeterProvider(readers, resource, exemplar_filter=exemplars, shutdown_on_exit=False)
    except BaseException:
        for reader in readers:  # each has started a thread
            reader.shutdown()
        raise


def _exporter(signal: Signal, destination: Destination, meters: Any) -> tuple[Any, Connection | None]:
    console, module_name, name = _EXPORTERS[signal]
    if destination.kind == "console":
        return console(out=sys.stderr), None  # stdout is the program's own
    try:
        kind = getattr(import_module(f"opentelemetry.exporter.otlp.proto.http.{module_name}"), name)
        connection = Connection(_session(destination))
    except ImportError as error:
        raise InvalidRequestError(
            f"configure: sending {signal} to {destination} needs an exporter; install it with: pip install 'asel[otlp]'"
        ) from error
    headers = destination.headers or None
    exporter = kind(
        endpoint=destination.endpoint, headers=headers, session=connection.session, **_accepted(kind, meters)
    )
    return exporter, connection


def _session(destination: Destination) -> Any:
    requests = import_module("requests")
    found = destination.credential_provider
    if found is None:
        return requests.Session()
    try:
        session = found.load()()
    except Exception as error:
        raise InvalidRequestError(
            f"configure: the credential provider {found.name!r} failed: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(session, requests.Session):
        raise InvalidRequestError(
            f"configure: the credential provider {found.name!r} returned {type(session).__name__},"
            " and should return a requests.Session"
        )
    return session
