"""One readable file of records: in real time, with real files."""

from __future__ import annotations

import json
import threading

import anyio
import pytest
from support.store_contract import everything, record

from asel.errors import StoreError
from asel.stores import DocumentStore
from asel.stores.document_file import DocumentFile
from asel.stores.records import Record


def run(fn, *args, backend="asyncio"):
    return anyio.run(fn, *args, backend=backend)


@pytest.mark.parametrize("contents", [b"", b'{"asel": 2, "rec', b"\xff\x00garbage", b"[1, 2]", b"[" * 100_000])
def test_a_bad_document_is_kept_in_a_copy_and_a_new_one_begun(document, contents):
    """No contents are lost: the copy is beside the new document."""
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


def test_one_bad_record_does_not_affect_others_in_a_document(document):
    """Each record is read independently, and the bad record is kept in a copy."""
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


def test_a_slow_reader_does_not_lose_another_writers_record(document, monkeypatch):
    """A reader may have an older state than the file; the next put merges with the file, not with that state."""
    parse, is_read, is_late = DocumentFile._parse, threading.Event(), threading.Event()
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
    monkeypatch.setattr(DocumentFile, "_parse", slow_reader)
    reader = threading.Thread(target=run, args=(late.get, one.address))
    reader.start()
    assert is_read.wait(5)
    run(other.put, two)
    monkeypatch.setattr(DocumentFile, "__setattr__", set_by_a_writer, raising=False)
    run(late.put, three)
    monkeypatch.undo()
    assert len(run(everything, document)) == 3


def test_a_document_that_is_a_link_is_not_replaced(document, tmp_path):
    """The put raises StoreError."""
    document.path.symlink_to(tmp_path / "other.json")
    (tmp_path / "other.json").write_text("precious")

    async def scene():
        with pytest.raises(StoreError, match="link"):
            await document.put(record())

    run(scene)
    assert (tmp_path / "other.json").read_text() == "precious"


def test_a_document_is_sorted_with_one_record_on_each_line(document):
    """A diff of two versions shows the records that differ."""

    async def scene():
        for number in (3, 1, 2):
            await document.put(record(number, checksum=f"c{number}"))

    run(scene)
    first, *lines, last = document.path.read_text().splitlines()
    assert (first, last) == ('{"asel": 2, "records": [', "]}")
    assert [Record.from_json(line.rstrip(",")).cfg for line in lines] == [1, 2, 3]


def test_concurrent_puts_are_written_together(document, monkeypatch, real_backend):
    """A hundred puts of one process rewrite the file a few times, not a hundred."""
    writes = []
    overwrite = DocumentFile._write_alone

    def counted(self, changes, directory):
        writes.append(len(changes))
        return overwrite(self, changes, directory)

    monkeypatch.setattr(DocumentFile, "_write_alone", counted)

    async def scene():
        async with anyio.create_task_group() as tasks:
            for number in range(100):
                tasks.start_soon(document.put, record(number, checksum=f"c{number}"))
        assert len(await everything(document)) == 100

    run(scene, backend=real_backend)
    assert sum(writes) == 100
    assert len(writes) < 50  # 3 on an idle machine; records that are slow to be encoded come in later batches


def test_a_cancelled_put_does_not_affect_its_batch(document, real_backend):
    """If the task that writes a batch is cancelled, the next one continues."""

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


def test_a_document_behind_a_link_is_read(tmp_path):
    """As config maps and package managers lay them out."""
    real = DocumentStore(tmp_path / "real.json")
    run(real.put, record())
    (tmp_path / "link.json").symlink_to(real.path)
    assert run(DocumentStore(tmp_path / "link.json").get, record().address) == record()
