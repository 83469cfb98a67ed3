"""Damaged records, in every store: no damage changes an answer or affects other records."""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import threading
from contextlib import suppress
from dataclasses import replace
from functools import partial

import anyio
import pytest
from support.kernels import BEST, Bench, Blocks, Toy, call
from support.redis_server import RedisServer
from support.store_contract import KEY, everything, flips, record

from asel import PersistentCache
from asel.errors import StoreError
from asel.stores import Change, DirectoryStore, DocumentStore, directory, document_file, document_format
from asel.stores.config_store import StoreQuery
from asel.stores.records import Record, RecordError
from asel.stores.redis.store import RedisStore

SMALL = Record(key=KEY, cfg={"m": 128, "n": 8}, checksum="c1", environment={}, created=1.5, report={"t_s": [0.25, 3]})


def signed(facts: dict) -> dict:
    """Return any facts with a matching digest, as a forger would write them."""
    body = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return {**facts, "sha256": hashlib.sha256(body.encode()).hexdigest()}


# Every bit.


def test_no_flipped_bit_changes_a_record():
    """A record is read as it was written, or it is refused."""
    for flipped in flips(SMALL.to_json().encode()):
        with suppress(RecordError):
            assert Record.from_json(flipped) == SMALL


def test_no_flipped_bit_in_a_file_changes_an_answer(tmp_path):
    """A directory returns the correct record or none."""
    store = DirectoryStore(tmp_path)
    store.on_rejected = lambda rejected: None

    async def scene():
        await store.put(SMALL)
        [path] = tmp_path.rglob("*.json")
        for flipped in flips(path.read_bytes()):
            path.write_bytes(flipped)
            assert await store.get(SMALL.address) in (None, SMALL)
            assert await everything(store) in ([], [SMALL])

    anyio.run(scene)


def test_no_flipped_bit_in_a_document_changes_an_answer_or_costs_another_record(tmp_path):
    """At most one of three records is missing, and the other two are unchanged."""
    store = DocumentStore(tmp_path / "c.json")
    records = {one.address: one for one in (replace(SMALL, checksum=f"c{number}") for number in range(3))}

    async def put():
        for one in records.values():
            await store.put(one)

    anyio.run(put)
    for flipped in flips(store.path.read_bytes()):
        contents = document_format.parse(flipped, "", {})
        found = {address: Record.from_json(line) for address, line in contents.lines.items()}
        assert len(found) >= 2
        assert found.items() <= records.items()


def test_no_flipped_bit_in_redis_changes_an_answer():
    """For any bit of the value."""
    with RedisServer() as server, server.client() as client:

        async def scene():
            async with RedisStore(server.url()) as store:
                store.on_rejected = lambda rejected: None
                await store.put(SMALL)
                [name] = [name for name in client.keys() if b":record:" in name]
                for flipped in flips(client.get(name)):
                    client.set(name, flipped)
                    assert await store.get(SMALL.address) in (None, SMALL)

        anyio.run(scene)


# Files.


def put_meanwhile(path, kept, *, replaces):
    """Put a good record into the place of a bad file, as another process would."""

    async def put():
        other = DirectoryStore(path)
        other.on_rejected = lambda rejected: None
        await other.put(kept, replace=replaces)

    process = threading.Thread(target=anyio.run, args=(put,))
    process.start()
    process.join()


@pytest.mark.parametrize("size", [0, 3_800_000])
@pytest.mark.parametrize("replaces", [True, False])
@pytest.mark.parametrize("read", ["get", "records", "put"])
def test_a_record_that_replaces_a_bad_file_is_not_set_aside(tmp_path, monkeypatch, read, replaces, size):
    """Only the file that was examined is moved."""
    store, kept, set_aside = DirectoryStore(tmp_path), record("kept"), directory.set_aside
    store.on_rejected = lambda rejected: None
    anyio.run(store.put, record("old"))
    [path] = tmp_path.rglob("*.json")
    path.write_bytes(b"x" * size)

    def late(*args):
        monkeypatch.undo()
        put_meanwhile(tmp_path, kept, replaces=replaces)
        return set_aside(*args)

    monkeypatch.setattr(directory, "set_aside", late)

    async def scene():
        match read:
            case "get":
                await store.get(kept.address)
            case "records":
                await everything(store)
            case "put":
                assert await store.put(record("late")) == kept
        assert await store.get(kept.address) == kept

    anyio.run(scene)


@pytest.mark.parametrize("plant", [os.mkfifo, os.mkdir, partial(os.symlink, "/dev/zero")], ids=["pipe", "dir", "link"])
def test_a_record_that_replaces_a_link_or_pipe_is_not_set_aside(tmp_path, monkeypatch, plant):
    """A link or pipe cannot be held open, so its type is checked again before the move."""
    store, kept, set_aside = DirectoryStore(tmp_path), record("kept"), directory.set_aside
    store.on_rejected = lambda rejected: None
    anyio.run(store.put, record("old"))
    [path] = tmp_path.rglob("*.json")
    path.unlink()
    plant(path)

    def late(*args):
        monkeypatch.undo()
        put_meanwhile(tmp_path, kept, replaces=False)
        return set_aside(*args)

    monkeypatch.setattr(directory, "set_aside", late)
    anyio.run(store.get, kept.address)
    assert anyio.run(store.get, kept.address) == kept


# Documents.


def hundred(path) -> dict:
    store = DocumentStore(path)
    records = {one.address: one for one in (record(number, checksum=f"c{number}") for number in range(100))}

    async def put():
        async with anyio.create_task_group() as tasks:
            for one in records.values():
                tasks.start_soon(store.put, one)

    anyio.run(put)
    return records


@pytest.mark.parametrize("seed", range(30))
def test_a_flipped_bit_costs_a_document_one_record_and_the_next_put_none(tmp_path, seed):
    """The other 99 are read and kept by the next put, and a copy has the damaged line."""
    path = tmp_path / "c.json"
    records = hundred(path)
    chance, contents = random.Random(seed), bytearray(path.read_bytes())
    contents[chance.randrange(len(contents))] ^= 1 << chance.randrange(8)
    path.write_bytes(contents)
    store, rejected = DocumentStore(path), []
    store.on_rejected = rejected.append
    new = record("new", checksum="new")

    async def scene():
        found = {one.address: one for one in await everything(store)}
        assert len(found) >= 99
        assert found.items() <= records.items()
        await store.put(new)
        again = {one.address: one for one in await everything(DocumentStore(path))}
        assert again == found | {new.address: new}

    anyio.run(scene)
    json.loads(path.read_text())
    if rejected:
        assert path.with_name("c.json.bad-0").read_bytes() == bytes(contents)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
@pytest.mark.parametrize("spelling", ["a record a line", "indented"])
def test_nan_in_a_document_costs_one_record(tmp_path, number, spelling):
    """Every other key can be read and put."""
    store, bad, good = DocumentStore(tmp_path / "c.json"), record(777.5), record(2, checksum="c2")
    rejected = []
    store.on_rejected = rejected.append

    async def scene():
        await store.put(bad)
        await store.put(good)
        text = store.path.read_text().replace("777.5", number)
        store.path.write_text(json.dumps(json.loads(text), indent=2) if spelling == "indented" else text)
        assert await store.get(bad.address) is None
        assert await store.put(record(3, checksum="c3")) == record(3, checksum="c3")
        assert [one.cfg for one in await everything(DocumentStore(store.path))] == [2, 3]

    anyio.run(scene)
    assert rejected


@pytest.mark.parametrize("name", ["cache", "cache.json"])
def test_an_import_skips_only_the_bad_records(tmp_path, name):
    """NaN in one of 299 records costs that record, which is listed with the reason."""

    async def scene():
        source = PersistentCache("toy", tmp_path / "source.json")
        await source.import_({"records": [record(n, checksum=f"c{n}").to_facts() for n in range(299)]})
        document = json.loads(await source.export())
        document["records"][128]["cfg"] = math.nan
        taken = await PersistentCache("toy", tmp_path / name).import_(document)
        assert (taken.imported, taken.skipped) == (298, ())
        [(where, reason)] = taken.mismatched
        assert "128" in where
        assert "not JSON" in reason

    anyio.run(scene)


def test_an_indented_document_is_read_and_written_as_usual(tmp_path):
    """A formatter changes no record."""
    path = tmp_path / "c.json"
    records = hundred(path)
    path.write_text(json.dumps(json.loads(path.read_text()), indent=4))

    async def scene():
        store = DocumentStore(path)
        assert {one.address: one for one in await everything(store)} == records
        await store.put(record("new", checksum="new"))

    anyio.run(scene)
    assert len(path.read_text().splitlines()) == 103
    assert not list(tmp_path.glob("*.bad-*"))


# A config that no tune can have chosen.


@pytest.mark.parametrize("name", ["cache", "cache.json"])
def test_a_tuned_config_that_is_not_a_candidate_is_rejected_and_replaced(tmp_path, name):
    """Even with a correct digest. An event reports it, and the key is tuned."""

    async def scene():
        def bench():
            return Bench(persistent=PersistentCache("toy", tmp_path / name, cfg_type=Blocks), costs={Blocks(3): 0.0})

        async with bench().chain as chain:
            assert await chain.choose(call(), Toy()) == BEST
        cache = PersistentCache("toy", tmp_path / name)
        [stored] = [one async for one in cache.records()]
        await cache.store.put(replace(stored, cfg={"m": 10**9, "n": 1}), replace=True)
        second = bench()
        async with second.chain as chain:
            selection = await chain.select(call(), Toy())
        assert (selection.cfg, selection.tier) == (BEST, "autotune")
        [event] = second.sink.named("record_rejected")
        assert "not a candidate" in event.reason
        async with bench().chain as chain:
            selection = await chain.select(call(), Toy())
        assert (selection.cfg, selection.tier) == (BEST, "persistent")

    anyio.run(scene)


def test_a_users_own_config_need_not_be_a_candidate(tmp_path):
    """A user's put is deliberate."""

    async def scene():
        cache = PersistentCache("toy", tmp_path / "cache", cfg_type=Blocks)
        async with Bench(persistent=cache).chain as chain:
            key = (await chain.explain(call(), Toy())).key
            await cache.put(*key, Blocks(77))
            selection = await chain.select(call(), Toy())
        assert (selection.cfg, selection.tier) == (Blocks(77), "persistent")

    anyio.run(scene)


def test_a_forged_digest_does_not_make_an_invalid_number_valid():
    """The digest detects damage, not intent, so contents are checked as well."""
    facts = {name: value for name, value in SMALL.to_facts().items() if name != "sha256"}
    assert Record.from_facts(signed({**facts, "cfg": 5})).cfg == 5
    with pytest.raises(RecordError):
        Record.from_facts(signed({**facts, "cfg": math.nan}))


# What else a document has to bear.


def test_a_document_is_not_written_larger_than_it_can_be_read(tmp_path, monkeypatch):
    """Such a put fails; the document stays readable, and can be made smaller."""
    monkeypatch.setattr(document_file, "_MAX_BYTES", 2000)
    store, stored = DocumentStore(tmp_path / "c.json"), []

    async def scene():
        with pytest.raises(StoreError, match="use a directory"):
            for number in range(100):
                stored.append(await store.put(record(number, checksum=f"c{number}")))
        assert sorted(one.cfg for one in await everything(DocumentStore(store.path))) == [one.cfg for one in stored]
        monkeypatch.setattr(document_file, "_MAX_BYTES", 1 << 20)
        await store.put(record("large", checksum="large"))
        monkeypatch.setattr(document_file, "_MAX_BYTES", store.path.stat().st_size - 1)
        fresh = DocumentStore(store.path)
        fresh._file._seen = store._file._seen
        assert await fresh.delete(record(checksum="large").address)

    anyio.run(scene)
    assert stored


def test_bad_lines_are_reported_and_copied_once_if_a_put_fails(tmp_path, monkeypatch):
    """On a full disk, reads still work, and retries make no further copies."""
    path = tmp_path / "c.json"
    hundred(path)
    path.write_text(path.read_text().replace("0.25", "0.26", 1))
    store, rejected, overwrite = DocumentStore(path), [], document_file.overwrite
    store.on_rejected = rejected.append

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    async def scene():
        monkeypatch.setattr(document_file, "overwrite", full)
        for _ in range(3):
            with pytest.raises(StoreError, match="No space"):
                await store.put(record("new", checksum="new"))
        monkeypatch.setattr(document_file, "overwrite", overwrite)
        await store.put(record("new", checksum="new"))
        assert len(await everything(store)) == 100

    anyio.run(scene)
    assert len(rejected) == 1
    assert [copy.name for copy in tmp_path.glob("*.bad-*")] == ["c.json.bad-0"]


def test_a_copy_is_made_even_if_similar_names_exist(tmp_path):
    """Names that look like a copy's, and are none, keep no damage from being kept."""
    store = DocumentStore(tmp_path / "c.json")
    store.on_rejected = lambda rejected: None
    (tmp_path / "c.json.bad-999999999999999999").touch()
    (tmp_path / "c.json.bad-1").mkdir()
    for number in range(2):
        store.path.write_text(f"damage {number}")
        anyio.run(store.put, record())
    kept = {path.name: path.read_text() for path in tmp_path.glob("*.bad-*") if path.is_file()}
    assert sorted(kept.values()) == ["", "damage 0", "damage 1"]


def test_a_change_that_was_written_before_its_caller_was_cancelled_counts_as_made():
    """The next waiter writes the batch again, and finds the change in the file."""
    lines: dict = {}
    put = document_file.PendingChange(Change.put(record()))
    assert put.apply(lines)
    assert not put.apply(lines)
    assert put.result.done
    delete = document_file.PendingChange(Change.delete(record().address, expected=record()))
    assert delete.apply(lines)
    assert not delete.apply(lines)
    assert delete.result.done


# Records that were read, and then changed.


@pytest.mark.parametrize("make", [DirectoryStore, lambda path: DocumentStore(path / "c.json")])
def test_a_caller_may_change_a_record_and_put_it(tmp_path, make):
    """A record's values belong to its reader."""

    async def scene():
        store = make(tmp_path)
        await store.put(record({"m": 1}))
        found = await store.get(record().address)
        found.cfg["m"] = 4096
        await store.put(found, replace=True)
        assert (await store.get(record().address)).cfg == {"m": 4096}

    anyio.run(scene)


def test_a_record_under_a_wrong_name_is_set_aside(tmp_path):
    """A copy of a file would be listed twice, and never be pruned."""
    store, rejected = DirectoryStore(tmp_path), []
    store.on_rejected = rejected.append

    async def scene():
        await store.put(record())
        [path] = tmp_path.rglob("*.json")
        path.with_name("copy.json").write_bytes(path.read_bytes())
        assert await everything(store) == [record()]

    anyio.run(scene)
    assert "another address" in rejected[0].reason


def test_an_unreadable_directory_does_not_end_a_listing(tmp_path, monkeypatch):
    """Another user's private folder in a shared cache is reported and skipped."""
    store, rejected, shard = DirectoryStore(tmp_path), [], DirectoryStore._shard
    store.on_rejected = rejected.append
    mine, theirs = record(1), record(2, key=KEY._replace(device="theirs"))

    def guarded(self, name, **options):
        if name == theirs.address.key_digest[:2]:
            raise PermissionError(13, "Permission denied", name)
        return shard(self, name, **options)

    async def scene():
        for one in (mine, theirs):
            await store.put(one)
        monkeypatch.setattr(DirectoryStore, "_shard", guarded)
        assert await everything(store) == [mine]
        assert (await store.stats()).records == 1

    anyio.run(scene)
    assert "Permission denied" in rejected[0].reason


@pytest.mark.parametrize(("stored", "candidate"), [(128.0, 128), (True, 1), (1, True)])
def test_a_config_of_another_type_is_not_a_candidate(tmp_path, stored, candidate):
    """1, 1.0 and True are three different configs."""

    async def scene():
        cache = PersistentCache("toy", tmp_path)
        await cache.store.put(record(stored))
        query = StoreQuery(KEY, "c1", record().environment, among=(candidate,))
        assert await cache.find(query) is None
        await cache.store.put(record(candidate), replace=True)
        assert (await cache.find(query)).cfg is candidate

    anyio.run(scene)
