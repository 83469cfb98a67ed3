"""The dispatcher: every sink gets every event, no sink affects another, and slow sinks of the loop are reported."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from asel.events import CacheHit, Stale
from asel.events.deferred_sinks import DeferredSinks
from asel.events.dispatcher import Dispatcher
from asel.kernels.keys import CacheKey
from asel.testing import RecordingSink

KEY = CacheKey("dev", "op@v1", "key")


def hit(n: int = 0) -> CacheHit:
    return CacheHit(key=KEY, start=1.0, end=2.0, level="memory", cfg=n)


def stale() -> Stale:
    return Stale(key=KEY, start=0.0, end=0.0, cfg=0, checksum="a", expected="b")


class Picky(RecordingSink):
    def wants(self, kind):
        return kind is Stale


def test_a_failing_sink_is_reported_once_and_the_others_get_everything(caplog):
    """A failing sink affects nothing else."""

    class Broken:
        on_loop = True

        def emit(self, event):
            raise RuntimeError("no disk")

        def wants(self, kind):
            if kind is Stale:
                raise RuntimeError("no idea")
            return True

    sink, heard = RecordingSink(), []
    dispatcher = Dispatcher([Broken(), sink], heard.append)
    for n in range(3):
        dispatcher(hit(n))
    dispatcher(stale())
    assert [e.cfg for e in sink.events] == [e.cfg for e in heard] == [0, 1, 2, 0]
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert "the sink Broken failed on 'cache_hit'" in record.getMessage()
    assert Dispatcher([Broken()], None).wants(Stale) is False


def test_a_keyboard_interrupt_is_not_swallowed():
    """Only errors are contained, and KeyboardInterrupt is not one."""

    def interrupt(event):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Dispatcher([], interrupt)(hit())


def test_unwanted_events_are_not_made():
    """A sink may choose kinds of events; one that does not, and a callback, gets all."""
    assert Dispatcher([], None).wants(CacheHit) is False
    assert Dispatcher([Picky()], None).wants(CacheHit) is False
    assert Dispatcher([Picky()], None).wants(Stale) is True
    assert Dispatcher([Picky(), RecordingSink()], None).wants(CacheHit) is True
    assert Dispatcher([Picky()], print).wants(CacheHit) is True


def test_a_sink_gets_only_what_it_wants():
    """Even if another sink wants the event."""
    picky, other = Picky(), RecordingSink()
    dispatcher = Dispatcher([picky, other])
    dispatcher.hit(KEY, 0, 0.0)
    dispatcher(stale())
    assert (picky.names, other.names) == (["stale"], ["cache_hit", "stale"])


def test_a_sink_without_a_base_class_needs_only_emit():
    """It may also define `wants`, `watch` and `flush`."""
    flushed, events = [], []
    sink = SimpleNamespace(
        on_loop=True, emit=events.append, wants=lambda kind: kind is Stale, flush=lambda timeout_s: flushed.append(1)
    )
    dispatcher = Dispatcher([sink])
    dispatcher(hit())
    dispatcher(stale())
    assert not dispatcher.is_flushed
    dispatcher.close(1.0)
    assert ([event.name for event in events], flushed) == (["stale"], [1])


@pytest.fixture
def clock(monkeypatch):
    """Replaces the timer: sinks advance it themselves."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("asel.events.dispatcher.perf_counter", lambda: clock.now)
    return clock


@pytest.mark.parametrize(
    ("calls_s", "named"),
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
def test_a_callback_is_named_when_it_is_slow_twice_in_a_hundred_calls_or_half_a_second_once(
    calls_s, named, clock, caplog
):
    """One pause of the garbage collector, or a slow first call, is not enough."""
    costs = iter(calls_s)

    def slow(event):
        clock.now += next(costs)

    dispatcher = Dispatcher([], slow)
    for n in range(len(calls_s)):
        dispatcher(hit(n))
    assert bool(caplog.records) is named


@pytest.mark.parametrize("as_callback", [True, False])
def test_a_slow_sink_on_the_loop_is_named_in_one_warning(as_callback, clock, caplog):
    """With the fix; and only once, while streams come and go."""

    class Slow(RecordingSink):
        def emit(self, event):
            super().emit(event)
            clock.now += 0.05

    sink, stream = Slow(), RecordingSink()
    dispatcher = Dispatcher([] if as_callback else [sink], sink.emit if as_callback else None)
    dispatcher.hit(KEY, 0, 0.0)
    dispatcher.add(stream)
    dispatcher.hit(KEY, 1, 0.0)
    dispatcher.remove(stream)
    for n in range(2, 5):
        dispatcher.hit(KEY, n, 0.0)
    assert [event.cfg for event in sink.events] == list(range(5))
    assert [event.cfg for event in stream.events] == [1]
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    name, way_out = ("on_event=", "in `sinks`") if as_callback else ("the sink Slow", "without `on_loop = True`")
    assert name in record.getMessage()
    assert "held up the event loop for 0.050 s" in record.getMessage()
    assert way_out in record.getMessage()


def test_an_error_in_wants_hit_stays_with_its_sink(caplog):
    """Even a CancelledError: the calling task is not cancelled."""

    class Undecided(RecordingSink):
        on_loop = False

        def wants_hit(self):
            raise asyncio.CancelledError

    undecided, sink = Undecided(), RecordingSink()
    dispatcher = Dispatcher([DeferredSinks([undecided, sink], None)])
    for n in range(3):
        dispatcher.hit(KEY, n, 0.0)
    assert [event.cfg for event in sink.events] == [0, 1, 2]
    [record] = caplog.records
    assert "the sink Undecided failed on 'cache_hit'" in record.getMessage()


def test_a_mock_is_a_sink():
    """It has every attribute, and gets its events by `emit`."""
    sink = Mock()
    dispatcher = Dispatcher([DeferredSinks([sink], None)])
    dispatcher(stale())
    dispatcher.hit(KEY, 1, 0.0)
    assert [call.args[0].name for call in sink.emit.call_args_list] == ["stale", "cache_hit"]
