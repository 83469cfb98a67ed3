"""Events as values, and the stream."""

from __future__ import annotations

import dataclasses
import inspect

import anyio
import pytest

from asel import events
from asel.events import Answer, CacheHit, Closed, Event, EventStream
from asel.kernels.keys import CacheKey

KEY = CacheKey("dev", "op@v1", "key")
KINDS = [
    kind for kind in vars(events).values() if inspect.isclass(kind) and Event in kind.__mro__[1:] and kind is not Answer
]


def hit(n: int = 0) -> CacheHit:
    return CacheHit(key=KEY, start=1.0, end=2.0, level="memory", cfg=n)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_event_is_a_frozen_documented_value_with_its_own_name(kind):
    """One frozen dataclass for each thing that happens."""
    assert dataclasses.is_dataclass(kind)
    assert kind.__dataclass_params__.frozen
    assert kind.__doc__
    assert [other.name for other in KINDS].count(kind.name) == 1
    assert kind.severity in ("debug", "info", "warning", "error")


def test_an_event_has_the_field_names_of_ejkernel():
    """`event.name` and `event.fields()` equal the arguments of ejKernel's callbacks."""
    event = hit(7)
    assert (event.name, event.op, event.device) == ("cache_hit", "op@v1", "dev")
    assert event.fields() == {
        "device": "dev",
        "op_id": "op@v1",
        "call_key": "key",
        "start": 1.0,
        "end": 2.0,
        "level": "memory",
        "cfg": 7,
        "declined": {},
        "wait_s": 0.0,
        "tune_id": None,
        "began": False,
    }
    closed = Closed(key=None, start=0.0, end=1.0, cancelled=0, abandoned=())
    assert (closed.op, closed.device) == (None, None)
    assert "device" not in closed.fields()


@pytest.mark.anyio
async def test_a_slow_reader_loses_the_oldest_events_and_their_number_is_counted():
    """The stream never slows the selector: its buffer is bounded, and drops are counted."""
    stream = EventStream(2, lambda stream: None)
    for n in range(5):
        stream.emit(hit(n))
    assert stream.dropped == 3
    assert [(await stream.receive()).cfg for _ in range(2)] == [3, 4]
    stream.emit(hit(5))
    stream.end()
    assert [event.cfg async for event in stream] == [5]
    with pytest.raises(anyio.EndOfStream):
        await stream.receive()


@pytest.mark.anyio
async def test_a_waiting_reader_is_woken():
    """`receive` waits for an event, and ends with the stream."""
    stream = EventStream(2, lambda stream: None)
    got = []

    async def read():
        async for event in stream:
            got.append(event.cfg)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        for n in range(3):
            await anyio.wait_all_tasks_blocked()
            stream.emit(hit(n))
        await anyio.wait_all_tasks_blocked()
        await stream.aclose()
    assert got == [0, 1, 2]
    assert stream.dropped == 0
