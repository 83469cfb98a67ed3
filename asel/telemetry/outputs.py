"""The destinations of structlog entries after `configure`: a collector, the console, a file."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import IO, Any

import structlog
from opentelemetry import _logs, context

from asel.telemetry.logs import current_entry
from asel.telemetry.names import log_attribute
from asel.telemetry.sentences import sentence

__all__ = ["Output", "configure_structlog", "printed", "sent"]

Output = Callable[[dict[str, Any]], object]

_SEVERITIES = {"debug": 5, "info": 9, "warning": 13, "error": 17, "critical": 21}
# Levels that OpenTelemetry spells differently.
_SEVERITY_TEXTS = {"warning": "WARN", "critical": "FATAL"}
# Keys that are fields of an OTLP record.
_FIELDS = frozenset({"level", "event", "timestamp", "trace_id", "span_id"})


def configure_structlog(outputs: Sequence[Output]) -> None:
    """Configure structlog to pass each entry, from level info on, to every output."""

    def hand_out(logger: Any, level: str, entry: Any) -> Any:
        for output in outputs:
            output(dict(entry))
        raise structlog.DropEvent

    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            _stamp,
            hand_out,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
    )


def _stamp(logger: Any, level: str, entry: Any) -> Any:
    """Add the time of the event: asel's own entries are written later, in the telemetry thread."""
    moment = datetime.fromtimestamp(_time_ns() / 1e9, UTC)
    entry["timestamp"] = moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
    return entry


def _time_ns() -> int:
    own = current_entry.get()
    return time.time_ns() if own is None else own.time_ns


def printed(stream: IO[str] | None = None) -> Output:
    """Return an output that writes JSON lines to a stream, or readable ones to the console."""
    render: Any
    if stream is None:
        render = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    else:
        render = structlog.processors.JSONRenderer(default=str)

    def write(entry: dict[str, Any]) -> None:
        print(render(None, entry["level"], entry), file=stream or sys.stderr)

    return write


def sent(logger: _logs.Logger) -> Output:
    """Return an output that emits entries as OpenTelemetry log records, in the current span's context.

    Following OpenTelemetry's conventions for events, asel's own entries have an event name and attributes; their
    body is a sentence.
    """

    def send(entry: dict[str, Any]) -> None:
        own, level = current_entry.get(), entry["level"]
        names = frozenset[str]() if own is None else own.names
        logger.emit(
            _logs.LogRecord(
                timestamp=_time_ns(),
                observed_timestamp=time.time_ns(),
                severity_text=_SEVERITY_TEXTS.get(level, level.upper()),
                severity_number=_logs.SeverityNumber(_SEVERITIES.get(level, 9)),
                body=entry["event"] if own is None else sentence(own.event),
                event_name=None if own is None else entry["event"],
                attributes={
                    log_attribute(key) if key in names else key: _plain(value)
                    for key, value in entry.items()
                    if key not in _FIELDS
                },
                context=context.get_current(),
            )
        )

    return send


def _plain(value: Any) -> Any:
    if isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return [f"{key}: {text}" for key, text in value.items()]
    return str(value)
