"""What else lies in a store: other versions' records, half-written files of the dead, bad files, stale locks."""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from contextlib import AsyncExitStack, contextmanager
from functools import partial

import anyio
import pytest
from support.redis_server import RedisServer
from support.store_contract import everything, record

from asel import PersistentCache
from asel.stores import DirectoryStore, DocumentStore, file_claims, leftovers, records
from asel.stores.redis.store import RedisStore


@pytest.fixture(scope="module")
def redis():
    with RedisServer() as server:
        yield server


@pytest.fixture(params=["directory", "document", "redis"])
def make_store(request, tmp_path):
    """Return a new store over the same records, of the current version."""
    if request.param == "redis":
        server = request.getfixturevalue("redis")
        with server.client() as client:
            client.flushall()
        return lambda: RedisStore(server.url())
    kind, name = {"directory": (DirectoryStore, "cache"), "document": (DocumentStore, "c.json")}[request.param]
    return lambda: kind(tmp_path / name)


@pytest.fixture
def version(monkeypatch):
    """Be another version of asel for a while."""

    @contextmanager
    def schema(number):
        with monkeypatch.context() as patch:
            patch.setattr(records, "SCHEMA", number)
            yield

    return schema


# Versions.


def test_versions_of_the_format_share_a_store(make_store, version):
    """Each reads its own records, and none sets another's aside."""
    rejected = []

    def store():
        made = make_store()
        made.on_rejected = rejected.append
        return made

    async def scene():
        for number in (1, 2, 3):
            with version(number):
                assert await store().get(record().address) is None
                assert await store().put(record(f"of version {number}")) == record(f"of version {number}")
        for number in (3, 1, 2):
            with version(number):
                assert await everything(store()) == [record(f"of version {number}")]
                await store().put(record(0, checksum="another"))
                assert await store().delete(record(checksum="another").address)
        for number in (1, 2, 3):
            with version(number):
                assert await store().get(record().address) == record(f"of version {number}")

    anyio.run(scene)
    assert not rejected


def test_versions_do_not_wait_for_each_others_claims(make_store, version):
    """One version cannot use the results of another."""

    async def scene():
        async with AsyncExitStack() as stack:
            for number in (1, 2, 3):
                with version(number):
                    assert (await stack.enter_async_context(make_store().claim(record().address))).held

    anyio.run(scene)


def test_another_versions_record_under_our_name_stays_until_it_is_in_the_way(tmp_path):
    """No version of asel writes it. It is a miss, and a put of that address sets it aside."""
    store, rejected = DirectoryStore(tmp_path), []
    store.on_rejected = rejected.append

    async def scene():
        await store.put(record())
        [path] = tmp_path.rglob("*.json")
        contents = path.read_text().replace('"asel":2', '"asel":99')
        path.write_text(contents)
        assert await store.get(record().address) is None
        assert await everything(store) == []
        assert path.read_text() == contents
        assert not rejected
        assert await store.put(record("new")) == record("new")
        [bad] = rejected
        assert "version 99" in bad.reason
        assert [aside.read_text() for aside in (tmp_path / "set-aside").iterdir()] == [contents]

    anyio.run(scene)


def test_another_versions_record_under_our_name_in_redis_stays(redis):
    """It is a miss, and a put of its address sets it aside for a week."""
    rejected = []

    async def scene():
        async with RedisStore(redis.url()) as store:
            store.on_rejected = rejected.append
            await store.put(record())
            with redis.client() as client:
                [name] = client.keys("asel:2:record:*")
                client.set(name, '{"asel":99}')
                assert await store.get(record().address) is None
                assert await everything(store) == []
                assert not rejected
                assert client.get(name) == b'{"asel":99}'
                assert await store.put(record("new")) == record("new")
                [aside] = client.keys("asel:2:set-aside:*")
                assert client.get(aside) == b'{"asel":99}'
                assert 0 < client.ttl(aside) <= 7 * 24 * 3600
                assert (await store.stats()).set_aside == 1

    with redis.client() as client:
        client.flushall()
    anyio.run(scene)
    assert "version 99" in rejected[0].reason


# Half-written files.


@pytest.fixture
def slow_link(monkeypatch):
    """A writer that stops between its file and the file's name, until it may go on."""
    link, reached, go_on = os.link, threading.Event(), threading.Event()

    def slow(*args, **kwargs):
        reached.set()
        assert go_on.wait(10)
        return link(*args, **kwargs)

    monkeypatch.setattr(os, "link", slow)
    return reached, go_on


@pytest.mark.parametrize("ahead_s", [0, 7200])
def test_a_living_writers_file_is_not_swept_at_any_age(tmp_path, monkeypatch, slow_link, ahead_s):
    """It is locked while it is written, so clocks and time stamps do not matter."""
    store, (reached, go_on) = DirectoryStore(tmp_path), slow_link
    writer = threading.Thread(target=anyio.run, args=(store.put, record()))
    writer.start()
    assert reached.wait(10)
    [half_written] = tmp_path.rglob(".tmp-*")
    os.utime(half_written, (1, 1))
    monkeypatch.setattr(time, "time", partial(lambda now: now() + ahead_s, time.time))
    assert anyio.run(everything, DirectoryStore(tmp_path)) == []
    monkeypatch.undo()
    go_on.set()
    writer.join()
    assert anyio.run(everything, store) == [record()]


def test_a_lister_whose_clock_is_ahead_sweeps_no_fresh_file(tmp_path, monkeypatch):
    """Ages are measured by the file system's clock, also for a file that is not locked yet."""
    store = DirectoryStore(tmp_path)
    anyio.run(store.put, record())
    [path] = tmp_path.rglob("*.json")
    fresh, old = path.with_name(".tmp-fresh"), path.with_name(".tmp-old")
    for half_written in (fresh, old):
        half_written.write_text("{")
    os.utime(old, (1, 1))
    monkeypatch.setattr(time, "time", partial(lambda now: now() + 7200, time.time))
    anyio.run(everything, store)
    assert (fresh.exists(), old.exists()) == (True, False)


def test_a_file_swept_before_it_was_locked_is_written_again(tmp_path, monkeypatch):
    """A writer that was suspended after creating its file creates another."""
    flock, swept = fcntl.flock, []

    def late(file, operation):
        if not swept and operation & fcntl.LOCK_EX:
            swept.extend(tmp_path.rglob(".tmp-*"))
            for path in swept:
                path.unlink()
        return flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    store = DirectoryStore(tmp_path)
    assert anyio.run(store.put, record()) == record()
    assert swept
    assert anyio.run(store.get, record().address) == record()


def test_without_locks_only_the_age_counts(tmp_path, monkeypatch):
    """On such a file system a file stays for an hour, by the file system's clock."""

    def refuse(*args):
        raise OSError("no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    store = DirectoryStore(tmp_path)
    anyio.run(store.put, record())
    [path] = tmp_path.rglob("*.json")
    half_an_hour, two_hours = path.with_name(".tmp-a"), path.with_name(".tmp-b")
    for half_written, age_s in ((half_an_hour, 1800), (two_hours, 7200)):
        half_written.write_text("{")
        os.utime(half_written, (path.stat().st_mtime - age_s,) * 2)
    anyio.run(everything, store)
    assert (half_an_hour.exists(), two_hours.exists()) == (True, False)


def test_documents_have_one_temporary_file_at_most(tmp_path):
    """All writers use the same name."""
    store = DocumentStore(tmp_path / "c.json")
    leftover = tmp_path / ".c.json.tmp"
    leftover.write_text("half a docu")

    async def scene():
        assert (await store.stats()).temporary == 1
        await store.put(record())
        assert (await store.stats()).temporary == 0

    anyio.run(scene)
    assert {path.name for path in tmp_path.iterdir()} == {"c.json", ".c.json.lock"}


# Bad files kept for people to look at, within bounds.


def test_a_directory_keeps_the_newest_bad_files(tmp_path, monkeypatch):
    """The oldest are removed first, and `stats` has the number."""
    monkeypatch.setattr(leftovers.trim, "__kwdefaults__", {"max_files": 3, "max_bytes": 1 << 20})
    store, rejected = DirectoryStore(tmp_path), []
    store.on_rejected = rejected.append

    async def scene():
        for number in range(10):
            one = record(checksum=f"c{number}")
            await store.put(one)
            [path] = tmp_path.rglob(f"{one.address.digest}.json")
            path.write_text(f"bad {number}")
            await store.get(one.address)
        stats = await store.stats()
        assert (stats.records, stats.set_aside, stats.set_aside_bytes) == (0, 3, 15)

    anyio.run(scene)
    assert sorted(path.read_text() for path in (tmp_path / "set-aside").iterdir()) == ["bad 7", "bad 8", "bad 9"]
    assert len(rejected) == 10


def test_bad_files_are_bounded_in_bytes_and_the_newest_always_stays(tmp_path, monkeypatch):
    """A single file above the limit is kept."""
    monkeypatch.setattr(leftovers.trim, "__kwdefaults__", {"max_files": 100, "max_bytes": 1000})
    store = DirectoryStore(tmp_path)
    store.on_rejected = lambda rejected: None

    async def scene():
        for size in (400, 400, 400, 5000):
            await store.put(record())
            [path] = tmp_path.glob("schema-2/??/*.json")
            path.write_text("x" * size)
            await store.get(record().address)

    anyio.run(scene)
    assert [path.stat().st_size for path in (tmp_path / "set-aside").iterdir()] == [5000]


def test_a_document_keeps_the_newest_copies(tmp_path, monkeypatch):
    """Their numbers continue after copies were removed."""
    monkeypatch.setattr(leftovers.trim, "__kwdefaults__", {"max_files": 3, "max_bytes": 1 << 20})
    store = DocumentStore(tmp_path / "c.json")
    store.on_rejected = lambda rejected: None

    async def scene():
        for number in range(6):
            store.path.write_text(f"bad {number}")
            await store.put(record())
        stats = await store.stats()
        assert (stats.records, stats.set_aside, stats.set_aside_bytes) == (1, 3, 15)

    anyio.run(scene)
    copies = {path.name: path.read_text() for path in tmp_path.glob("*.bad-*")}
    assert copies == {"c.json.bad-3": "bad 3", "c.json.bad-4": "bad 4", "c.json.bad-5": "bad 5"}


def stale_locks(folder, count):
    """Leave lock files as killed holders do; return their names, oldest first."""
    names = [f"{record(checksum=f'stale {number}').address.digest}.schema-2.lock" for number in range(count)]
    for number, name in enumerate(names):
        (folder / name).touch()
        os.utime(folder / name, (2**31 + number,) * 2)  # newer than any that is held
    return names


@pytest.mark.parametrize("name", ["cache", "cache.json"])
def test_stale_locks_are_removed_oldest_first_and_held_ones_never(tmp_path, monkeypatch, name):
    """A bounded number of stale files stays, and all files that are not asel's."""
    store = PersistentCache("toy", tmp_path / name).store
    monkeypatch.setattr(file_claims.remove_stale_locks, "__defaults__", (3,))
    held = record(checksum="held").address

    async def scene():
        async with store.claim(held):
            [folder] = {path.parent for path in tmp_path.rglob("*.lock")}
            stale = stale_locks(folder, 10)
            own = [folder / f"report {number}.pdf" for number in range(10)]
            for path in own:
                path.touch()
            stats = await store.stats()
            # The oldest eight were to go; one of them is held.
            assert sorted(path.name for path in folder.glob("*.lock")) == sorted(
                [f"{held.digest}.schema-2.lock", *stale[7:]]
            )
            assert stats.locks == 4
            assert all(path.exists() for path in own)
            async with store.claim(held) as second:
                assert not second.held

    anyio.run(scene)


def test_claims_remove_stale_locks_occasionally(tmp_path, monkeypatch):
    """A service that never lists its cache is cleaned, too."""
    monkeypatch.setattr(file_claims, "_attempts", iter([0]))
    store = DirectoryStore(tmp_path)
    folder = tmp_path / "claims"
    folder.mkdir()
    stale_locks(folder, 300)

    async def scene():
        async with store.claim(record().address) as claim:
            assert claim.held

    anyio.run(scene)
    assert len(list(folder.iterdir())) == file_claims.MAX_LOCK_FILES


def test_a_users_own_files_in_the_folder_of_bad_files_stay(tmp_path, monkeypatch):
    """Only files that asel has moved there are removed."""
    monkeypatch.setattr(leftovers.trim, "__kwdefaults__", {"max_files": 1, "max_bytes": 1})
    store = DirectoryStore(tmp_path)
    store.on_rejected = lambda rejected: None
    own = tmp_path / "set-aside" / "notes.txt"
    own.parent.mkdir()
    own.touch()

    async def scene():
        for number in range(3):
            await store.put(record())
            [path] = tmp_path.glob("schema-2/??/*.json")
            path.write_text(f"bad {number}")
            await store.get(record().address)

    anyio.run(scene)
    assert [path.read_text() for path in own.parent.iterdir() if path != own] == ["bad 2"]
    assert own.exists()


def test_stats_count_everything_in_a_store(make_store, version, tmp_path):
    """Records, their size, and other versions' records."""

    async def scene():
        with version(1):
            await make_store().put(record())
        for number in range(3):
            await make_store().put(record(number, checksum=f"c{number}"))
        stats = await PersistentCache("toy", make_store()).stats()
        assert (stats.records, stats.other_schemas) == (3, 1)
        assert stats.bytes >= sum(len(record(n, checksum=f"c{n}").to_json()) for n in range(3))
        assert (stats.set_aside, stats.temporary, stats.locks) == (0, 0, 0)

    anyio.run(scene)


def test_stats_of_an_empty_store(make_store):
    """All numbers are zero, and nothing is created."""
    stats = anyio.run(make_store().stats)
    assert (stats.records, stats.bytes, stats.set_aside, stats.other_schemas) == (0, 0, 0, 0)


def test_version_1_directories_are_counted(tmp_path):
    """Their records were not in a folder for the version."""
    (tmp_path / "ab").mkdir()
    (tmp_path / "ab" / "x.json").write_text(json.dumps({"asel": 1}))
    assert anyio.run(DirectoryStore(tmp_path).stats).other_schemas == 1
