"""Span and log record processors for the SDK that export through a queue with priorities.

Only `configure` imports this module, because it needs the SDK.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from opentelemetry.context import (
    _SUPPRESS_INSTRUMENTATION_KEY,
    Context,
    attach,
    detach,
    set_value,
)
from opentelemetry.sdk._logs import LogRecordProcessor, ReadableLogRecord, ReadWriteLogRecord
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.trace import StatusCode

from asel.telemetry.connections import Connection
from asel.telemetry.environment import Limits
from asel.telemetry.export_queue import ExportQueue, Outcome, Rank
from asel.telemetry.names import SPANS

__all__ = ["LogQueue", "SpanQueue", "rank_of_log", "rank_of_span"]

_HIT_TIERS = frozenset({"memory", "override", "overlay"})
_INFO, _WARN = 9, 13  # OpenTelemetry's severity numbers
# The longest wait of `provider.shutdown()`, which takes no timeout. `Telemetry.close` keeps its own, shorter one.
_SHUTDOWN_S = 30.0


def rank_of_span(span: ReadableSpan) -> Rank:
    """Return a span's priority: tunes, candidates, store operations and errors are vital."""
    if span.status.status_code is StatusCode.ERROR:
        return Rank.VITAL
    attributes = span.attributes or {}
    if span.name == "asel.choose":
        if attributes.get("asel.tier") in _HIT_TIERS:
            return Rank.HIT
        return Rank.VITAL if "asel.tune.id" in attributes else Rank.ORDINARY
    return Rank.VITAL if span.name in SPANS else Rank.ORDINARY


def rank_of_log(record: Any) -> Rank:
    """Return a log record's priority: warnings, errors, and asel's own records from level info on are vital."""
    severity = 0 if record.severity_number is None else record.severity_number.value
    if severity >= _WARN or (severity >= _INFO and (record.event_name or "").startswith("asel.")):
        return Rank.VITAL
    return Rank.HIT if 0 < severity < _INFO else Rank.ORDINARY


class _Exporting:
    """The common part of the processors of both signals."""

    queue: ExportQueue[Any]
    _exporter: Any

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self.queue.flush(timeout_millis / 1000)

    def shutdown(self) -> None:
        self.queue.close(_SHUTDOWN_S)
        self._exporter.shutdown()


class SpanQueue(_Exporting, SpanProcessor):
    """Exports sampled spans through a queue."""

    def __init__(self, exporter: Any, limits: Limits, connection: Connection | None = None) -> None:
        self._exporter = exporter
        self.queue: ExportQueue[ReadableSpan] = ExportQueue("traces", _sender(exporter, connection), limits)

    def on_end(self, span: ReadableSpan) -> None:
        context = span.context
        if context is not None and context.trace_flags.sampled:
            self.queue.put(span, rank_of_span(span), context.trace_id)


class LogQueue(_Exporting, LogRecordProcessor):
    """Exports log records through a queue."""

    def __init__(self, exporter: Any, limits: Limits, connection: Connection | None = None) -> None:
        self._exporter = exporter
        self.queue: ExportQueue[ReadableLogRecord] = ExportQueue("logs", _sender(exporter, connection), limits)

    def on_emit(self, log_record: ReadWriteLogRecord) -> None:
        record = copy.copy(log_record.log_record)
        record.context = Context()  # it may hold large objects of the application; the record has the ids
        resource = log_record.resource if log_record.resource is not None else Resource.create({})
        readable = ReadableLogRecord(record, resource, log_record.instrumentation_scope, log_record.limits)
        self.queue.put(readable, rank_of_log(record))


def _sender(exporter: Any, connection: Connection | None) -> Callable[[Sequence[Any]], Outcome]:
    def send(batch: Sequence[Any]) -> Outcome:
        # Without this, an instrumented HTTP client would make a span for each export, and so another export.
        token = attach(set_value(_SUPPRESS_INSTRUMENTATION_KEY, True))
        try:
            if connection is not None:
                connection.outcomes.clear()
            if exporter.export(batch).name == "SUCCESS":
                return Outcome.ARRIVED
            return Outcome.UNREACHED if connection is None else connection.failure()
        finally:
            detach(token)

    return send
