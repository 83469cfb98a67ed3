"""The fan-out: every sink gets every event, and none hurts another."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from asel.events import CacheHit, Stale
from asel.fanout import FanOut
from asel.keys import CacheKey
from asel.testing import RecordingSink

KEY = CacheKey("dev", "op@v1", "key")


def hit(n: int = 0) -> CacheHit:
    return CacheHit(key=KEY, start=1.0, end=2.0, level="memory", cfg=n)


def test_a_failing_sink_is_reported_once_and_the_others_get_everything(caplog):
    """A sink's failure is its own."""

    class Broken:
        def emit(self, event):
            raise RuntimeError("no disk")

        def wants(self, kind):
            raise RuntimeError("no idea")

    sink, heard = RecordingSink(), []
    fan_out = FanOut([Broken(), sink], heard.append)
    for n in range(3):
        fan_out(hit(n))
    assert [e.cfg for e in sink.events] == [e.cfg for e in heard] == [0, 1, 2]
    assert len(caplog.records) == 1
    assert caplog.records[0].levelno == logging.ERROR
    assert FanOut([Broken()], None).wants(CacheHit) is False


def test_what_interrupts_a_program_is_not_swallowed():
    """Isolation is for errors; a KeyboardInterrupt is none."""

    def interrupt(event):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        FanOut([], interrupt)(hit())


def test_events_nobody_wants_need_not_be_made():
    """A sink may say which kinds it looks at; one that does not, or a callback, takes all."""

    class Picky(RecordingSink):
        def wants(self, kind):
            return kind is Stale

    assert FanOut([], None).wants(CacheHit) is False
    assert FanOut([Picky()], None).wants(CacheHit) is False
    assert FanOut([Picky()], None).wants(Stale) is True
    assert FanOut([Picky(), RecordingSink()], None).wants(CacheHit) is True
    assert FanOut([Picky()], print).wants(CacheHit) is True


class Clock:
    """Stands for the timer that sinks are watched with: they say themselves how long they took."""

    def __init__(self, monkeypatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("asel.fanout.perf_counter", lambda: self.now)


class Elsewhere:
    """Stands for the thread that slow sinks move to."""

    made: list[Elsewhere]
    shed = 0
    is_over = True

    def __init__(self, name, give, now):
        self.name, self.give, self.queue = name, give, []
        self.made.append(self)

    def emit(self, event):
        self.queue.append(event)

    def end(self, timeout_s):
        return len(self.queue)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


@pytest.fixture
def asides(monkeypatch):
    monkeypatch.setattr(Elsewhere, "made", [], raising=False)
    return Elsewhere.made


@pytest.mark.parametrize(
    ("calls_s", "moved"),
    [
        ([0.009] * 200, False),
        ([0.4], False),
        ([0.6], True),
        ([0.011, 0.011], True),
        ([0.4, *[0.0] * 98, 0.011], True),
        ([0.4, *[0.0] * 99, 0.4], False),
        ([0.4, *[0.0] * 99, 0.4, 0.011], True),
    ],
)
def test_a_sink_is_moved_when_it_is_slow_twice_in_a_hundred_calls_or_half_a_second_once(calls_s, moved, clock, asides):
    """One pause of the garbage collector, or a slow first call, is no reason."""
    costs = iter(calls_s)

    def slow(event):
        clock.now += next(costs)

    fan_out = FanOut([], slow, aside=Elsewhere)
    for n in range(len(calls_s)):
        fan_out(hit(n))
    assert bool(asides) is moved


def test_a_moved_sink_gets_each_event_once_and_its_neighbours_stay(clock, asides, caplog):
    """Nothing overtakes, nothing is told twice, and one line says what happened."""
    told, neighbour = [], RecordingSink()

    def slow(event):
        told.append(event.cfg)
        clock.now += 0.05

    fan_out = FanOut([neighbour], slow, aside=Elsewhere)
    for n in range(5):
        fan_out.hit(KEY, n, 0.0)
    [aside] = asides
    assert told == [0, 1]
    for event in aside.queue:
        aside.give(event)
    assert told == [event.cfg for event in neighbour.events] == [0, 1, 2, 3, 4]
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "slow held up the event loop for 0.050 s: it is called from a thread of its own" in record.getMessage()


def test_how_a_sink_did_is_remembered_while_streams_come_and_go(clock, asides):
    """A sink that was moved stays moved, and the first of two slow calls is not forgotten."""

    def slow(event):
        clock.now += 0.05

    sink, stream = SimpleNamespace(emit=slow), RecordingSink()
    fan_out = FanOut([sink], aside=Elsewhere)
    fan_out(hit(0))
    fan_out.add(stream)
    fan_out(hit(1))
    fan_out.remove(stream)
    fan_out(hit(2))
    assert [[event.cfg for event in aside.queue] for aside in asides] == [[2]]


@pytest.mark.parametrize("as_callback", [True, False])
def test_a_sink_that_is_bound_to_the_loop_stays_and_is_named_once(as_callback, clock, asides, caplog):
    """`on_loop = True`, on a sink, or on the one whose method is the callback."""

    class Bound(RecordingSink):
        on_loop = True

        def emit(self, event):
            super().emit(event)
            clock.now += 1.0

    sink = Bound()
    fan_out = FanOut([] if as_callback else [sink], sink.emit if as_callback else None, aside=Elsewhere)
    for n in range(5):
        fan_out(hit(n))
    assert len(sink.events) == 5
    assert asides == []
    [record] = caplog.records
    assert "it stays there, so make it quicker" in record.getMessage()


def test_a_slow_wants_leaves_the_loop_too(clock, asides):
    """What a sink wants is asked on the loop, so that nothing is made in vain, unless asking is what takes long."""

    class Ponders(RecordingSink):
        on_loop = False

        def wants(self, kind):
            clock.now += 0.05
            return kind is Stale

    sink = Ponders()
    fan_out = FanOut([sink], aside=Elsewhere)
    for _ in range(10):
        fan_out.wants(CacheHit)
    assert clock.now < 0.25
    fan_out(hit())
    [aside] = asides
    aside.give(aside.queue.pop())
    assert sink.events == []


def test_a_picky_sink_is_asked_on_the_loop_when_it_has_moved(clock, asides):
    """A hit that a slow sink does not want is neither made nor queued."""

    class Picky(RecordingSink):
        on_loop = False

        def wants(self, kind):
            return kind is Stale

        def emit(self, event):
            clock.now += 0.05

    fan_out = FanOut([Picky()], aside=Elsewhere)
    for _ in range(2):
        fan_out(Stale(key=KEY, start=0.0, end=0.0, cfg=0, checksum="a", expected="b"))
    assert not fan_out.wants(CacheHit)
    fan_out(hit())
    assert [aside.queue for aside in asides] == [[]]


def test_closing_flushes_quick_sinks_before_slow_ones_and_tells_what_was_not_told(clock, asides, caplog):
    """A sink that hangs costs no other its time; a moved one is flushed once it was told."""
    order = []

    class Flushed(RecordingSink):
        on_loop = False

        def __init__(self, name, took_s):
            super().__init__()
            self.name, self.took_s = name, took_s

        def emit(self, event):
            clock.now += self.took_s

        def flush(self, timeout_s):
            order.append((self.name, timeout_s > 0))

    fan_out = FanOut([Flushed("slow", 0.05), Flushed("quick", 0.0)], aside=Elsewhere)
    for _ in range(4):
        fan_out(hit())
    asides[0].end = lambda timeout_s: order.append(("thread", timeout_s > 0)) or 2
    caplog.clear()
    fan_out.close(10.0)
    assert order == [("quick", True), ("thread", True), ("slow", True)]
    [record] = caplog.records
    assert "before the slow sink Flushed was told of the last 2 events" in record.getMessage()
