"""Records without their reports: for a preload, and for learning from other calls."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace

import anyio
import pytest
from support.kernels import BEST, COSTS, Blocks
from support.store_contract import flips, record

from asel import PersistentCache
from asel.kernels.keys import CacheKey
from asel.stores import records
from asel.stores.config_store import StoreQuery
from asel.stores.records import OtherSchemaError, Record, RecordError
from asel.stores.summaries import RecordLine, RecordSummary
from asel.tuning.outcomes import Measured, TuneReport

HERE = {"jax": "1"}


def stored(call, *, op="toy@v1", device="dev", cfg=BEST, created=1.0, environment=None, checksum="c") -> Record:
    key = CacheKey(device, op, call)
    environment = HERE if environment is None else environment
    outcomes = tuple(Measured(one, cost, (cost, cost), 0.01) for one, cost in COSTS.items())
    report = TuneReport(key, cfg, outcomes, 1.5, environment, tune_id="t", checksum=checksum)
    return Record(
        key=key,
        cfg={"m": cfg.m, "n": cfg.n},
        checksum=checksum,
        environment=environment,
        report=json.loads(report.to_json(lambda one: {"m": one.m, "n": one.n})),
        created=created,
    )


def query(call="a", *, op="toy@v1", environment=None, among=()):
    return StoreQuery(CacheKey("dev", op, call), "c", HERE if environment is None else environment, among=among)


@pytest.fixture(params=["cache", "cache.json"])
def cache(request, tmp_path):
    return PersistentCache("toy", tmp_path / request.param, cfg_type=Blocks)


async def listed(cache, device="dev") -> list[RecordSummary]:
    return [summary async for batch in cache.summaries(device) for summary in batch]


@pytest.mark.parametrize(
    "one",
    [
        record(),
        record({"m": 64, "deep": [[1, 2.5, None, True, 'ü\n\0"}']]}),
        record("text", environment={}, checksum=""),
        replace(record(), key=CacheKey('a "b"', "{c}", "ü\\")),
        replace(record(), environment={"jax": '"}{', "driver": "ü"}),
        replace(record(), created=1, report=None),
    ],
)
def test_a_summary_agrees_with_its_record(one):
    """In any formatting, it has the record's key, checksum, environment, config and time."""
    for text in (one.line(), one.line().encode(), json.dumps(json.loads(one.line()), indent=1)):
        line = RecordLine.parse(text)
        assert line.address == one.address
        assert json.loads(line.summary.cfg_json) == one.cfg
        assert line.summary.environment == one.environment
        assert line.summary.created == one.created
        assert line.record() == one
        assert "\n" not in line.text


def test_no_flipped_bit_changes_a_summary():
    """The digest covers the whole line, including the part that a summary does not read."""
    one = record({"m": 64})
    for damaged in flips(one.line().encode()):
        with suppress(RecordError):
            assert RecordLine.parse(damaged).record() == one


def test_another_versions_line_has_no_summary(monkeypatch):
    """It is ignored and does not count as damaged."""
    line = record().line()
    monkeypatch.setattr(records, "SCHEMA", records.SCHEMA + 1)
    with pytest.raises(OtherSchemaError):
        RecordLine.parse(line)


@pytest.mark.parametrize(
    "part", ['"created":1e999', '"created":-', '"key":["a","b"]', '"environment":{"jax":1}', '"checksum":1']
)
def test_a_line_with_a_digest_and_a_wrong_part_is_rejected(part):
    """A digest proves that a line is whole, not that asel wrote it."""
    facts = json.loads(record().line())
    name = part.partition(":")[0].strip('"')
    whole = json.dumps({**facts, name: 0}, sort_keys=True, separators=(",", ":")).replace(f'"{name}":0', part)
    body = whole[: whole.index(',"sha256"')] + whole[whole.index('",', whole.index(',"sha256"')) + 1 :]
    with pytest.raises(RecordError):
        RecordLine.parse(f'{body[:-1]},"sha256":"{records.sha256(body)}"}}')


def test_summaries_are_those_of_one_device(cache, real_backend):
    """Other devices' configs are not needed in memory."""

    async def scene():
        for call in "abc":
            await cache.store.put(stored(call))
        await cache.store.put(stored("a", device="another"))
        assert sorted(one.key.call_key for one in await listed(cache)) == ["a", "b", "c"]
        assert await listed(cache, "unknown") == []

    anyio.run(scene, backend=real_backend)


def test_a_summary_is_read_as_the_record_would_be(cache):
    """With the same config and the same `foreign`; a config that is not a candidate is rejected."""

    async def scene():
        await cache.store.put(stored("a"))
        [summary] = await listed(cache)
        read = cache.read_summary(summary, query(among=tuple(COSTS)))
        assert (read.cfg, read.foreign) == (BEST, False)
        assert cache.read_summary(summary, query(environment={"jax": "2"}, among=tuple(COSTS))).foreign
        rejected = []
        async with cache.rejections_to(rejected.append):
            assert cache.read_summary(summary, query(among=(Blocks(1), Blocks(2)))) is None
        assert "not a candidate" in rejected[0].reason
        await cache.put("dev", "toy@v1", "a", Blocks(7))
        put = next(one for one in await listed(cache) if one.is_user_put)
        read = cache.read_summary(put, query(environment={"jax": "2"}, among=tuple(COSTS)))
        assert (read.cfg, read.foreign) == (Blocks(7), False)

    anyio.run(scene)


def test_a_shipped_record_yields_to_the_stores_own(tmp_path):
    """A shipped record is used only if the store has none for the key."""

    async def scene():
        shipped = PersistentCache("toy", tmp_path / "shipped.json")
        for call in "ab":
            await shipped.store.put(stored(call, cfg=Blocks(1)))
        cache = PersistentCache("toy", tmp_path / "own", shipped=[tmp_path / "shipped.json"])
        await cache.store.put(stored("a"))
        found = {one.key.call_key: json.loads(one.cfg_json)["m"] for one in await listed(cache)}
        assert found == {"a": BEST.m, "b": 1}

    anyio.run(scene)


def test_a_bad_file_costs_a_listing_one_record(tmp_path):
    """It is set aside and reported, as in any other read."""

    async def scene():
        cache = PersistentCache("toy", tmp_path)
        for call in "abc":
            await cache.store.put(stored(call))
        bad = next((tmp_path).glob("schema-*/*/*.json"))
        bad.write_bytes(bad.read_bytes().replace(b"samples", b"sampled"))
        rejected = []
        async with cache.rejections_to(rejected.append):
            assert len(await listed(cache)) == 2
        assert len(rejected) == 1

    anyio.run(scene)


def test_earlier_tunes_are_the_newest_of_the_same_kernel_for_other_calls(cache, real_backend):
    """Same device, kernel and software; a bounded number."""

    async def scene():
        for created, call in enumerate("abcde"):
            await cache.store.put(stored(call, created=float(created)))
        await cache.store.put(stored("f", op="other@v1"))
        await cache.store.put(stored("g", device="another"))
        await cache.store.put(stored("h", environment={"jax": "2"}))
        await cache.put("dev", "toy@v1", "i", Blocks(3))
        reports = await cache.earlier_tunes(query("e", among=tuple(COSTS)), 3)
        assert [report.key.call_key for report in reports] == ["d", "c", "b"]
        assert all(report.winner == BEST and len(report.outcomes) == len(COSTS) for report in reports)

    anyio.run(scene, backend=real_backend)


def test_earlier_tunes_list_the_store_once(cache, monkeypatch):
    """For many cold keys of one kernel; this process's tunes are added without a listing."""

    async def scene():
        await cache.store.put(stored("a"))
        assert len(await cache.earlier_tunes(query("b"), 9)) == 1
        monkeypatch.setattr(cache, "summaries", None)
        await cache.keep(TuneReport.from_facts(stored("c").report, lambda value: Blocks(**value)), replace=False)
        assert len(await cache.earlier_tunes(query("b"), 9)) == 2

    anyio.run(scene)
