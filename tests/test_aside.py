"""Slow sinks: each has a thread of its own, and no selection waits for it. Real threads, ordered by gates."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from contextvars import ContextVar
from functools import partial

import anyio
import pytest
from kernels import COSTS, Blocks, Toy, call, scripted

from asel import ConfigCache, ConfigSelectorChain
from asel.events import AutotuneStart, CacheHit, Event, Heuristics, NoAnswer
from asel.keys import CacheKey
from asel.telemetry import Pipeline
from asel.telemetry.aside import Aside
from asel.testing import CapturedTelemetry, RecordingSink

TOY = Toy()
KEY = CacheKey("dev", "op@v1", "key")
PATIENCE_S = 10.0  # how long a gate holds before the test is called broken; never reached by a passing one


class Slow(RecordingSink):
    """Claims to take 50 ms on the loop; in a thread, stands still until its gate is open."""

    on_loop = False

    def __init__(self, monkeypatch, *, is_open: bool = False) -> None:
        super().__init__()
        self.home = threading.current_thread()
        self.threads: list[threading.Thread] = []
        self.gate, self.entered = threading.Event(), threading.Event()
        if is_open:
            self.gate.set()
        now = time.perf_counter
        self.spent_s = 0.0
        monkeypatch.setattr("asel.fanout.perf_counter", lambda: now() + self.spent_s)

    def emit(self, event: Event) -> None:
        thread = threading.current_thread()
        if thread is self.home:
            self.spent_s += 0.05
        else:
            self.entered.set()
            assert self.gate.wait(PATIENCE_S)
        self.threads.append(thread)
        super().emit(event)

    @property
    def thread(self) -> threading.Thread:
        """The thread it moved to, of which there is one."""
        [thread] = set(self.threads) - {self.home}
        return thread


def chain_of(*sinks, costs=COSTS, **options) -> ConfigSelectorChain:
    tuner, _ = scripted(costs)
    return ConfigSelectorChain(ConfigCache(), tuner=tuner, sinks=sinks, **options)


async def until(gate: threading.Event) -> None:
    assert await anyio.to_thread.run_sync(gate.wait, PATIENCE_S)


@pytest.mark.anyio
@pytest.mark.parametrize("as_callback", [True, False])
async def test_a_slow_sink_delays_two_calls_and_no_selection_after(as_callback, monkeypatch):
    """While it stands still, selections go on; it gets every event, in order, across the move."""
    slow, quick = Slow(monkeypatch), RecordingSink()
    sinks, on_event = ([quick], slow.emit) if as_callback else ([slow, quick], None)
    async with chain_of(*sinks, on_event=on_event) as chain:
        for _ in range(50):
            assert await chain.choose(call(), TOY) == Blocks(3)
        assert len(slow.events) == 2
        slow.gate.set()
    assert slow.events == quick.events
    assert slow.names[-2:] == ["cache_hit", "closed"]
    assert slow.threads[:2] == [slow.home] * 2
    assert set(slow.threads[2:]) == {slow.thread}
    assert slow.thread.daemon
    slow.thread.join(PATIENCE_S)
    assert not slow.thread.is_alive()


@pytest.mark.timeout(60)
def test_a_callback_that_sleeps_holds_up_its_first_calls_only(real_backend):
    """The real thing, on a clock that nobody turns."""
    heard = []

    async def main():
        loop_thread, on_loop = threading.current_thread(), 0

        def sleepy(event):
            nonlocal on_loop
            if threading.current_thread() is loop_thread:
                on_loop += 1
                until_s = time.perf_counter() + 0.03  # time.sleep would fail the test: no sleeping on a loop
                while time.perf_counter() < until_s:
                    pass
            else:
                time.sleep(0.005)
            heard.append(event)

        async with chain_of(on_event=sleepy, costs=0.001) as chain:
            for _ in range(20):
                await chain.choose(call(), TOY)
        return on_loop

    assert anyio.run(main, backend=real_backend) == 2
    assert [event.name for event in heard].count("cache_hit") == 19
    assert heard[-1].name == "closed"


@pytest.mark.anyio
async def test_a_quick_sink_is_called_before_its_selection_returns():
    """As it always was: whoever appends to a list finds the event there."""
    heard = []
    async with chain_of(on_event=heard.append) as chain:
        await chain.choose(call(), TOY)
        for n in range(200):
            before = len(heard)
            await chain.choose(call(), TOY)
            assert len(heard) == before + 1, n
        assert {thread.name for thread in threading.enumerate()} & {"asel sink: list.append"} == set()


@pytest.mark.anyio
async def test_a_sink_that_is_slow_and_raises_is_reported_once_and_called_for_everything(monkeypatch, caplog):
    """Its failures are its own, on the loop as in the thread."""

    class Broken(Slow):
        def emit(self, event):
            super().emit(event)
            raise RuntimeError("no disk")

    slow, quick = Broken(monkeypatch, is_open=True), RecordingSink()
    async with chain_of(slow, quick) as chain:
        for _ in range(20):
            await chain.choose(call(), TOY)
    assert slow.events == quick.events
    assert slow.thread is not slow.home
    reports = [record for record in caplog.records if record.name == "asel"]
    assert [record.levelno for record in reports] == [logging.ERROR, logging.WARNING]


@pytest.mark.anyio
@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_sink_that_hangs_holds_up_closing_no_longer_than_the_grace(cancelled, monkeypatch, caplog):
    """Closing, cancelled or not, ends in time, and says how many events were not told."""
    slow, quick = Slow(monkeypatch), RecordingSink()
    with anyio.CancelScope() as scope:
        async with chain_of(slow, quick, close_grace_s=0.02) as chain:
            for _ in range(20):
                await chain.choose(call(), TOY)
            await until(slow.entered)
            if cancelled:
                scope.cancel()
    assert quick.names[-1] == "closed"
    untold = len(quick.events) - 2
    [report] = [record.getMessage() for record in caplog.records if "closed before" in record.getMessage()]
    assert f"the slow sink Slow was told of the last {untold} events" in report
    [thread] = [thread for thread in threading.enumerate() if thread.name == "asel sink: Slow"]
    slow.gate.set()
    await anyio.to_thread.run_sync(thread.join, PATIENCE_S)
    assert slow.events == quick.events[:3]


@pytest.mark.anyio
async def test_a_slow_sink_delays_neither_another_slow_sink_nor_telemetry(monkeypatch):
    """A thread for each; the one that stands still is on its own."""
    stands, works = Slow(monkeypatch), Slow(monkeypatch, is_open=True)
    monkeypatch.setattr("asel.fanout.perf_counter", lambda: time.perf_counter() + stands.spent_s + works.spent_s)
    pipeline = Pipeline()
    captured, told = CapturedTelemetry(pipeline=pipeline), threading.Event()

    def count(event):
        if works.names.count("cache_hit") == 19:
            told.set()

    emit = works.emit
    works.emit = lambda event: (emit(event), count(event))
    try:
        async with chain_of(stands, works, *captured.sinks, close_grace_s=1.0) as chain:
            for _ in range(20):
                await chain.choose(call(), TOY)
            await until(told)
            assert await anyio.to_thread.run_sync(pipeline.flush, PATIENCE_S)
            assert len(stands.events) == 2
            assert [span.name for span in captured.spans].count("asel.choose") == 20
        assert works.names[-1] == "closed"
    finally:
        stands.gate.set()


@pytest.mark.anyio
async def test_what_other_threads_choose_is_told_in_order_across_the_move(monkeypatch):
    """A slow sink sees the order that a quick one sees."""
    slow, quick = Slow(monkeypatch, is_open=True), RecordingSink()
    async with chain_of(quick, slow) as chain:
        cfg = await chain.select(call(), TOY)
        slow_so_far = len(slow.events)

        def choose_some():
            for _ in range(20):
                assert chain.choose_nowait(call(), TOY) == cfg.cfg

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(anyio.to_thread.run_sync, choose_some)
            for _ in range(20):
                await chain.choose(call(), TOY)
    assert slow_so_far >= 2
    assert slow.events == quick.events
    assert slow.names.count("cache_hit") == 80


@pytest.mark.anyio
async def test_a_sink_of_the_loops_stays_on_it(monkeypatch):
    """`on_loop = True`: it may set an event that a task waits for; a stream is such a sink."""

    class Bound(Slow):
        on_loop = True
        closed = None

        def emit(self, event):
            super().emit(event)
            if event.name == "autotuned":
                self.closed.set()

    bound = Bound(monkeypatch)
    bound.closed = anyio.Event()
    async with chain_of(bound) as chain, chain.events() as stream:
        assert stream.on_loop
        await chain.choose(call(), TOY)
        await bound.closed.wait()
        for _ in range(10):
            await chain.choose(call(), TOY)
    assert set(bound.threads) == {bound.home}


@pytest.mark.anyio
async def test_without_async_with_a_slow_sink_is_moved_as_well(monkeypatch):
    """Nobody closes such a chain; its thread goes when it has nothing to do, and is a daemon."""
    monkeypatch.setattr("asel.telemetry.aside._IDLE_S", 0.0)
    slow, quick = Slow(monkeypatch), RecordingSink()
    chain = chain_of(slow, quick)
    for _ in range(20):
        await chain.choose(call(), TOY)
    await until(slow.entered)
    [thread] = [thread for thread in threading.enumerate() if thread.name == "asel sink: Slow"]
    assert len(slow.events) == 2
    slow.gate.set()
    await anyio.to_thread.run_sync(thread.join, PATIENCE_S)
    assert slow.events == quick.events


@pytest.mark.anyio
async def test_a_chain_that_is_opened_again_never_calls_a_sink_from_two_threads(monkeypatch):
    """The thread that hung tells of what comes later, and once it has ended another may."""
    slow, quick = Slow(monkeypatch), RecordingSink()
    chain = chain_of(slow, quick, close_grace_s=0.0)
    async with chain:
        await chain.choose(call(), TOY)
        await until(slow.entered)
    untold = len(quick.events) - 3
    chain.close_grace_s = PATIENCE_S
    async with chain:
        await chain.choose(call(), TOY)
        slow.gate.set()
    assert slow.events == quick.events[:3] + quick.events[3 + untold :]
    first = slow.thread
    await anyio.to_thread.run_sync(first.join, PATIENCE_S)
    async with chain:
        await chain.choose(call(), TOY)
    assert slow.names[-2:] == ["cache_hit", "closed"]
    assert slow.threads[-1] not in (first, slow.home)


def test_a_sink_in_its_thread_sees_the_callers_context():
    """Each event is told in the context it happened in."""
    who, seen = ContextVar("who", default="nobody"), []
    aside = Aside("seer", lambda event: seen.append((event.cfg, who.get())), time.monotonic)
    for n, name in enumerate(["ann", "bob"]):
        token = who.set(name)
        aside.emit(CacheHit(key=KEY, start=0.0, end=0.0, level="memory", cfg=n))
        who.reset(token)
    assert aside.end(PATIENCE_S) == 0
    assert seen == [(0, "ann"), (1, "bob")]


def test_over_the_ceiling_hits_are_dropped_first_and_it_is_said_once(caplog):
    """Tunes and errors are never dropped, and the sink is told how much was."""
    entered, gate, told = threading.Event(), threading.Event(), []

    def give(event):
        entered.set()
        assert gate.wait(PATIENCE_S)
        told.append(event)

    stamp = partial(dict, key=KEY, start=0.0, end=0.0)
    tune = AutotuneStart(**stamp(), tune_id="t", candidates=1, objective="forward", background=False)
    aside = Aside("crawler", give, time.monotonic, ceiling=10)
    aside.emit(tune)
    assert entered.wait(PATIENCE_S)
    for n in range(15):
        aside.emit(CacheHit(**stamp(), level="memory", cfg=n))
    for _ in range(15):
        aside.emit(Heuristics(**stamp(), cfg=0))
    for _ in range(15):
        aside.emit(tune)
        aside.emit(NoAnswer(**stamp(), reason="no_config"))
    gate.set()
    assert aside.end(PATIENCE_S) == 0
    names = [event.name for event in told]
    assert [names.count(name) for name in ("cache_hit", "heuristics", "autotune_start", "error")] == [10, 10, 16, 15]
    assert [event.cfg for event in told if event.name == "cache_hit"] == list(range(10))
    assert aside.shed == 10
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "the sink crawler is too slow for what happens: 11 events wait for it" in record.getMessage()
    assert "make it quicker, or let its `wants(kind)` decline" in record.getMessage()


FORKING = """
import json, os, threading, time
from asel.fanout import FanOut
from asel.keys import CacheKey
from asel.telemetry.aside import Aside

entered, gate, told = threading.Event(), threading.Event(), []
home = threading.current_thread()

def slow(event):
    if threading.current_thread() is home:
        time.sleep(0.011)
    else:
        entered.set()
        gate.wait(10)
    told.append(event.cfg)

fan_out = FanOut([], slow, aside=Aside)
for n in range(6):
    fan_out.hit(CacheKey("dev", "op@v1", "key"), n, 0.0)
entered.wait(10)                # the thread is at work when the process forks, and has more to do
child = os.fork()
gate.set()
fan_out.hit(CacheKey("dev", "op@v1", "key"), 6 if child else 7, 0.0)
fan_out.close(10.0)
os.write(1, json.dumps(["parent" if child else "child", told]).encode() + b"\\n")
if child:
    os.waitpid(child, 0)
"""


@pytest.mark.timeout(60)
def test_a_forked_child_tells_what_the_child_does():
    """What was queued is told once, by the parent; a sink that was moved is called from a thread in both."""
    result = subprocess.run([sys.executable, "-c", FORKING], capture_output=True, text=True, check=False, timeout=50)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ['["child", [0, 1, 7]]', '["parent", [0, 1, 2, 3, 4, 5, 6]]']


EXITING = """
import threading, time
from asel.fanout import FanOut
from asel.keys import CacheKey
from asel.telemetry.aside import Aside

def hang(event):
    if threading.current_thread() is threading.main_thread():
        time.sleep(0.011)
    else:
        threading.Event().wait()

fan_out = FanOut([], hang, aside=Aside)
for n in range(4):
    fan_out.hit(CacheKey("dev", "op@v1", "key"), n, 0.0)
fan_out.close(0.0)
print("over")
"""


@pytest.mark.timeout(60)
def test_a_sink_that_hangs_does_not_keep_the_program():
    """Its thread is a daemon, and what was given up at the close is not waited for again."""
    result = subprocess.run([sys.executable, "-c", EXITING], capture_output=True, text=True, check=False, timeout=50)
    assert (result.returncode, result.stdout, result.stderr) == (0, "over\n", "")
