"""Events as structlog entries."""

from __future__ import annotations

import logging
import sys
import time
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from opentelemetry.trace import get_current_span

from asel.events import Answer, BaseSink, CacheHit, CandidateFailed, CandidateMeasured, Event
from asel.telemetry.sentences import sentence

__all__ = ["Entry", "StructlogSink", "current_entry"]

# Times on the loop's clock are meaningless to a reader, who gets `duration_s` instead.
_NOT_SHOWN = frozenset({"start", "end"})
# Hits between two checks for a new configuration of structlog.
_CHECK_INTERVAL = 64


@dataclass(frozen=True, slots=True)
class Entry:
    """The event, the time and asel's keys of a log entry: facts that structlog does not pass to its processors."""

    time_ns: int
    names: frozenset[str]
    event: Event


current_entry: ContextVar[Entry | None] = ContextVar("asel_log_entry", default=None)
"""Set while structlog processes one of asel's entries."""


class StructlogSink(BaseSink):
    """Logs each event as `asel.<name>` with its facts as keys.

    Without `logger`, and if the application has not configured structlog, entries go to the standard logger
    `asel`, which is silent by default, as sentences with the facts in `record.asel`. An entry is written after the
    event, with the context variables and the span of the caller.
    """

    def __init__(self, logger: Any = None) -> None:
        self._given = logger
        self._bound: Any = None
        self._bound_to: Any = None
        self._hits_enabled: bool | None = None
        self._hits_seen = 0
        self._stdlib = logging.getLogger("asel")

    def wants(self, kind: type[Event]) -> bool:
        """Return whether the logger is enabled for the level of this kind of event."""
        if self._goes_to_stdlib():
            return self._stdlib.isEnabledFor(_LEVELS[kind.severity])
        return self._enabled(self._logger(), _LEVELS[kind.severity])

    def wants_hit(self) -> bool:
        """Return the same for hits, but faster: a new configuration of structlog is noticed within 64 hits."""
        if self._given is None and not _structlog_is_configured():
            return self._stdlib.isEnabledFor(logging.DEBUG)
        self._hits_seen += 1
        if self._hits_seen % _CHECK_INTERVAL == 0 or self._bound is None:
            self._logger()
        return self._hits_enabled if self._hits_enabled is not None else self._enabled(self._bound, logging.DEBUG)

    def is_silent(self) -> bool:
        """Return whether hits are not logged, because the logger is not enabled for their level."""
        return not self.wants(CacheHit)

    def _enabled(self, bound: Any, level: int) -> bool:
        # structlog's filtering loggers have the first method, standard loggers the second.
        for ask in ("is_enabled_for", "isEnabledFor"):
            if hasattr(type(bound), ask):  # of the type, because some loggers create any attribute on demand
                return bool(getattr(bound, ask)(level))
        return True

    def emit(self, event: Event) -> None:
        """Log an event that has just ended."""
        self.emit_at(event, time.time_ns() - round(event.end * 1e9))

    def emit_at(self, event: Event, epoch_ns: int) -> None:
        """Log the event, with the time at which it ended."""
        facts = _facts(event)
        time_ns = epoch_ns + round(event.end * 1e9)
        if self._goes_to_stdlib():
            self._log(_LEVELS[event.severity], event, facts, time_ns)
            return
        token = current_entry.set(Entry(time_ns, frozenset(facts), event))
        try:
            getattr(self._logger(), event.severity)(f"asel.{event.name}", **facts)
        finally:
            current_entry.reset(token)

    def _log(self, level: int, event: Event, facts: dict[str, Any], time_ns: int) -> None:
        if not self._stdlib.isEnabledFor(level):
            return
        record = self._stdlib.makeRecord(
            "asel", level, __file__, 0, "asel.%s: %s", (event.name, sentence(event)), None, extra={"asel": facts}
        )
        late_s = record.created - time_ns / 1e9
        record.created -= late_s
        record.msecs = time_ns // 1_000_000 % 1000
        record.relativeCreated -= late_s * 1000
        self._stdlib.handle(record)

    def _goes_to_stdlib(self) -> bool:
        return self._given is None and not _structlog_is_configured()

    def _logger(self) -> Any:
        # Bound once for each configuration: structlog's lazy proxy would build a logger for every call.
        configuration = None
        if self._given is None:
            import structlog

            configuration = structlog.get_config()
        if self._bound is None or configuration != self._bound_to:
            self._bound_to = configuration
            self._bound = (structlog.get_logger("asel") if self._given is None else self._given).bind()
            # The level of a filtering logger is part of its type, so it never changes.
            fixed = hasattr(type(self._bound), "is_enabled_for")
            self._hits_enabled = self._bound.is_enabled_for(logging.DEBUG) if fixed else None
        return self._bound


def _structlog_is_configured() -> bool:
    # Not imported here, which takes long: an application that has configured structlog has imported it.
    is_configured = getattr(sys.modules.get("structlog"), "is_configured", None)
    return is_configured is not None and bool(is_configured())


def _facts(event: Event) -> dict[str, Any]:
    """Return the keys of an entry: the event's facts, without the empty ones."""
    facts = {
        name: value
        for name, value in event.fields().items()
        if name not in _NOT_SHOWN and value is not None and value != {}
    }
    if isinstance(event, CandidateMeasured | CandidateFailed):
        facts = {name: value for name, value in facts.items() if name not in ("compiled", "measured")}
    if isinstance(event, Answer):
        facts.pop("level", None)  # a cache hit's; in a log the word means something else
        facts["tier"] = event.tier
    if facts.get("tune_id") is None:
        facts.pop("wait_s", None)
        facts.pop("began", None)
    facts["duration_s"] = event.end - event.start
    context = get_current_span().get_span_context()
    if context.is_valid:
        facts |= {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}
    return facts


_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
