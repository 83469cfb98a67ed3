"""Reads spans from OTLP JSON of any program."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asel.errors import InvalidRequestError
from asel.redaction import redact

__all__ = ["BadLine", "Span", "read_spans"]

_ID = re.compile(r"[0-9a-fA-F]+")
_ERROR = 2


@dataclass(frozen=True, slots=True)
class Span:
    """One span of a waterfall. Times are in nanoseconds since the epoch."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    start_ns: int
    end_ns: int
    service: str = ""
    failed: bool = False
    attributes: dict[str, Any] = field(default_factory=dict)
    links: tuple[tuple[str, str], ...] = ()
    """The trace and the span of each link."""

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that could not be read completely."""

    number: int
    reason: str


def read_spans(path: Path) -> tuple[list[Span], list[BadLine]]:
    """Return the spans in a file of OTLP JSON lines, and the lines that could not be read completely.

    A file with a single JSON document on several lines is read as well; lines of metrics and log records are ignored.

    Raises:
        InvalidRequestError: the file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InvalidRequestError(f"cannot read {path}: {redact(error.strerror or error)}; check the path") from error
    spans: dict[tuple[str, str], Span] = {}
    bad: list[BadLine] = []
    for number, line in _documents(text):
        problems: list[str] = []
        try:
            for span in _spans_in(json.loads(line), problems):
                spans[span.trace_id, span.span_id] = span
        except (ValueError, RecursionError) as error:
            problems = [redact(error) or "it is nested too deeply"]
        if problems:
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            bad.append(BadLine(number, problems[0] + more))
    return list(spans.values()), bad


def _documents(text: str) -> list[tuple[int, str]]:
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if lines and lines[0][1].strip() in ("{", "["):
        try:
            json.loads(text)
        except (ValueError, RecursionError):
            return lines
        return [(1, text)]
    return lines


def _spans_in(document: Any, problems: list[str]) -> list[Span]:
    if not isinstance(document, dict):
        problems.append(f"it is a JSON {type(document).__name__}, not an object")
        return []
    found = []
    for resource in _objects(document, "resourceSpans"):
        described = resource.get("resource")
        attributes = _attributes(described) if isinstance(described, dict) else {}
        service = str(attributes.get("service.name", ""))
        for scope in _objects(resource, "scopeSpans"):
            for facts in _objects(scope, "spans"):
                try:
                    found.append(_span(facts, service))
                except (KeyError, TypeError, ValueError) as error:
                    missing = " is missing" if isinstance(error, KeyError) else ""
                    problems.append(f"a span was left out: {redact(error)}{missing}")
    return found


def _objects(facts: dict[str, Any], name: str) -> list[dict[str, Any]]:
    listed = facts.get(name)
    return [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []


def _span(facts: dict[str, Any], service: str) -> Span:
    start_ns, end_ns = int(facts["startTimeUnixNano"]), int(facts["endTimeUnixNano"])
    if end_ns < start_ns:
        raise ValueError("it ends before it starts")
    status = facts.get("status")
    return Span(
        _id(facts["traceId"]),
        _id(facts["spanId"]),
        str(facts.get("parentSpanId") or "").lower(),
        str(facts.get("name", "?")),
        start_ns,
        end_ns,
        service,
        isinstance(status, dict) and status.get("code") in (_ERROR, "STATUS_CODE_ERROR"),
        _attributes(facts),
        tuple((str(link.get("traceId")), str(link.get("spanId"))) for link in _objects(facts, "links")),
    )


def _id(value: Any) -> str:
    if not isinstance(value, str) or not _ID.fullmatch(value):
        raise ValueError(f"{value!r:.40} is not an id")
    return value.lower()


def _attributes(facts: dict[str, Any]) -> dict[str, Any]:
    return {str(one.get("key")): _value(one.get("value")) for one in _objects(facts, "attributes")}


def _value(value: Any) -> Any:
    """Return a plain value from `{"intValue": "5"}` and its like."""
    if not isinstance(value, dict) or not value:
        return None
    kind, content = next(iter(value.items()))
    if kind == "intValue":
        return int(content) if str(content).lstrip("-").isdigit() else None
    if kind == "arrayValue" and isinstance(content, dict):
        return [_value(one) for one in _objects(content, "values")]
    if kind == "kvlistValue" and isinstance(content, dict):
        return {str(one.get("key")): _value(one.get("value")) for one in _objects(content, "values")}
    return content
