"""Measurements: their names, their labels, and that counts are exact."""

from __future__ import annotations

import gc
import sys
import threading

import anyio
import pytest
from support.kernels import BEST, COSTS, Blocks, Toy, call, scripted
from support.traces import Store, chain_of, request

from asel import AutotunePolicy, ConfigSelectorChain
from asel.events import CallerLeft, CandidateMeasured, ClaimWait, NoAnswer, StoreFailed
from asel.events.counters import AnswerCounters
from asel.kernels.keys import CacheKey
from asel.runtime.counter import Count
from asel.telemetry import MetricsSink, Pipeline
from asel.telemetry.metrics import _durations
from asel.telemetry.names import DURATION_BUCKETS_S, INSTRUMENTS, METRICS
from asel.testing import CapturedTelemetry

TOY = Toy()
KEY = CacheKey("NVIDIA H100|12.4", "op@v1", "key")
OP = ("asel.op", "toy@v1")


@pytest.mark.anyio
async def test_measurements_of_a_tune_with_waiters():
    """Every metric has its documented name and labels."""
    captured = CapturedTelemetry(pipeline=Pipeline())
    script = {"run_errors": {Blocks(2): ValueError("no")}, "compile_s": 1.0}
    async with chain_of(captured, script=script, persistent=Store(0.5)) as chain:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(request, captured, chain)
            tasks.start_soon(request, captured, chain, "later", 1.0)
            await anyio.sleep(2.0)
            during = captured.metrics()
        await request(captured, chain)
    after = captured.metrics()
    assert during["asel.tunes.pending"] == {(OP,): 1}
    assert during["asel.waiters"] == {(OP,): 2}
    assert after["asel.tunes.pending"] == after["asel.waiters"] == {(OP,): 0}
    assert after["asel.background.queue"] == {(): 0}
    assert after["asel.selections"] == {(OP, ("asel.tier", "autotune")): 2, (OP, ("asel.tier", "memory")): 1}
    assert after["asel.choose.duration"][OP, ("asel.tier", "autotune")] == (2, pytest.approx(4.8 + 3.8))
    assert after["asel.wait.duration"] == {(OP,): (2, pytest.approx(4.3 + 3.8))}
    assert after["asel.tune.duration"] == {(("asel.device.kind", "NVIDIA H100"), OP): (1, pytest.approx(4.3))}
    assert after["asel.candidate.duration"] == {
        (OP, ("asel.stage", "compile")): (3, pytest.approx(3.0)),
        (OP, ("asel.stage", "measure")): (2, pytest.approx(0.8)),
        (OP, ("asel.stage", "measure"), ("error.type", "ValueError")): (1, 0.0),
    }
    assert after["asel.store.duration"] == {
        (("asel.operation", "get"),): (1, pytest.approx(0.5)),
        (("asel.operation", "put"),): (1, pytest.approx(0.5)),
    }
    assert after.keys() == METRICS.keys()
    for name, points in after.items():
        for labels in points:
            assert {label for label, _ in labels} <= set(METRICS[name])
    data = captured._reader.get_metrics_data()
    found = {m.name: m for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics}
    assert {name: (instrument(metric), metric.unit) for name, metric in found.items()} == INSTRUMENTS


def instrument(metric) -> str:
    monotonic = getattr(metric.data, "is_monotonic", None)
    return "histogram" if monotonic is None else "counter" if monotonic else "updowncounter"


@pytest.mark.anyio
async def test_an_op_without_a_tune_reports_zero():
    """A graph without a line would not show whether callers wait."""
    captured = CapturedTelemetry()
    async with chain_of(captured, policy=AutotunePolicy(allow_autotune=False)) as chain:
        await request(captured, chain)
    assert captured.metrics()["asel.tunes.pending"] == captured.metrics()["asel.waiters"] == {(OP,): 0}


@pytest.mark.anyio
async def test_a_slow_bucket_links_to_a_trace():
    """Durations are recorded with the event's span as the current span, so that they can be exemplars."""
    captured = CapturedTelemetry()
    async with chain_of(captured) as chain:
        await request(captured, chain)
    choose = next(span for span in captured.spans if span.name == "asel.choose")
    tune = next(span for span in captured.spans if span.name == "asel.autotune")
    exemplars = captured.exemplars()
    for name, span in (("asel.choose.duration", choose), ("asel.tune.duration", tune)):
        assert {exemplar.span_id for exemplar in exemplars[name]} == {span.context.span_id}


def test_durations_have_buckets_from_a_microsecond_to_five_minutes():
    """The SDK's default buckets begin at five seconds, and a hit takes microseconds."""
    captured = CapturedTelemetry()
    [deferred] = captured.sinks
    captured_sink = deferred.routes[1].sink
    captured_sink.emit_at(StoreFailed.of(KEY, "get", 0.0, 1.0, OSError("gone")), 0)
    data = captured._reader.get_metrics_data()
    [metric] = [m for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics if "duration" in m.name]
    [point] = metric.data.data_points
    assert tuple(point.explicit_bounds) == DURATION_BUCKETS_S
    assert (DURATION_BUCKETS_S[0], DURATION_BUCKETS_S[-1], metric.unit) == (1e-6, 300.0, "s")


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (
            NoAnswer(key=KEY, start=0.0, end=2.0, reason="no_config"),
            [("asel.choose.duration", 2.0, {"asel.op": "op@v1", "asel.tier": "error", "error.type": "NoConfigError"})],
        ),
        (
            CallerLeft(key=KEY, start=0.0, end=2.0, reason="cancelled"),
            [("asel.choose.duration", 2.0, {"asel.op": "op@v1", "asel.tier": "left", "error.type": "cancelled"})],
        ),
        (
            StoreFailed.of(KEY, "put", 0.0, 2.0, OSError("full")),
            [("asel.store.duration", 2.0, {"asel.operation": "put", "error.type": "OSError"})],
        ),
        (
            ClaimWait(key=KEY, start=0.0, end=2.0, waited_s=2.0, outcome="record"),
            [("asel.store.duration", 2.0, {"asel.operation": "claim"})],
        ),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_error_type_is_a_label_of_failures_only(event, expected):
    """Otherwise it would double every series."""
    assert list(_durations(event)) == expected


def test_waiting_for_a_compile_slot_is_not_compile_time():
    """A candidate that is lowered in advance is compiled in two steps; the metric has their sum."""
    facts = {"tune_id": "1", "index": 0, "cfg": Blocks(1), "median_s": 0.1, "samples": 3}
    event = CandidateMeasured(key=KEY, start=0.0, end=9.0, compile_s=2.0, compiled=((0.0, 1.0), (4.0, 5.0)), **facts)
    [(name, seconds, labels)] = _durations(event)
    assert (name, seconds, labels["asel.stage"]) == ("asel.candidate.duration", 2.0, "compile")


@pytest.mark.timeout(60)
def test_counts_are_exact_across_threads():
    """No addition is lost or counted twice, even while the counters are read."""
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        counters, threads, each = AnswerCounters(), 4, 20_000

        def count():
            for _ in range(each):
                counters.hits["op"]()
                counters.add("op", "heuristics")

        running = [threading.Thread(target=count) for _ in range(threads)]
        for thread in running:
            thread.start()
        while any(thread.is_alive() for thread in running):
            assert all(0 <= value <= threads * each for value in counters.read().values())
    finally:
        sys.setswitchinterval(switch)
    assert counters.read() == {("op", "memory"): threads * each, ("op", "heuristics"): threads * each}
    counted = Count()
    assert [counted.value for _ in range(3)] == [0, 0, 0]


@pytest.mark.anyio
async def test_every_answer_is_counted_even_if_its_event_is_dropped():
    """Selections come from plain counters, so shedding and sampling do not affect them."""
    captured = CapturedTelemetry(pipeline=Pipeline(ceiling=1))
    tuner, _ = scripted(COSTS)
    async with ConfigSelectorChain(tuner=tuner, sinks=captured.sinks) as chain:
        await chain.choose(call(), TOY)
        for _ in range(500):
            await chain.choose(call(), TOY)
        for _ in range(3):
            await chain.choose(call(override_cfg=BEST), TOY)
        chain.policy = AutotunePolicy(allow_autotune=False)
        await chain.choose(call(16), TOY)
    assert captured.metrics()["asel.selections"] == {
        (OP, ("asel.tier", "autotune")): 1,
        (OP, ("asel.tier", "memory")): 500,
        (OP, ("asel.tier", "override")): 3,
        (OP, ("asel.tier", "heuristics")): 1,
    }


@pytest.mark.anyio
async def test_one_in_64_hits_from_the_fast_lane_is_timed():
    """A histogram costs more than a hit, and quantiles need only a sample."""
    captured = CapturedTelemetry()
    async with chain_of(captured) as chain:
        await chain.choose(call(), TOY)
        await chain.choose(call(), TOY)
        for _ in range(640):
            await chain.choose(call(), TOY)
    count, _ = captured.metrics()["asel.choose.duration"][OP, ("asel.tier", "memory")]
    assert 10 <= count <= 12


@pytest.mark.anyio
async def test_metrics_do_not_keep_a_selector_alive():
    """Metrics hold no chain alive."""
    captured = CapturedTelemetry()
    [deferred] = captured.sinks
    sink: MetricsSink = deferred.routes[1].sink
    async with chain_of(captured) as chain:
        await chain.choose(call(override_cfg=BEST), TOY)
        assert len(list(sink._statistics())) == 1
    del chain
    gc.collect()
    assert list(sink._statistics()) == []
