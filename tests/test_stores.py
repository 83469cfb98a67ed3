"""The stores made of files: in real time, with real files."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
import subprocess
import sys
import threading
from functools import partial

import anyio
import pytest
from pydantic import RedisDsn, TypeAdapter
from store_contract import KEY, LAWS, everything, record

from asel import ConfigSelectorChain, PersistentCache, threads
from asel.errors import InvalidRequestError, StoreError
from asel.stores import DirectoryStore, DocumentStore, open_store
from asel.stores.records import MOST_BYTES, Record

MAKERS = {
    "directory": lambda path: DirectoryStore(path / "cache"),
    "document": lambda path: DocumentStore(path / "c.json"),
}


@pytest.fixture(params=MAKERS)
def make_store(request, tmp_path):
    return partial(MAKERS[request.param], tmp_path)


@pytest.fixture
def directory(tmp_path):
    return DirectoryStore(tmp_path / "cache")


@pytest.fixture
def document(tmp_path):
    return DocumentStore(tmp_path / "c.json")


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


def test_a_location_names_its_store(tmp_path):
    """A path, a document or a store of one's own."""
    assert isinstance(open_store(tmp_path / "x"), DirectoryStore)
    assert isinstance(open_store(str(tmp_path / "x.json")), DocumentStore)
    own = DirectoryStore(tmp_path)
    assert open_store(own) is own


@pytest.mark.parametrize("location", ["", 7, None, object(), "http://host/x", "sqlite:///x"])
def test_what_is_no_location_is_refused(location):
    """The message says what would do."""
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


def test_opening_a_store_touches_nothing(tmp_path):
    """Directories are made when something is put, not before."""
    for name in ("a", "b.json"):
        open_store(tmp_path / "new" / name)
    assert not list(tmp_path.iterdir())


# What is bad.


def forged(before: str, after: str) -> bytes:
    """Return a record's line that somebody has changed, together with its digest."""
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
    "too large": b" " * (MOST_BYTES + 1),
    "too deep": b'{"asel":2,"cfg":' + b"[" * 100_000,
    "deep within limits of the parser": forged('"cfg":1', '"cfg":' + "[" * 200 + "]" * 200),
    "another record": record(key=KEY._replace(device="other")).to_json().encode(),
}


@pytest.mark.parametrize("contents", BAD.values(), ids=BAD)
def test_a_bad_file_is_a_miss_told_once_and_set_aside(directory, contents):
    """It costs itself and nothing else: its neighbours answer, and its place can be written."""
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


def test_a_put_finds_what_stands_in_its_way_is_bad_and_takes_its_place(directory):
    """A bad file is found by whoever meets it first, reader or writer."""

    async def scene():
        await directory.put(record())
        the_file(directory).write_bytes(b"")
        assert await directory.put(record(2)) == record(2)

    run(scene)


@pytest.mark.parametrize("contents", [BAD[name] for name in ("empty", "truncated", "garbage", "a list", "too deep")])
def test_a_bad_document_is_set_aside_and_begun_anew(document, contents):
    """Nothing that was in it is lost: it lies beside the new one."""
    rejected = []
    document.on_rejected = rejected.append
    document.path.write_bytes(contents)

    async def scene():
        assert await document.get(record().address) is None
        assert await everything(document) == []
        assert await document.put(record()) == record()
        assert await DocumentStore(document.path).get(record().address) == record()

    run(scene)
    assert [bad.where for bad in rejected] == [str(document.path)]
    assert document.path.with_name("c.json.bad-0").read_bytes() == contents


def test_one_bad_record_costs_a_document_no_other(document):
    """Each record of a document stands for itself, and the bad one is kept in a copy."""
    rejected = []
    document.on_rejected = rejected.append
    lines = [json.loads(record(1).to_json()), {"asel": 2}, 7, json.loads(record(2, checksum="c2").to_json())]
    document.path.write_text(json.dumps({"asel": 2, "records": lines}))

    async def scene():
        assert len(await everything(document)) == 2
        assert len(await everything(document)) == 2
        await document.put(record(3, checksum="c3"))
        assert len(await everything(DocumentStore(document.path))) == 3

    run(scene)
    assert [bad.where.rpartition(" ")[2] for bad in rejected] == ["1", "2"]
    assert json.loads(document.path.with_name("c.json.bad-0").read_text())["records"] == lines


def test_a_bad_file_that_cannot_be_set_aside_is_an_error_and_no_endless_trial(directory):
    """Whoever puts is told, instead of writing the same thing again and again."""
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


def test_a_record_spelt_another_way_is_deleted_as_any_other(directory):
    """A file that somebody indented is still the record it was."""

    async def scene():
        await directory.put(record())
        path = the_file(directory)
        path.write_text(json.dumps(json.loads(path.read_text()), indent=2))
        assert not await directory.delete(record().address, expected=record(2))
        assert await directory.delete(record().address, expected=record())
        assert await everything(directory) == []

    run(scene)


def test_a_reader_in_another_thread_takes_nothing_from_a_writer(document, monkeypatch):
    """What a slow reader saw before another process wrote is not what the next put is added to."""
    parse, is_read, is_late = DocumentStore._parse, threading.Event(), threading.Event()
    one, two, three = (record(number, checksum=f"c{number}") for number in (1, 2, 3))

    def slow_reader(store, directory):
        seen = parse(store, directory)
        if threading.current_thread().name.startswith("asel: reading"):
            is_read.set()
            assert is_late.wait(5)
        return seen

    def set_by_a_writer(store, name, value):
        object.__setattr__(store, name, value)
        if threading.current_thread().name.startswith("asel: writing") and not is_late.is_set():
            is_late.set()
            reader.join(5)

    run(document.put, one)
    other = DocumentStore(document.path)
    late = DocumentStore(document.path)
    monkeypatch.setattr(DocumentStore, "_parse", slow_reader)
    reader = threading.Thread(target=run, args=(late.get, one.address))
    reader.start()
    assert is_read.wait(5)
    run(other.put, two)
    monkeypatch.setattr(DocumentStore, "__setattr__", set_by_a_writer, raising=False)
    run(late.put, three)
    monkeypatch.undo()
    assert len(run(everything, document)) == 3


# What must not be touched.


def test_a_planted_link_is_not_written_through(directory, tmp_path):
    """Whatever lies in a cache directory, a write stays inside it."""
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
    """Nor is a linked directory one of ours."""
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


@pytest.mark.parametrize(
    ("kind", "claims", "name"),
    [("directory", "cache/claims", "{}.schema-2.lock"), ("document", ".c.json.claims", "{}.schema-2.lock")],
)
def test_claims_are_not_made_through_a_planted_link(kind, claims, name, tmp_path):
    """Not even a lock, which is removed afterwards with whatever had its name."""
    outside = tmp_path / "outside"
    outside.mkdir()
    victim = outside / name.format(record().address.digest)
    victim.write_text("precious")
    (tmp_path / claims).parent.mkdir(exist_ok=True)
    (tmp_path / claims).symlink_to(outside)

    async def scene():
        with pytest.raises(StoreError):
            async with MAKERS[kind](tmp_path).claim(record().address):
                pass

    run(scene)
    assert victim.read_text() == "precious"


def test_a_document_that_is_a_link_is_not_replaced(document, tmp_path):
    """Whoever puts is told that the store failed."""
    document.path.symlink_to(tmp_path / "other.json")
    (tmp_path / "other.json").write_text("precious")

    async def scene():
        with pytest.raises(StoreError, match="link"):
            await document.put(record())

    run(scene)
    assert (tmp_path / "other.json").read_text() == "precious"


@pytest.mark.parametrize("plant", [os.mkfifo, os.mkdir], ids=["pipe", "directory"])
def test_what_is_no_file_does_not_hang_a_reader(directory, plant):
    """A pipe under a record's name is bad, like any other nonsense."""

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
    """A cache that a team shares is as readable as the team's umask says."""
    before = os.umask(0o002)
    try:
        run(make_store().put, record())
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*.json") if path.is_file()]
    assert [stat.S_IMODE(path.stat().st_mode) for path in files] == [0o664]


def test_nothing_temporary_is_left(make_store, tmp_path):
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


def test_what_a_killed_writer_left_is_swept_when_it_is_old(directory):
    """A half-written file of a process that was killed does not stay for ever; a fresh one may be in use."""

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


# The document.


def test_a_document_is_sorted_and_has_a_record_a_line(document):
    """Two versions of it differ where their records do."""

    async def scene():
        for number in (3, 1, 2):
            await document.put(record(number, checksum=f"c{number}"))

    run(scene)
    first, *lines, last = document.path.read_text().splitlines()
    assert (first, last) == ('{"asel": 2, "records": [', "]}")
    assert [Record.from_json(line.rstrip(",")).cfg for line in lines] == [1, 2, 3]


def test_puts_at_once_are_written_together(document, monkeypatch, real_backend):
    """A hundred puts of one process rewrite the file a few times, not a hundred."""
    writes = []
    overwrite = DocumentStore._write_alone

    def counted(self, changes, directory):
        writes.append(len(changes))
        return overwrite(self, changes, directory)

    monkeypatch.setattr(DocumentStore, "_write_alone", counted)

    async def scene():
        async with anyio.create_task_group() as tasks:
            for number in range(100):
                tasks.start_soon(document.put, record(number, checksum=f"c{number}"))
        assert len(await everything(document)) == 100

    run(scene, backend=real_backend)
    assert sum(writes) == 100
    assert len(writes) <= 3


def test_one_putter_cancelled_costs_the_others_nothing(document, real_backend):
    """Whoever writes for all may be cancelled: the next one carries on."""

    async def scene():
        async def first():
            with anyio.CancelScope() as scope:
                scopes.append(scope)
                await document.put(record(0, checksum="first"))

        scopes = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(first)
            for number in range(1, 10):
                tasks.start_soon(document.put, record(number, checksum=f"c{number}"))
            while not scopes:  # trio starts tasks in any order
                await anyio.lowlevel.checkpoint()
            scopes[0].cancel()
        assert {one.cfg for one in await everything(document)} >= set(range(1, 10))

    run(scene, backend=real_backend)


# Where the file system refuses.


def test_without_links_the_first_writer_still_wins(directory, monkeypatch, real_backend):
    """Some file systems have no hard links: then it is a rename, alone by a lock."""

    def refuse(*args, **kwargs):
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    for law in LAWS:
        if law.__name__ in ("many_putters_have_one_winner", "the_first_writer_wins_and_the_loser_adopts"):
            root = directory.root / law.__name__
            run(law, partial(DirectoryStore, root), backend=real_backend)


def test_a_store_that_is_only_read_is_never_written(directory, tmp_path):
    """What was shipped stays as it was shipped, bad files included."""
    run(directory.put, record())
    the_file(directory).write_bytes(b"bad")
    shipped, rejected = open_store(directory.root, read_only=True), []
    shipped.on_rejected = rejected.append
    before = sorted(tmp_path.rglob("*"))

    async def scene():
        assert await shipped.get(record().address) is None
        with pytest.raises(StoreError, match="only read"):
            await shipped.put(record())

    run(scene)
    assert len(rejected) == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_a_document_behind_a_link_is_read(tmp_path):
    """As config maps and package managers lay them out."""
    real = DocumentStore(tmp_path / "real.json")
    run(real.put, record())
    (tmp_path / "link.json").symlink_to(real.path)
    assert run(DocumentStore(tmp_path / "link.json").get, record().address) == record()


def test_a_shipped_directory_may_be_made_of_links(directory, tmp_path):
    """It is only read, so it does not matter where they lead."""
    run(directory.put, record())
    shipped = tmp_path / "shipped"
    (shipped / "schema-2").mkdir(parents=True)
    for path in directory.root.glob("schema-2/??"):
        (shipped / "schema-2" / path.name).symlink_to(path)
    assert run(open_store(shipped, read_only=True).get, record().address) == record()


def test_a_put_is_on_disk_before_it_is_acknowledged(directory, monkeypatch):
    """The contents before their name, and then the name: what a power cut leaves is whole."""
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


def test_whoever_waits_for_a_claim_occupies_no_thread(make_store, real_backend):
    """Neither of the shared pool nor of our own: thirty of them poll, and rest in between."""

    async def scene():
        holder = make_store()
        async with holder.claim(record().address), anyio.create_task_group() as tasks:

            async def wait():
                async with make_store().claim(record().address, wait_s=30):
                    pass

            for _ in range(30):
                tasks.start_soon(wait)
            least = 30
            for _ in range(50):
                await anyio.sleep(0.01)
                least = min(least, len(threads._crew.busy))
                assert anyio.to_thread.current_default_thread_limiter().borrowed_tokens == 0
            assert least < 6
            tasks.cancel_scope.cancel()

    run(scene, backend=real_backend)


FORKED = """
import os, sys, anyio
sys.path.insert(0, {tests!r})
from store_contract import record
from asel.stores import DirectoryStore

async def main():
    async with DirectoryStore({root!r}).claim(record().address) as claim:
        child = os.fork()
        if child == 0:
            os.read(0, 1)  # lives on until its input ends
            os._exit(0)
        print(claim.held, flush=True)
        os.kill(os.getpid(), 9)

anyio.run(main)
"""


def test_a_forked_child_does_not_keep_its_dead_parents_lock(directory, request):
    """filelock lets go of inherited locks; a child that would not delays others by `wait_s`, like any stuck holder."""
    script = FORKED.format(tests=str(request.path.parent), root=str(directory.root))
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"True\n"
        holder.wait()

        async def scene():
            async with directory.claim(record().address, wait_s=10) as claim:
                assert claim.held

        run(scene)  # while the child lives
        holder.stdin.close()
