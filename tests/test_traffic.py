"""Whether others use the loop: by how often its thread wakes, and how long it works, while ours is waited for."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from functools import partial
from itertools import count
from types import SimpleNamespace

import anyio
import pytest
from anyio.lowlevel import checkpoint

from asel import traffic
from asel.threads import run_in_thread
from asel.traffic import LoopTraffic, loop_traffic

WATCH_S = 0.1


def wait_in_a_thread() -> None:
    threading.Event().wait(WATCH_S)


async def watch() -> bool:
    """Return whether a loop is quiet that was watched while a thread was waited for."""
    with loop_traffic().watched():
        await run_in_thread("waiting", wait_in_a_thread)
    return loop_traffic().is_quiet


async def is_mostly_quiet() -> bool:
    """Tell what most of some watches find: a machine that stops for a moment may fool one of them, either way."""
    found = [await watch() for _ in range(5)]
    return sum(found) > 2


async def is_mostly_quiet_beside(neighbour) -> bool:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(neighbour)
        quiet = await is_mostly_quiet()
        tasks.cancel_scope.cancel()
    return quiet


async def beats() -> None:
    for _ in count():
        await anyio.sleep(0.005)


async def waits() -> None:
    await anyio.sleep_forever()


async def works() -> None:
    """Keep the loop at work without ever letting its thread sleep, as a flood of requests does."""
    for _ in count():
        await checkpoint()


def test_a_loop_that_nobody_else_uses_is_quiet(real_backend):
    assert anyio.run(is_mostly_quiet, backend=real_backend)


def test_a_neighbour_that_waits_does_not_use_the_loop(real_backend):
    """Ten thousand who wait for a tune are no traffic."""
    assert anyio.run(is_mostly_quiet_beside, waits, backend=real_backend)


@pytest.mark.parametrize("neighbour", [beats, works])
def test_a_loop_that_serves_someone_is_not_quiet(neighbour, real_backend):
    """Be it woken often, or never let sleep."""
    assert not anyio.run(is_mostly_quiet_beside, neighbour, backend=real_backend)


@pytest.mark.parametrize("known", [True, False])
def test_what_we_do_meanwhile_is_no_traffic(known, real_backend):
    """Steps of ours that end while another is watched are known, and so is how often the loop wakes for them."""

    async def steps() -> None:
        for _ in count():
            with loop_traffic().expected() if known else nullcontext():
                await run_in_thread("passing by", partial(threading.Event().wait, 0.025))

    assert anyio.run(is_mostly_quiet_beside, steps, backend=real_backend) is known


def test_each_loop_is_known_by_itself(real_backend):
    async def known() -> bool:
        return loop_traffic().is_quiet

    assert anyio.run(is_mostly_quiet, backend=real_backend)
    assert not anyio.run(known, backend=real_backend)


@pytest.fixture
def clock(monkeypatch):
    """Time that passes when a test says so."""
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(traffic, "time", SimpleNamespace(perf_counter=lambda: now.seconds))
    return now


@pytest.fixture
def thread(monkeypatch, clock):
    """A thread that sleeps and works when a test says so."""
    used = SimpleNamespace(busy_s=0.0, woken=0)
    monkeypatch.setattr(traffic, "_use_of_thread", lambda: (used.busy_s, used.woken))
    return used


def look(loop, clock, thread, seconds, *, busy_s=0.0, woken=1) -> bool:
    with loop.watched():
        clock.seconds += seconds
        thread.busy_s += busy_s
        thread.woken += woken
    return loop.is_quiet


def test_a_loop_that_was_not_watched_long_enough_is_not_known_to_be_quiet(clock, thread):
    """A task that is woken every few milliseconds would not be seen; short watches add up."""
    loop = LoopTraffic()
    assert not look(loop, clock, thread, 0.03)
    assert look(loop, clock, thread, 0.03)


@pytest.mark.parametrize(
    ("busy_s", "woken", "quiet"),
    [(0.004, 3, True), (0.0, 4, False), (0.006, 1, False), (0.0, 0, False)],
    ids=["seldom", "often", "long", "never asleep"],
)
def test_what_others_may_do_in_a_tenth_of_a_second(busy_s, woken, quiet, clock, thread):
    """They may wake it once beside the twice that are ours. A loop that never sleeps is at work, or not counted."""
    assert look(LoopTraffic(), clock, thread, 0.1, busy_s=busy_s, woken=woken) is quiet


def test_steps_of_ours_are_known_to_each_other(clock, thread):
    """Two that are watched at once, or one beside one that is not: whoever ends first wakes the loop for both."""
    loop = LoopTraffic()
    with loop.watched():
        with loop.expected():
            thread.woken += 2
        assert look(loop, clock, thread, 0.1, woken=2)
        thread.woken += 2
    assert loop.is_quiet


def test_a_step_that_fails_has_woken_the_loop_as_well(clock, thread):
    loop = LoopTraffic()
    with loop.watched():
        with pytest.raises(LookupError), loop.expected():
            raise LookupError
        clock.seconds += 0.1
        thread.woken += 4
    assert loop.is_quiet


def test_what_was_seen_is_forgotten_with_each_verdict(clock, thread):
    """Traffic that has ended is no reason to go on as if it had not, and what was quiet may be so no longer."""
    loop = LoopTraffic()
    assert not look(loop, clock, thread, 0.1, woken=50)
    assert look(loop, clock, thread, 0.1)
    assert not look(loop, clock, thread, 0.1, woken=50)


def test_what_was_seen_long_ago_says_nothing_of_now(clock, thread):
    """A service that was quiet when it started may be busy an hour later; and half a look of then is none."""
    loop = LoopTraffic()
    assert look(loop, clock, thread, 0.1)
    look(loop, clock, thread, 0.03)
    clock.seconds += 3600
    assert not loop.is_quiet
    assert not look(loop, clock, thread, 0.03)


def test_where_threads_are_not_told_apart_no_loop_is_quiet(monkeypatch, clock):
    """Not every system counts by thread, and one in use must not be taken for a quiet one."""
    monkeypatch.setattr(traffic, "_BY_THREAD", None)
    loop = LoopTraffic()
    with loop.watched():
        clock.seconds += 1.0
    assert not loop.is_quiet
