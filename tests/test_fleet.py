"""One tune per fleet: real processes over one store."""

from __future__ import annotations

import signal
from contextlib import contextmanager

import pytest
from fleet import Fleet, Member
from redis_server import RedisServer

pytestmark = pytest.mark.timeout(120)  # each process loads JAX

BEST = {"m": 3, "n": 1}


@pytest.fixture(params=["directory", "document", "redis"])
def location(request, tmp_path):
    """Where the fleet keeps its records."""
    if request.param == "redis":
        with RedisServer() as server:
            yield server.url()
    else:
        yield str(tmp_path / ("cache" if request.param == "directory" else "cache.json"))


@contextmanager
def ended(*members: Member):
    try:
        yield
    finally:
        for member in members:
            member.end()


def test_eight_processes_and_one_cold_key_make_one_tune(location, tmp_path):
    """Everyone gets the same answer, and only one had to work for it."""
    with Fleet(location, tmp_path / "log", 8) as fleet:
        answers = fleet.answers()
        assert [answer.cfg for answer in answers] == [BEST] * 8
        assert len(fleet.tuners) == 1
    assert sorted(answer.tier for answer in answers) == ["autotune"] + ["persistent"] * 7
    assert sum(answer.events.count("autotune_start") for answer in answers) == 1
    assert sum(answer.events.count("persisted") for answer in answers) == 1


def test_a_holder_that_is_killed_is_replaced_by_one_other(location, tmp_path):
    """A file's lock ends with its process, a lease soon after: the tune is finished by one of those who waited."""
    log, options = tmp_path / "log", ("--lease-s", "2") if location.startswith("redis") else ()
    holder = Member(location, log, "--hang", *options)
    with ended(holder):
        holder.ready()
        holder.go()
        assert holder.says() == "measuring"
        with Fleet(location, log, 3, *options) as fleet:
            for member in fleet.members:
                member.go()
            holder.process.send_signal(signal.SIGKILL)
            assert [member.answer().cfg for member in fleet.members] == [BEST] * 3
            assert len(fleet.tuners - {str(holder.process.pid)}) == 1


def test_a_holder_that_is_stopped_delays_others_no_longer_than_they_wait(tmp_path):
    """A stuck holder blocks nobody beyond `wait_s`; the first to store settles it, also for the stuck one."""
    location, log = str(tmp_path / "cache"), tmp_path / "log"
    stuck = Member(location, log, "--favourite", "2", "--sample-s", "0.2")
    with ended(stuck):
        stuck.ready()
        stuck.go()
        assert stuck.says() == "measuring"
        stuck.process.send_signal(signal.SIGSTOP)
        with Fleet(location, log, 2, "--wait-s", "0.5") as fleet:
            answers = fleet.answers()
        assert [answer.cfg for answer in answers] == [BEST] * 2
        stuck.process.send_signal(signal.SIGCONT)
        assert stuck.answer().cfg == BEST  # not its own favourite
