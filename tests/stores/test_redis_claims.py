"""Claims in Redis: leases, heartbeats and wake-ups, on a real redis-server."""

from __future__ import annotations

import signal
import subprocess
import sys

import anyio
import pytest
from support.paths import TESTS
from support.redis_checks import (
    ADDRESS,
    LEASE,
    both_ways,
    calls,
    open_or_not,
    within,
    works,
)
from support.redis_server import RedisServer, until
from support.store_contract import record

from asel.errors import StoreError
from asel.stores.redis.client import Turn
from asel.stores.redis.scripts import ACQUIRE
from asel.stores.redis.store import RedisStore


def test_a_holder_without_its_lease_replaces_nothing(server, real_backend):
    """A paused holder does not overwrite newer records of others."""

    async def main() -> None:
        store, other = RedisStore(server.url()), RedisStore(server.url())
        await store.put(record(0))
        async with store.claim(ADDRESS) as claim:
            with server.client() as client:
                client.delete(LEASE)  # as if it had ended
            assert await store.put(record(1), replace=True, claim=claim) == record(0)
            async with other.claim(ADDRESS) as theirs:
                assert theirs.held
                assert await store.put(record(1), replace=True, claim=claim) == record(0)
                assert await other.put(record(2), replace=True, claim=theirs) == record(2)
            assert await store.put(record(1), replace=True, claim=claim) == record(2)
            assert await store.put(record(1), claim=claim) == record(2)
            assert await store.put(record(3), replace=True) == record(3)

    anyio.run(main, backend=real_backend)


def test_leaving_a_lost_claim_does_not_end_anothers(server, real_backend):
    """A lease is released only with the token that took it."""

    async def main() -> None:
        store = RedisStore(server.url())
        with server.client() as client:
            async with store.claim(ADDRESS):
                client.set(LEASE, "another's", px=60_000)
            assert client.get(LEASE) == b"another's"

    anyio.run(main, backend=real_backend)


@both_ways
def test_renewals_keep_the_lease(server, real_backend, is_open):
    """A claim lasts as long as its block, even with a short lease."""

    async def main() -> None:
        store = RedisStore(server.url(), lease_s=0.3, renew_s=0.03)
        async with open_or_not(store, is_open), store.claim(ADDRESS) as claim:
            token = claim.token
            with server.client() as client:
                for _ in range(40):
                    await anyio.sleep(0.01)
                    assert client.get(LEASE) == token.encode()
            assert claim.held

    anyio.run(main, backend=real_backend)


@both_ways
def test_a_lost_lease_shows_in_its_claim(server, real_backend, is_open):
    """`held` becomes False when a renewal finds another token."""

    async def main() -> None:
        store = RedisStore(server.url(), lease_s=5, renew_s=0.02)
        with server.client() as client, anyio.fail_after(3):
            async with open_or_not(store, is_open), store.claim(ADDRESS) as claim:
                assert claim.held
                client.set(LEASE, "another's")
                await until(lambda: not claim.held)

    anyio.run(main, backend=real_backend)


def test_a_claim_is_lost_if_redis_is_gone_for_longer_than_the_lease(real_backend):
    """Another process may hold it by then. Leaving the block is prompt."""

    async def main() -> None:
        slow = RedisStore(server.url("timeout_s=1.2"), lease_s=0.5, renew_s=0.1)
        async with slow, slow.claim(ADDRESS) as claim:
            server.pause()
            began = anyio.current_time()
            await until(lambda: not claim.held)
            assert 0.2 < anyio.current_time() - began < 1.0  # and not when the renewal gives up
            server.resume()
        store = RedisStore(server.url("timeout_s=0.3"), lease_s=0.5, renew_s=0.1)
        async with store, within(2.5):
            async with store.claim(ADDRESS) as claim:
                server.pause()
                began = anyio.current_time()
                await until(lambda: not claim.held)
                assert 0.2 < anyio.current_time() - began < 1.0
            began = anyio.current_time()
            async with within(1.0):
                server.resume()
                async with store.claim(ADDRESS, wait_s=1):
                    server.pause()
                    began = anyio.current_time()
            assert anyio.current_time() - began < 0.7
            server.resume()

    with RedisServer() as server:
        anyio.run(main, backend=real_backend)


def test_a_lease_whose_answer_was_lost_is_released(server, real_backend, monkeypatch):
    """Otherwise others would wait for the lease to end."""
    run = Turn.run

    async def deaf(self, script, *args, **options):
        answer = await run(self, script, *args, **options)
        if script is ACQUIRE:
            raise StoreError("nothing was heard")
        return answer

    async def main() -> None:
        with pytest.raises(StoreError, match="nothing was heard"):
            async with RedisStore(server.url("timeout_s=20")).claim(ADDRESS):
                pytest.fail("held")
        with server.client() as client:
            assert not client.exists(LEASE)

    monkeypatch.setattr(Turn, "run", deaf)
    anyio.run(main, backend=real_backend)


@both_ways
def test_a_holder_takes_its_lease_again_after_a_restart(real_backend, is_open):
    """The lease keeps others from tuning, but no longer allows replacing records."""

    async def main() -> None:
        store, other = RedisStore(server.url(), lease_s=10, renew_s=0.05), RedisStore(server.url())
        async with open_or_not(store, is_open), within(5):
            async with store.claim(ADDRESS) as claim:
                with server.client() as client:
                    server.restart()
                    await until(lambda: client.exists(LEASE))
                async with other.claim(ADDRESS) as theirs:
                    assert not theirs.held
                assert claim.held
                await other.put(record(0))
                assert await store.put(record(1), replace=True, claim=claim) == record(0)
            async with other.claim(ADDRESS) as theirs:
                assert theirs.held
            await works(store)

    with RedisServer() as server:
        anyio.run(main, backend=real_backend)


def test_waiters_are_woken_and_do_not_poll(server, real_backend, pausing):
    """A published record ends the wait immediately."""

    async def main() -> None:
        store, other = RedisStore(server.url(), lease_s=60, renew_s=50), RedisStore(server.url())
        heard: list[float] = []

        async def wait() -> None:
            async with other.claim(ADDRESS, wait_s=15) as claim:
                heard.append(anyio.current_time())
                assert claim.record == record()

        with server.client() as client:
            async with store, store.claim(ADDRESS) as claim:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(wait)
                    await until(lambda: pausing)
                    before = calls(client)
                    await anyio.sleep(0.5)
                    after = calls(client)
                    assert {name for name in after if after[name] != before.get(name, 0)} <= {"cmdstat_info"}
                    began = anyio.current_time()
                    await store.put(record(), claim=claim)
                assert heard[0] - began < 0.25
                assert len(pausing) == 1
            await until(lambda: client.pubsub_numsub(f"asel:2:wake:{ADDRESS.digest}")[0][1] == 0)

    anyio.run(main, backend=real_backend)


def test_no_wake_up_is_lost_between_request_and_wait(server, real_backend, pausing, monkeypatch):
    """A message that is published before the waiter pauses still wakes it."""
    look = RedisStore._get

    async def main() -> None:
        store, other = RedisStore(server.url(), lease_s=60, renew_s=50), RedisStore(server.url())
        async with store.claim(ADDRESS) as claim:

            async def looked(self, link, address):
                found = await look(self, link, address)
                if self is other and found is None:
                    await store.put(record(), claim=claim)
                return found

            monkeypatch.setattr(RedisStore, "_get", looked)
            async with within(2), other.claim(ADDRESS, wait_s=15) as theirs:
                assert (theirs.held, theirs.record) == (False, record())
        assert len(pausing) == 1

    anyio.run(main, backend=real_backend)


HOLDER = """
import anyio, sys
from support.store_contract import record
from asel.stores.redis.store import RedisStore
from asel.stores.redis.scripts import ACQUIRE

async def main():
    async with RedisStore(sys.argv[1], lease_s=0.6, renew_s=0.1).claim(record().address) as claim:
        print(claim.held, flush=True)
        await anyio.sleep_forever()

anyio.run(main, backend=sys.argv[2])
"""


def test_a_killed_holder_is_replaced_when_its_lease_ends(server, real_backend):
    """`kill -9` publishes nothing; the waiter tries again when the lease has ended, and not before."""
    command = [sys.executable, "-c", HOLDER, server.url(), real_backend]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=TESTS)

    async def main() -> None:
        store = RedisStore(server.url(), lease_s=0.6, renew_s=0.1)
        async with store.claim(ADDRESS, wait_s=0.7) as claim:
            assert not claim.held  # it is alive and renews
        holder.send_signal(signal.SIGKILL)
        with server.client() as client:
            left_s = client.pttl(LEASE) / 1000
        began = anyio.current_time()
        async with store.claim(ADDRESS, wait_s=10) as claim:
            assert claim.held
            assert left_s - 0.1 < anyio.current_time() - began < left_s + 1.0

    try:
        assert holder.stdout.readline() == "True\n"
        anyio.run(main, backend=real_backend)
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
