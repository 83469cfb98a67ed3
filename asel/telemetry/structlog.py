"""Events as structlog entries."""

from __future__ import annotations

import logging
from typing import Any

import structlog
from structlog import is_configured

from asel.events import Event

__all__ = ["StructlogSink"]


class StructlogSink:
    """Logs each event as `asel.<name>` with its facts as keys.

    Without a logger of the application's, and where it has not configured structlog, entries go to
    the standard logger `asel`, which is silent until asked.
    """

    def __init__(self, logger: Any = None) -> None:
        self._given = logger
        self._bound: Any = None
        self._stdlib = logging.getLogger("asel")

    def wants(self, kind: type[Event]) -> bool:
        """Tell whether an entry of this kind's level would go anywhere."""
        if self._given is None and not is_configured():
            return self._stdlib.isEnabledFor(_LEVELS[kind.severity])
        is_enabled = getattr(self._logger(), "is_enabled_for", None)
        return True if is_enabled is None else bool(is_enabled(_LEVELS[kind.severity]))

    def emit(self, event: Event) -> None:
        facts = event.fields()
        facts["duration_s"] = event.end - event.start
        if self._goes_to_stdlib():
            level = _LEVELS[event.severity]
            if self._stdlib.isEnabledFor(level):
                self._stdlib.log(level, "asel.%s %s", event.name, facts, extra={"asel": facts})
            return
        getattr(self._logger(), event.severity)(f"asel.{event.name}", **facts)

    def _goes_to_stdlib(self) -> bool:
        return self._given is None and not structlog.is_configured()

    def _logger(self) -> Any:
        # Bound once: structlog's lazy proxy assembles a logger anew at every call.
        if self._bound is None:
            self._bound = (structlog.get_logger("asel") if self._given is None else self._given).bind()
        return self._bound


_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
