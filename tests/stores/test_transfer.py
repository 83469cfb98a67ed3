"""Exports, imports and prunes of many records: in threads, in pages, with one rewrite for a batch."""

from __future__ import annotations

import gc
import io
import json
import os
import stat
import tempfile
import threading
from functools import partial
from pathlib import Path

import anyio
import pytest
from support.redis_server import RedisServer
from support.store_contract import everything, record

from asel import InvalidRequestError, PersistentCache
from asel.errors import StoreError
from asel.runtime.threads import run_in_thread
from asel.stores import (
    DocumentStore,
    StoreDefaults,
    directory,
    document_file,
    pages,
    protocol,
    removal,
    strict_json,
    transfer,
)
from asel.stores import file_ops as files
from asel.stores.records import Record
from asel.stores.redis import store as redis_store

COUNT = 600


def many(count: int = COUNT) -> list[Record]:
    return [record(number, checksum=f"c{number}") for number in range(count)]


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch):
    """These are tests of many records, and of no power cut."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


@pytest.fixture(scope="module")
def redis():
    with RedisServer() as server:
        yield server


@pytest.fixture(params=["cache", "cache.json", "redis", "a store of one's own"])
def cache(request, tmp_path):
    if request.param == "redis":
        server = request.getfixturevalue("redis")
        with server.client() as client:
            client.flushall()
        return PersistentCache("toy", server.url())
    if request.param == "a store of one's own":
        return PersistentCache("toy", InMemory())
    return PersistentCache("toy", tmp_path / request.param)


class InMemory:
    """The smallest store that there can be."""

    location = "memory"

    def __init__(self) -> None:
        self.kept: dict = {}
        self.on_rejected = lambda rejected: None

    async def get(self, address):
        return self.kept.get(address)

    async def put(self, record, *, replace=False, claim=None):
        if replace:
            self.kept[record.address] = record
        return self.kept.setdefault(record.address, record)

    def claim(self, address, *, wait_s=0.0, anew=False):
        raise NotImplementedError

    async def records(self, key=None):
        for one in list(self.kept.values()):
            yield one

    async def delete(self, address, *, expected=None):
        return self.kept.pop(address, None) is not None


def test_records_can_be_moved_between_any_two_stores(cache, tmp_path, real_backend):
    """As a document in memory or in a file; existing records are skipped."""

    async def scene():
        async with cache:
            taken = await cache.import_({"records": [one.to_facts() for one in many(300)]})
            assert (taken.imported, taken.skipped, taken.mismatched) == (300, (), ())
            path = tmp_path / "export.json"
            assert await cache.export_to(path, lambda one: one.cfg != 7) == 299
            document = await cache.export(lambda one: one.cfg != 7)
            assert document == path.read_bytes()
            for form in (path, document, json.loads(document)):
                other = PersistentCache("toy", tmp_path / type(form).__name__)
                assert (await other.import_(form)).imported == 299
            await cache.store.put(record("changed", checksum="c9"), replace=True)
            taken = await cache.import_(str(path))
            assert taken.imported == 0
            assert {why for _, why in taken.skipped} == {"there already", "there already, with another config"}
            assert (await cache.stats()).records == 300
            assert await cache.prune(lambda one: one.cfg == "changed" or one.cfg % 2) == 150
            assert (await cache.stats()).records == 150

    anyio.run(scene, backend=real_backend)


def test_a_document_is_written_once_for_a_batch(tmp_path, monkeypatch):
    """Importing and pruning hundreds of records rewrite it once each."""
    overwrite, writes = document_file.overwrite, []

    def counted(*args, **options):
        writes.append(args)
        overwrite(*args, **options)

    monkeypatch.setattr(document_file, "overwrite", counted)

    async def scene():
        cache = PersistentCache("toy", tmp_path / "cache.json")
        assert (await cache.import_({"records": [one.to_facts() for one in many()]})).imported == COUNT
        assert len(writes) == 1
        assert await cache.prune(lambda one: one.cfg % 2 == 0) == COUNT // 2
        assert len(writes) == 2

    anyio.run(scene)


def test_a_directory_is_synced_once_for_a_batch(tmp_path, monkeypatch):
    """Not once for each record."""
    synced = []

    def counted(file):
        if stat.S_ISDIR(os.fstat(file).st_mode):
            synced.append(file)

    async def scene():
        cache = PersistentCache("toy", tmp_path / "cache")
        await cache.import_({"records": [one.to_facts() for one in many()]})  # all of one key, and so of one folder
        monkeypatch.setattr(os, "fsync", counted)
        assert await cache.prune(lambda one: True) == COUNT
        assert len(synced) <= COUNT / 16 + 1

    anyio.run(scene)


def test_slow_steps_run_in_threads(cache, tmp_path, monkeypatch, real_backend):
    """Records are parsed and written as JSON in threads, also for one large put."""
    loop, on_loop = threading.get_ident(), []

    def watched(function):
        def call(*args):
            if threading.get_ident() == loop:
                on_loop.append(function.__name__)
            return function(*args)

        return call

    class Spool(io.BufferedRandom):
        def close(self):
            if not self.closed:
                watched(super().close)()
                closed.set()

    large, closed = record("x" * 200_000, checksum="large"), threading.Event()
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda: Spool(io.FileIO(tmp_path / "spool", "w+")))

    async def scene():
        async with cache:
            facts = [one.to_facts() for one in many(300)]
            monkeypatch.setattr(strict_json, "dumps", watched(strict_json.dumps))
            monkeypatch.setattr(strict_json, "loads", watched(strict_json.loads))
            await cache.import_({"records": facts})
            await cache.export()
            await cache.export_to(tmp_path / "export.json")
            await cache.import_(tmp_path / "export.json")
            await cache.store.put(large)
            await cache.store.put(large, replace=True)
            assert await cache.store.get(large.address) == large
            await cache.prune(lambda one: True)

    anyio.run(scene, backend=real_backend)
    assert closed.wait(10)
    assert on_loop == []


def test_threads_hand_over_after_a_few_records(cache, tmp_path, monkeypatch):
    """A thread that parses for long delays the event loop by 5 ms for each step."""
    counts = [0]

    def parsed(function):
        def call(*args):
            counts[-1] += 1
            return function(*args)

        return call

    async def counted(what, work):
        counts.append(0)
        return await run_in_thread(what, work)

    async def scene():
        facts = [one.to_facts() for one in many(100)]
        for module in (transfer, removal, protocol, files, redis_store):
            monkeypatch.setattr(module, "run_in_thread", counted)
        for name in ("from_json", "from_facts", "line"):
            monkeypatch.setattr(Record, name, parsed(getattr(Record, name)))
        async with cache:
            await cache.import_({"records": facts})
            await cache.import_(await cache.export())
            await cache.import_(json.dumps({"records": facts}, indent=1).encode())
            await cache.export_to(tmp_path / "export.json")
            await cache.prune(lambda one: True)

    anyio.run(scene)
    assert sum(counts) > 600
    assert max(counts) <= 32


def test_an_export_to_a_file_has_few_records_in_memory(tmp_path):
    """One page at a time."""
    most = 0

    async def scene():
        nonlocal most
        cache = PersistentCache("toy", tmp_path / "cache")
        await cache.import_({"records": [one.to_facts() for one in many(2000)]})

        def look(one):
            nonlocal most
            if one.cfg % 200 == 0:
                most = max(most, sum(isinstance(each, Record) for each in gc.get_objects()))
            return True

        assert await cache.export_to(tmp_path / "export.json", look) == 2000

    anyio.run(scene)
    assert most < 1000


@pytest.mark.parametrize("cache", ["cache", "redis"], indirect=True)
def test_an_export_holds_records_as_text(cache, tmp_path):
    """With dicts and lists of thousands of records, the garbage collector would stop every thread."""
    tracked = []

    def look(one):
        if one.cfg % 100 == 0:
            gc.collect(0)
            tracked.append(len(gc.get_objects()))
        return True

    async def scene():
        async with cache:
            await cache.import_({"records": [one.to_facts() for one in many(800)]})
            for export in (partial(cache.export, look), partial(cache.export_to, tmp_path / "export.json", look)):
                tracked.clear()
                await export()
                assert max(tracked) - min(tracked) < 1000

    anyio.run(scene)


def test_an_import_writes_no_file_for_an_existing_record(tmp_path, monkeypatch):
    """Writing and syncing a file in vain would take most of the time."""

    def write(*args, **options):
        raise AssertionError("a file was written")

    async def scene():
        cache = PersistentCache("toy", tmp_path / "cache")
        await cache.import_({"records": [one.to_facts() for one in many(20)]})
        monkeypatch.setattr(directory, "create", write)
        assert len((await cache.import_(await cache.export())).skipped) == 20

    anyio.run(scene)


def test_moving_parses_each_record_once(redis, tmp_path, monkeypatch):
    """Into and out of Redis, records stay lines of JSON."""
    loads, parsed = strict_json.loads, []

    def counted(text):
        parsed.append(text)
        return loads(text)

    async def scene():
        source = PersistentCache("toy", tmp_path / "c.json")
        await source.import_({"records": [one.to_facts() for one in many(50)]})
        document = await source.export()
        monkeypatch.setattr(strict_json, "loads", counted)
        async with PersistentCache("toy", redis.url("prefix=once")) as cache:
            assert (await cache.import_(document)).imported == 50
            assert len(parsed) == 50
            assert await cache.prune(lambda one: True) == 50
            assert len(parsed) == 100

    anyio.run(scene)


def test_pruning_redis_deletes_only_records_it_has_read(redis, monkeypatch):
    """In any formatting; a record that has replaced it stays."""

    async def scene():
        async with PersistentCache("toy", redis.url("prefix=spelt")) as cache:
            await cache.import_({"records": [one.to_facts() for one in many(2)]})
            with redis.client() as client:
                names = {json.loads(client.get(name))["cfg"]: name for name in client.keys("spelt:*:record:*")}
                client.set(names[0], json.dumps(json.loads(client.get(names[0])), indent=2))
            newer = record("newer", checksum="c1")
            list_, replaced = cache.store.records, []

            async def listed(key=None):
                async for one in list_(key):
                    yield one
                    if one.cfg == 1:
                        replaced.append(await cache.store.put(newer, replace=True))

            monkeypatch.setattr(cache.store, "records", listed)
            assert await cache.prune(lambda one: True) == 1
            assert await everything(cache.store) == replaced == [newer]

    anyio.run(scene)


def test_reformatted_and_damaged_files_are_imported(tmp_path):
    """An indented file completely; a file with a bad line without that line."""

    async def scene():
        source = PersistentCache("toy", tmp_path / "source")
        await source.import_({"records": [one.to_facts() for one in many(20)]})
        path = tmp_path / "export.json"
        await source.export_to(path)
        lines = path.read_text().splitlines()
        path.write_text(json.dumps(json.loads(path.read_text()), indent=2))
        assert (await PersistentCache("toy", tmp_path / "a").import_(path)).imported == 20
        lines[3] = lines[3].replace("0.25", "0.26")
        path.write_text("\n".join(lines))
        taken = await PersistentCache("toy", tmp_path / "b").import_(path)
        assert (taken.imported, len(taken.mismatched)) == (19, 1)
        assert "line 4" in taken.mismatched[0][0]

    anyio.run(scene)


@pytest.mark.parametrize("contents", [b"", b"nonsense", b"[]", b'{"some": "thing"}', None])
def test_a_file_that_is_not_a_document_is_refused(tmp_path, contents):
    """With the reason; nothing is imported."""
    path = tmp_path / "x.json"
    if contents is not None:
        path.write_bytes(contents)

    async def scene():
        with pytest.raises(InvalidRequestError, match="cannot be imported"):
            await PersistentCache("toy", tmp_path / "cache").import_(path)

    anyio.run(scene)


def test_other_versions_records_are_not_imported(tmp_path):
    """They are listed as mismatched."""
    facts = record().to_facts() | {"asel": 99}

    async def scene():
        taken = await PersistentCache("toy", tmp_path / "cache").import_({"records": [facts]})
        assert (taken.imported, len(taken.mismatched)) == (0, 1)
        assert "version" in taken.mismatched[0][1]

    anyio.run(scene)


def test_a_store_is_not_exported_over_itself(tmp_path):
    """A concurrent put would lose its record."""

    async def scene():
        cache = PersistentCache("toy", tmp_path / "c.json")
        await cache.store.put(record())
        with pytest.raises(InvalidRequestError, match="another file"):
            await cache.export_to(tmp_path / "c.json")
        assert await everything(DocumentStore(tmp_path / "c.json")) == [record()]

    anyio.run(scene)


def test_a_failed_export_leaves_the_earlier_one(tmp_path, monkeypatch):
    """A full disk costs the export, not the earlier one."""

    async def scene():
        cache, path = PersistentCache("toy", tmp_path / "cache"), tmp_path / "export.json"
        await cache.store.put(record())
        path.write_text("the earlier one")
        monkeypatch.setattr(transfer, "in_pieces", broken)
        with pytest.raises(StoreError, match=r"export.json failed: .*No space"):
            await cache.export_to(path)
        assert path.read_text() == "the earlier one"

    def broken(*args):
        yield b"half"
        raise OSError(28, "No space left on device")

    anyio.run(scene)
    assert {path.name for path in Path(tmp_path).iterdir()} == {"cache", "export.json", ".export.json.lock"}


def test_a_failing_store_ends_a_batch_with_its_own_error(tmp_path):
    """One error, not a group, for any number of changes in progress."""

    class Full(InMemory):
        async def put(self, record, *, replace=False, claim=None):
            await anyio.lowlevel.checkpoint()
            raise StoreError("full")

    async def scene():
        with pytest.raises(StoreError, match=r"^full$"):
            await PersistentCache("toy", Full()).import_({"records": [one.to_facts() for one in many(200)]})

    anyio.run(scene)


def test_stores_without_optional_methods_get_the_defaults():
    """They are in `StoreDefaults`."""

    class Own(InMemory, StoreDefaults):
        pass

    async def scene():
        store = Own()
        await store.put(record())
        assert (await store.stats()).records == 1

    anyio.run(scene)


@pytest.mark.parametrize("bad", [{"asel": 1, "t": float("nan")}, {"asel": 1, "t": {1, 2}}, {"asel": 1, 2: 3}, {1, 2}])
def test_invalid_json_costs_an_import_one_record(tmp_path, bad):
    """Also in a record of another version."""

    async def scene():
        facts = [one.to_facts() for one in many(40)]
        taken = await PersistentCache("toy", tmp_path / "cache").import_({"records": [*facts[:20], bad, *facts[20:]]})
        assert (taken.imported, len(taken.mismatched)) == (40, 1)

    anyio.run(scene)


def test_a_record_that_is_in_a_document_twice_is_imported_once(tmp_path):
    """The first is imported, and the second is listed as skipped."""
    first, second = record(1), record(2)

    async def scene():
        cache = PersistentCache("toy", tmp_path / "cache")
        taken = await cache.import_({"records": [first.to_facts(), second.to_facts()]})
        assert (taken.imported, taken.skipped) == (1, ((first.address, "it is in the document twice"),))
        assert await everything(cache.store) == [first]

    anyio.run(scene)


def test_an_export_detects_its_own_store_under_any_path(tmp_path):
    """A link or a detour leads to the same file."""
    (tmp_path / "x").mkdir()
    (tmp_path / "link.json").symlink_to(tmp_path / "c.json")

    async def scene():
        cache = PersistentCache("toy", tmp_path / "c.json")
        await cache.store.put(record())
        for path in (tmp_path / "x" / ".." / "c.json", tmp_path / "link.json"):
            with pytest.raises(InvalidRequestError, match="another file"):
                await cache.export_to(path, lambda one: False)
        assert await everything(cache.store) == [record()]

    anyio.run(scene)


def test_an_export_keeps_the_permissions_of_the_file_it_replaces(tmp_path):
    """It leaves at most one half-written file, even if it is killed repeatedly."""
    path = tmp_path / "export.json"
    path.touch(mode=0o600)
    (tmp_path / ".export.json.tmp").write_text("half")

    async def scene():
        cache = PersistentCache("toy", tmp_path / "cache")
        await cache.store.put(record())
        await cache.export_to(path)

    anyio.run(scene)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not (tmp_path / ".export.json.tmp").exists()


def test_pages_are_bounded_in_bytes(tmp_path, monkeypatch):
    """Large records are put and pruned a few at a time."""
    monkeypatch.setattr(pages, "_MAX_BYTES", 10_000)
    apply, sizes = DocumentStore.apply, []

    async def counted(self, changes):
        sizes.append(len(changes))
        return await apply(self, changes)

    monkeypatch.setattr(DocumentStore, "apply", counted)
    large = [record("x" * 3000, checksum=f"c{number}") for number in range(40)]

    async def scene():
        cache = PersistentCache("toy", tmp_path / "c.json")
        assert (await cache.import_({"records": [one.to_facts() for one in large]})).imported == 40
        assert max(sizes) <= 16
        del sizes[:]
        assert await cache.prune(lambda one: True) == 40

    anyio.run(scene)
