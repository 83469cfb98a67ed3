"""The Redis store, against a real redis-server that is treated badly."""

from __future__ import annotations

import logging
import pickle
import signal
import ssl
import subprocess
import sys
import threading
import time
import traceback
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
import trustme
from redis_server import RedisServer, black_hole, free_port, in_front_of, until
from store_contract import KEY, LAWS, everything, record

from asel.errors import InvalidRequestError, StoreError
from asel.stores.leases import Lease
from asel.stores.links import Turn
from asel.stores.records import MOST_BYTES
from asel.stores.redis import RedisStore
from asel.stores.scripts import ACQUIRE

ADDRESS = record().address
NAME = f"asel:2:record:{ADDRESS.digest}"
LEASE = f"asel:2:lease:{ADDRESS.digest}"
SECRET = "hunter2/?#@:%"  # all that a URL can trip over
QUOTED = "hunter2%2F%3F%23%40%3A%25"


@pytest.fixture(scope="module")
def running():
    with RedisServer() as server:
        yield server


@pytest.fixture
def server(running):
    with running.client() as client:
        client.flushall()
        client.config_resetstat()
    return running


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_contract(law, server, real_backend):
    """The laws of every store."""
    anyio.run(law, lambda: RedisStore(server.url()), backend=real_backend)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_contract_while_open(law, server, real_backend):
    """The laws hold over one kept connection as well."""

    async def main() -> None:
        async with RedisStore(server.url()) as store:
            await law(lambda: store)

    anyio.run(main, backend=real_backend)


@asynccontextmanager
async def within(seconds: float):
    """What is inside takes no longer than this."""
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


def calls(client) -> dict[str, int]:
    return {name: stats["calls"] for name, stats in client.info("commandstats").items()}


def every_word(error: BaseException | None) -> str:
    """All that a log could show of an error: its causes and contexts, hidden or not."""
    words = []
    while error is not None:
        words += [str(error), repr(error), "".join(traceback.format_exception(error))]
        assert error.__cause__ is None or error.__context__ is None or error.__cause__ is error.__context__
        error = error.__cause__ or error.__context__
    return "\n".join(words)


async def every_operation_fails(store: RedisStore, seconds: float) -> list[StoreError]:
    """Each operation raises StoreError in time."""

    async def claim(wait_s: float) -> None:
        async with store.claim(ADDRESS, wait_s=wait_s):
            pytest.fail("held without Redis")

    operations = {
        "get": lambda: store.get(ADDRESS),
        "put": lambda: store.put(record()),
        "delete": lambda: store.delete(ADDRESS),
        "delete expected": lambda: store.delete(ADDRESS, expected=record()),
        "claim": lambda: claim(0.0),
        "claim and wait": lambda: claim(30.0),
        "records": lambda: everything(store),
        "records of a key": lambda: everything(store, KEY),
    }
    errors = []

    async def one(name: str) -> None:
        with pytest.raises(StoreError) as raised:
            await operations[name]()
        assert raised.value.location == store.location, name
        errors.append(raised.value)

    async with within(seconds), anyio.create_task_group() as tasks:
        for name in operations:
            tasks.start_soon(one, name)
    return errors


async def works(store: RedisStore) -> None:
    """Each operation does what it should."""
    await store.delete(ADDRESS)
    assert await store.put(record()) == record()
    assert await store.get(ADDRESS) == record()
    assert await everything(store) == await everything(store, KEY) == [record()]
    async with store.claim(ADDRESS, wait_s=5) as claim:
        assert claim.held
    assert await store.delete(ADDRESS, expected=record())


@asynccontextmanager
async def open_or_not(store: RedisStore, is_open: bool):
    if is_open:
        async with store:
            yield
    else:
        yield


both_ways = pytest.mark.parametrize("is_open", [True, False], ids=["open", "not open"])


# What is stored


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"\xff\x00", "it is not JSON"),
        (b"", "it is not JSON"),
        (b"[1]", "JSON list"),
        (b'{"asel":2}', "digest"),
        (record(checksum="another").to_json().encode(), "another address"),
        (b"x" * (MOST_BYTES + 1), "a string of 4,194,305 bytes"),
        (["a", "list"], "a list"),
    ],
    ids=["garbage", "empty", "no object", "no digest", "another address", "too large", "not a string"],
)
def test_what_is_no_record_is_a_miss_told_once_and_set_aside(server, real_backend, value, reason):
    """A bad value costs neither its neighbours nor those who come after, and is kept for people to look at."""

    def plant(client) -> None:
        client.rpush(NAME, *value) if isinstance(value, list) else client.set(NAME, value)

    async def main() -> None:
        store, told = RedisStore(server.url()), []
        store.on_rejected = told.append
        neighbour = record(2, checksum="c2")
        await store.put(neighbour)
        with server.client() as client:
            index = f"asel:2:key:{ADDRESS.key_digest}"
            for read, key in [
                (lambda: store.get(ADDRESS), KEY),
                (lambda: everything(store), None),
                (lambda: everything(store, KEY), KEY),
                (lambda: store.put(record(1)), KEY),
                (lambda: store.put(record(1), claim=None), KEY),
            ]:
                client.delete(NAME)
                plant(client)
                client.sadd(index, ADDRESS.digest)
                assert await read() in (None, [neighbour], record(1))
                assert await store.get(ADDRESS) in (None, record(1))
                [rejected] = told
                told.clear()
                assert reason in rejected.reason
                assert NAME in rejected.where
                assert rejected.key == key
                [aside] = client.keys("asel:2:set-aside:*")
                if isinstance(value, list):
                    assert client.lrange(aside, 0, -1) == [b"a", b"list"]
                else:
                    assert client.get(aside) == value
                client.delete(aside)
            assert await store.get(ADDRESS) == record(1)
            assert sorted(one.cfg for one in await everything(store, KEY)) == [1, 2]

    anyio.run(main, backend=real_backend)


def test_indexes_and_leases_of_another_type_are_no_obstacle(server, real_backend):
    """Whatever somebody planted under our names, records are stored and claims are won."""

    async def main() -> None:
        store = RedisStore(server.url())
        with server.client() as client:
            client.set(f"asel:2:key:{ADDRESS.key_digest}", "no set")
            client.rpush(LEASE, "no lease")
        assert await everything(store, KEY) == []
        assert not await store.delete(ADDRESS)
        assert await store.put(record()) == record()
        assert await everything(store, KEY) == [record()]
        async with store.claim(ADDRESS) as claim:
            assert claim.held

    anyio.run(main, backend=real_backend)


def test_records_expire_and_leave_nothing_behind(server, real_backend):
    """`expire_s` ends a record; what the index still says of it is taken out when found."""

    async def main() -> None:
        store, brief = RedisStore(server.url()), RedisStore(server.url("expire_s=0.05"))
        with server.client() as client:
            index = f"asel:2:key:{ADDRESS.key_digest}"
            await brief.put(record(1))
            assert 0 < client.pttl(NAME) <= 50
            assert 0 < client.pttl(index) <= 50
            await store.put(record(2, checksum="c2"))
            assert client.pttl(index) == -1
            await until(lambda: not client.exists(NAME))
            assert client.scard(index) == 2
            assert await store.get(ADDRESS) is None
            assert await everything(store) == await everything(store, KEY) == [record(2, checksum="c2")]
            assert client.scard(index) == 1

    anyio.run(main, backend=real_backend)


def test_keys_have_prefix_database_and_version(server, real_backend):
    """Stores with another prefix or database do not see each other, and a later schema has other keys."""

    async def main() -> None:
        urls = [server.url(), server.url("prefix=team:a"), server.url(db=3), server.url("prefix=team:a", db=3)]
        for number, url in enumerate(urls):
            assert await RedisStore(url).put(record(number)) == record(number)
        for number, url in enumerate(urls):
            assert await everything(RedisStore(url)) == [record(number)]
        with server.client(db=3) as client:
            names = sorted(name.decode() for name in client.keys())
            start = [f"{prefix}:2:{kind}:" for prefix in ("asel", "team:a") for kind in ("key", "record")]
            assert [name.startswith(one) for name, one in zip(names, start, strict=True)] == [True] * 4
            client.set(NAME.replace(":2:", ":3:"), "what a later asel writes")
            assert await everything(RedisStore(urls[2])) == [record(2)]

    anyio.run(main, backend=real_backend)


def test_hundreds_of_records_are_all_given(server, real_backend):
    """Pages do not lose or repeat records, also while the store changes."""

    async def main() -> None:
        async with RedisStore(server.url()) as store:
            async with anyio.create_task_group() as tasks:
                for number in range(600):
                    key = KEY._replace(device=str(number % 2))
                    tasks.start_soon(store.put, record(number, checksum=str(number), key=key))
            assert sorted(one.cfg for one in await everything(store)) == list(range(600))
            assert sorted(one.cfg for one in await everything(store, key)) == list(range(1, 600, 2))
            async for one in store.records():
                await store.delete(one.address)
            assert await everything(store) == []

    anyio.run(main, backend=real_backend)


# Claims


def test_a_lost_lease_cannot_replace(server, real_backend):
    """A paused holder that comes back late puts nothing over what others stored meanwhile."""

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
    """A lease is given back only by the token that took it."""

    async def main() -> None:
        store = RedisStore(server.url())
        with server.client() as client:
            async with store.claim(ADDRESS):
                client.set(LEASE, "another's", px=60_000)
            assert client.get(LEASE) == b"another's"

    anyio.run(main, backend=real_backend)


@both_ways
def test_a_heartbeat_keeps_the_lease(server, real_backend, is_open):
    """A claim lasts as long as its block, however short the lease."""

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
def test_a_claim_says_that_its_lease_was_lost(server, real_backend, is_open):
    """`held` turns False when renewal finds another's token."""

    async def main() -> None:
        store = RedisStore(server.url(), lease_s=5, renew_s=0.02)
        with server.client() as client, anyio.fail_after(3):
            async with open_or_not(store, is_open), store.claim(ADDRESS) as claim:
                assert claim.held
                client.set(LEASE, "another's")
                await until(lambda: not claim.held)

    anyio.run(main, backend=real_backend)


def test_a_claim_is_lost_when_redis_is_gone_for_its_length(real_backend):
    """Unreachable past the lease's end: another may hold it by now, so one no longer does; leaving is prompt."""

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


def test_a_lease_whose_answer_was_lost_is_given_back(server, real_backend, monkeypatch):
    """Whoever could not hear that it won does not keep others waiting for the lease to end."""
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
    """Redis lost the lease; its holder takes it again if it is free, but no longer replaces records with it."""

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


@pytest.fixture
def pausing(monkeypatch):
    """How often a waiter came to its pause."""
    came = []
    pause = Lease.pause

    async def noted(self) -> None:
        came.append(self)
        await pause(self)

    monkeypatch.setattr(Lease, "pause", noted)
    return came


def test_waiters_are_woken_not_polling(server, real_backend, pausing):
    """While one waits, Redis is asked nothing; when the record is published, the wait is over at once."""

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


def test_no_wake_up_falls_between_asking_and_waiting(server, real_backend, pausing, monkeypatch):
    """What is published after the waiter asked and before it pauses still wakes it."""
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
from store_contract import record
from asel.stores.redis import RedisStore
from asel.stores.scripts import ACQUIRE

async def main():
    async with RedisStore(sys.argv[1], lease_s=0.6, renew_s=0.1).claim(record().address) as claim:
        print(claim.held, flush=True)
        await anyio.sleep_forever()

anyio.run(main, backend=sys.argv[2])
"""


def test_a_killed_holder_is_replaced_when_its_lease_ends(server, real_backend):
    """`kill -9` publishes nothing; the waiter comes by itself when the lease is over, and not before."""
    command = [sys.executable, "-c", HOLDER, server.url(), real_backend]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent)

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


# A Redis that is slow, refuses, is gone, comes back


@both_ways
def test_a_stopped_redis_fails_in_time_and_works_again(server, real_backend, is_open):
    """Slow is an error within `timeout_s`, and over as soon as Redis answers again."""

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
def test_a_redis_that_is_gone_and_comes_back(real_backend, is_open):
    """Refused connections fail at once; a restarted Redis, which knows no scripts, is used again by itself."""

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
def test_a_black_hole(real_backend, is_open, caplog):
    """Something that never answers costs `timeout_s`, also where it takes any number of connections."""

    async def main(port: int) -> None:
        store = RedisStore(f"redis://127.0.0.1:{port}?timeout_s=0.2")
        async with open_or_not(store, is_open):
            await every_operation_fails(store, 5)
            await every_operation_fails(store, 5)

    with black_hole() as port:
        anyio.run(main, port, backend=real_backend)
    assert not caplog.records


def test_a_connection_that_fell_silent_is_given_up(server, real_backend):
    """Nothing may say that a connection is lost; after one late answer the next operation makes another."""

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


def test_a_waiter_hears_that_redis_is_gone(real_backend, pausing):
    """A wait does not outlive the connection it listens on: it is an error, or goes on with the next Redis."""

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


def test_cancelled_anywhere_the_store_stays_usable(server, real_backend):
    """However far an operation came, cancelling it harms neither the store nor those beside it."""

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


def test_a_store_belongs_to_no_event_loop(server):
    """One object serves one loop after another, of either backend, open or not."""
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
    """Two chains may have one store open: the first to leave takes nothing from the other."""

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


# What Redis refuses


def test_a_full_redis_says_what_to_do(real_backend):
    """Writes are refused with advice, and reads go on."""

    async def main() -> None:
        store = RedisStore(server.url())
        await store.put(record(1))
        with server.client() as client:
            client.config_set("maxmemory", 1)
        with pytest.raises(StoreError, match="is full: raise its maxmemory"):
            await store.put(record(2, checksum="c2"))
        with pytest.raises(StoreError, match="is full"):
            async with store.claim(ADDRESS):
                pass
        assert await everything(store) == [record(1)]
        assert await store.get(ADDRESS) == record(1)

    with RedisServer() as server:
        anyio.run(main, backend=real_backend)


def test_a_read_only_redis_says_what_to_do(real_backend):
    """A replica is read, and a bad value on it is told once though it cannot be set aside."""

    async def main() -> None:
        store, told = RedisStore(server.url()), []
        store.on_rejected = told.append
        await store.put(record(1))
        with server.client() as client:
            client.set(f"asel:2:record:{record(checksum='c2').address.digest}", "nonsense")
            client.config_set("replica-serve-stale-data", "yes")
            client.replicaof("127.0.0.1", free_port())
        with pytest.raises(StoreError, match="read-only replica: give the address of the primary"):
            await store.put(record(2, checksum="c3"))
        for _ in range(3):
            assert await everything(store) == [record(1)]
        assert len(told) == 1

    with RedisServer() as server:
        anyio.run(main, backend=real_backend)


def test_passwords(real_backend, caplog):
    """The right one works; a wrong or missing one is an error that says so, and none is ever shown."""
    caplog.set_level(logging.DEBUG)

    async def main() -> None:
        right = RedisStore(f"redis://:{QUOTED}@127.0.0.1:{server.port}")
        await works(right)
        for url, advice in [
            (f"redis://127.0.0.1:{server.port}", "wants a password: put it into the URL"),
            (f"redis://:wr0ng{QUOTED}@127.0.0.1:{server.port}", "refused the user or the password"),
            (f"redis://hunter2:wr0ng@127.0.0.1:{server.port}", "refused the user or the password"),
        ]:
            store = RedisStore(url)
            for error in await every_operation_fails(store, 5):
                assert advice in str(error)
                assert "hunter2" not in every_word(error)
                assert "wr0ng" not in every_word(error)
                assert pickle.loads(pickle.dumps(error)).args == error.args
        for db, error in [(99, "has no database 99")]:
            with pytest.raises(StoreError, match=error):
                await RedisStore(f"redis://:{QUOTED}@127.0.0.1:{server.port}/{db}").get(ADDRESS)
        assert "hunter2" not in repr(right) + right.location + repr(right._target)

    with RedisServer(password=SECRET) as server:
        anyio.run(main, backend=real_backend)
    assert "hunter2" not in caplog.text
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]


def test_users(real_backend):
    """A user who may do no more than asel needs can do all of it; one who may do less is told so."""

    async def main() -> None:
        with server.client() as client:
            needs = [
                "~team:*",
                "resetchannels",
                "&team:*",
                "+@scripting",
                "+@read",
                "+@write",
                "+@pubsub",
                "+@connection",
                "-@dangerous",
            ]
            client.execute_command("ACL", "SETUSER", "enough", "on", ">hunter2", *needs)
            client.execute_command("ACL", "SETUSER", "foreign", "on", ">hunter2", "~x:*", "+@all")
            client.execute_command("ACL", "SETUSER", "reader", "on", ">hunter2", "~*", "+@all", "-@write")
            client.execute_command("ACL", "SETUSER", "nobody", "on", ">hunter2", "-@all", "+hello", "+select")
        password = "hunter2"
        await works(RedisStore(f"redis://enough:hunter2@127.0.0.1:{server.port}?prefix=team"))
        for user in ["foreign", "reader", "nobody"]:
            with pytest.raises(StoreError, match=r"does not allow this user .* ~team:\*") as raised:
                await RedisStore(f"redis://{user}:{password}@127.0.0.1:{server.port}?prefix=team").put(record())
            assert "hunter2" not in every_word(raised.value)

    with RedisServer() as server:
        anyio.run(main, backend=real_backend)


def test_what_repeats_the_password_is_not_repeated(real_backend, caplog):
    """An old Redis answers HELLO by saying all that it was sent; a stranger may say anything."""
    caplog.set_level(logging.DEBUG)
    answers = [
        b"-ERR unknown command `HELLO`, with args beginning with: `3`, `AUTH`, `default`, `"
        + SECRET.encode()
        + b"`\r\n",
        b"-ERR " + SECRET.encode() + b"\r\n",
        b"+" + SECRET.encode() + b"\r\n",
        SECRET.encode() + b"\r\n",
        b"-ERR " + repr(SECRET).upper().encode() + b" " * 290 + SECRET[:8].encode() + b"\r\n",
        b"HTTP/1.1 400 Bad Request\r\n\r\n" + QUOTED.encode(),
    ]

    async def main(port: int) -> None:
        for error in await every_operation_fails(RedisStore(f"redis://:{QUOTED}@127.0.0.1:{port}?timeout_s=0.5"), 4):
            assert "hunter2" not in every_word(error).lower()

    for answer in answers:
        with in_front_of(0, answer=answer) as port:
            anyio.run(main, port, backend=real_backend)
    assert "hunter2" not in caplog.text


def test_tls(server, real_backend, tmp_path):
    """`rediss://` checks certificate and host; an authority, or a certificate of one's own, is given by the URL."""
    authority = trustme.CA()
    mine, theirs = authority.issue_cert("127.0.0.1"), authority.issue_cert("asel@example.org")
    paths = {name: tmp_path / f"{name}.pem" for name in ("ca", "cert", "key")}
    authority.cert_pem.write_to_path(paths["ca"])
    paths["cert"].write_bytes(theirs.cert_chain_pems[0].bytes())
    theirs.private_key_pem.write_to_path(paths["key"])
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    mine.configure_cert(context)
    authority.configure_trust(context)

    async def main(port: int) -> None:
        own = f"ssl_certfile={paths['cert']}&ssl_keyfile={paths['key']}"
        trusted = RedisStore(f"rediss://127.0.0.1:{port}?ssl_ca_certs={paths['ca']}&{own}&timeout_s=5")
        assert trusted.location == f"rediss://127.0.0.1:{port}/0"
        await works(trusted)
        async with trusted:
            await works(trusted)
        await works(RedisStore(f"rediss://127.0.0.1:{port}?ssl_cert_reqs=none&{own}&timeout_s=5"))
        with pytest.raises(StoreError, match="certificate verify failed"):
            await RedisStore(f"rediss://127.0.0.1:{port}?{own}").get(ADDRESS)
        for url in [
            f"rediss://localhost:{port}?ssl_ca_certs={paths['ca']}&{own}",  # another host than it is for
            f"rediss://127.0.0.1:{port}?ssl_ca_certs={paths['ca']}",  # without a certificate of one's own
            f"redis://127.0.0.1:{port}?timeout_s=0.3",
            f"rediss://127.0.0.1:{server.port}?timeout_s=0.3",
        ]:
            with pytest.raises(StoreError):
                await RedisStore(url).get(ADDRESS)

    context.verify_mode = ssl.CERT_REQUIRED
    with in_front_of(server.port, context) as port:
        anyio.run(main, port, backend=real_backend)


# What a URL cannot say


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("http://:hunter2@host", "no Redis URL"),
        ("hunter2", "no Redis URL"),
        ("redis://:hunter2@", "host"),
        ("redis://:hunter2@host:0x1", "port"),
        ("redis://:hunter2@host:99999", "port"),
        ("redis://[:hunter2@host", "Redis URL"),
        ("redis://:hunter2\u2100@host", "Redis URL"),
        ("redis://user:hunter2", "port"),
        ("redis://:hunter2/x@host/0", "%2F"),
        ("redis://:hunter2?x@host/0", "%3F"),
        ("redis://:hunter2#x@host/0", "%23"),
        ("redis://:hunter2@host/one", "db"),
        ("redis://:hunter2@host/-1", "db"),
        ("redis://:hunter2@host/1/2", "db"),
        ("redis://:hunter2@host?db=1", "'db'"),
        ("redis://:hunter2@host?password=hunter2", "'password'"),
        ("redis://:hunter2@host?prefix=a*", "prefix='a*'"),
        ("redis://:hunter2@host?prefix=", "prefix=''"),
        ("redis://:hunter2@host?prefix=a&prefix=b", "prefix= stands twice"),
        ("redis://:hunter2@host?timeout_s=soon", "timeout_s='soon'"),
        ("redis://:hunter2@host?timeout_s=0", "timeout_s='0'"),
        ("redis://:hunter2@host?timeout_s=nan", "timeout_s='nan'"),
        ("redis://:hunter2@host?expire_s=-1", "expire_s='-1'"),
        ("redis://:hunter2@host?expire_s=inf", "expire_s='inf'"),
        ("redis://:hunter2@host?ssl_ca_certs=x", "ssl_ca_certs= in a Redis URL needs TLS"),
        ("rediss://:hunter2@host?ssl_ca_certs=/nowhere", "ssl_ca_certs='/nowhere'"),
        ("rediss://:hunter2@host?ssl_certfile=/nowhere", "ssl_certfile='/nowhere'"),
        ("rediss://:hunter2@host?ssl_keyfile=/nowhere", "ssl_keyfile="),
        ("rediss://:hunter2@host?ssl_cert_reqs=maybe", "ssl_cert_reqs='maybe'"),
        ("rediss://:hunter2@host?ssl_check_hostname=maybe", "ssl_check_hostname='maybe'"),
    ],
)
def test_a_url_that_means_nothing_is_refused_by_name(url, named):
    """What is wrong is said where it is given, and the password is not."""
    with pytest.raises(InvalidRequestError) as raised:
        RedisStore(url)
    assert named in str(raised.value)
    error: BaseException | None = raised.value
    while error is not None:
        assert "hunter2" not in str(error)
        error = error.__context__


@pytest.mark.parametrize(
    ("url", "location"),
    [
        ("redis://host", "redis://host:6379/0"),
        ("redis://user:hunter2@host:1234/5?prefix=x&timeout_s=1", "redis://host:1234/5?prefix=x"),
        ("rediss://:hunter2@[::1]", "rediss://[::1]:6379/0"),
    ],
)
def test_the_location_has_no_secrets(url, location):
    """People read which Redis it is, and nothing else."""
    assert RedisStore(url).location == location
    assert repr(RedisStore(url)) == f"RedisStore({location!r})"


def test_a_host_that_cannot_be_looked_up(real_backend):
    """Whatever is wrong with a name, it is an error of the store."""

    async def main() -> None:
        for host in ["no-such-host.invalid", "a..b", "x" * 70]:
            with pytest.raises(StoreError, match="Redis at redis://"):
                await RedisStore(f"redis://{host}?timeout_s=1").get(ADDRESS)

    anyio.run(main, backend=real_backend)


def test_leases_are_renewed_before_they_end():
    """A heartbeat slower than its lease would lose every claim."""
    with pytest.raises(InvalidRequestError, match="renew_s"):
        RedisStore("redis://host", lease_s=5, renew_s=5)


def test_without_coredis_it_says_how_to_get_it(monkeypatch):
    """The extra is named where it is missing."""
    for name in [name for name in sys.modules if name.startswith(("coredis", "asel.stores.l", "asel.stores.ref"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("asel.stores.links", raising=False)
    monkeypatch.delattr("asel.stores.leases", raising=False)
    monkeypatch.setitem(sys.modules, "coredis", None)
    with pytest.raises(InvalidRequestError, match=r"pip install 'asel\[redis\]'"):
        RedisStore("redis://host")
