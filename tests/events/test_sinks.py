"""A selector's sinks: called from the telemetry thread unless `on_loop`. Real threads, ordered by gates."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from contextvars import ContextVar

import anyio
import pytest
from support.kernels import COSTS, Blocks, Toy, call, scripted
from support.pipelines import KEY, Gated

from asel import ConfigCache, ConfigSelectorChain
from asel.events.dispatcher import Dispatcher
from asel.telemetry import Pipeline, default_sinks, shared_pipeline
from asel.testing import CapturedTelemetry, RecordingSink

TOY = Toy()


class Deferred(RecordingSink):
    """Keeps events, and the threads it was called from."""

    on_loop = False

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[str] = set()

    def emit(self, event):
        self.threads.add(threading.current_thread().name)
        super().emit(event)


@pytest.fixture
def pipeline(monkeypatch):
    """Replaces the pipeline that all selectors share, so that no test leaves its thread blocked."""
    pipeline = Pipeline()
    monkeypatch.setattr("asel.events.dispatcher.shared_pipeline", lambda: pipeline)
    return pipeline


def chain_of(*sinks, **options) -> ConfigSelectorChain:
    return ConfigSelectorChain(ConfigCache(), tuner=scripted(COSTS)[0], sinks=sinks, **options)


@pytest.mark.anyio
async def test_a_sink_gets_every_event_in_order_in_the_telemetry_thread(pipeline):
    """Closing the selector waits for the thread, and then flushes the sink."""

    class Flushed(Deferred):
        def flush(self, timeout_s):
            self.flushed_after = self.names[-1]

    sink, reference = Flushed(), RecordingSink()
    async with chain_of(sink, reference) as chain:
        for _ in range(5):
            assert await chain.choose(call(), TOY) == Blocks(3)
    assert sink.events == reference.events
    assert sink.threads == {"asel telemetry"}
    assert sink.flushed_after == sink.names[-1] == "closed"


@pytest.mark.anyio
async def test_no_selection_waits_for_a_blocked_sink(pipeline, caplog):
    """Closing waits no longer than the grace, and logs the number of undelivered events."""
    sink = Gated()
    async with chain_of(sink, close_grace_s=0.02) as chain:
        for _ in range(10):
            assert await chain.choose(call(), TOY) == Blocks(3)
    assert sink.events == []
    undelivered = pipeline.statistics().queued
    [report] = [record.getMessage() for record in caplog.records if record.name == "asel"]
    assert f"closed with {undelivered} undelivered events: the sinks (Gated)" in report
    sink.gate.set()
    assert await anyio.to_thread.run_sync(pipeline.flush, 10)
    assert sink.names[-1] == "closed"
    assert len(sink.events) == undelivered


@pytest.mark.anyio
async def test_a_sink_of_the_loop_has_the_event_before_its_selection_returns(pipeline):
    """With `on_loop = True` it may set an event that a task waits for. Streams and callbacks are such sinks."""
    heard, sink = [], RecordingSink()
    async with chain_of(sink, on_event=heard.append) as chain, chain.events() as stream:
        await chain.choose(call(), TOY)
        for _ in range(20):
            before = len(heard)
            await chain.choose(call(), TOY)
            assert len(heard) == len(sink.events) == before + 1
    assert heard == sink.events
    assert [event async for event in stream] == heard[:-1]
    assert pipeline.statistics().offered == 0


@pytest.mark.anyio
async def test_events_of_other_threads_reach_every_sink(pipeline):
    """`choose_nowait` in threads: each event arrives exactly once."""
    sink, reference = Deferred(), RecordingSink()
    async with chain_of(sink, reference) as chain:
        cfg = await chain.choose(call(), TOY)

        def choose_some():
            for _ in range(20):
                assert chain.choose_nowait(call(), TOY) == cfg

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(anyio.to_thread.run_sync, choose_some)
    assert sink.names.count("cache_hit") == reference.names.count("cache_hit") == 60


@pytest.mark.anyio
async def test_a_failing_sink_is_reported_once_and_its_neighbours_get_everything(pipeline, caplog):
    """Even SystemExit in the thread does not affect the others."""

    class Broken(Deferred):
        def emit(self, event):
            super().emit(event)
            raise RuntimeError("no disk")

    class Undecided(Deferred):
        def wants(self, kind):
            raise RuntimeError("no idea")

    broken, undecided, sink, reference = Broken(), Undecided(), Deferred(), RecordingSink()
    async with chain_of(broken, undecided, sink, reference) as chain:
        for _ in range(5):
            await chain.choose(call(), TOY)
    assert broken.events == sink.events == reference.events
    assert undecided.events == []
    reports = [record for record in caplog.records if record.name == "asel"]
    assert [record.levelno for record in reports] == [logging.ERROR] * 2


def test_a_sink_sees_the_callers_context(pipeline):
    """Each event is delivered in the context it happened in."""
    who, seen = ContextVar("who", default="nobody"), []

    class Seer(Deferred):
        def emit(self, event):
            seen.append((event.cfg, who.get()))

    dispatcher = Dispatcher([Seer()])
    for n, name in enumerate(["ann", "bob"]):
        token = who.set(name)
        dispatcher.hit(KEY, n, 0.0)
        who.reset(token)
    assert pipeline.flush(10)
    assert seen == [(0, "ann"), (1, "bob")]


def test_all_selectors_share_one_thread():
    """Except captured telemetry, which keeps its own pipeline."""
    mine = Pipeline()
    [captured] = CapturedTelemetry(pipeline=mine).sinks
    dispatcher = Dispatcher([*default_sinks(), captured, RecordingSink()])
    assert {deferred._pipeline for deferred in dispatcher._deferred} == {shared_pipeline(), mine}


EXITING = """
import threading
from asel.events.dispatcher import Dispatcher
from asel.kernels.keys import CacheKey

class Hangs:
    entered = threading.Event()
    def emit(self, event):
        self.entered.set()
        threading.Event().wait()

sink = Hangs()
dispatcher = Dispatcher([sink])
for n in range(4):
    dispatcher.hit(CacheKey("dev", "op@v1", "key"), n, 0.0)
assert sink.entered.wait(10)
import logging
logging.basicConfig(format="%(message)s")
print("over", flush=True)
"""


@pytest.mark.timeout(60)
def test_a_hanging_sink_does_not_keep_the_program_running():
    """Its thread is a daemon; the program waits one second, and logs the number of undelivered events."""
    result = subprocess.run([sys.executable, "-c", EXITING], capture_output=True, text=True, check=False, timeout=50)
    assert (result.returncode, result.stdout, result.stderr) == (0, "over\n", "exiting with 4 undelivered events\n")
