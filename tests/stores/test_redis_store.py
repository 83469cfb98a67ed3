"""Records in Redis, on a real redis-server: the contract of stores, and bad values, expiry and key names."""

from __future__ import annotations

import anyio
import pytest
from support.redis_checks import (
    ADDRESS,
    LEASE,
    NAME,
)
from support.redis_server import until
from support.store_contract import KEY, LAWS, everything, record

from asel.stores.records import MAX_BYTES
from asel.stores.redis.store import RedisStore


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


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"\xff\x00", "it is not JSON"),
        (b"", "it is not JSON"),
        (b"[1]", "JSON list"),
        (b'{"asel":2}', "digest"),
        (record(checksum="another").to_json().encode(), "another address"),
        (b"x" * (MAX_BYTES + 1), "a string of 4,194,305 bytes"),
        (["a", "list"], "a list"),
    ],
    ids=["garbage", "empty", "no object", "no digest", "another address", "too large", "not a string"],
)
def test_an_invalid_record_is_a_miss_reported_once_and_set_aside(server, real_backend, value, reason):
    """A bad value affects no other record, and is kept for people to examine."""

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


def test_only_the_last_bad_value_of_an_address_is_kept(server, real_backend):
    """A program that keeps writing bad values cannot fill the server."""

    async def main() -> None:
        store = RedisStore(server.url())
        store.on_rejected = lambda rejected: None
        with server.client() as client:
            for number in range(3):
                client.set(NAME, f"bad {number}")
                client.sadd(f"asel:2:key:{ADDRESS.key_digest}", ADDRESS.digest)
                assert await store.get(ADDRESS) is None
            [aside] = client.keys("asel:2:set-aside:*")
            assert client.get(aside) == b"bad 2"
            assert 0 < client.ttl(aside) <= 7 * 24 * 3600
        assert (await store.stats()).set_aside == 1

    anyio.run(main, backend=real_backend)


def test_indexes_and_leases_of_another_type_do_not_block_the_store(server, real_backend):
    """Even if other programs write to asel's keys, records are stored and claims are taken."""

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
    """`expire_s` ends a record; its entry in the index is removed when it is found."""

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


def test_a_listing_of_hundreds_of_records_is_complete(server, real_backend):
    """Pages neither lose nor repeat records, even while the store changes."""

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
