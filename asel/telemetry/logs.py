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

# Times on the loop's clock mean nothing to a reader; `duration_s` does.
_NOT_SHOWN = frozenset({"start", "end"})
_LOOK_EVERY = 64


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry's event, its time, and which of its keys are asel's: structlog's processors are not passed these."""

    time_ns: int
    names: frozenset[str]
    event: Event


current_entry: ContextVar[Entry | None] = ContextVar("asel_log_entry", default=None)
"""Set while structlog processes one of asel's entries, which is later than the event."""


class StructlogSink(BaseSink):
    """Logs each event as `asel.<name>` with its facts as keys.

    Without a logger of the application's, and if it has not configured structlog, entries go to
    the standard logger `asel`, which is silent until asked, as sentences with the facts in
    `record.asel`. An entry is written later than its event happened, with the context variables and the
    span of its caller.
    """

    def __init__(self, logger: Any = None) -> None:
        self._given = logger
        self._bound: Any = None
        self._bound_to: Any = None
        self._hits_enabled: bool | None = None
        self._looks = 0
        self._stdlib = logging.getLogger("asel")

    def wants(self, kind: type[Event]) -> bool:
        """Tell whether a logger is enabled for this kind's level."""
        if self._goes_to_stdlib():
            return self._stdlib.isEnabledFor(_LEVELS[kind.severity])
        return self._enabled(self._logger(), _LEVELS[kind.severity])

    def wants_hit(self) -> bool:
        """The same, for hits: another configuration of structlog is noticed within some."""
        if self._given is None and not _structlog_is_configured():
            return self._stdlib.isEnabledFor(logging.DEBUG)
        self._looks += 1
        if self._looks % _LOOK_EVERY == 0 or self._bound is None:
            self._logger()
        return self._hits_enabled if self._hits_enabled is not None else self._enabled(self._bound, logging.DEBUG)

    def is_silent(self) -> bool:
        """Tell whether hits are not logged, because no logger is enabled for their level."""
        return not self.wants(CacheHit)

    def _enabled(self, bound: Any, level: int) -> bool:
        # A filtering logger knows its level; a standard one underneath is asked itself.
        for ask in ("is_enabled_for", "isEnabledFor"):
            if hasattr(type(bound), ask):  # of the type: some loggers have whatever attribute they are asked for
                return bool(getattr(bound, ask)(level))
        return True

    def emit(self, event: Event) -> None:
        """Log an event that ended just now."""
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
        # Bound once for a configuration: structlog's lazy proxy assembles a logger anew at every call.
        configuration = None
        if self._given is None:
            import structlog

            configuration = structlog.get_config()
        if self._bound is None or configuration != self._bound_to:
            self._bound_to = configuration
            self._bound = (structlog.get_logger("asel") if self._given is None else self._given).bind()
            # A filtering logger's level is its type's, and never changes.
            fixed = hasattr(type(self._bound), "is_enabled_for")
            self._hits_enabled = self._bound.is_enabled_for(logging.DEBUG) if fixed else None
        return self._bound


def _structlog_is_configured() -> bool:
    # Importing structlog takes long, and an application that has configured it has imported it.
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
