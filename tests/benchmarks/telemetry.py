"""The cost of telemetry to callers and the event loop: `python tests/benchmarks/telemetry.py`.

Hits with the default telemetry beside the bare hit and the floor, in a trace that is not sampled and in
one that is; then the loop's lag while a backlog of 60,000 events is delivered. Every event becomes a real span of the
SDK, with its batch processor and an exporter that drops spans. Exits with 1 if a budget is
exceeded.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import anyio
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from selection import MatMul, floor, two_arrays
from side_by_side import Budget, Contender, compare, race

from asel import ConfigSelectorChain, Invocation, Tuner
from asel.telemetry import shared_pipeline
from asel.testing import ScriptedMeasure

BEAT_S = 0.005
BACKLOG = 60_000
P99_S = 0.005
UNSAMPLED = TracerProvider(sampler=ALWAYS_OFF).get_tracer("benchmark")
SAMPLED = trace.get_tracer("benchmark")
BUDGETS = {
    "hit": Budget(5, "floor"),
    "hit, telemetry, not sampled": Budget(2, "hit"),
    "hit, telemetry, sampled": Budget(4, "hit"),
}


class Nowhere(SpanExporter):
    def export(self, spans: Any) -> SpanExportResult:
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        pass


def set_up() -> None:
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(Nowhere()))
    trace.set_tracer_provider(provider)
    metrics.set_meter_provider(MeterProvider([InMemoryMetricReader()]))


@contextmanager
def inside(tracer: trace.Tracer) -> Iterator[None]:
    """Run the block inside a request, and deliver its events before the next contender."""
    with tracer.start_as_current_span("request"):
        yield
    shared_pipeline().flush(60)


async def time_hits(rounds: int, slice_s: float) -> dict[str, float | None]:
    tuner, inv, kernel = Tuner(measure=ScriptedMeasure(0.0)), Invocation("matmul", two_arrays(), {}), MatMul()
    async with ConfigSelectorChain(tuner=tuner, sinks=()) as quiet, ConfigSelectorChain(tuner=tuner) as telling:
        for selector in (quiet, telling):
            await selector.choose(inv, kernel)
            await selector.choose(inv, kernel)
        calls = [(inv, kernel)]
        before = shared_pipeline().statistics()
        timed = race(
            [
                floor(),
                Contender("hit", quiet.choose, calls),
                Contender("hit, telemetry, not sampled", telling.choose, calls, partial(inside, UNSAMPLED)),
                Contender("hit, telemetry, sampled", telling.choose, calls, partial(inside, SAMPLED)),
            ],
            rounds=rounds,
            slice_s=slice_s,
        )
        after = shared_pipeline().statistics()
        if after.shed != before.shed:
            raise RuntimeError(f"hits were shed, and shedding is cheaper than telling: {after}")
        return dict(timed)


async def lags(fill: Callable[[Any, Any, Any], Any] | None, seconds: float) -> tuple[list[float], float]:
    """Return the lateness of each heartbeat while a backlog is delivered, and the time to make that backlog."""
    tuner, inv, kernel = Tuner(measure=ScriptedMeasure(0.0)), Invocation("matmul", two_arrays(), {}), MatMul()
    late: list[float] = []
    async with ConfigSelectorChain(tuner=tuner, close_grace_s=0.0) as selector:
        await selector.choose(inv, kernel)
        await selector.choose(inv, kernel)
        gc.collect()
        start = perf_counter()
        if fill is not None:
            await fill(selector, inv, kernel)
        filled_s = perf_counter() - start
        until = perf_counter() + seconds
        while perf_counter() < until:
            start = perf_counter()
            await anyio.sleep(BEAT_S)
            late.append(perf_counter() - start - BEAT_S)
        if fill is not None and shared_pipeline().is_flushed:
            raise RuntimeError("the backlog was gone before the heartbeat ended: that is not what was to be measured")
    return late, filled_s


async def background_queue(selector: Any, inv: Any, kernel: Any) -> None:
    with SAMPLED.start_as_current_span("request"):
        for _ in range(BACKLOG):
            await selector.choose(inv, kernel)


def measure_lag(seconds: float, rounds: int) -> tuple[Table, bool]:
    table = Table("loop", "what runs", box=SIMPLE)
    for heading in ("beats", "p50", "p99", "max", "budget", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    kept = True
    cases = [
        (backend, name, fill)
        for backend in ("asyncio", "trio")
        for name, fill in (("nothing", None), (f"{BACKLOG:,} events to tell", background_queue))
    ]
    best: dict[tuple[str, str], tuple[float, ...]] = {}
    for _ in range(rounds):
        for backend, name, fill in cases:
            shared_pipeline().flush(120)
            late, _ = anyio.run(lags, fill, seconds, backend=backend)
            cuts = quantiles(late, n=100, method="inclusive")
            found = (cuts[98], cuts[49], max(late), len(late))
            best[backend, name] = min(found, best.get((backend, name), found))
    for backend, name, fill in cases:
        p99, p50, most, beats = best[backend, name]
        row = [f"{beats:,}", *(f"{value * 1e3:,.2f} ms" for value in (p50, p99, most))]
        if fill is not None:
            ok = p99 <= P99_S
            kept = kept and ok
            row += [f"p99 <= {P99_S * 1e3:g} ms", "[green]ok" if ok else "[bold red]OVER"]
        table.add_row(backend, name, *row)
    return table, kept


def time_telling(events: int) -> float:
    """Return the seconds per event while a backlog is flushed."""

    async def fill() -> None:
        tuner, inv, kernel = Tuner(measure=ScriptedMeasure(0.0)), Invocation("matmul", two_arrays(), {}), MatMul()
        async with ConfigSelectorChain(tuner=tuner, close_grace_s=0.0) as selector:
            await selector.choose(inv, kernel)
            with SAMPLED.start_as_current_span("request"):
                for _ in range(events):
                    await selector.choose(inv, kernel)

    taken = []
    for _ in range(3):
        shared_pipeline().flush(120)
        anyio.run(fill)
        start, before = perf_counter(), shared_pipeline().statistics().emitted
        shared_pipeline().flush(120)
        taken.append((perf_counter() - start) / max(1, shared_pipeline().statistics().emitted - before))
    return median(taken)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure what telemetry costs.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: sooner, and noisier")
    quick: bool = parser.parse_args().quick
    set_up()
    hits = anyio.run(time_hits, 40 if quick else 200, 0.002)
    table, cheap = compare(hits, BUDGETS, floor="floor")
    lag, calm = measure_lag(2 if quick else 4, 1 if quick else 5)
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(table)
    console.print(lag)
    told = time_telling(5000)
    console.print(f"Telling one event, in a hurry: {told * 1e6:,.0f} us. {shared_pipeline().statistics()}", style="dim")
    return 0 if cheap and calm else 1


if __name__ == "__main__":
    sys.exit(main())
