"""One tune per fleet while Redis restarts or hangs for a moment: real processes over a real Redis."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.fleet import Fleet, Order
from support.redis_server import RedisServer

pytestmark = pytest.mark.timeout(120)  # each process loads JAX

LEASE_S = 2.0


@pytest.fixture(scope="module")
def fleet():
    with Fleet(8) as fleet:
        yield fleet.members


def wait_until(condition: Callable[[], object]) -> None:
    while not condition():
        time.sleep(0.01)


def subscribed(server: RedisServer) -> int:
    """Return how many processes wait for a claim of another."""
    with server.client() as client:
        return sum(count for _, count in client.pubsub_numsub(*client.pubsub_channels()))


def pause_for_longer_than_a_lease(server: RedisServer) -> None:
    """Pause until every waiter has polled in vain, because the lease it waited for has ended."""
    with server.paused():
        time.sleep(LEASE_S + 1.0)


@pytest.mark.parametrize(
    ("disturb", "keeps_data"),
    [(RedisServer.restart, True), (RedisServer.restart, False), (pause_for_longer_than_a_lease, False)],
    ids=["restart with data", "restart without data", "pause"],
)
def test_a_short_outage_does_not_make_every_process_tune(fleet, tmp_path, disturb, keeps_data):
    """Waiters keep waiting. The holder finishes, or one other process does, and all get one answer.

    Half of the processes would choose another config by themselves, so one answer is not a coincidence.
    """
    keeping = ("--dir", str(tmp_path), "--appendonly", "yes", "--appendfsync", "always")
    with RedisServer(*(keeping if keeps_data else ())) as server:
        gate = tmp_path / "gate"
        order = Order(server.url("timeout_s=0.5"), str(tmp_path / "log"), lease_s=LEASE_S, gate=str(gate))
        for number, member in enumerate(fleet):
            member.go(replace(order, favourite=2 + number % 2))
        wait_until(lambda: len(order.tuners) == 1 and subscribed(server) == 7)
        disturb(server)
        Path(gate).touch()
        said = [member.answer() for member in fleet]
        assert [answer.cfg for answer in said] == [said[0].cfg] * 8
        assert said[0].cfg in ({"m": 2, "n": 1}, {"m": 3, "n": 1})
        assert len(order.tuners) <= 2
        assert sum(answer.events.count("autotune_start") for answer in said) <= 2
