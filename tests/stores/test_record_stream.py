"""Reformatted documents: read one record at a time, and damage costs no other record."""

from __future__ import annotations

import gc
import io
import json
import os
import threading
from dataclasses import replace

import anyio
import pytest
from support.store_contract import KEY, flips, record

from asel import PersistentCache
from asel.stores import document_format, record_stream
from asel.stores.document_format import read_reformatted
from asel.stores.records import SCHEMA, Record

ONE = Record(key=KEY, cfg={"m": 128, "text": 'ü "[]{}, '}, checksum="c1", environment={}, created=1.5)
RECORDS = [replace(ONE, checksum=f"c{number}", report={"t_s": [0.25] * number}) for number in range(3)]
FACTS = {"asel": SCHEMA, "records": [one.to_facts() for one in RECORDS]}


def read(document: bytes) -> tuple[list[Record], list[str]]:
    """Return the records of a document, and why others are none of ours."""
    found = list(read_reformatted(b"", io.BytesIO(document), "x"))
    lines = [line for some in found for line in some.lines]
    others = [bad.reason for some in found for bad in some.rejected] + [
        "foreign" for some in found for _ in some.foreign
    ]
    return [Record.from_json(line.text) for line in lines], others


@pytest.mark.parametrize("piece_bytes", [1, 7, 1 << 15])
@pytest.mark.parametrize(
    "spelling",
    [
        {"indent": 1},
        {"indent": "\t\n\r", "ensure_ascii": False},
        {"separators": (",", ":")},
        {"sort_keys": True, "separators": (" , ", " : ")},
    ],
    ids=["indented", "blank lines", "one line", "blanks"],
)
def test_reformatted_records_are_read_correctly(monkeypatch, spelling, piece_bytes):
    """Also if the file is read in pieces that end within a name or a character."""
    monkeypatch.setattr(record_stream, "_PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(document_format, "_MAX_HEADER_BYTES", 60)
    assert read(json.dumps(FACTS, **spelling).encode()) == (RECORDS, [])


@pytest.mark.parametrize(
    "facts",
    [
        {"records": FACTS["records"]},
        {**FACTS, "note": "x" * 1000, "more": [{}]},
        {"note": "of its own", **FACTS},
        {"asel": SCHEMA, "records": []},
    ],
    ids=["no version", "something behind", "something before", "empty"],
)
def test_other_entries_of_a_document_do_not_matter(facts):
    """Only its records count."""
    records = RECORDS if facts["records"] else []
    assert read(json.dumps(facts, indent=2).encode()) == (records, [])


def test_a_flipped_bit_in_a_reformatted_document_costs_one_record():
    """The other two are unchanged, and no record is read wrongly."""
    for flipped in flips(json.dumps(FACTS, indent=1).encode()):
        found, others = read(flipped)
        assert all(one in RECORDS for one in found)
        assert len(found) == 3 or (len(found) == 2 and others), flipped


def test_joined_documents_keep_all_records():
    """The text after the first document is reported, and its records are read."""
    second = [replace(one, checksum=f"more {number}") for number, one in enumerate(RECORDS)]
    facts = {"asel": SCHEMA, "records": [one.to_facts() for one in second]}
    found, rejected = read(b"\n".join(json.dumps(one, indent=1).encode() for one in (FACTS, facts)))
    assert found == RECORDS + second
    assert len(rejected) == 1


def test_a_truncated_document_keeps_its_whole_records():
    """The missing end is reported."""
    document = json.dumps(FACTS, indent=1).encode()
    for end in range(document.index(b"[") + 1, len(document)):
        found, rejected = read(document[:end])
        assert found == RECORDS[: len(found)]
        assert len(rejected) == 1
    assert len(found) == 3


def test_a_record_without_an_end_is_given_up_within_bounds(monkeypatch):
    """The next record is found."""
    monkeypatch.setattr(record_stream, "_MAX_AHEAD", 10_000)
    monkeypatch.setattr(record_stream, "_PIECE_BYTES", 100)
    text, longest = json.dumps(FACTS, indent=1).replace('"c0"', '"' + "x" * 100_000, 1), 0
    stream = record_stream.RecordStream(text[:100].encode(), io.BytesIO(text[100:].encode()))
    found = []
    for one in stream:
        found.append(one)
        longest = max(longest, len(stream._text))
    assert [type(one) for one in found] == [record_stream.NotJson, dict, dict]
    assert longest < 50_000


def test_a_reformatted_document_is_imported_with_few_objects_in_memory(tmp_path):
    """With thousands of parsed records, the garbage collector would stop every thread."""
    tracked = []

    def load(value):
        if len(tracked) < 2:  # the page of records to be put grows later
            tracked.append(len(gc.get_objects()))
        return value

    path = tmp_path / "x.json"
    path.write_text(json.dumps({"records": [record(n, checksum=f"c{n}").to_facts() for n in range(1000)]}, indent=2))

    async def scene():
        cache = PersistentCache("toy", tmp_path / "cache.json", loader=load, dumper=lambda cfg: cfg)
        gc.collect()
        tracked.append(len(gc.get_objects()))
        assert (await cache.import_(path)).imported == 1000

    anyio.run(scene)
    assert tracked[1] - tracked[0] < 1000


def test_a_reformatted_document_may_come_through_a_pipe(tmp_path):
    """As in `asel cache import /dev/stdin`: no part is read twice."""
    reader, writer = os.pipe()
    document = json.dumps({"note": 1, **FACTS}, indent=1).encode()

    def write():
        with open(writer, "wb") as pipe:
            pipe.write(document)

    process = threading.Thread(target=write)
    process.start()

    async def scene():
        return await PersistentCache("toy", tmp_path / "c.json").import_(f"/dev/fd/{reader}")

    assert anyio.run(scene).imported == 3
    process.join()
    os.close(reader)
