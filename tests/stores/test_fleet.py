"""One tune per fleet: real processes over one store."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from dataclasses import replace

import pytest
from support.fleet import Fleet, Member, Order, answers
from support.redis_server import RedisServer

pytestmark = pytest.mark.timeout(120)  # each process loads JAX

BEST = {"m": 3, "n": 1}


@pytest.fixture(params=["directory", "document", "redis"])
def location(request, tmp_path):
    """The location of the fleet's store."""
    if request.param == "redis":
        with RedisServer() as server:
            yield server.url()
    else:
        yield str(tmp_path / ("cache" if request.param == "directory" else "cache.json"))


@pytest.fixture(scope="module")
def fleet():
    """Eight processes, half of them on trio, that answer one test after the other."""
    with Fleet(8) as fleet:
        yield fleet.members


@contextmanager
def one_more(order: Order):
    """A process that has begun a tune, and may be killed."""
    member = Member()
    try:
        member.ready()
        member.go(order)
        assert member.says() == "measuring"
        yield member
    finally:
        member.end()


def test_eight_processes_and_one_cold_key_make_one_tune(fleet, location, tmp_path):
    """All processes get the same answer from one tune."""
    order = Order(location, str(tmp_path / "log"))
    said = answers(fleet, order)
    assert [answer.cfg for answer in said] == [BEST] * 8
    assert len(order.tuners) == 1
    assert sorted(answer.tier for answer in said) == ["autotune"] + ["persistent"] * 7
    assert sum(answer.events.count("autotune_start") for answer in said) == 1
    assert sum(answer.events.count("persisted") for answer in said) == 1


def test_processes_that_run_the_same_batch_share_it(fleet, location, tmp_path):
    """A key that another process tunes is postponed while others are left; each key is tuned once."""
    gate = tmp_path / "gate"
    order = Order(location, str(tmp_path / "log"), sample_s=0.001, gate=str(gate), batch=7)
    for member in fleet[:3]:
        member.go(order)
    for member in fleet[:3]:
        assert member.says() == "measuring"  # all at once, and so a key each
    gate.touch()
    said = [member.answer() for member in fleet[:3]]
    assert [list(answer.cfg.values()) for answer in said] == [[BEST] * 7] * 3
    assert sum(answer.events.count("autotune_start") for answer in said) == 7
    assert sum(answer.tier.split().count("tuned") for answer in said) == 7


def test_a_killed_holder_is_replaced_by_one_waiter(fleet, location, tmp_path):
    """A file lock ends with its process, and a lease soon after; one of the waiters tunes."""
    order = Order(location, str(tmp_path / "log"), lease_s=2.0 if location.startswith("redis") else None)
    with one_more(replace(order, hang=True)) as holder:
        others = fleet[:3]
        for member in others:
            member.go(order)
        holder.send_signal(signal.SIGKILL)
        assert [member.answer().cfg for member in others] == [BEST] * 3
        assert len(order.tuners - {str(holder.pid)}) == 1


def test_a_stopped_holder_delays_others_by_wait_s_at_most(fleet, tmp_path):
    """The first process to store its result wins, and the stopped one adopts it later."""
    order = Order(str(tmp_path / "cache"), str(tmp_path / "log"), wait_s=0.5)
    with one_more(replace(order, favourite=2, sample_s=0.2, wait_s=None)) as stuck:
        stuck.send_signal(signal.SIGSTOP)
        assert [answer.cfg for answer in answers(fleet[:2], order)] == [BEST] * 2
        stuck.send_signal(signal.SIGCONT)
        assert stuck.answer().cfg == BEST  # not its own favourite
