"""Events as OpenTelemetry spans, made when they end with the times they had."""

from __future__ import annotations

import time
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context, get_current
from opentelemetry.trace import Span, Status, StatusCode

from asel.events import (
    AutotuneFailed,
    AutotuneFinish,
    AutotuneStart,
    CacheHit,
    CandidateFailed,
    CandidateMeasured,
    Event,
    Heuristics,
    NoAnswer,
    OverlayHit,
    Override,
)

__all__ = ["OpenTelemetrySink"]

_ANSWERS: dict[type[Event], str] = {
    Override: "override",
    OverlayHit: "overlay",
    Heuristics: "heuristics",
    NoAnswer: "error",
}
_CANDIDATES = (CandidateMeasured, CandidateFailed)
_TUNES = frozenset({AutotuneStart, AutotuneFinish, AutotuneFailed})


class OpenTelemetrySink:
    """Turns answers into `asel.choose` spans, tunes into `asel.autotune` and candidates into `asel.candidate`.

    Uses OpenTelemetry's API only: where the application has set up no provider, nothing is recorded.
    Inside a trace that is not sampled a cache hit is not even made into an event.
    """

    def __init__(self, tracer: trace.Tracer | None = None) -> None:
        self._given = tracer is not None
        self._tracer = trace.get_tracer("asel") if tracer is None else tracer
        self._tunes: dict[str, Span] = {}
        self._unsampled: Context | None = None

    def wants(self, kind: type[Event]) -> bool:
        here = get_current()
        if here is not self._unsampled:
            parent = trace.get_current_span(here)
            if parent.is_recording():
                return True
            if not parent.get_span_context().is_valid:
                # Without a trace, the provider's sampler has the say.
                return kind in _TUNES or self._given or _has_provider()
            # A context never changes, and a trace that is not sampled stays so: no need to look again.
            self._unsampled = here
        return kind in _TUNES

    def emit(self, event: Event) -> None:
        if isinstance(event, AutotuneStart):
            span = self._start("asel.autotune", event, {"asel.candidate.count": event.candidates})
            self._tunes[event.tune_id] = span
        elif isinstance(event, AutotuneFinish | AutotuneFailed):
            self._end_tune(event)
        elif isinstance(event, _CANDIDATES):
            self._candidate(event)
        elif isinstance(event, CacheHit):
            self._answer(event, event.level)
        elif type(event) in _ANSWERS:
            self._answer(event, _ANSWERS[type(event)])

    def _answer(self, event: Event, tier: str) -> None:
        span = self._start("asel.choose", event, {"asel.tier": tier})
        if isinstance(event, NoAnswer):
            span.set_attribute("error.type", "NoConfigError")
            span.set_status(Status(StatusCode.ERROR, event.reason))
        span.end()

    def _candidate(self, event: CandidateMeasured | CandidateFailed) -> None:
        tune = self._tunes.get(event.tune_id)
        context = None if tune is None else trace.set_span_in_context(tune)
        span = self._start("asel.candidate", event, {"asel.candidate.index": event.index}, context)
        if isinstance(event, CandidateFailed):
            span.set_attribute("error.type", event.error_type)
            span.set_status(Status(StatusCode.ERROR, event.message))
        span.end()

    def _end_tune(self, event: AutotuneFinish | AutotuneFailed) -> None:
        span = self._tunes.pop(event.tune_id, None)
        if span is None:
            return
        if isinstance(event, AutotuneFinish):
            span.set_attribute("asel.config", repr(event.cfg))
        else:
            span.set_attribute("error.type", event.error_type)
            span.set_status(Status(StatusCode.ERROR, event.message))
        span.end()

    def _start(self, name: str, event: Event, facts: dict[str, Any], context: Any = None) -> Span:
        attributes: dict[str, Any] = dict(facts)
        if event.key is not None:
            attributes |= {"asel.op": event.key.op_id, "asel.device": event.key.device, "asel.key": event.key.call_key}
        if (cfg := getattr(event, "cfg", None)) is not None:
            attributes["asel.config"] = repr(cfg)
        if (tune_id := getattr(event, "tune_id", None)) is not None:
            attributes["asel.tune.id"] = tune_id
        # The event's own clock has no fixed relation to the wall's; but the event ended just now.
        start_ns = time.time_ns() - int((event.end - event.start) * 1e9)
        return self._tracer.start_span(name, context, attributes=attributes, start_time=start_ns)


def _has_provider() -> bool:
    return type(trace.get_tracer_provider()) not in _PLACEHOLDERS


_PLACEHOLDERS = frozenset({trace.NoOpTracerProvider, trace.ProxyTracerProvider})
