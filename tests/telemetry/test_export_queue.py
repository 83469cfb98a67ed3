"""The queue behind a slow collector: which items are kept and dropped, and that the counts are exact."""

from __future__ import annotations

import multiprocessing
import threading
import time
import warnings

import anyio
import pytest
import structlog
from opentelemetry import trace
from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.trace import Status, StatusCode
from support.exports import (
    _nothing_is_set_up,  # noqa: F401 - a fixture
    dropped,
    dropped_in,
    one_tune,
)
from support.kernels import COSTS, Toy, call, scripted
from support.otlp_receiver import receiving

from asel import ConfigCache, ConfigSelectorChain
from asel.telemetry import configure, shared_pipeline
from asel.telemetry.environment import Limits
from asel.telemetry.export_queue import ExportQueue, Outcome, Rank
from asel.testing import run_in_virtual_time

TUNES, HITS = 50, 4000


class Counted(SpanProcessor):
    """How many spans were made, by name."""

    def __init__(self):
        self.names = []

    def on_end(self, span):
        self.names.append(span.name)


@pytest.fixture(autouse=True)
def _exporters_are_patient(monkeypatch):
    """A gate stays closed however long this machine takes: no request times out meanwhile."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "60")


async def tunes_among_hits(hits=HITS):
    tracer = trace.get_tracer("test")
    tuner, _ = scripted(COSTS)
    async with ConfigSelectorChain(ConfigCache(), tuner=tuner) as chain:
        for number in range(TUNES):
            with tracer.start_as_current_span("a cold request"):
                await chain.choose(call(8 + 8 * number), Toy())
            # A real tune takes longer than its spans take to be made; one in virtual time does not.
            assert await anyio.to_thread.run_sync(shared_pipeline().flush)
            for _ in range(hits // TUNES):
                with tracer.start_as_current_span("a warm request"):
                    await chain.choose(call(8), Toy())


@pytest.mark.timeout(60)
def test_a_slow_collector_gets_every_tune_and_drops_are_counted(caplog):
    """Of 50 tunes among 4,000 hits, only hits are dropped and counted while no request is answered."""
    before, in_all = dropped("traces", "queue_full"), dropped("traces", "queue_full", "export_failed", "closed")
    with receiving() as receiver:
        receiver.gate.clear()
        telemetry = configure("service", receiver.endpoint, close_timeout_s=30)
        counted = Counted()
        trace.get_tracer_provider().add_span_processor(counted)
        run_in_virtual_time(tunes_among_hits)
        receiver.gate.set()
        assert telemetry.close() is True
        names = [span.name for span in receiver.spans]
        assert names.count("asel.autotune") == counted.names.count("asel.autotune") == TUNES
        for kept in ("asel.candidate", "asel.candidate.compile", "asel.candidate.measure", "a cold request"):
            assert names.count(kept) == counted.names.count(kept)
        missing = len(counted.names) - len(names)
        assert missing > 500
        assert dropped("traces", "queue_full") - before == missing
        assert dropped_in(receiver, "traces") == missing + in_all
    told = [record.getMessage() for record in caplog.records if record.name == "asel"]
    assert [message.split("; hits")[0] for message in told] == [
        "dropping spans: the collector is not keeping up",
        f"the queue of spans is empty again; {missing} were dropped",
    ]


@pytest.mark.timeout(60)
def test_log_records_are_dropped_lowest_rank_first(monkeypatch):
    """Warnings and asel's own records are kept; the application's other records are dropped and counted."""
    monkeypatch.setenv("OTEL_BLRP_MAX_QUEUE_SIZE", "16")
    before = dropped("logs", "queue_full")
    with receiving() as receiver:
        receiver.gate.clear()
        telemetry = configure("service", receiver.endpoint, close_timeout_s=30)
        run_in_virtual_time(tunes_among_hits, 0)
        log = structlog.get_logger()
        log.warning("something is wrong")
        for number in range(200):
            log.info("a request", number=number)
        receiver.gate.set()
        assert telemetry.close() is True
        bodies = [record.body.string_value for record in receiver.logs]
        events = [record.event_name for record in receiver.logs]
        assert bodies.count("something is wrong") == 1
        assert (events.count("asel.autotune_start"), events.count("asel.autotune_finish")) == (TUNES, TUNES)
        missing = 200 - bodies.count("a request")
        assert missing >= 200 - 16 - 32
        assert dropped("logs", "queue_full") - before == missing


@pytest.mark.timeout(60)
def test_closing_keeps_its_deadline_and_reports_unsent_items(caplog):
    """With a collector that never answers, the count and the warning include every unsent item."""
    before = {signal: dropped(signal, "closed") for signal in ("traces", "logs")}
    with receiving() as receiver:
        receiver.gate.clear()
        telemetry = configure("service", receiver.endpoint, close_timeout_s=0.3)
        counted = Counted()
        trace.get_tracer_provider().add_span_processor(counted)
        run_in_virtual_time(one_tune)
        assert shared_pipeline().flush(10)
        start = time.perf_counter()
        assert telemetry.close() is False
        assert time.perf_counter() - start < 5
        unsent = {signal: dropped(signal, "closed") - before[signal] for signal in before}
        assert unsent == {"traces": len(counted.names), "logs": 3}
        told = [record.getMessage() for record in caplog.records if "unsent" in record.getMessage()]
        assert told == [
            f"telemetry was closed with {unsent['traces']} spans unsent",
            "telemetry was closed with 3 log records unsent",
        ]


class RedisConnection:
    """What a queue sends to: batches wait for `gate`, and the first `failing` of them end with `outcome`."""

    def __init__(self, failing=0, outcome=Outcome.UNREACHED):
        self.gate, self.entered = threading.Event(), threading.Event()
        self.failing, self.outcome, self.arrived, self.attempts = failing, outcome, [], 0

    def send(self, batch):
        self.attempts += 1
        self.entered.set()
        assert self.gate.wait(20)
        if self.attempts <= self.failing:
            return self.outcome
        self.arrived += batch
        return Outcome.ARRIVED


def opened_during(wire, queue, work):
    """Return what flushing or closing a queue returns if nothing is sent before the call waits."""
    results = []
    thread = threading.Thread(target=lambda: results.append(work(10)))
    thread.start()
    while not queue._flushes:
        time.sleep(0.001)
    wire.gate.set()
    thread.join(20)
    return results[0]


def held_up(wire, **limits):
    """Return a queue whose thread has a batch of one in hand, so that everything else stays queued."""
    queue = ExportQueue("traces", wire.send, Limits(**{"queue_size": 10, "batch_size": 1, "delay_s": 1000, **limits}))
    queue.put("first", Rank.VITAL)
    assert wire.entered.wait(10)
    return queue


def test_each_rank_has_its_own_bound_and_drops_its_own_oldest():
    """Hits displace only hits."""
    wire = RedisConnection()
    queue = held_up(wire)
    before = dropped("traces", "queue_full")
    for number in range(30):
        for rank in Rank:
            queue.put((rank, number), rank)
    assert dropped("traces", "queue_full") - before == 20 + 10 + 0 + 0
    wire.gate.set()
    assert queue.close(10) is True
    assert wire.arrived == [
        "first",
        *((Rank.VITAL, number) for number in range(30)),
        *((Rank.COMPANION, number) for number in range(30)),
        *((Rank.ORDINARY, number) for number in range(10, 30)),
        *((Rank.HIT, number) for number in range(20, 30)),
    ]


def test_memory_is_bounded():
    """If the collector never comes back, 23 times the queue's size is the maximum."""
    wire = RedisConnection()
    queue = held_up(wire)
    for number in range(5000):
        for rank in Rank:
            queue.put(number, rank, trace=number if rank > Rank.ORDINARY else 0)
    assert len(queue) == (1 + 2 + 4 + 16) * 10
    assert len(queue._traces) == 4096
    wire.gate.set()
    queue.abandon()


def test_a_trace_with_a_tune_is_kept_whole():
    """Its hits and requests are kept longer than others, whether they end before or after the tune's span."""
    wire = RedisConnection()
    queue = held_up(wire)
    queue.put("its hit, before", Rank.HIT, trace=7)
    queue.put("its request", Rank.ORDINARY, trace=7)
    queue.put("its tune", Rank.VITAL, trace=7)
    for number in range(30):
        queue.put(number, Rank.HIT, trace=100 + number)
    queue.put("its hit, after", Rank.HIT, trace=7)
    for number in range(30, 60):
        queue.put(number, Rank.HIT, trace=100 + number)
        queue.put(-number, Rank.ORDINARY, trace=100 + number)
    wire.gate.set()
    assert queue.close(10) is True
    kept = ["its tune", "its hit, before", "its hit, after", "its request"]
    assert wire.arrived == ["first", *kept, *range(-40, -60, -1), *range(50, 60)]


def test_vital_items_are_sent_again_and_the_rest_counts_as_failed():
    """After a short outage the collector gets the tunes; the other items are lost and counted."""
    wire = RedisConnection(failing=2)
    queue = held_up(wire, batch_size=20, delay_s=0.01)
    before = dropped("traces", "export_failed")
    for number in range(5):
        queue.put(f"tune {number}", Rank.VITAL)
        queue.put(f"hit {number}", Rank.HIT)
    assert opened_during(wire, queue, queue.close) is False  # hits were lost
    assert wire.arrived == ["first", *(f"tune {number}" for number in range(5))]
    assert dropped("traces", "export_failed") - before == 5


@pytest.mark.parametrize(
    ("outcome", "attempts"), [(Outcome.UNREACHED, 5), (Outcome.UNANSWERED, 3), (Outcome.REFUSED, 1)]
)
def test_a_batch_that_fails_repeatedly_is_dropped(outcome, attempts):
    """A slow collector may have accepted it each time, and a refusal is final. The loss is counted."""
    wire = RedisConnection(failing=1000, outcome=outcome)
    before = dropped("traces", "export_failed")
    queue = ExportQueue("traces", wire.send, Limits(queue_size=10, batch_size=5, delay_s=1000))
    for number in range(5):
        queue.put(number, Rank.VITAL)
    assert opened_during(wire, queue, queue.close) is False
    assert wire.attempts == attempts
    assert dropped("traces", "export_failed") - before == 5


def test_items_that_are_sent_again_do_not_exceed_the_bound():
    """Items that were queued meanwhile stay, and the batch without room is lost."""
    wire = RedisConnection(failing=1)
    queue = ExportQueue("traces", wire.send, Limits(queue_size=1, batch_size=16, delay_s=1000))
    before = dropped("traces", "export_failed")
    for number in range(16):
        queue.put(number, Rank.VITAL)
    assert wire.entered.wait(10)
    for number in range(16, 26):
        queue.put(number, Rank.VITAL)
    assert opened_during(wire, queue, queue.close) is False
    assert wire.arrived == list(range(10, 26))
    assert dropped("traces", "export_failed") - before == 10


@pytest.mark.parametrize("error", [OSError, SystemExit, KeyboardInterrupt])
def test_an_exporter_that_raises_does_not_end_the_thread(caplog, error):
    """The next batch is sent by the same thread. The log has the error without its secrets, once."""
    wire = RedisConnection()

    def send(batch):
        if wire.send(batch) and batch == ["hit"]:
            raise error("cannot reach http://me:hunter2@host/v1/traces?token=hunter2")
        return Outcome.ARRIVED

    queue = ExportQueue("traces", send, Limits(queue_size=10, batch_size=1, delay_s=1000))
    queue.put("hit", Rank.HIT)
    assert opened_during(wire, queue, queue.flush) is False
    thread = queue._thread
    queue.put("another", Rank.HIT)
    assert queue.flush(10) is True
    assert queue._thread is thread
    assert queue.close(10)
    why = f"{error.__name__}: cannot reach http://***@host/v1/traces?token=***"
    assert [record.getMessage() for record in caplog.records] == [
        f"dropping spans: {why} (asel.telemetry.dropped has the count)",
        "the queue of spans is empty again; 1 were dropped",
    ]


def test_a_refusal_is_reported_once(caplog):
    """A collector that answers 401 is not slow. The number of drops is logged after a batch has arrived."""
    wire = RedisConnection(failing=3, outcome=Outcome.REFUSED)
    wire.gate.set()
    queue = ExportQueue("logs", wire.send, Limits(queue_size=10, batch_size=10, delay_s=1000))
    for number in range(4):
        queue.put(number, Rank.VITAL)
        queue.flush(10)
    assert queue.close(10)
    assert [record.getMessage() for record in caplog.records] == [
        "dropping log records: the collector refuses them (asel.telemetry.dropped has the count)",
        "the queue of log records is empty again; 3 were dropped",
    ]


def test_closing_reports_each_loss_once(caplog):
    """Earlier drops, and unsent items."""
    wire = RedisConnection()
    queue = held_up(wire)
    for number in range(13):
        queue.put(number, Rank.HIT)
    queue.abandon()
    wire.gate.set()
    assert [record.getMessage() for record in caplog.records][1:] == [
        "3 spans were dropped before telemetry was closed",
        "telemetry was closed with 11 spans unsent",
    ]


def test_a_flush_does_not_wait_for_later_items():
    """Otherwise it would never succeed in a busy program."""
    queue = None

    def send(batch):
        queue.put("the next", Rank.HIT)
        return Outcome.ARRIVED

    queue = ExportQueue("traces", send, Limits(queue_size=10, batch_size=512, delay_s=1000))
    queue.put("first", Rank.HIT)
    assert queue.flush(10) is True
    queue.abandon()


def test_items_after_closing_are_counted_and_start_no_thread():
    """A tracer that outlives its provider is harmless."""
    wire = RedisConnection()
    queue = ExportQueue("traces", wire.send, Limits(queue_size=10, batch_size=1, delay_s=1000))
    before = dropped("traces", "closed")
    assert queue.close(1) is True
    queue.put("late", Rank.VITAL)
    assert dropped("traces", "closed") - before == 1
    assert queue._thread is None
    assert wire.attempts == 0


def test_spans_are_ranked_by_kind_tier_and_error():
    """Hits are lowest, then the application's spans, then tunes and errors."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    from asel.telemetry.processors import rank_of_span

    tracer = TracerProvider(resource=Resource.get_empty(), shutdown_on_exit=False).get_tracer("test")

    def rank(name, error=False, **facts):
        span = tracer.start_span(name, attributes={f"asel.{key}": value for key, value in facts.items()})
        if error:
            span.set_status(Status(StatusCode.ERROR))
        return rank_of_span(span)

    assert {rank("asel.choose", tier=tier) for tier in ("memory", "override", "overlay")} == {Rank.HIT}
    assert rank("asel.choose", tier="heuristics") == rank("GET /generate") == Rank.ORDINARY
    waiter = {"asel.tune.id": "1", "asel.tier": "autotune"}
    assert rank_of_span(tracer.start_span("asel.choose", attributes=waiter)) == Rank.VITAL
    vital = ("asel.autotune", "asel.candidate", "asel.candidate.compile", "asel.store.get", "asel.withdraw")
    assert {rank(name) for name in vital} == {Rank.VITAL}
    assert rank("GET /generate", error=True) == rank("asel.choose", error=True, tier="memory") == Rank.VITAL


def test_exports_are_not_instrumented_and_only_sampled_spans_are_sent():
    """An instrumented HTTP client would make a span for each export, and so another export."""
    from opentelemetry.context import _SUPPRESS_INSTRUMENTATION_KEY, get_value
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider, sampling
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    from asel.telemetry.processors import SpanQueue

    exported = []

    class Exporter(SpanExporter):
        def export(self, spans):
            exported.append(([span.name for span in spans], get_value(_SUPPRESS_INSTRUMENTATION_KEY)))
            return SpanExportResult.SUCCESS

    class Sampler(sampling.Sampler):
        """Records every span, and samples some."""

        def should_sample(self, parent_context, trace_id, name, *arguments, **options):
            kept = sampling.Decision.RECORD_AND_SAMPLE if name == "sampled" else sampling.Decision.RECORD_ONLY
            return sampling.SamplingResult(kept)

        def get_description(self):
            return "by name"

    provider = TracerProvider(Sampler(), Resource.get_empty(), shutdown_on_exit=False)
    provider.add_span_processor(SpanQueue(Exporter(), Limits(queue_size=10, batch_size=10, delay_s=1000)))
    for name in ("sampled", "recorded only"):
        provider.get_tracer("test").start_span(name).end()
    provider.shutdown()
    assert exported == [(["sampled"], True)]
    assert get_value(_SUPPRESS_INSTRUMENTATION_KEY) is None


@pytest.mark.timeout(60)
def test_a_forked_child_has_an_empty_queue_and_its_own_thread():
    """The parent sends its queued items."""
    wire = RedisConnection()
    queue = held_up(wire)
    queue.put("the parent's", Rank.VITAL)
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)

    def child():
        arrived = []
        queue._send = lambda batch: arrived.extend(batch) or Outcome.ARRIVED
        queue.put("the child's", Rank.VITAL)
        send.send((queue.close(10), arrived, dropped("traces", "closed", "queue_full", "export_failed")))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other tests' threads do not concern this child
        process = context.Process(target=child)
        process.start()
    assert receive.poll(30)
    assert receive.recv() == (True, ["the child's"], 0)
    process.join(10)
    wire.gate.set()
    assert queue.close(10) is True
    assert wire.arrived == ["first", "the parent's"]


def test_no_thread_is_left_when_a_queue_is_closed():
    """No thread is started before the first item."""
    before = set(threading.enumerate())
    wire = RedisConnection()
    wire.gate.set()
    queue = ExportQueue("logs", wire.send, Limits(queue_size=10, batch_size=1, delay_s=1000))
    assert set(threading.enumerate()) == before
    queue.put("one", Rank.HIT)
    assert queue.close(10) is True
    assert set(threading.enumerate()) == before
