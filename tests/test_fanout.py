"""The fan-out: every sink gets every event, and none hurts another."""

from __future__ import annotations

import logging

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
