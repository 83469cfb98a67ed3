"""`asel cache`: the same commands over a directory and a document, and over Redis."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import anyio
import pytest
from support.command_line import asel, fill, report
from support.redis_server import RedisServer

from asel import CacheKey, InvalidRequestError, PersistentCache
from asel.cli.cache.record_lookup import matching
from asel.stores.records import Record
from asel.web.entries import Entry


@pytest.fixture(params=["directory", "document"])
def store(request, tmp_path):
    return fill(tmp_path / ("cache" if request.param == "directory" else "cache.json"))


def keys(store):
    return sorted(one["key"] for one in asel("cache", "ls", "--store", store, "--json").json)


def test_ls_shows_each_key_with_its_config_and_speedup(store):
    """One row for each record, and one line for each row if there is no terminal."""
    lines = asel("cache", "ls", "--store", store).out.splitlines()
    assert len(lines) == 3
    assert lines[0].split()[:4] == ["key", "op", "call", "config"]
    assert "00000200  matmul@v1  a=f32[512,512], causal=True    rows=64  2.00x \u00b12%" in lines[1]


def test_ls_filters_by_operation_and_device(store):
    """`--op matmul` matches every version."""
    for options, count in ((["--op", "matmul"], 2), (["--op", "matmul@v2"], 0), (["--device", "H100"], 2)):
        assert len(asel("cache", "ls", "--store", store, *options, "--json").json) == count


def test_narrow_windows_get_a_block_of_lines_for_each_row(store, monkeypatch):
    """Nothing is cut off at forty columns, and NO_COLOR is respected."""
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    shown = asel("cache", "ls", "--store", store, terminal=True).out
    plain = re.sub(r"\x1b\[[01]m", "", shown)  # bold is not a colour
    assert "config    rows=64\n" in plain
    assert max(map(len, plain.splitlines())) <= 40
    assert "\x1b" not in plain


def test_show_draws_candidates_with_their_spread(store):
    """The winner first; solid to the fastest sample, shaded to the slow ones; failures and skips with reasons."""
    shown = asel("cache", "show", "00000200", "--store", store).out
    (winner,) = [line for line in shown.splitlines() if line.endswith("winner")]
    (slow,) = [line for line in shown.splitlines() if "out after round 1" in line]
    assert winner.split()[:3] == ["rows=64", "100", "us"]
    assert winner.count("\u2588") < slow.count("\u2588")
    assert "rows=96    failed in compile: TypeError: cannot reshape 512 into 96" in shown
    assert "rows=4096  skipped: the tune's budget of 60 s was spent" in shown
    assert "jax 0.10.2" in shown


def test_a_key_may_be_named_by_part_of_its_call(store):
    """If several keys match, the error lists the digits of each."""
    assert asel("cache", "show", "f32[1024", "--store", store, "--json").json[0]["config"] == {"rows": 64}
    several = asel("cache", "show", "matmul", "--store", store)
    assert several.code == 2
    assert "00000200" in several.err
    assert "00000400" in several.err
    assert "asel cache ls" in asel("cache", "show", "ffff", "--store", store).err


def test_why_explains_the_winner(store):
    """In sentences: the heuristic, the runner-up, the failures, the device."""
    told = asel("cache", "why", "00000200", "--store", store).out
    assert "runs with rows=64" in told
    assert "50.0% less time than the heuristic's rows=32 (2.00x as fast); the noise is 2.0%" in told
    assert "rows=96 failed in compile" in told
    assert "1.5 s on NVIDIA H100 with jax 0.10.2" in told


def test_diff_compares_configs_of_the_same_calls(store, tmp_path):
    """Exit code 1 if they differ, 0 if not."""
    other = fill(tmp_path / "other.json", report(512, fastest=32), report(2048))
    ran = asel("cache", "diff", store, other)
    assert ran.code == 1
    assert "other config" in ran.out
    assert "only in A" in ran.out
    assert "only in B" in ran.out
    assert "0 of 3 calls" in ran.out
    assert asel("cache", "diff", store, store).code == 0


def test_diff_compares_two_versions_in_one_cache(tmp_path):
    """One cache may have records of two versions of JAX."""
    both = fill(tmp_path / "cache", report(512), report(512, fastest=32, jax="0.9.0"))
    rows = asel("cache", "diff", both, both, "--jax-a", "0.9.0", "--jax-b", "0.10.2", "--json").json
    assert [(row["change"], row["a"]["config"], row["b"]["config"]) for row in rows] == [
        ("other config", "rows=32", "rows=64")
    ]


def test_export_and_import_move_a_cache(store, tmp_path):
    """Importing twice changes nothing."""
    document, elsewhere = tmp_path / "moved.json", tmp_path / "elsewhere"
    assert asel("cache", "export", document, "--store", store).out == f"2 records in {document}\n"
    assert asel("cache", "export", document, "--store", store, "--json").json["records"] == 2
    for imported, skipped in ((2, 0), (0, 2)):
        done = asel("cache", "import", document, "--store", elsewhere, "--json").json
        assert (done["imported"], done["skipped"]) == (imported, skipped)
    assert keys(elsewhere) == keys(store)


def test_prune_shows_asks_and_deletes(store):
    """Nothing is deleted without a yes."""
    condition = ["cache", "prune", "--store", store, "--not-jax", "0.11.0"]
    refused = asel(*condition, answer="n\n")
    assert "a=f32[512,512]" in refused.out
    assert "nothing was deleted" in refused.out
    assert "2 records would be deleted" in asel(*condition, "--dry-run").out
    assert asel(*condition, "--json").code == 2  # it cannot ask
    looked = asel(*condition, "--json", "--dry-run").json
    assert (looked["deleted"], len(looked["matching"])) == (0, 2)
    assert len(keys(store)) == 2
    assert "2 deleted" in asel(*condition, "--yes").out
    assert keys(store) == []
    assert "nothing to delete" in asel(*condition).out


def test_prune_keeps_young_records(store):
    """All conditions have to be met."""
    assert "nothing to delete" in asel("cache", "prune", "--store", store, "--older-than", "1h", "--op", "matmul").out
    wrong = asel("cache", "prune", "--store", store, "--older-than", "soon")
    assert wrong.code == 2
    assert "90d" in wrong.err


def test_stats_count_records(store):
    """With their size, and the other files of the store."""
    (counted,) = asel("cache", "stats", "--store", store, "--json").json
    assert counted["records"] == 2
    assert counted["set_aside"] == 0
    assert "records" in asel("cache", "stats", "--store", store).out


def test_stats_count_unreadable_files(tmp_path):
    """They are not counted as records; `ls` names them, and reading does not set them aside."""
    store = fill(tmp_path / "cache")
    min((tmp_path / "cache").glob("schema-*/*/*.json")).write_text("{")
    (counted,) = asel("cache", "stats", "--store", store, "--json").json
    assert (counted["records"], counted["unreadable"], counted["set_aside"]) == (1, 1, 0)


def test_a_key_of_several_operations_is_named_by_its_call():
    """Operations with equal arguments have equal digits."""
    keys = [CacheKey("cpu", op, "ab" * 16, "x=f32[8]") for op in ("add@v1", "mul@v1")]
    entries = [Entry.of(Record(key=key, cfg={"m": 1}, environment={}, created=1.0), "here") for key in keys]
    with pytest.raises(InvalidRequestError, match="the whole call of one of them"):
        matching(entries, "abab")
    assert matching(entries, "mul@v1(x=f32[8])") == entries[1:]
    there = Entry.of(replace(entries[0].record, key=CacheKey("gpu", "add@v1", "ab" * 16, "x=f32[8]")), "here")
    with pytest.raises(InvalidRequestError, match="Add --device"):
        matching([entries[0], there], "abab")


def test_without_a_store_all_caches_of_the_cache_directory_are_read(tmp_path, monkeypatch):
    """In ASEL_CACHE_DIR; the name of an operation addresses its cache."""
    monkeypatch.setenv("ASEL_CACHE_DIR", str(tmp_path))
    assert "no cache" in asel("cache", "ls").err
    fill(tmp_path / "first")
    fill(tmp_path / "second", report(op="other@v1"))
    assert len(asel("cache", "ls", "--json").json) == 3
    assert len(asel("cache", "ls", "--store", "second", "--json").json) == 1
    several = asel("cache", "export", tmp_path / "out.json")
    assert several.code == 2
    assert "first, second" in several.err


def test_a_bad_record_is_named_and_stays_in_place(tmp_path):
    """Reading a cache changes nothing in it."""
    store = fill(tmp_path / "cache")
    (bad, _) = sorted((tmp_path / "cache").glob("schema-*/*/*.json"))
    bad.write_text(bad.read_text().replace("rows", "cols"))
    ran = asel("cache", "ls", "--store", store)
    assert ran.code == 1
    assert len(ran.out.splitlines()) == 2
    assert str(bad) in ran.err
    assert bad.exists()


def test_a_users_put_has_a_config_and_no_report(tmp_path):
    """It is listed, shown and explained all the same."""
    anyio.run(PersistentCache("test", tmp_path / "cache").put, "cpu", "op@v1", "abc", {"m": 1})
    store = str(tmp_path / "cache")
    assert "m=1" in asel("cache", "ls", "--store", store).out
    assert "a user put it" in asel("cache", "show", "abc", "--store", store).out
    assert "A user put it" in asel("cache", "why", "op", "--store", store).out


def test_redis_is_addressed_by_its_url(tmp_path):
    """All commands work over Redis, too."""
    with RedisServer() as server:
        url = fill(server.url("prefix=mine"))
        assert len(asel("cache", "ls", "--store", url, "--json").json) == 2
        assert "winner" in asel("cache", "show", "00000200", "--store", url).out
        looked = asel("doctor", "--store", url, "--json").json["findings"]
        assert any(one["topic"] == "redis" and "2 good records" in one["text"] for one in looked)
        document = tmp_path / "fleet.json"
        assert asel("cache", "export", document, "--store", url).code == 0
        assert len(json.loads(document.read_text())["records"]) == 2
        pruned = asel("cache", "prune", "--store", url, "--op", "matmul", "--device", "H100", "--yes")
        assert "2 deleted" in pruned.out
