"""The queue between events and telemetry: nothing is lost uncounted, and nobody waits for it."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from pathlib import Path

import anyio
import pytest
from kernels import COSTS, Blocks, Toy, call, scripted

from asel import ConfigCache, ConfigSelectorChain, InvalidRequestError
from asel.events import AutotuneStart, CacheHit, Event, Heuristics, NoAnswer, Stale
from asel.fanout import FanOut
from asel.keys import CacheKey
from asel.telemetry import Pipeline, Tap, default_sinks, gathered, shared_pipeline
from asel.testing import CapturedTelemetry, RecordingSink

TOY = Toy()
KEY = CacheKey("dev", "op@v1", "key")


def hit(n: int = 0) -> CacheHit:
    return CacheHit(key=KEY, start=0.0, end=0.0, level="memory", cfg=n)


def guess() -> Heuristics:
    return Heuristics(key=KEY, start=0.0, end=0.0, cfg=0)


def tune() -> AutotuneStart:
    return AutotuneStart(key=KEY, start=0.0, end=0.0, tune_id="t", candidates=1, objective="forward", background=False)


class Gated(RecordingSink):
    """A sink that takes its time: until the gate is open."""

    deferred = True

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.entered = threading.Event(), threading.Event()

    def emit(self, event: Event) -> None:
        self.entered.set()
        assert self.gate.wait(10)
        super().emit(event)


def held(ceiling: int) -> tuple[Gated, Pipeline, Tap]:
    """Return a pipeline whose thread is held up with one event in hand."""
    sink, pipeline = Gated(), Pipeline(ceiling=ceiling)
    tap = Tap([sink], pipeline)
    tap.emit(tune())
    assert sink.entered.wait(10)
    return sink, pipeline, tap


def test_events_come_out_in_order_and_all_of_them():
    """What is offered below the ceiling is emitted."""
    sink, pipeline, tap = held(1000)
    for n in range(500):
        tap.hit(KEY, n, 0.0) if n % 2 else tap.emit(hit(n))
    sink.gate.set()
    assert pipeline.flush(10)
    assert [event.cfg for event in sink.events[1:]] == list(range(500))
    assert pipeline.statistics().emitted == pipeline.statistics().offered == 501
    assert pipeline.is_flushed


def test_over_the_ceiling_hits_are_shed_first_and_tunes_and_errors_never():
    """Emitted and shed are what was offered, exactly."""
    sink, pipeline, tap = held(100)
    for _ in range(150):
        tap.hit(KEY, 0, 0.0)
    for _ in range(150):
        tap.emit(guess())
    for _ in range(10):
        tap.emit(tune())
        tap.emit(NoAnswer(key=KEY, start=0.0, end=0.0, reason="no_config"))
        tap.emit(Stale(key=KEY, start=0.0, end=0.0, cfg=0, checksum="a", expected="b"))
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
def test_the_account_is_exact_whoever_offers():
    """Threads race for the last places, and each of their events is either emitted or counted as shed."""
    sink, pipeline = RecordingSink(), Pipeline(ceiling=50)
    sink.deferred = True
    tap, threads, each = Tap([sink], pipeline), 4, 5000

    def offer():
        for n in range(each):
            tap.hit(KEY, n, 0.0)

    running = [threading.Thread(target=offer) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert pipeline.flush(30)
    done = pipeline.statistics()
    assert done.emitted + done.shed["ceiling"] == done.offered == threads * each
    assert sum(event.name == "cache_hit" for event in sink.events) == done.emitted


def test_shedding_is_told_once_when_it_starts_and_once_when_it_stops(caplog):
    """One line each, with how much was lost."""
    caplog.set_level(logging.WARNING, logger="asel")
    sink, pipeline = Gated(), Pipeline(ceiling=100)
    tap = Tap([sink, *default_sinks()], pipeline)
    told = threading.Event()
    shedding, tell = [], tap.tell

    def listen(kind, **facts):
        shedding.append((kind.name, facts))
        tell(kind, **facts)
        if kind.name == "shedding_stopped":
            told.set()

    tap.tell = listen
    tap.emit(tune())
    assert sink.entered.wait(10)
    for _ in range(250):
        tap.hit(KEY, 0, 0.0)
    sink.gate.set()
    assert told.wait(10)
    [(start, started), (stop, stopped)] = shedding
    assert (start, stop, stopped) == ("shedding_started", "shedding_stopped", {"shed": 150})
    assert 0 < started["queued"] <= 100
    lines = [record.getMessage().split()[0] for record in caplog.records if record.name == "asel"]
    assert lines == ["asel.shedding_started", "asel.shedding_stopped"]


def test_drops_are_in_the_metrics():
    """asel.telemetry.events and asel.telemetry.dropped add up to what was offered."""
    pipeline = Pipeline(ceiling=10)
    captured = CapturedTelemetry(pipeline=pipeline)
    [tap] = captured.sinks
    gate = Gated()
    held_up = Tap([gate], pipeline)
    held_up.emit(tune())
    assert gate.entered.wait(10)
    for _ in range(30):
        tap.hit(KEY, 0, 0.0)
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
    sink.deferred = True
    tap = Tap([sink], pipeline)
    assert pipeline._thread is None
    for n in range(20):
        tap.hit(KEY, n, 0.0)
        assert pipeline.flush(10)
        thread = pipeline._thread
        while not pipeline._asleep:
            thread.join(0)  # lets the other thread run
    assert [event.cfg for event in sink.events] == list(range(20))
    assert pipeline._thread is thread


@pytest.mark.anyio
async def test_a_slow_sink_behind_a_pipeline_delays_no_selection():
    """Whoever takes long, takes it in the pipeline's thread; closing waits no longer than it may."""
    sink = Gated()
    tuner, _ = scripted(COSTS)
    pipeline = Pipeline()
    async with ConfigSelectorChain(
        ConfigCache(), tuner=tuner, sinks=gathered([sink], pipeline), close_grace_s=0.0
    ) as chain:
        for _ in range(10):
            assert await chain.choose(call(), TOY) == Blocks(3)
    assert sink.events == []
    assert pipeline.statistics().offered > 10
    sink.gate.set()
    assert await anyio.to_thread.run_sync(pipeline.flush, 10)
    assert sink.names[-1] == "closed"


@pytest.mark.anyio
async def test_closing_a_chain_waits_for_its_telemetry():
    """After the `async with`, what the chain did has been told."""
    sink, pipeline = RecordingSink(), Pipeline()
    sink.deferred = True
    tuner, _ = scripted(COSTS)
    async with ConfigSelectorChain(ConfigCache(), tuner=tuner, sinks=gathered([sink], pipeline)) as chain:
        await chain.choose(call(), TOY)
        await chain.choose(call(), TOY)
    assert sink.names[-3:] == ["autotuned", "cache_hit", "closed"]


def test_a_raising_sink_is_reported_once_and_the_others_get_everything(caplog):
    """A sink's failure is its own, in the thread as on the loop."""

    class Broken:
        deferred = True

        def emit(self, event):
            raise RuntimeError("no disk")

        def wants(self, kind):
            if kind is Stale:
                raise RuntimeError("no idea")
            return True

    sink, pipeline = RecordingSink(), Pipeline()
    sink.deferred = True
    fan_out = FanOut([Tap([Broken(), sink], pipeline)])
    for n in range(3):
        fan_out.hit(KEY, n, 0.0)
    fan_out(Stale(key=KEY, start=0.0, end=0.0, cfg=0, checksum="a", expected="b"))
    assert pipeline.flush(10)
    assert [event.cfg for event in sink.events] == [0, 1, 2]
    assert [record.levelno for record in caplog.records] == [logging.ERROR, logging.ERROR]


def test_a_pipeline_that_is_closed_counts_what_it_could_not_tell():
    """Closing has a deadline; what is left then is shed, with that reason."""
    sink, pipeline, tap = held(1000)
    for n in range(10):
        tap.hit(KEY, n, 0.0)
    assert pipeline.close(timeout_s=0.0) is False
    tap.hit(KEY, 11, 0.0)
    sink.gate.set()
    pipeline._thread.join(10)
    done = pipeline.statistics()
    assert (done.emitted, done.shed["closed"], done.offered) == (1, 11, 12)


def test_a_thread_that_was_let_go_ends_and_the_next_event_starts_another():
    """Ending is not closing: what is offered later is told."""
    sink, pipeline = RecordingSink(), Pipeline()
    tap = Tap([sink], pipeline)
    for n in range(3):
        tap.hit(KEY, n, 0.0)
        thread = pipeline._thread
        assert pipeline.end(10) == 0
        thread.join(10)
        assert not thread.is_alive()
        assert not pipeline.is_running
    assert [event.cfg for event in sink.events] == [0, 1, 2]


def test_a_thread_that_hangs_is_let_go_and_never_has_a_second_beside_it():
    """Ending has a deadline; what is left is counted, and the one in hand is among it."""
    sink, pipeline, tap = held(1000)
    thread = pipeline._thread
    for n in range(10):
        tap.hit(KEY, n, 0.0)
    assert pipeline.end(timeout_s=0.0) == 11
    tap.hit(KEY, 10, 0.0)
    assert pipeline._thread is thread
    sink.gate.set()
    thread.join(10)
    assert [event.name for event in sink.events] == ["autotune_start", "cache_hit"]
    done = pipeline.statistics()
    assert (done.emitted, done.shed["closed"], done.offered) == (2, 10, 12)


def test_a_thread_without_work_ends_after_a_while_if_asked_to():
    """No event is lost between its last look and its end, whenever it comes."""
    sink, pipeline = RecordingSink(), Pipeline(rest_s=0.0, idle_s=0.0)
    tap, threads = Tap([sink], pipeline), set()
    for n in range(200):
        tap.hit(KEY, n, 0.0)
        threads.add(pipeline._thread)
        while pipeline.is_running and n % 2:
            time.sleep(0)
    assert pipeline.flush(10)
    assert [event.cfg for event in sink.events] == list(range(200))
    assert len(threads - {None}) > 2


def test_an_event_that_comes_as_the_thread_is_about_to_end_keeps_it(monkeypatch):
    """Whoever called a thread that had waited long enough finds it at work, or starts another."""
    sink, pipeline = RecordingSink(), Pipeline(rest_s=0.0, idle_s=0.0)
    tap, told = Tap([sink], pipeline), threading.Event()

    def too_late(timeout_s):
        if len(sink.events) == 1:
            tap.hit(KEY, 1, 0.0)
        else:
            told.set()
        return False

    monkeypatch.setattr(pipeline._mail, "wait", too_late)
    tap.hit(KEY, 0, 0.0)
    assert told.wait(10)
    assert [event.cfg for event in sink.events] == [0, 1]


def test_asels_own_sinks_share_one_pipeline_and_the_users_stay_on_the_loop():
    """One thread for a process; a sink that says nothing is called as it always was."""
    mine = RecordingSink()
    tap, other = gathered([*default_sinks(), mine])
    assert other is mine
    assert isinstance(tap, Tap)
    assert tap._pipeline is shared_pipeline()
    assert gathered([mine]) == (mine,)
    assert gathered([tap]) == (tap,)


def test_bad_sizes_are_refused():
    """A queue holds something, and a thread that never works tells nothing."""
    for wrong in ({"ceiling": 0}, {"work_s": 0.0}, {"rest_s": -1.0}):
        with pytest.raises(InvalidRequestError, match="Pipeline"):
            Pipeline(**wrong)


FORKING = """
import json, os, sys, threading
sys.path.insert(0, {tests!r})
from asel.keys import CacheKey
from asel.telemetry import Pipeline, Tap
from asel.testing import CapturedTelemetry, RecordingSink

key = CacheKey("dev", "op@v1", "key")
pipeline = Pipeline()
captured = CapturedTelemetry(pipeline=pipeline)
[tap] = captured.sinks

class Held(RecordingSink):
    entered, gate = threading.Event(), threading.Event()
    def emit(self, event):
        self.entered.set()
        self.gate.wait(10)

blocked = Tap([Held()], pipeline)
blocked.hit(key, 0, 0.0)        # the thread is at work when the process forks
Held.entered.wait(10)
for _ in range(5):
    tap.hit(key, 0, 0.0)        # and has more to do
child = os.fork()
if child == 0:
    empty = pipeline.statistics()
    Held.gate.set()
    tap.hit(key, 1, 0.0)
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
    """What was queued is told once, by the parent; the child tells of what the child does."""
    script = FORKING.format(tests=str(Path(__file__).parent))
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=50)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [
        '["child", 0, true, [1], 1]',
        '["parent", 6, true, [5], 5]',
    ]


def test_a_sink_that_exits_does_not_end_the_thread():
    """SystemExit in the telemetry thread would stop all telemetry, silently."""

    class Exits(RecordingSink):
        deferred = True

        def emit(self, event):
            super().emit(event)
            raise SystemExit

    sink, pipeline = Exits(), Pipeline()
    tap = Tap([sink], pipeline)
    for n in range(3):
        tap.hit(KEY, n, 0.0)
    assert pipeline.flush(10)
    assert len(sink.events) == pipeline.statistics().emitted == 3


def test_a_sink_that_exits_when_told_of_shedding_does_not_end_the_thread():
    """What happens to telemetry is told in the same thread."""
    sink, pipeline, tap = held(1)
    told = threading.Event()

    def leave(kind, **facts):
        told.set()
        raise SystemExit

    tap.tell = leave
    for n in range(3):
        tap.hit(KEY, n, 0.0)
    sink.gate.set()
    assert told.wait(10)
    tap.emit(tune())
    assert pipeline.flush(10)
    assert sink.names == ["autotune_start", "cache_hit", "autotune_start"]
