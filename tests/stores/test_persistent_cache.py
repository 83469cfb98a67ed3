"""`PersistentCache`, alone and in a selector: in real time, with real files."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass, replace
from functools import partial

import anyio
import pytest
from support.kernels import BEST, COSTS, GUESS, Bench, Blocks, Toy, call
from support.store_contract import record

from asel import InvalidRequestError, PersistentCache, StoreError
from asel.kernels.keys import CacheKey
from asel.stores import DirectoryStore, DocumentStore, document_file
from asel.stores.config_store import StoreQuery
from asel.stores.records import Record
from asel.tuning.outcomes import Failed, Measured, TuneReport

KEY = CacheKey("dev", "toy@v1", "k")
HERE = {"jax": "1"}


@pytest.fixture(params=["cache", "cache.json"])
def make_cache(request, tmp_path):
    """Another handle on the same records each time, as another process would have."""

    def make(**options):
        options.setdefault("cfg_type", Blocks)
        return PersistentCache("toy", tmp_path / request.param, **options)

    return make


def run(fn, *args, backend="asyncio"):
    return anyio.run(fn, *args, backend=backend)


def report(cfg=BEST, checksum="c", environment=None, **facts):
    outcomes = tuple(Measured(one, cost, (cost, cost), 0.01) for one, cost in COSTS.items())
    environment = HERE if environment is None else environment
    return TuneReport(KEY, cfg, outcomes, 1.5, environment, tune_id="t", checksum=checksum, **facts)


def query(checksum="c", environment=None, **options):
    return StoreQuery(KEY, checksum, HERE if environment is None else environment, **options)


async def found(cache, *args, **options):
    stored = await cache.find(query(*args, **options))
    return None if stored is None else stored.cfg


# As its users know it.


def test_get_returns_what_put_stored(make_cache, real_backend):
    """In this process and in the next, with the same type."""

    async def scene():
        cache = make_cache()
        assert await cache.get(*KEY) is None
        await cache.put(*KEY, Blocks(64, 2))
        assert await cache.get(*KEY) == Blocks(64, 2)
        assert await make_cache().get(*KEY) == Blocks(64, 2)

    run(scene, backend=real_backend)


def test_put_replaces_a_keys_records_and_get_returns_the_newest(make_cache):
    """With any checksum: a user's put is deliberate."""

    async def scene():
        cache = make_cache()
        await cache.put(*KEY, Blocks(1))
        await cache.put(*KEY, Blocks(2))
        assert await cache.get(*KEY) == Blocks(2)
        await cache.keep(report(), replace=False)
        assert await cache.get(*KEY) == BEST
        await cache.put(*KEY, Blocks(5))
        assert await cache.get(*KEY) == Blocks(5)
        assert await found(cache) == Blocks(5)
        assert [record.cfg["m"] async for record in cache.records()] == [5]

    run(scene)


def test_an_unserialisable_config_fails_only_its_own_put(make_cache):
    """A clear error at that put; the puts before and after it are fine."""

    async def scene():
        cache = make_cache(cfg_type=None)
        await cache.put("d", "o", "1", 1)
        with pytest.raises(InvalidRequestError, match="cannot be stored"):
            await cache.put("d", "o", "2", object())
        await cache.put("d", "o", "3", 3)
        assert [await cache.get("d", "o", name) for name in "123"] == [1, None, 3]

    run(scene)


def test_the_environment_names_the_default_directory(monkeypatch, tmp_path):
    """ASEL_CACHE_DIR, or the platform's cache directory, with a folder for each operation."""
    monkeypatch.setenv("ASEL_CACHE_DIR", str(tmp_path / "here"))
    cache = PersistentCache("matmul")
    assert cache.path == str(tmp_path / "here" / "matmul")
    monkeypatch.delenv("ASEL_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert PersistentCache("matmul").path == str(tmp_path / "xdg" / "asel" / "matmul")


@pytest.mark.parametrize(
    "opname", ["", "../up", "a/b", "/etc/passwd", ".hidden", "a\0b", "..", "x" * 200, 7, None, "a b"]
)
def test_an_operation_name_is_a_plain_name(opname):
    """It cannot be a path; the message names the parameter for a location."""
    with pytest.raises(InvalidRequestError, match="path="):
        PersistentCache(opname)


def test_ejkernels_documented_form_opens_that_file(tmp_path):
    """PersistentCache("/path/to/cache.json") and with a loader and a dumper after it."""
    path = str(tmp_path / "cache.json")
    assert isinstance(PersistentCache(path).store, DocumentStore)
    cache = PersistentCache(path, lambda text: Blocks(int(text)), lambda cfg: str(cfg.m))

    async def scene():
        await cache.put(*KEY, Blocks(8))
        assert await cache.get(*KEY) == Blocks(8)

    run(scene)
    assert '"cfg":"8"' in (tmp_path / "cache.json").read_text()


@pytest.mark.parametrize("name", ["my cache.json", "t\N{LATIN SMALL LETTER U WITH DIAERESIS}nes.json", ".json"])
def test_a_file_may_have_any_name(name, tmp_path):
    """Only a name that becomes a directory has to be plain."""
    assert PersistentCache(str(tmp_path / name)).path == str(tmp_path / name)


def test_a_custom_store_is_used_itself(tmp_path):
    """Anything with the Store protocol."""
    store = DirectoryStore(tmp_path)
    assert PersistentCache("toy", store).store is store


# What a chain stores and finds.


def test_a_record_keeps_the_whole_tune(make_cache):
    """Outcomes, environment, checksum, time and duration are read back."""
    kept = report(incumbent=GUESS, noise=0.02, margin=0.5, objective="forward+backward")

    async def scene():
        await make_cache().keep(kept, replace=False)
        stored = await make_cache().find(query())
        assert stored.cfg == BEST
        assert stored.report == kept
        assert stored.record.seconds == 1.5
        assert stored.record.environment == HERE

    run(scene)


def test_records_are_kept_apart_by_checksum_and_environment(make_cache):
    """Old and new versions of a service, or of jaxlib, share a store without re-tuning each other."""
    there = {"jax": "2"}

    async def scene():
        cache = make_cache()
        await cache.keep(report(Blocks(1)), replace=False)
        await cache.keep(report(Blocks(2), environment=there), replace=False)
        await cache.keep(report(Blocks(3), checksum="other"), replace=False)
        assert await found(cache) == Blocks(1)
        assert await found(cache, environment=there) == Blocks(2)
        assert await found(cache, "other") == Blocks(3)
        assert await found(cache, "unknown") is None

    run(scene)


def test_another_environments_record_counts_except_with_exact(make_cache):
    """match_environment="any" prefers an exact record, and otherwise takes the newest; "exact" takes no other."""

    async def scene():
        cache = make_cache()
        await cache.keep(report(Blocks(1), environment={"jax": "0"}), replace=False)
        await cache.keep(report(Blocks(2), environment={"jax": "2"}), replace=False)
        assert await found(cache) == Blocks(2)
        assert await found(cache, exact=True) is None
        await cache.keep(report(Blocks(3)), replace=False)
        assert await found(cache) == await found(cache, exact=True) == Blocks(3)

    run(scene)


def test_the_loser_of_two_writers_adopts_and_names_the_conflict(make_cache, caplog):
    """Adopting another process's config is silent; for a second config of this process there is one warning."""
    caplog.set_level(logging.DEBUG, "asel")

    async def scene():
        cache = make_cache()
        first = await cache.keep(report(), replace=False)
        for _ in range(2):
            again = await cache.keep(report(Blocks(2)), replace=False)
            assert (again.cfg, again.adopted, again.conflict) == (BEST, True, "duplicated_key")
        await cache.store.put(replace(first.record, writer="another process"), replace=True)
        other = await cache.keep(report(Blocks(2)), replace=False)
        assert (other.cfg, other.adopted, other.conflict) == (BEST, True, "key_out_of_sync")

    run(scene)
    assert [entry.levelname for entry in caplog.records] == ["WARNING", "DEBUG"]


def test_withdrawal_removes_only_the_record_that_was_found(make_cache):
    """A record that proved wrong is removed; another that replaced it meanwhile stays."""

    async def scene():
        cache = make_cache()
        await cache.keep(report(), replace=False)
        stored = await cache.find(query())
        await cache.keep(report(Blocks(2)), replace=True)
        assert not await cache.withdraw(stored)
        assert await cache.withdraw(await cache.find(query()))
        assert await cache.find(query()) is None

    run(scene)


@dataclass(frozen=True)
class OldBlocks:
    m: int
    depth: int = 1


def test_a_record_that_no_longer_fits_is_a_miss_that_names_the_field(make_cache):
    """The next tune replaces it."""
    rejected = []

    async def scene():
        await make_cache(cfg_type=OldBlocks).keep(report(OldBlocks(3)), replace=False)
        cache = make_cache()
        async with cache.rejections_to(rejected.append):
            assert await cache.find(query()) is None
            stored = await cache.keep(report(), replace=False)
            assert (stored.cfg, stored.adopted) == (BEST, False)
        assert await found(make_cache()) == BEST

    run(scene)
    assert rejected[0].reason.startswith("depth:")
    assert rejected[0].key == KEY


def test_without_a_type_a_selector_gets_its_own_candidates(make_cache, real_backend):
    """A kernel gets the config that it declared, not a dict."""

    async def scene():
        for tier in ("autotune", "persistent"):
            bench = Bench(persistent=make_cache(cfg_type=None), costs=dict.fromkeys(COSTS, 0.001) | {BEST: 0.0001})
            async with bench.chain as chain:
                selection = await chain.select(call(), Toy())
            assert (selection.tier, type(selection.cfg)) == (tier, Blocks)

    run(scene, backend=real_backend)


def test_a_candidate_that_cannot_be_written_does_not_prevent_the_put(make_cache):
    """The record is stored without its report."""
    odd = Measured(object(), 1.0, (1.0,), 0.0)

    async def scene():
        cache = make_cache()
        await cache.keep(replace(report(), outcomes=(*report().outcomes, odd)), replace=False)
        stored = await cache.find(query())
        assert (stored.cfg, stored.report) == (BEST, None)

    run(scene)


def test_the_next_process_finds_a_stored_tune(make_cache, real_backend):
    """The persistent tier over real files: one tune, then none."""

    async def scene():
        quick = {cfg: cost / 1000 for cfg, cost in COSTS.items()}
        first, second = (Bench(persistent=make_cache(), costs=quick) for _ in range(2))
        async with first.chain as chain:
            assert (await chain.select(call(), Toy())).tier == "autotune"
        async with second.chain as chain:
            selection = await chain.select(call(), Toy())
            assert (selection.cfg, selection.tier) == (BEST, "persistent")
            assert (await chain.select(call(), Toy())).tier == "memory"
        assert (first.tunes, second.tunes) == (1, 0)
        assert selection.report.winner == BEST

    run(scene, backend=real_backend)


def test_a_users_put_answers_for_any_checksum(make_cache):
    """As in memory: a user's put is deliberate."""

    async def scene():
        bench = Bench(persistent=make_cache())
        async with bench.chain as chain:
            key = (await chain.explain(call(), Toy())).key
            await make_cache().put(*key, Blocks(77))
            assert (await chain.select(call(), Toy())).cfg == Blocks(77)
        assert bench.tunes == 0

    run(scene)


def test_a_users_put_comes_before_another_environments_record(make_cache):
    """Even if that is newer: the user meant it for every environment."""

    async def scene():
        cache = make_cache()
        await cache.put(*KEY, Blocks(77))
        await cache.keep(report(Blocks(2), environment={"jax": "2"}), replace=False)
        assert await found(cache) == await found(cache, exact=True) == Blocks(77)

    run(scene)


# Shipped with a program.


def test_shipped_records_yield_to_local_ones_and_are_never_written(tmp_path):
    """A wheel's tuned configs answer until there is something local; nothing touches them."""
    shipped = tmp_path / "wheel" / "configs.json"
    shipped.parent.mkdir()

    async def scene():
        await PersistentCache("toy", shipped, cfg_type=Blocks).keep(report(Blocks(1)), replace=False)
        before = shipped.read_bytes()
        os.chmod(shipped.parent, 0o555)
        cache = PersistentCache("toy", tmp_path / "local", cfg_type=Blocks, shipped=[shipped])
        assert await found(cache) == Blocks(1)
        assert await cache.get(*KEY) == Blocks(1)
        assert [record async for record in cache.records()] == []
        await cache.keep(report(Blocks(2)), replace=False)
        assert await found(cache) == await cache.get(*KEY) == Blocks(2)
        assert shipped.read_bytes() == before
        assert {path.name for path in shipped.parent.iterdir()} <= {"configs.json", ".configs.json.lock"}

    run(scene)


# Moving caches.


def test_an_exported_document_can_be_imported_anywhere(make_cache, tmp_path):
    """Every store exports and imports the same document; importing twice changes nothing."""

    async def scene():
        cache = make_cache()
        await cache.keep(report(), replace=False)
        await cache.keep(report(Blocks(2), checksum="other"), replace=False)
        document = await cache.export()
        assert len(json.loads(await cache.export(lambda record: record.checksum == "c"))["records"]) == 1
        for target in (tmp_path / "there", tmp_path / "there.json"):
            other = PersistentCache("toy", target, cfg_type=Blocks)
            first, second = await other.import_(document), await other.import_(document)
            assert (first.imported, first.skipped, first.mismatched) == (2, (), ())
            assert (second.imported, len(second.skipped)) == (0, 2)
            assert (await other.find(query())).report == report()
        path = tmp_path / "written.json"
        path.write_bytes(document)
        assert await found(PersistentCache("toy", path, cfg_type=Blocks)) == BEST

    run(scene)


def test_many_records_are_moved_together(tmp_path, monkeypatch):
    """A document is written a few times, and not once for every record."""
    overwrite, written = document_file.overwrite, []

    def counted(*args, **options):
        written.append(args)
        overwrite(*args, **options)

    monkeypatch.setattr(document_file, "overwrite", counted)
    facts = [record(i, checksum=f"{i}").to_facts() for i in range(500)]

    async def scene():
        cache = PersistentCache("toy", tmp_path / "cache.json")
        assert (await cache.import_({"asel": 2, "records": facts})).imported == 500
        assert len((await cache.import_({"asel": 2, "records": facts})).skipped) == 500
        assert await cache.prune(older_than=0) == 500

    run(scene)
    assert len(written) == 2


def test_a_move_that_fails_raises_the_stores_error(tmp_path):
    """One error, for any number of records in progress."""
    (tmp_path / "cache").write_text("in the way")
    facts = [record(i, checksum=f"{i}").to_facts() for i in range(5)]

    async def scene():
        with pytest.raises(StoreError):
            await PersistentCache("toy", tmp_path / "cache").import_({"asel": 2, "records": facts})

    run(scene)


def test_a_record_with_a_huge_report_is_stored_without_it(make_cache):
    """A compiler's error may have megabytes."""

    async def scene():
        cache = make_cache()
        endless = Failed(Blocks(9), "compile", "XlaRuntimeError", "x" * 5_000_000)
        await cache.keep(replace(report(), outcomes=(endless,)), replace=False)
        assert await found(cache) == BEST

    run(scene)


def test_an_import_lists_rejected_records_with_reasons(make_cache):
    """Records that do not fit the config type, and lines that are not records."""

    async def scene():
        old = make_cache(cfg_type=OldBlocks)
        await old.keep(report(OldBlocks(3)), replace=False)
        document = json.loads(await old.export())
        document["records"].append({"asel": 2, "nonsense": True})
        await old.prune(lambda record: True)
        result = await make_cache().import_(document)
        assert result.imported == 0
        reasons = [reason for _, reason in result.mismatched]
        assert any("depth" in reason for reason in reasons)
        assert any("digest" in reason for reason in reasons)
        with pytest.raises(InvalidRequestError, match="cannot be imported"):
            await make_cache().import_({"some": "thing"})

    run(scene)


# Read by whoever wants to.


def test_many_tasks_share_one_cache(make_cache, real_backend):
    """Fifty writers and fifty readers at once: every acknowledged put is there."""

    async def scene():
        cache = make_cache()

        async def write(number):
            await cache.put("d", "o", str(number), Blocks(number))
            assert await cache.get("d", "o", str(number)) == Blocks(number)

        async with anyio.create_task_group() as tasks:
            for number in range(50):
                tasks.start_soon(write, number)
        assert {record.cfg["m"] async for record in make_cache().records()} == set(range(50))

    run(scene, backend=real_backend)


def test_a_record_has_its_writer_and_its_time(make_cache):
    """For people who examine a cache."""

    async def scene():
        cache = make_cache()
        await cache.keep(report(), replace=False)
        [record] = [one async for one in cache.records()]
        assert isinstance(record, Record)
        assert record.writer.endswith(f"-{os.getpid()}")
        assert record.created > 1.7e9

    run(scene)


def test_a_cache_without_connections_is_an_async_context_manager(make_cache):
    """`async with` keeps the connections of stores that have them."""

    async def scene():
        async with make_cache() as cache, cache:
            await cache.put(*KEY, BEST)
        assert await cache.get(*KEY) == BEST

    run(partial(scene))
