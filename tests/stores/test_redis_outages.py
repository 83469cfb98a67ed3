"""A Redis with many concurrent requests, late answers or lost connections: in real time, on both backends."""

from __future__ import annotations

import threading

import anyio
import pytest
from support.redis_server import RedisServer, in_front_of, until
from support.store_contract import record

from asel.errors import StoreError
from asel.stores.redis.leases import Lease
from asel.stores.redis.store import RedisStore

ADDRESS = record().address


def scripts_run(server: RedisServer) -> int:
    with server.client() as client:
        stats = client.info("commandstats")
    return sum(stats.get(name, {"calls": 0})["calls"] for name in ("cmdstat_evalsha", "cmdstat_eval"))


# Much at once


@pytest.mark.parametrize(
    ("real_backend", "is_open"),
    [("asyncio", True), ("trio", False)],
    ids=["open", "not open"],
    indirect=["real_backend"],
)
def test_thousands_of_concurrent_gets_do_not_time_out(server, real_backend, is_open):
    """Redis answers each immediately, though together they take longer than `timeout_s`; they share one connection."""

    async def main() -> None:
        store = RedisStore(server.url("timeout_s=0.8"))
        await store.put(record())
        found = []

        async def get() -> None:
            found.append(await store.get(ADDRESS))

        with server.client() as client:
            before = client.info("stats")["total_connections_received"]
            async with store if is_open else anyio.create_task_group(), anyio.create_task_group() as tasks:
                for _ in range(3000):
                    tasks.start_soon(get)
            assert client.info("stats")["total_connections_received"] == before + 1
        assert found == [record()] * 3000

    anyio.run(main, backend=real_backend)


@pytest.mark.parametrize(("ends_by", "count"), [("a record", 3_000), ("a failure", 1_000)])
def test_thousands_of_waiters_for_one_claim_send_a_few_requests(real_backend, ends_by, count):
    """The first in the queue sends requests for all, who share the record or the failure."""

    async def main() -> None:
        heard = []

        async def wait() -> None:
            try:
                async with store.claim(ADDRESS, wait_s=60) as claim:
                    heard.append(claim.record)
            except StoreError as error:
                heard.append(str(error))

        async with holder.claim(ADDRESS) as claim, store, anyio.create_task_group() as tasks:
            for _ in range(count):
                tasks.start_soon(wait)
            queue = await one_queue(store)
            await until(lambda: len(queue) == count and subscribers(server) == 1)
            if ends_by == "a record":
                await holder.put(record(), claim=claim)
            else:
                server.kill()
        if ends_by == "a record":
            assert heard == [record()] * count
            assert scripts_run(server) < 20
        else:
            assert len(heard) == count
            assert set(heard) == {heard[0]}
            assert "cannot be reached" in heard[0]

    async def one_queue(store: RedisStore):
        [shared] = store._links.values()
        await until(lambda: shared.link.queues)
        [queue] = shared.link.queues.values()
        return queue

    with RedisServer() as server:
        store, holder = RedisStore(server.url("timeout_s=10")), RedisStore(server.url())
        anyio.run(main, backend=real_backend)


def subscribers(server: RedisServer) -> int:
    with server.client() as client:
        return sum(count for _, count in client.pubsub_numsub(*client.pubsub_channels()))


def test_waiters_of_one_process_get_the_claim_in_order(server, real_backend, monkeypatch):
    """First come, first served; a cancelled or timed-out waiter does not hold up the others."""
    pausing, pause = [], Lease.pause

    async def noted(self) -> None:
        pausing.append(self)
        await pause(self)

    async def main() -> None:
        came, order, inside = [], [], []

        async def hold(number: int) -> None:
            if number % 7 not in (3, 5):
                came.append(number)
            with anyio.move_on_after(0 if number % 7 == 3 else 60):
                async with store.claim(ADDRESS, wait_s=0.001 if number % 7 == 5 else 60) as claim:
                    if claim.held:
                        inside.append(number)
                        await anyio.sleep(0.001)
                        assert inside == [number]
                        order.append(inside.pop())

        store = RedisStore(server.url())
        async with store:
            async with anyio.create_task_group() as tasks, store.claim(ADDRESS):
                for number in range(100):
                    tasks.start_soon(hold, number)
                await until(lambda: pausing)
            assert [number for number in order if number in came] == came
            [shared] = store._links.values()
            assert not shared.link.queues

    monkeypatch.setattr(Lease, "pause", noted)
    anyio.run(main, backend=real_backend)


def test_queued_operations_fail_with_the_one_that_timed_out(server, real_backend):
    """A stopped Redis costs many callers one timeout, not one for each batch."""

    async def main() -> None:
        failed = []

        async def get() -> None:
            with pytest.raises(StoreError, match=r"did not answer within 0\.5 s"):
                await store.get(ADDRESS)
            failed.append(anyio.current_time())

        async with store:
            await store.get(ADDRESS)
            with server.paused():
                began = anyio.current_time()
                async with anyio.create_task_group() as tasks:
                    for _ in range(640):
                        tasks.start_soon(get)
            assert max(failed) - began < 4 * 0.5  # in turns of 64 they would need ten timeouts
            assert await store.get(ADDRESS) is None

    store = RedisStore(server.url("timeout_s=0.5"))
    anyio.run(main, backend=real_backend)


def test_a_blocked_event_loop_does_not_time_out(server, real_backend):
    """An answer that arrived while the loop was blocked for longer than `timeout_s` is read."""

    async def main() -> None:
        async with store, anyio.create_task_group() as tasks:
            assert await store.put(record()) == record()
            with server.paused():
                tasks.start_soon(store.get, ADDRESS)
                await anyio.wait_all_tasks_blocked()  # it waits for its answer
            threading.Event().wait(2.0)

    store = RedisStore(server.url("timeout_s=1.5"))
    anyio.run(main, backend=real_backend)


# Late answers, and none


def test_timeout_s_limits_a_whole_operation(server, real_backend):
    """Two requests that are each fast enough may exceed it together."""

    async def main(port: int) -> None:
        async with RedisStore(f"redis://127.0.0.1:{port}?timeout_s=1") as store:
            await store.put(record())
            await store.delete(ADDRESS)  # Redis has the script from now on
            await store.put(record())
            slow.set()
            assert await store.get(ADDRESS) == record()
            with pytest.raises(StoreError, match=r"did not answer within 1 s"):
                await store.delete(ADDRESS)  # it reads, and then deletes

    slow = threading.Event()
    with in_front_of(server.port, slow=slow, delay_s=0.9) as port:
        anyio.run(main, port, backend=real_backend)


def test_a_connection_lost_during_the_greeting_is_reported_as_such(real_backend):
    """The error does not blame the version of Redis."""

    async def main(port: int) -> None:
        with pytest.raises(StoreError, match="closed the connection during the greeting") as raised:
            await RedisStore(f"redis://127.0.0.1:{port}").get(ADDRESS)
        assert "version" not in str(raised.value)

    with in_front_of(0, answer=b"") as port:
        anyio.run(main, port, backend=real_backend)


def test_an_unintelligible_greeting_asks_whether_it_is_a_redis(real_backend):
    """It is distinguished from a lost connection."""

    async def main(port: int) -> None:
        with pytest.raises(StoreError, match="did not answer as a Redis of version 6 or later does"):
            await RedisStore(f"redis://127.0.0.1:{port}").get(ADDRESS)

    with in_front_of(0, answer=b"+OK\r\n") as port:
        anyio.run(main, port, backend=real_backend)


def test_maxclients_is_named_when_it_is_reached(real_backend):
    """The error names the setting to raise."""

    async def main() -> None:
        # Redis says so and hangs up, and the second may be noticed first.
        with pytest.raises(StoreError, match=r"no room for .*maxclients"):
            await RedisStore(server.url()).get(ADDRESS)

    with RedisServer("--maxclients", "1") as server, server.client() as client:
        client.ping()
        anyio.run(main, backend=real_backend)
