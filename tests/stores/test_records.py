"""Records: every input is checked before it is used."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import anyio
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.store_contract import record

from asel.errors import InvalidRequestError
from asel.kernels.keys import CacheKey
from asel.stores import records as records_module
from asel.stores import strict_json
from asel.stores.config_store import StoreQuery
from asel.stores.persistent_cache import PersistentCache
from asel.stores.records import MAX_BYTES, Address, Record, RecordError, environment_digest

texts = st.text(st.characters(), max_size=20)  # lone surrogates and all
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)
records = st.builds(
    Record,
    key=st.builds(CacheKey, texts, texts, texts),
    cfg=values,
    checksum=texts,
    environment=st.dictionaries(texts, texts, max_size=3),
    report=st.none() | st.dictionaries(texts, values, max_size=4),
    created=st.floats(0, 1e12),
    seconds=st.floats(0, 1e6),
    writer=texts,
)


@given(records)
def test_records_are_read_back_equal(kept):
    """With any contents."""
    assert Record.from_json(kept.to_json()) == kept


def test_hashing_keeps_the_gil(monkeypatch):
    """A thread that repeatedly releases the GIL for microseconds starves the event loop."""
    sizes, sha256 = [], hashlib.sha256

    class Watched:
        def __init__(self, contents=b""):
            self.inner = sha256()
            self.update(contents)

        def update(self, contents):
            sizes.append(len(contents))
            self.inner.update(contents)

        def hexdigest(self):
            return self.inner.hexdigest()

    monkeypatch.setattr(records_module.hashlib, "sha256", Watched)
    large = record("x" * 10_000)
    assert Record.from_json(large.to_json()) == Record.from_facts(large.to_facts()) == large
    assert sum(sizes) > 40_000
    assert max(sizes) < 2048  # from there on hashlib releases it


@given(records)
def test_a_record_is_one_line(kept):
    """A document has one record on each line."""
    assert len(kept.to_json().splitlines()) == 1
    assert kept.to_json().isascii()


@given(st.binary(max_size=300) | st.text(max_size=300))
@example(b"[" * 100_000)
@example(b'{"asel":' + b"9" * 5000)
@example("\ud800")
def test_no_input_crashes_the_reader(anything):
    """Invalid input raises RecordError."""
    with pytest.raises(RecordError):
        Record.from_json(anything)


@given(st.data())
@settings(suppress_health_check=list(HealthCheck))
def test_a_damaged_record_is_refused_or_still_a_record(data):
    """After one byte is changed, removed or added, a record is refused or can be written again."""
    spelt = bytearray(record({"m": [1, 2.5, "x"]}).to_json().encode())
    where = data.draw(st.integers(0, len(spelt) - 1))
    with_byte = data.draw(st.integers(0, 255))
    match data.draw(st.sampled_from(["change", "remove", "add"])):
        case "change":
            spelt[where] = with_byte
        case "remove":
            del spelt[where]
        case "add":
            spelt.insert(where, with_byte)
    try:
        read = Record.from_json(bytes(spelt))
    except RecordError:
        return
    assert Record.from_json(read.to_json()) == read


@given(values, values, values)
@settings(max_examples=50, deadline=None)
def test_any_record_is_an_answer_or_a_miss(tmp_path_factory, cfg, report, outcomes):
    """A valid record with an invalid report is an answer without a report."""
    from support.kernels import Blocks

    report = {"outcomes": outcomes, "x": report} if not isinstance(report, dict) else report | {"outcomes": outcomes}
    path = tmp_path_factory.mktemp("fuzz")

    async def scene():
        for cfg_type in (None, Blocks):
            cache = PersistentCache("toy", path, cfg_type=cfg_type)
            kept = replace(record(cfg), report=report)
            await cache.store.put(kept, replace=True)
            stored = await cache.find(StoreQuery(kept.key, kept.checksum, kept.environment))
            assert stored is None or stored.report is None or cfg_type is None
            assert isinstance(await cache.reports(StoreQuery(kept.key, kept.checksum, kept.environment)), list)

    anyio.run(scene)


@pytest.mark.parametrize(
    "cfg",
    [float("nan"), float("inf"), object(), {1: 2}, (1, 2), {"a": {1, 2}}, b"bytes"],
    ids=lambda cfg: str(type(cfg)),
)
def test_a_value_without_a_json_form_is_refused_on_writing(cfg):
    """Not later, when another process reads it."""
    with pytest.raises(InvalidRequestError, match="cannot be stored"):
        record(cfg).to_json()


def test_a_record_has_a_maximum_size_and_depth():
    """For writing and for reading."""
    deep: list = []
    for _ in range(100):
        deep = [deep]
    for cfg in ("x" * MAX_BYTES, deep):
        with pytest.raises(InvalidRequestError):
            record(cfg).to_json()


def test_addresses_whose_joined_fields_are_equal_do_not_collide():
    """("a|b", "c") and ("a", "b|c") are two keys, and so on for every field."""
    addresses = [
        Address(CacheKey("a|b", "c", "d")),
        Address(CacheKey("a", "b|c", "d")),
        Address(CacheKey("a", "b", "c"), "de", "f"),
        Address(CacheKey("a", "b", "c"), "d", "ef"),
        Address(CacheKey("a", "b", "c"), "", "def"),
    ]
    assert len({address.digest for address in addresses}) == len(addresses)


def test_the_digest_of_an_environment_covers_all_entries():
    """In any order; an empty environment has no digest."""
    assert environment_digest({"a": "1", "b": "2"}) == environment_digest({"b": "2", "a": "1"})
    assert environment_digest({"a": "1", "b": "2"}) != environment_digest({"a": "1b", "": "2"})
    assert environment_digest({}) == ""


def test_digests_are_the_same_in_every_version():
    """Stores outlive programs, and these names are on disks."""
    address = Address(CacheKey("dev", "op@v1", "call"), "sum", environment_digest({"jax": "1"}))
    assert address.digest == "1b9fb77c5f2f12b79343d5cd6cf0d168.28a9b852cc7938ca.61f47fafcfc94376"
    assert json.loads(record().to_json())["asel"] == 2


def test_a_large_value_is_freed_piece_by_piece():
    """Its lists and dicts are emptied one by one, so that other threads can run in between."""
    outcomes = [{"cfg": {"m": 64}, "samples_s": [1.0]} for _ in range(3)]
    value = {"report": {"outcomes": outcomes}}
    strict_json.discard(value)
    assert value == {}
    assert outcomes == []
