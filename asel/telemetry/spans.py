"""Events as OpenTelemetry spans, which are made after the event with the event's times.

    asel.choose                     one call, with the tier that answered
    |- asel.store.get
    |- asel.store.claim             under the tune, if the call did not wait for it
    '- asel.autotune                under the call that began it; the other waiting calls have a link to it
       |- asel.candidate            with its config first; `asel.winner` or `asel.failed`, if it won or failed
       |  |- asel.candidate.compile
       |  '- asel.candidate.measure
       '- asel.store.put
    asel.withdraw                   ERROR: a winner failed in a real call; under the caller's current span

A failed candidate does not have status ERROR, which would mark the whole trace; a tune in which nothing could be
measured has it. A candidate has a span for each of its compilations.

A background tune begins its own trace, with a link to the call that caused it: as a child, it
would outlive its parent.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextvars import copy_context
from typing import Any, TypeVar

from opentelemetry import trace
from opentelemetry.context import Context, attach, get_current
from opentelemetry.trace import Link, NonRecordingSpan, Span, SpanContext, Status, StatusCode, set_span_in_context

from asel.events import (
    Answer,
    AutotuneFailed,
    AutotuneFinish,
    AutotuneStart,
    BaseSink,
    CallerLeft,
    CandidateFailed,
    CandidateMeasured,
    ClaimWait,
    Event,
    Interval,
    NoAnswer,
    PendingJoin,
    Persisted,
    StoreFailed,
    StoreRead,
    WinnerFailed,
)
from asel.events.context import asking, inside_a_tune
from asel.kernels.config_text import config_text
from asel.telemetry.names import SPANS, VERSION

__all__ = ["OpenTelemetrySink"]

T = TypeVar("T")
_STORE = (StoreRead, Persisted, StoreFailed, ClaimWait)
# Unfinished calls and tunes that are kept, in each table; the oldest is forgotten first.
_MAX_KEPT = 4096
# Hits between two checks for a new provider.
_CHECK_INTERVAL = 64


class OpenTelemetrySink(BaseSink):
    """Turns answers, tunes, candidates and store operations into spans.

    Uses OpenTelemetry's API only: if the application has set up no provider, nothing is recorded.
    The caller's sampling decision is respected: inside a trace that is not sampled, no span is made.
    """

    makes_spans = True

    def __init__(self, tracer: trace.Tracer | None = None) -> None:
        self._given = tracer
        self._provider: Any = None
        self._tracer: trace.Tracer | None = tracer
        self._unsampled: Context | None = None
        self._hits_seen = 0
        self.renew()

    def renew(self) -> None:
        """Forget unfinished calls and tunes: the parent process ends them."""
        self._tunes: OrderedDict[str, Span] = OrderedDict()
        self._ended: OrderedDict[str, SpanContext] = OrderedDict()
        # Calls that wait for the tune they began, and calls that met a tune and have their answer.
        self._calls: OrderedDict[int, Span] = OrderedDict()
        self._answered: OrderedDict[int, SpanContext] = OrderedDict()
        # Store events of a call without an answer yet, or of a tune that has not begun.
        self._held: OrderedDict[int | str, list[tuple[Event, int]]] = OrderedDict()

    def wants(self, kind: type[Event]) -> bool:
        """Return whether the current trace is recorded; outside of a trace, whether there is a provider."""
        sampled = self._sampled_here()
        return self._find_tracer() is not None if sampled is None else sampled

    def wants_hit(self) -> bool:
        """Return the same for hits, but faster: a provider that is set later is noticed within 64 hits."""
        if get_current() is self._unsampled:
            return False
        sampled = self._sampled_here()
        if sampled is not None:
            return sampled
        self._hits_seen += 1
        if self._hits_seen % _CHECK_INTERVAL == 0:
            self._find_tracer()
        return self._tracer is not None

    def is_silent(self) -> bool:
        """Return whether no hit leads to a span, because there is no provider."""
        return self._find_tracer() is None

    def _sampled_here(self) -> bool | None:
        here = get_current()
        if here is self._unsampled:
            return False
        span = trace.get_current_span(here)
        context = span.get_span_context()
        if not context.is_valid:
            return None
        if context.trace_flags.sampled or span.is_recording():
            return True
        # A context never changes, so its sampling need not be checked again.
        self._unsampled = here
        return False

    def _find_tracer(self) -> trace.Tracer | None:
        if self._given is None:
            provider = trace.get_tracer_provider()
            if provider is not self._provider:
                self._provider = provider
                self._tracer = None if type(provider) in _PLACEHOLDERS else provider.get_tracer("asel", VERSION)
        return self._tracer

    def watch(self, loop: object, statistics: object) -> None:
        self._find_tracer()

    def emit(self, event: Event) -> None:
        """Make the span of an event that has just ended."""
        copy_context().run(self.emit_at, event, time.time_ns() - round(event.end * 1e9))

    def emit_at(self, event: Event, epoch_ns: int) -> None:
        """Make the event's span, and leave it current for the sinks that receive the event next."""
        tracer = self._find_tracer()
        if tracer is not None and (made := _SpanBuilder(self, tracer, event, epoch_ns).span()) is not None:
            attach(set_span_in_context(made))


class _SpanBuilder:
    """Makes the span of one event."""

    def __init__(self, sink: OpenTelemetrySink, tracer: trace.Tracer, event: Event, epoch_ns: int) -> None:
        self._sink = sink
        self._tracer = tracer
        self._event = event
        self._epoch_ns = epoch_ns

    def span(self) -> Span | None:
        event = self._event
        if isinstance(event, Answer):
            return self._answer(event)
        if isinstance(event, AutotuneStart):
            return self._begin_tune(event)
        if isinstance(event, AutotuneFinish | AutotuneFailed):
            return self._end_tune(event)
        if isinstance(event, CandidateMeasured | CandidateFailed):
            return self._candidate(event)
        if isinstance(event, _STORE):
            return self._store(event)
        if isinstance(event, WinnerFailed):
            return self._withdraw(event)
        if isinstance(event, PendingJoin):
            return None
        return self._sink._tunes.get(getattr(event, "tune_id", ""))

    # Calls.

    def _answer(self, event: Answer) -> Span:
        asked = asking.get()
        span = None if asked is None else self._sink._calls.pop(asked.id, None)
        if span is None:
            span = self._start("asel.choose", event.start, links=self._links_to_tune(event))
        span.set_attributes(_of_answer(event))
        if isinstance(event, NoAnswer):
            _fail(span, "NoConfigError" if event.reason == "no_config" else "TuningError", event.reason)
        elif isinstance(event, CallerLeft):
            span.set_attribute("error.type", event.reason)
        if asked is not None:
            self._release(asked.id, span)
            if event.tune_id is not None:
                _put(self._sink._answered, asked.id, span.get_span_context())
        if event.began and event.tune_id is not None and event.tune_id not in self._sink._tunes:
            self._release(event.tune_id, span)  # no tune began here: another process stored its record
        span.end(self._ns(event.end))
        return span

    def _release(self, holder: int | str, parent: Span) -> None:
        for held, epoch_ns in self._sink._held.pop(holder, ()):
            _SpanBuilder(self._sink, self._tracer, held, epoch_ns)._store_span(set_span_in_context(parent))

    def _links_to_tune(self, event: Answer) -> Sequence[Link]:
        if event.tune_id is None or event.began:
            return ()
        tune = self._sink._tunes.get(event.tune_id)
        context = self._sink._ended.get(event.tune_id) if tune is None else tune.get_span_context()
        return () if context is None else (Link(context, {"asel.tune.id": event.tune_id}),)

    def _context_of_call(self) -> Context:
        """Return the context of the event's call; begin the call's span if there is none yet."""
        asked = asking.get()
        if asked is None:
            return get_current()
        if (answered := self._sink._answered.get(asked.id)) is not None:
            return set_span_in_context(NonRecordingSpan(answered))
        span = self._sink._calls.get(asked.id)
        if span is None:
            span = self._start("asel.choose", asked.start)
            for _, forgotten in _put(self._sink._calls, asked.id, span):
                forgotten.end()
        return set_span_in_context(span)

    # Tunes.

    def _begin_tune(self, event: AutotuneStart) -> Span:
        cause = self._context_of_call()
        context, links = cause, []
        if event.background and (caller := trace.get_current_span(cause).get_span_context()).is_valid:
            context, links = Context(), [Link(caller)]
        facts = {"asel.candidate.count": event.candidates, "asel.objective": event.objective}
        span = self._start("asel.autotune", event.start, facts, context, links)
        for _, forgotten in _put(self._sink._tunes, event.tune_id, span):
            forgotten.end()
        self._release(event.tune_id, span)
        return span

    def _end_tune(self, event: AutotuneFinish | AutotuneFailed) -> Span | None:
        span = self._sink._tunes.pop(event.tune_id, None)
        if span is None:
            return None
        _put(self._sink._ended, event.tune_id, span.get_span_context())
        if isinstance(event, AutotuneFinish):
            span.set_attributes(
                {
                    "asel.config": config_text(event.cfg),
                    "asel.candidate.measured": event.measured,
                    "asel.candidate.failed": event.failed,
                    "asel.candidate.skipped": event.skipped,
                    "asel.waiters": event.waiters,
                }
            )
            if event.margin is not None:
                span.set_attribute("asel.margin", event.margin)
        else:
            _fail(span, event.error_type, event.message)
        span.end(self._ns(event.end))
        return span

    def _candidate(self, event: CandidateMeasured | CandidateFailed) -> Span:
        facts: dict[str, Any] = {"asel.candidate.index": event.index}
        if isinstance(event, CandidateFailed):
            facts |= {"asel.failed": True, "asel.stage": event.stage}
            facts |= {"error.type": event.error_type, "exception.message": event.message}
        else:
            facts |= {"asel.winner": True} if event.winner else {}
            facts |= {"asel.ranked_s": event.ranked_s} if event.ranked_s is not None else {}
            facts |= {"asel.median_s": event.median_s, "asel.samples": event.samples}
        span = self._start("asel.candidate", event.start, facts, self._context_of_tune(event.tune_id))
        inside = set_span_in_context(span)
        for when in event.compiled:
            self._step("asel.candidate.compile", when, inside)
        if event.measured is not None:
            self._step("asel.candidate.measure", event.measured, inside)
        span.end(self._ns(event.end))
        return span

    def _step(self, name: str, when: Interval, context: Context) -> None:
        self._start(name, when[0], context=context).end(self._ns(when[1]))

    def _context_of_tune(self, tune_id: str) -> Context:
        tune = self._sink._tunes.get(tune_id)
        return get_current() if tune is None else set_span_in_context(tune)

    # Stores.

    def _store(self, event: Event) -> Span | None:
        asked, tune_id = asking.get(), inside_a_tune()
        if tune_id in self._sink._tunes:
            return self._store_span(self._context_of_tune(tune_id))
        if not tune_id and asked is None:
            return self._store_span(get_current())
        # The parent span does not exist yet: the tune's, or the call's, which needs its answer for the link.
        waits = asked is not None and asked.id not in self._sink._answered
        holder = asked.id if asked is not None and (waits or not tune_id) else tune_id
        held = self._sink._held.get(holder, [])
        held.append((event, self._epoch_ns))
        _put(self._sink._held, holder, held)
        return None

    def _store_span(self, context: Context) -> Span:
        event = self._event
        facts: dict[str, Any] = {}
        operation = getattr(event, "operation", _OPERATIONS.get(type(event), ""))
        if isinstance(event, StoreRead):
            facts["asel.found"] = event.found
        elif isinstance(event, Persisted):
            facts["asel.adopted"] = event.adopted
        elif isinstance(event, ClaimWait):
            facts |= {"asel.wait_s": event.waited_s, "asel.outcome": event.outcome}
        name = f"asel.store.{operation}"
        span = self._start(name if name in SPANS else "asel.store.get", event.start, facts, context)
        if isinstance(event, StoreFailed):
            _fail(span, event.error_type, event.message)
        span.end(self._ns(event.end))
        return span

    # Winners that failed.

    def _withdraw(self, event: WinnerFailed) -> Span:
        facts: dict[str, Any] = {"asel.tier": event.tier}
        if event.instead is not None:
            facts["asel.instead"] = config_text(event.instead)
        span = self._start("asel.withdraw", event.start, facts, get_current())
        _fail(span, event.error_type, event.message)
        span.end(self._ns(event.end))
        return span

    # All of them.

    def _start(
        self,
        name: str,
        start: float,
        facts: Mapping[str, Any] | None = None,
        context: Context | None = None,
        links: Sequence[Link] = (),
    ) -> Span:
        event = self._event
        attributes: dict[str, Any] = {}
        if (cfg := getattr(event, "cfg", None)) is not None:
            attributes["asel.config"] = config_text(cfg)  # first: it distinguishes candidates' spans
        attributes |= facts or {}
        if event.key is not None:
            attributes["asel.op"] = event.key.op_id
            if event.call is not None:
                attributes["asel.call"] = event.call
            attributes |= {"asel.device": event.key.device, "asel.key": event.key.call_key}
        if (tune_id := getattr(event, "tune_id", None)) is not None:
            attributes["asel.tune.id"] = tune_id
        return self._tracer.start_span(name, context, attributes=attributes, links=links, start_time=self._ns(start))

    def _ns(self, moment: float) -> int:
        return self._epoch_ns + round(moment * 1e9)


def _of_answer(event: Answer) -> dict[str, Any]:
    facts: dict[str, Any] = {"asel.tier": event.tier}
    if event.declined:
        facts["asel.declined"] = [f"{tier}: {why}" for tier, why in event.declined.items()]
    if (cfg := getattr(event, "cfg", None)) is not None:
        facts["asel.config"] = config_text(cfg)
    if event.tune_id is not None:
        facts |= {"asel.tune.id": event.tune_id, "asel.wait_s": event.wait_s}
    return facts


def _fail(span: Span, error_type: str, message: str) -> None:
    span.set_attribute("error.type", error_type)
    span.set_status(Status(StatusCode.ERROR, message))


def _put(table: OrderedDict[Any, T], key: Any, value: T) -> list[tuple[Any, T]]:
    """Add an entry; remove and return the oldest above the limit, since some calls never end."""
    table[key] = value
    table.move_to_end(key)
    return [table.popitem(last=False) for _ in range(len(table) - _MAX_KEPT)]


_OPERATIONS = {StoreRead: "get", Persisted: "put", ClaimWait: "claim"}
_PLACEHOLDERS = frozenset({trace.NoOpTracerProvider, trace.ProxyTracerProvider})
