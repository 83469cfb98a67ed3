"""An exporter that appends spans to a file as OTLP JSON, one line for each batch."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import format_span_id, format_trace_id

__all__ = ["SpanFile"]


class SpanFile(SpanExporter):
    """Writes each batch as one line: `{"resourceSpans": [...]}`."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._lock = threading.Lock()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        line = json.dumps(_request(spans), ensure_ascii=False, separators=(",", ":"))
        with self._lock:
            if self._file.closed:
                return SpanExportResult.FAILURE
            self._file.write(line + "\n")
            self._file.flush()
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        with self._lock:
            self._file.close()


def _request(spans: Sequence[ReadableSpan]) -> dict[str, Any]:
    scopes: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for span in spans:
        scope = span.instrumentation_scope
        name = ("", "") if scope is None else (scope.name, scope.version or "")
        scopes.setdefault(name, []).append(_span(span))
    resource = _attributes(spans[0].resource.attributes) if spans else []
    by_scope = [{"scope": {"name": name, "version": version}, "spans": own} for (name, version), own in scopes.items()]
    return {"resourceSpans": [{"resource": {"attributes": resource}, "scopeSpans": by_scope}]}


def _span(span: ReadableSpan) -> dict[str, Any]:
    context = span.get_span_context()
    assert context is not None
    facts: dict[str, Any] = {
        "traceId": format_trace_id(context.trace_id),
        "spanId": format_span_id(context.span_id),
        "name": span.name,
        "kind": span.kind.value + 1,  # OTLP counts from 1, the SDK from 0
        "startTimeUnixNano": str(span.start_time or 0),
        "endTimeUnixNano": str(span.end_time or 0),
        "attributes": _attributes(span.attributes or {}),
        "status": {"code": span.status.status_code.value},
    }
    if span.parent is not None:
        facts["parentSpanId"] = format_span_id(span.parent.span_id)
    if span.status.description:
        facts["status"]["message"] = span.status.description
    if span.events:
        facts["events"] = [
            {"timeUnixNano": str(e.timestamp), "name": e.name, "attributes": _attributes(e.attributes or {})}
            for e in span.events
        ]
    if span.links:
        facts["links"] = [
            {
                "traceId": format_trace_id(link.context.trace_id),
                "spanId": format_span_id(link.context.span_id),
                "attributes": _attributes(link.attributes or {}),
            }
            for link in span.links
        ]
    return facts


def _attributes(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in given.items()]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}  # 64 bits do not fit into a JSON number
    if isinstance(value, float):
        return {"doubleValue": value if abs(value) < float("inf") else str(value)}
    if isinstance(value, list | tuple):
        return {"arrayValue": {"values": [_value(one) for one in value]}}
    return {"stringValue": str(value)}
