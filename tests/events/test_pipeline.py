"""The queue between events and telemetry: every lost event is counted, and no selection waits."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading

import pytest
from support.kernels import Toy
from support.paths import TESTS
from support.pipelines import KEY, Gated, held, tune

from asel import InvalidRequestError
from asel.events import CacheHit, Heuristics, NoAnswer, Stale
from asel.telemetry import DeferredSinks, Pipeline, default_sinks
from asel.testing import CapturedTelemetry, RecordingSink

TOY = Toy()


def hit(n: int = 0) -> CacheHit:
    return CacheHit(key=KEY, start=0.0, end=0.0, level="memory", cfg=n)


def guess() -> Heuristics:
    return Heuristics(key=KEY, start=0.0, end=0.0, cfg=0)


def test_events_come_out_in_order_and_all_of_them():
    """Every event offered below the ceiling is emitted."""
    sink, pipeline, deferred = held(1000)
    for n in range(500):
        deferred.hit(KEY, n, 0.0) if n % 2 else deferred.emit(hit(n))
    sink.gate.set()
    assert pipeline.flush(10)
    assert [event.cfg for event in sink.events[1:]] == list(range(500))
    assert pipeline.statistics().emitted == pipeline.statistics().offered == 501
    assert pipeline.is_flushed


def test_over_the_ceiling_hits_are_shed_first_and_tunes_and_errors_never():
    """Emitted and shed events add up exactly to those offered."""
    sink, pipeline, deferred = held(100)
    for _ in range(150):
        deferred.hit(KEY, 0, 0.0)
    for _ in range(150):
        deferred.emit(guess())
    for _ in range(10):
        deferred.emit(tune())
        deferred.emit(NoAnswer(key=KEY, start=0.0, end=0.0, reason="no_config"))
        deferred.emit(Stale(key=KEY, start=0.0, end=0.0, cfg=0, checksum="a", expected="b"))
    before = pipeline.statistics()
    assert (before.emitted, before.shed["ceiling"], before.queued) == (0, 50 + 50, 1 + 100 + 100 + 30)
    assert before.offered == 1 + 150 + 150 + 30
    sink.gate.set()
    assert pipeline.flush(10)
    after = pipeline.statistics()
    assert (after.emitted, after.shed, after.queued) == (231, {"ceiling": 100, "closed": 0}, 0)
    kept = [event.name for event in sink.events if not event.name.startswith("shedding")]
    assert [kept.count(name) for name in ("cache_hit", "heuristics", "autotune_start", "error", "stale")] == [
        100,
        100,
        11,
        10,
        10,
    ]


@pytest.mark.timeout(60)
def test_counts_of_emitted_and_shed_events_are_exact_under_threads():
    """Threads race for the last places, and each of their events is either emitted or counted as shed."""
    sink, pipeline = RecordingSink(), Pipeline(ceiling=50)
    deferred, threads, each = DeferredSinks([sink], pipeline), 4, 5000

    def offer():
        for n in range(each):
            deferred.hit(KEY, n, 0.0)

    running = [threading.Thread(target=offer) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert pipeline.flush(30)
    done = pipeline.statistics()
    assert done.emitted + done.shed["ceiling"] == done.offered == threads * each
    assert sum(event.name == "cache_hit" for event in sink.events) == done.emitted


def test_shedding_is_announced_when_it_starts_and_when_it_stops(caplog):
    """One line each, with the number of lost events."""
    caplog.set_level(logging.WARNING, logger="asel")
    sink, pipeline = Gated(), Pipeline(ceiling=100)
    deferred = DeferredSinks([sink, *default_sinks()], pipeline)
    told = threading.Event()
    shedding, announce = [], deferred.announce

    def listen(kind, **facts):
        shedding.append((kind.name, facts))
        announce(kind, **facts)
        if kind.name == "shedding_stopped":
            told.set()

    deferred.announce = listen
    deferred.emit(tune())
    assert sink.entered.wait(10)
    for _ in range(250):
        deferred.hit(KEY, 0, 0.0)
    sink.gate.set()
    assert told.wait(10)
    [(start, started), (stop, stopped)] = shedding
    assert (start, stop, stopped) == ("shedding_started", "shedding_stopped", {"shed": 150})
    assert 0 <= started["queued"] <= 100, "events delivered in the meantime are no longer queued"
    lines = [record.getMessage().split()[0] for record in caplog.records if record.name == "asel"]
    assert lines == ["asel.shedding_started:", "asel.shedding_stopped:"]


def test_drops_are_in_the_metrics():
    """asel.telemetry.events and asel.telemetry.dropped add up to what was offered."""
    pipeline = Pipeline(ceiling=10)
    captured = CapturedTelemetry(pipeline=pipeline)
    [deferred] = captured.sinks
    gate = Gated()
    held_up = DeferredSinks([gate], pipeline)
    held_up.emit(tune())
    assert gate.entered.wait(10)
    for _ in range(30):
        deferred.hit(KEY, 0, 0.0)
    gate.gate.set()
    assert pipeline.flush(10)
    metrics = captured.metrics()
    assert metrics["asel.telemetry.events"] == {(): 11}
    assert metrics["asel.telemetry.dropped"] == {
        (("asel.reason", "ceiling"), ("asel.signal", "events")): 20,
        (("asel.reason", "closed"), ("asel.signal", "events")): 0,
    }
    assert metrics["asel.selections"] == {(("asel.op", "op@v1"), ("asel.tier", "memory")): 30}


def test_the_thread_sleeps_when_there_is_nothing_and_wakes_for_the_next():
    """No polling: an idle process stays idle."""
    sink, pipeline = RecordingSink(), Pipeline(rest_s=0.0)
    deferred = DeferredSinks([sink], pipeline)
    assert pipeline._thread is None
    for n in range(20):
        deferred.hit(KEY, n, 0.0)
        assert pipeline.flush(10)
        thread = pipeline._thread
        while not pipeline._asleep:
            thread.join(0)  # lets the other thread run
    assert [event.cfg for event in sink.events] == list(range(20))
    assert pipeline._thread is thread


def test_a_closed_pipeline_counts_undelivered_events():
    """Closing has a deadline; the events left then are shed, with that reason."""
    sink, pipeline, deferred = held(1000)
    for n in range(10):
        deferred.hit(KEY, n, 0.0)
    assert pipeline.close(timeout_s=0.0) is False
    deferred.hit(KEY, 11, 0.0)
    sink.gate.set()
    pipeline._thread.join(10)
    done = pipeline.statistics()
    assert (done.emitted, done.shed["closed"], done.offered) == (1, 11, 12)


def test_bad_sizes_are_refused():
    """A queue needs room for an event, and the thread needs time to work."""
    for wrong in ({"ceiling": 0}, {"work_s": 0.0}, {"rest_s": -1.0}):
        with pytest.raises(InvalidRequestError, match="Pipeline"):
            Pipeline(**wrong)


FORKING = """
import json, os, sys, threading
sys.path.insert(0, {tests!r})
from asel.kernels.keys import CacheKey
from asel.telemetry import Pipeline, DeferredSinks
from asel.testing import CapturedTelemetry, RecordingSink

key = CacheKey("dev", "op@v1", "key")
pipeline = Pipeline()
captured = CapturedTelemetry(pipeline=pipeline)
[deferred] = captured.sinks

class Held(RecordingSink):
    entered, gate = threading.Event(), threading.Event()
    def emit(self, event):
        self.entered.set()
        self.gate.wait(10)

blocked = DeferredSinks([Held()], pipeline)
blocked.hit(key, 0, 0.0)        # the thread is at work when the process forks
Held.entered.wait(10)
for _ in range(5):
    deferred.hit(key, 0, 0.0)        # and has more to do
child = os.fork()
if child == 0:
    empty = pipeline.statistics()
    Held.gate.set()
    deferred.hit(key, 1, 0.0)
    flushed = pipeline.flush(10)
    selections = list(captured.metrics()["asel.selections"].values())
    hits = len(captured.spans)
    os.write(1, json.dumps(["child", empty.offered, flushed, selections, hits]).encode() + b"\\n")
    os._exit(0)
os.waitpid(child, 0)
Held.gate.set()
flushed = pipeline.flush(10)
selections = list(captured.metrics()["asel.selections"].values())
print(json.dumps(["parent", pipeline.statistics().emitted, flushed, selections, len(captured.spans)]))
"""


@pytest.mark.timeout(60)
def test_a_forked_child_has_an_empty_queue_and_a_thread_of_its_own():
    """Queued events are delivered once, by the parent; the child delivers its own."""
    script = FORKING.format(tests=str(TESTS))
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=50)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [
        '["child", 0, true, [1], 1]',
        '["parent", 6, true, [5], 5]',
    ]


def test_a_sink_that_exits_does_not_end_the_thread():
    """SystemExit in the telemetry thread would stop all telemetry, silently."""

    class Exits(RecordingSink):
        def emit(self, event):
            super().emit(event)
            raise SystemExit

    sink, pipeline = Exits(), Pipeline()
    deferred = DeferredSinks([sink], pipeline)
    for n in range(3):
        deferred.hit(KEY, n, 0.0)
    assert pipeline.flush(10)
    assert len(sink.events) == pipeline.statistics().emitted == 3


def test_an_exit_while_shedding_is_announced_does_not_end_the_thread():
    """Events about the telemetry itself are emitted in the same thread."""
    sink, pipeline, deferred = held(1)
    told = threading.Event()

    def leave(kind, **facts):
        told.set()
        raise SystemExit

    deferred.announce = leave
    for n in range(3):
        deferred.hit(KEY, n, 0.0)
    sink.gate.set()
    assert told.wait(10)
    deferred.emit(tune())
    assert pipeline.flush(10)
    assert sink.names == ["autotune_start", "cache_hit", "autotune_start"]
