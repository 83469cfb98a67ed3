"""A Redis that is stopped, gone, silent, or comes back; and tasks that are cancelled meanwhile."""

from __future__ import annotations

import threading

import anyio
import pytest
from support.redis_checks import (
    ADDRESS,
    LEASE,
    both_ways,
    every_operation_fails,
    open_or_not,
    within,
    works,
)
from support.redis_server import RedisServer, black_hole, in_front_of, until
from support.store_contract import everything, record

from asel.errors import StoreError
from asel.stores.redis.store import RedisStore


@both_ways
def test_a_stopped_redis_fails_in_time_and_works_again(server, real_backend, is_open):
    """Operations fail within `timeout_s`, until Redis answers again."""

    async def main() -> None:
        store = RedisStore(server.url("timeout_s=0.3"))
        async with open_or_not(store, is_open):
            await works(store)
            with server.paused():
                for error in await every_operation_fails(store, 5):
                    assert "did not answer within 0.3 s" in str(error)
            with server.client() as client:
                client.flushall()  # what was asked before it stopped is done when it goes on
            await works(store)

    anyio.run(main, backend=real_backend)


@both_ways
def test_a_restarted_redis_is_used_again(real_backend, is_open):
    """Refused connections fail immediately, and missing scripts are loaded again."""

    async def main() -> None:
        store = RedisStore(server.url("timeout_s=1"))
        async with open_or_not(store, is_open):  # it is not there yet
            for error in await every_operation_fails(store, 5):
                assert "cannot be reached" in str(error)
            server.start()
            await works(store)
            for _ in range(3):
                server.restart()
                await works(store)
            server.kill()
            await every_operation_fails(store, 5)
            server.start()
            await works(store)
            with server.client() as client:
                client.script_flush()
                await works(store)
                client.client_kill_filter(_type="normal", skipme=True)
                client.client_kill_filter(_type="pubsub")
                await works(store)

    server = RedisServer()
    try:
        anyio.run(main, backend=real_backend)
    finally:
        server.kill()


@both_ways
def test_a_server_that_never_answers_costs_timeout_s(real_backend, is_open, caplog):
    """Even if it accepts any number of connections."""

    async def main(port: int) -> None:
        store = RedisStore(f"redis://127.0.0.1:{port}?timeout_s=0.2")
        async with open_or_not(store, is_open):
            await every_operation_fails(store, 5)
            await every_operation_fails(store, 5)

    with black_hole() as port:
        anyio.run(main, port, backend=real_backend)
    assert not caplog.records


def test_a_timeout_with_tls_mentions_tls(server, real_backend):
    """A Redis without TLS waits for the rest of a long command."""

    async def main() -> None:
        store = RedisStore(server.url("timeout_s=0.2").replace("redis://", "rediss://"))
        with pytest.raises(StoreError, match=r"did not answer within 0\.2 s: .* does it speak TLS\?"):
            await store.get(ADDRESS)

    anyio.run(main, backend=real_backend)


def test_a_silent_connection_is_replaced(server, real_backend):
    """A connection may be lost without a notice; after one timeout the next operation opens a new one."""

    async def main(port: int) -> None:
        async with RedisStore(f"redis://127.0.0.1:{port}?timeout_s=1.5") as store:
            await works(store)
            mute.set()
            with pytest.raises(StoreError, match="did not answer"):
                await store.get(ADDRESS)
            await works(store)

    mute = threading.Event()
    with in_front_of(server.port, mute=mute) as port:
        anyio.run(main, port, backend=real_backend)


def test_a_waiter_notices_that_redis_is_gone(real_backend, pausing):
    """The wait fails, or continues with the restarted Redis."""

    async def main() -> None:
        store, other = RedisStore(server.url("timeout_s=1")), RedisStore(server.url("timeout_s=1"))

        async def wait() -> None:
            with pytest.raises(StoreError):
                async with other.claim(ADDRESS, wait_s=30):
                    pytest.fail("held")

        async with within(4), store.claim(ADDRESS) as claim, anyio.create_task_group() as tasks:
            assert claim.held
            tasks.start_soon(wait)
            await until(lambda: pausing)
            server.kill()

    with RedisServer() as server:
        anyio.run(main, backend=real_backend)


def test_a_store_stays_usable_after_a_cancellation_at_any_point(server, real_backend):
    """Cancelling an operation harms neither the store nor other operations."""

    async def claim(store: RedisStore, wait_s: float) -> None:
        async with store.claim(ADDRESS, wait_s=wait_s):
            await anyio.sleep(0.002)

    async def main() -> None:
        kept = RedisStore(server.url())
        async with kept:
            for round_ in range(120):
                store = kept if round_ % 2 else RedisStore(server.url())
                doing = [store.get, store.delete, lambda _, s=store: s.put(record()), lambda _, s=store: claim(s, 0.0)]
                doing.append(lambda _, s=store: claim(s, 5.0))
                doing.append(lambda _, s=store: everything(s))
                with anyio.move_on_after(round_ * 0.0001):
                    async with anyio.create_task_group() as tasks:
                        for one in doing:
                            tasks.start_soon(one, ADDRESS)
            await works(kept)
        await works(kept)
        with server.client() as client:
            assert not client.exists(LEASE)

    anyio.run(main, backend=real_backend)


def test_one_store_works_in_several_event_loops(server):
    """One after another, of either backend, open or not."""
    store = RedisStore(server.url())

    async def main() -> None:
        await works(store)
        async with store:
            await works(store)
        await works(store)

    for backend in ["asyncio", "trio", "asyncio", "trio"]:
        anyio.run(main, backend=backend)


def test_an_open_store_has_one_connection(server, real_backend):
    """Many tasks share it, and nothing stays connected when the block ends."""

    async def main() -> None:
        with server.client() as client:
            client.ping()
            before = client.info("stats")["total_connections_received"]
            async with RedisStore(server.url()) as store, anyio.create_task_group() as tasks:
                for number in range(100):
                    tasks.start_soon(store.put, record(number))
                    tasks.start_soon(store.get, ADDRESS)
            assert client.info("stats")["total_connections_received"] == before + 1
            await until(lambda: len(client.client_list()) == 1)

    anyio.run(main, backend=real_backend)


def test_two_blocks_of_one_store_end_in_any_order(server, real_backend):
    """The first selector that leaves does not close the connection of the other."""

    async def main() -> None:
        store, first_in, first_out = RedisStore(server.url()), anyio.Event(), anyio.Event()

        async def first() -> None:
            async with store:
                first_in.set()
                await second_in.wait()
            first_out.set()

        second_in = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(first)
            await first_in.wait()
            async with store:
                second_in.set()
                await first_out.wait()
                await works(store)
        await works(store)

    anyio.run(main, backend=real_backend)
