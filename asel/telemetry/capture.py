"""Telemetry kept in memory, for tests: whole trees of spans, whole log entries, all measurements."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from opentelemetry.trace import Tracer

from asel.events.deferred_sinks import DeferredSinks
from asel.events.pipeline import Pipeline
from asel.telemetry.logs import StructlogSink
from asel.telemetry.metrics import MetricsSink
from asel.telemetry.names import VERSION
from asel.telemetry.spans import OpenTelemetrySink

__all__ = ["CapturedTelemetry", "SpanTree"]


@dataclass(frozen=True, slots=True)
class SpanTree:
    """A span and its descendants; times are seconds since the start of asel's first captured span."""

    name: str
    start: float
    end: float
    attributes: Mapping[str, Any]
    status: str
    links: tuple[str, ...]
    """The names of the linked spans; `?` for a span that was not captured."""
    children: tuple[SpanTree, ...]

    def outline(self, depth: int = 0) -> str:
        """Return the tree as text: a line for each span with its times, its status if set, and its links."""
        line = f"{'  ' * depth}{self.name}"
        # Other spans have wall-clock times, which are meaningless in virtual time.
        line += f" {self.start:g}-{self.end:g}" if self.name.startswith("asel.") else ""
        line += "" if self.status == "UNSET" else f" {self.status}"
        line += "".join(f" -> {link}" for link in self.links)
        return "\n".join([line, *(child.outline(depth + 1) for child in self.children)])


class CapturedTelemetry:
    """Keeps the spans, measurements and log entries of a selector with `sinks=captured.sinks`, in memory.

    `tracer` makes spans around the calls. Telemetry is made synchronously; with a `pipeline`, in the pipeline's thread
    as in production, and `pipeline.flush()` waits for it. Nothing global is changed.
    """

    def __init__(self, *, sampler: Any = None, pipeline: Pipeline | None = None) -> None:
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        self._exporter = InMemorySpanExporter()
        # By default the SDK starts threads to detect its host and waits for them.
        nowhere = Resource.get_empty()
        provider = TracerProvider(sampler=sampler, resource=nowhere, shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self._reader = InMemoryMetricReader()
        meter = MeterProvider([self._reader], resource=nowhere, shutdown_on_exit=False).get_meter("asel", VERSION)
        self.tracer: Tracer = provider.get_tracer("asel", VERSION)
        self.entries: list[dict[str, Any]] = []
        """The log entries, with their level."""
        self.sinks: tuple[DeferredSinks, ...] = (
            DeferredSinks(
                [
                    OpenTelemetrySink(self.tracer),
                    MetricsSink(meter, exports=dict),
                    StructlogSink(_keeping(self.entries)),
                ],
                pipeline,
            ),
        )

    @property
    def spans(self) -> list[Any]:
        """The SDK's spans that have ended."""
        return list(self._exporter.get_finished_spans())

    @property
    def trees(self) -> list[SpanTree]:
        """The spans that have ended, as trees, in order of their start."""
        spans = sorted(self.spans, key=lambda span: (span.start_time, span.end_time))
        zero = next((span.start_time for span in spans if span.name.startswith("asel.")), 0)
        names = {span.context.span_id: span.name for span in spans}

        def tree(span: Any) -> SpanTree:
            return SpanTree(
                span.name,
                round((span.start_time - zero) / 1e9, 6),
                round((span.end_time - zero) / 1e9, 6),
                dict(span.attributes or {}),
                span.status.status_code.name,
                tuple(names.get(link.context.span_id, "?") for link in span.links),
                tuple(tree(child) for child in spans if child.parent and child.parent.span_id == span.context.span_id),
            )

        return [tree(span) for span in spans if span.parent is None or span.parent.span_id not in names]

    def metrics(self) -> dict[str, dict[tuple[tuple[str, Any], ...], Any]]:
        """Return every metric's points: a number, or the count and sum of a histogram, by its sorted labels."""
        data = self._reader.get_metrics_data()
        found: dict[str, dict[tuple[tuple[str, Any], ...], Any]] = {}
        for resource in [] if data is None else data.resource_metrics:
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    points: list[Any] = list(metric.data.data_points)
                    found[metric.name] = {tuple(sorted((p.attributes or {}).items())): _value(p) for p in points}
        return found

    def exemplars(self) -> dict[str, list[Any]]:
        """Return the exemplars since the last call, by histogram. Each has the ids of its trace and span."""
        data = self._reader.get_metrics_data()
        metrics = [m for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics] if data else []
        points = {metric.name: list[Any](metric.data.data_points) for metric in metrics}
        return {name: [e for p in found for e in getattr(p, "exemplars", ())] for name, found in points.items()}


def _value(point: Any) -> Any:
    return (point.count, round(point.sum, 6)) if hasattr(point, "bucket_counts") else point.value


def _keeping(entries: list[dict[str, Any]]) -> Any:
    """Return a logger that adds entries to a list, with the caller's context variables."""
    import structlog

    def keep(logger: Any, level: str, entry: Any) -> Any:
        entries.append({"level": level, **entry})
        raise structlog.DropEvent

    processors: list[Callable[..., Any]] = [structlog.contextvars.merge_contextvars, keep]
    return structlog.wrap_logger(
        structlog.PrintLogger(), processors=processors, wrapper_class=structlog.make_filtering_bound_logger(0)
    )
