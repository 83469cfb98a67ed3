"""Events as OpenTelemetry measurements, and answers as counts.

Answers are counted by the caller, in plain numbers that the SDK reads when it collects: the
count is exact even if events are dropped. Durations are recorded with the event's span as the current span, so that an
SDK with exemplars can link a slow bucket to a trace.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Histogram, Meter, Observation

from asel.events import (
    Answer,
    AutotuneFailed,
    AutotuneFinish,
    BaseSink,
    CallerLeft,
    CandidateFailed,
    CandidateMeasured,
    ClaimWait,
    Event,
    NoAnswer,
    Persisted,
    StoreFailed,
    StoreRead,
    WinnerFailed,
)
from asel.events.context import Statistics
from asel.events.counters import AnswerCounters
from asel.events.pipeline import Pipeline
from asel.telemetry.names import DURATION_BUCKETS_S, VERSION

__all__ = ["MetricsSink"]

_DURATIONS = {
    "asel.choose.duration": "How long a call took to get its answer; of the hits from the fast lane, one in 64.",
    "asel.wait.duration": "How long callers waited for a tune.",
    "asel.tune.duration": "How long a tune took, from its beginning to its end.",
    "asel.candidate.duration": "How long a candidate was compiled, and measured.",
    "asel.store.duration": "How long a store took to answer.",
}
_STORE_OPERATIONS: dict[type[Event], str] = {StoreRead: "get", Persisted: "put", ClaimWait: "claim"}
_MEASURED = (
    Answer,
    AutotuneFinish,
    AutotuneFailed,
    CandidateMeasured,
    CandidateFailed,
    StoreFailed,
    WinnerFailed,
    *_STORE_OPERATIONS,
)


class MetricsSink(BaseSink):
    """Counts answers and records durations, with `meter` or with the application's provider.

    Make one for a process: two over one meter would report their instruments twice. `exports` returns the numbers of
    spans and log records that were dropped on export, by signal and reason; by default, those that `configure` counts.
    """

    def __init__(
        self,
        meter: Meter | None = None,
        *,
        exports: Callable[[], Mapping[tuple[str, str], int]] | None = None,
    ) -> None:
        self.counters: AnswerCounters = AnswerCounters()
        self._exports = _dropped_exports if exports is None else exports
        self._given = meter is not None
        self._provider: Any = None
        self._histograms: dict[str, Histogram] | None = None
        self._selectors: dict[int, weakref.WeakMethod[Callable[[], Statistics]]] = {}
        self._pipelines: weakref.WeakSet[Pipeline] = weakref.WeakSet()
        self._seen_ops: set[str] = set()
        if meter is not None:
            self._histograms = self._make_instruments(meter)

    def renew(self) -> None:
        """Count from zero: the parent process reports its own answers."""
        self.counters.clear()
        self._selectors.clear()

    def wants(self, kind: type[Event]) -> bool:
        return self._find_instruments() is not None and issubclass(kind, _MEASURED)

    def watch(self, loop: object, statistics: Callable[[], Statistics] | None) -> None:
        """Report a selector's tunes, waiters and queue while it lives."""
        self._find_instruments()
        if statistics is not None:
            selector = statistics.__self__  # type: ignore[attr-defined]
            self._selectors[id(selector)] = weakref.WeakMethod(statistics)

    def observe(self, pipeline: Pipeline) -> None:
        """Report the numbers of events that a pipeline delivers and drops."""
        self._pipelines.add(pipeline)

    def emit(self, event: Event) -> None:
        self.emit_at(event, time.time_ns())

    def emit_at(self, event: Event, epoch_ns: int) -> None:
        """Record the event's durations."""
        if (histograms := self._find_instruments()) is None:
            return
        for name, seconds, labels in _durations(event):
            histograms[name].record(seconds, {label: value for label, value in labels.items() if value is not None})

    # Instruments.

    def _find_instruments(self) -> dict[str, Histogram] | None:
        if not self._given:
            provider = metrics.get_meter_provider()
            if provider is not self._provider:
                self._provider = provider
                placeholder = type(provider).__name__ in _PLACEHOLDERS
                self._histograms = None if placeholder else self._make_instruments(provider.get_meter("asel", VERSION))
        return self._histograms

    def _make_instruments(self, meter: Meter) -> dict[str, Histogram]:
        meter.create_observable_counter(
            "asel.selections", [self._selections], "{selection}", "Answers, by the tier that gave them."
        )
        meter.create_observable_up_down_counter("asel.tunes.pending", [self._pending], "{tune}", "Tunes in flight.")
        meter.create_observable_up_down_counter(
            "asel.waiters", [self._waiters], "{caller}", "Callers that wait for a tune."
        )
        meter.create_observable_up_down_counter(
            "asel.background.queue", [self._queued], "{request}", "Keys waiting to be tuned in the background."
        )
        meter.create_observable_counter(
            "asel.telemetry.events", [self._emitted], "{event}", "Events that were turned into telemetry."
        )
        meter.create_observable_counter(
            "asel.telemetry.dropped",
            [self._dropped],
            "{item}",
            "Telemetry that was lost: events that were not recorded, spans and log records that may not have arrived.",
        )
        buckets = list(DURATION_BUCKETS_S)
        return {
            name: meter.create_histogram(name, "s", description, explicit_bucket_boundaries_advisory=buckets)
            for name, description in _DURATIONS.items()
        }

    def _selections(self, options: CallbackOptions) -> Iterable[Observation]:
        for (op, tier), answers in self.counters.read().items():
            yield Observation(answers, {"asel.op": op, "asel.tier": tier})

    def _pending(self, options: CallbackOptions) -> Iterable[Observation]:
        return self._by_op(lambda now: now.pending.items())

    def _waiters(self, options: CallbackOptions) -> Iterable[Observation]:
        return self._by_op(lambda now: now.waiters.items())

    def _by_op(self, read: Callable[[Statistics], Iterable[tuple[str, int]]]) -> Iterable[Observation]:
        # An op with nothing in flight is reported as zero. Otherwise it would keep its last value, or be missing if no
        # collection ever happened during a tune.
        totals = dict.fromkeys(self._seen_ops | self.counters.ops(), 0)
        for statistics in self._statistics():
            for op, number in read(statistics):
                totals[op] = totals.get(op, 0) + number
        self._seen_ops |= totals.keys()
        for op, number in totals.items():
            yield Observation(number, {"asel.op": op})

    def _queued(self, options: CallbackOptions) -> Iterable[Observation]:
        yield Observation(sum(statistics.queued for statistics in self._statistics()))

    def _statistics(self) -> Iterator[Statistics]:
        for address, method in list(self._selectors.items()):
            if (statistics := method()) is None:
                self._selectors.pop(address, None)
            else:
                yield statistics()

    def _emitted(self, options: CallbackOptions) -> Iterable[Observation]:
        yield Observation(sum(pipeline.statistics().emitted for pipeline in list(self._pipelines)))

    def _dropped(self, options: CallbackOptions) -> Iterable[Observation]:
        totals = {("events", "ceiling"): 0, ("events", "closed"): 0, **self._exports()}
        for pipeline in list(self._pipelines):
            for reason, number in pipeline.statistics().shed.items():
                totals["events", reason] += number
        for (signal, reason), number in totals.items():
            yield Observation(number, {"asel.signal": signal, "asel.reason": reason})


def _dropped_exports() -> Mapping[tuple[str, str], int]:
    from asel.telemetry.export_queue import dropped_exports  # not needed before a reader collects

    return dropped_exports()


def _durations(event: Event) -> Iterator[tuple[str, float, dict[str, str | None]]]:
    """Give an event's measurements: the histogram, the seconds, the labels."""
    op, took_s = event.op, event.end - event.start
    if isinstance(event, Answer):
        yield "asel.choose.duration", took_s, {"asel.op": op, "asel.tier": event.tier, "error.type": _no_answer(event)}
        if event.wait_s:
            yield "asel.wait.duration", event.wait_s, {"asel.op": op}
    elif isinstance(event, AutotuneFinish | AutotuneFailed):
        error = event.error_type if isinstance(event, AutotuneFailed) else None
        kind = None if event.device is None else event.device.partition("|")[0]
        yield "asel.tune.duration", took_s, {"asel.op": op, "asel.device.kind": kind, "error.type": error}
    elif isinstance(event, CandidateMeasured | CandidateFailed):
        failed = event.stage if isinstance(event, CandidateFailed) else None
        steps = {"compile": event.compiled, "measure": () if event.measured is None else (event.measured,)}
        if failed is not None:
            steps[failed] = steps.get(failed) or ((event.start, event.end),)
        took = {stage: sum(end - start for start, end in times) for stage, times in steps.items() if times}
        for stage, seconds in took.items():
            error = event.error_type if isinstance(event, CandidateFailed) and stage == failed else None
            yield "asel.candidate.duration", seconds, {"asel.op": op, "asel.stage": stage, "error.type": error}
    elif isinstance(event, WinnerFailed):
        yield "asel.candidate.duration", took_s, {"asel.op": op, "asel.stage": "run", "error.type": event.error_type}
    elif isinstance(event, StoreFailed):
        yield "asel.store.duration", took_s, {"asel.operation": event.operation, "error.type": event.error_type}
    elif (operation := _STORE_OPERATIONS.get(type(event))) is not None:
        yield "asel.store.duration", took_s, {"asel.operation": operation}


def _no_answer(event: Answer) -> str | None:
    if isinstance(event, NoAnswer):
        return "NoConfigError" if event.reason == "no_config" else "TuningError"
    return event.reason if isinstance(event, CallerLeft) else None


_PLACEHOLDERS = frozenset({"NoOpMeterProvider", "_ProxyMeterProvider"})
