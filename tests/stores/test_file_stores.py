"""The stores made of files: in real time, with real files."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
from functools import partial

import anyio
import pytest
from pydantic import RedisDsn, TypeAdapter
from support.store_contract import KEY, LAWS, everything, record

from asel import ConfigSelectorChain, PersistentCache
from asel.errors import InvalidRequestError, StoreError
from asel.stores import DirectoryStore, DocumentStore, open_store
from asel.stores.records import MAX_BYTES


def run(fn, *args, backend="asyncio"):
    return anyio.run(fn, *args, backend=backend)


def the_file(store: DirectoryStore):
    [path] = store.root.glob("schema-*/??/*.json")
    return path


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_contract(law, make_store, real_backend):
    """The laws of store_contract.py hold for files as for Redis."""
    run(law, make_store, backend=real_backend)


# Which store is meant.


def test_open_store_returns_the_store_for_a_location(tmp_path):
    """A path, a document or a custom store."""
    assert isinstance(open_store(tmp_path / "x"), DirectoryStore)
    assert isinstance(open_store(str(tmp_path / "x.json")), DocumentStore)
    own = DirectoryStore(tmp_path)
    assert open_store(own) is own


@pytest.mark.parametrize("location", ["", 7, None, object(), "http://host/x", "sqlite:///x"])
def test_an_invalid_location_is_refused(location):
    """The message has the valid forms."""
    with pytest.raises(InvalidRequestError, match="redis://"):
        open_store(location)


SECRET = "redis://:hunter2@host"


@pytest.mark.parametrize(
    "mistake",
    [
        lambda: open_store(SECRET.encode()),
        lambda: open_store([SECRET]),
        lambda: open_store(TypeAdapter(RedisDsn).validate_python(SECRET)),
        lambda: PersistentCache(SECRET),
        lambda: PersistentCache("toy", loader=SECRET),
        lambda: PersistentCache("toy", shipped=SECRET),
        lambda: ConfigSelectorChain(persistent=SECRET),
    ],
)
def test_a_url_in_the_wrong_place_is_not_repeated(mistake):
    """It may hold a password, and errors end up in logs."""
    with pytest.raises(InvalidRequestError) as refused:
        mistake()
    assert "hunter2" not in str(refused.value)


def test_opening_a_store_creates_nothing(tmp_path):
    """Directories are created at the first put."""
    for name in ("a", "b.json"):
        open_store(tmp_path / "new" / name)
    assert not list(tmp_path.iterdir())


# What is bad.


def forged(before: str, after: str) -> bytes:
    """Return a changed record's line with a matching digest."""
    body, mark, _ = record().to_json().rpartition(',"sha256":"')
    assert before in body
    body = body.replace(before, after)
    return f'{body}{mark}{hashlib.sha256(f"{body}}}".encode()).hexdigest()}"}}'.encode()


BAD = {
    "empty": b"",
    "truncated": record().to_json().encode()[:-10],
    "garbage": b"\xff\xfe\x00garbage",
    "a list": b"[]",
    "no version": forged('"asel":2,', ""),
    "no version that is a number": forged('"asel":2', '"asel":"2"'),
    "no digest": re.sub(r',"sha256":"[^"]*"', "", record().to_json()).encode(),
    "another config than its digest's": record().to_json().replace('"cfg":1', '"cfg":2').encode(),
    "other timings than its digest's": record().to_json().replace("0.25", "0.24").encode(),
    "a field too many": forged('"asel":2', '"asel":2,"more":1'),
    "a wrong type": forged('"seconds":0.125', '"seconds":"long"'),
    "not a number": forged('"seconds":0.125', '"seconds":NaN'),
    "beyond floats": forged('"seconds":0.125', '"seconds":1e999'),
    "too large": b" " * (MAX_BYTES + 1),
    "too deep": b'{"asel":2,"cfg":' + b"[" * 100_000,
    "deep within limits of the parser": forged('"cfg":1', '"cfg":' + "[" * 200 + "]" * 200),
    "another record": record(key=KEY._replace(device="other")).to_json().encode(),
}


@pytest.mark.parametrize("contents", BAD.values(), ids=BAD)
def test_a_bad_file_is_a_miss_reported_once_and_set_aside(directory, contents):
    """Its neighbours are read, and its address can be written."""
    rejected = []
    directory.on_rejected = rejected.append
    neighbour = record(5, checksum="c2")

    async def scene():
        await directory.put(record())
        path = the_file(directory)
        await directory.put(neighbour)
        path.write_bytes(contents)
        assert await directory.get(record().address) is None
        assert await directory.get(record().address) is None
        assert await everything(directory) == [neighbour]
        assert await directory.put(record(9)) == record(9)
        assert await directory.get(record().address) == record(9)

    run(scene)
    [bad] = rejected
    assert bad.key == KEY
    assert bad.reason
    with open(bad.where, "rb") as file:
        assert file.read() == contents


def test_a_put_replaces_a_bad_file_at_its_address(directory):
    """A bad file is found by the first to open it, reader or writer."""

    async def scene():
        await directory.put(record())
        the_file(directory).write_bytes(b"")
        assert await directory.put(record(2)) == record(2)

    run(scene)


def test_a_put_fails_if_a_bad_file_cannot_be_set_aside(directory):
    """It does not retry without end."""
    rejected = []
    directory.on_rejected = rejected.append

    async def scene():
        await directory.put(record())
        the_file(directory).write_bytes(b"")
        (directory.root / "set-aside").write_text("no directory")
        with pytest.raises(StoreError, match="could not be moved aside"):
            await directory.put(record(2))

    run(scene)
    assert 0 < len(rejected) < 10


def test_a_reformatted_record_is_deleted_like_any_other(directory):
    """An indented file still has the same record."""

    async def scene():
        await directory.put(record())
        path = the_file(directory)
        path.write_text(json.dumps(json.loads(path.read_text()), indent=2))
        assert not await directory.delete(record().address, expected=record(2))
        assert await directory.delete(record().address, expected=record())
        assert await everything(directory) == []

    run(scene)


# What must not be touched.


def test_a_planted_link_is_not_written_through(directory, tmp_path):
    """A write stays inside the cache directory."""
    victim = tmp_path / "victim"
    victim.write_text("precious")

    async def scene():
        await directory.put(record())
        path = the_file(directory)
        path.unlink()
        path.symlink_to(victim)
        assert await directory.get(record().address) is None
        assert await directory.put(record(2)) == record(2)
        path.unlink()
        path.symlink_to(victim)
        assert await directory.put(record(3), replace=True) == record(3)
        assert not path.is_symlink()

    run(scene)
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("depth", [0, 1])
def test_a_planted_directory_link_is_not_followed(directory, tmp_path, depth):
    """A linked directory is not part of the store."""
    outside = tmp_path / "outside"
    outside.mkdir()

    async def scene():
        planted = [directory.root / "schema-2", directory.root / "schema-2" / record().address.key_digest[:2]][depth]
        planted.parent.mkdir(parents=True)
        planted.symlink_to(outside)
        with pytest.raises(StoreError):
            await directory.put(record())

    run(scene)
    assert not list(outside.iterdir())


@pytest.mark.parametrize("plant", [os.mkfifo, os.mkdir], ids=["pipe", "directory"])
def test_a_fifo_or_device_does_not_hang_a_reader(directory, plant):
    """A pipe in the place of a record is bad like any other invalid file."""

    async def scene():
        await directory.put(record())
        path = the_file(directory)
        path.unlink()
        plant(path)
        with anyio.fail_after(5):
            assert await directory.get(record().address) is None
            assert await directory.put(record(2)) == record(2)

    run(scene)


def test_file_modes_follow_the_umask(make_store, tmp_path):
    """The umask decides whether a team can read a shared cache."""
    before = os.umask(0o002)
    try:
        run(make_store().put, record())
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*.json") if path.is_file()]
    assert [stat.S_IMODE(path.stat().st_mode) for path in files] == [0o664]


def test_a_put_leaves_no_temporary_files(make_store, tmp_path):
    """After a put there are records and locks, and nothing half-written."""

    async def scene():
        store = make_store()
        for number in range(20):
            await store.put(record(number, checksum=f"c{number % 10}"), replace=number % 3 == 0)
            async with store.claim(record().address):
                pass

    run(scene)
    assert not [path for path in tmp_path.rglob("*") if ".tmp-" in path.name]
    assert not list(tmp_path.rglob("claims/*.lock"))


def test_old_temporary_files_of_killed_writers_are_removed(directory):
    """A fresh one stays, since it may be in use."""

    async def scene():
        await directory.put(record())
        shard = the_file(directory).parent
        old, fresh = shard / ".tmp-old", shard / ".tmp-fresh"
        for path in (old, fresh):
            path.write_text("{")
        os.utime(old, (1, 1))
        assert await everything(directory) == [record()]
        assert (old.exists(), fresh.exists()) == (False, True)

    run(scene)


# Where the file system refuses.


def test_without_links_the_first_writer_still_wins(directory, monkeypatch, real_backend):
    """On file systems without hard links, a file is renamed under a lock instead."""

    def refuse(*args, **kwargs):
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    for law in LAWS:
        if law.__name__ in ("many_putters_have_one_winner", "the_first_writer_wins_and_the_loser_adopts"):
            root = directory.root / law.__name__
            run(law, partial(DirectoryStore, root), backend=real_backend)


def test_a_read_only_store_is_never_written(directory, tmp_path):
    """Shipped files do not change, bad ones included."""
    run(directory.put, record())
    the_file(directory).write_bytes(b"bad")
    shipped, rejected = open_store(directory.root, read_only=True), []
    shipped.on_rejected = rejected.append
    before = sorted(tmp_path.rglob("*"))

    async def scene():
        assert await shipped.get(record().address) is None
        with pytest.raises(StoreError, match="read-only"):
            await shipped.put(record())

    run(scene)
    assert len(rejected) == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_a_read_only_directory_may_consist_of_links(directory, tmp_path):
    """It is only read, so following links is safe."""
    run(directory.put, record())
    shipped = tmp_path / "shipped"
    (shipped / "schema-2").mkdir(parents=True)
    for path in directory.root.glob("schema-2/??"):
        (shipped / "schema-2" / path.name).symlink_to(path)
    assert run(open_store(shipped, read_only=True).get, record().address) == record()


def test_a_put_is_on_disk_before_it_is_acknowledged(directory, monkeypatch):
    """The contents are synced before the name, so a power cut leaves only whole records."""
    steps, fsync, link = [], os.fsync, os.link

    def synced(file):
        steps.append("directory" if stat.S_ISDIR(os.fstat(file).st_mode) else "file")
        fsync(file)

    def linked(*args, **kwargs):
        steps.append("link")
        link(*args, **kwargs)

    run(directory.put, record(checksum="the directories are there"))
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "link", linked)
    run(directory.put, record())
    assert steps == ["file", "link", "directory"]
    del steps[:]
    run(DirectoryStore(directory.root / "new" / "one").put, record())
    assert steps[:3] == ["directory"] * 3  # two directories and a shard are made, each in its parent
    assert steps[-3:] == ["file", "link", "directory"]
