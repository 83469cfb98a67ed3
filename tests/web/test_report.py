"""The contents of the report page, and its command."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace

from support.command_line import asel, fill, report

from asel import CacheKey, Failed, Measured, Skipped
from asel.web.report import MAX_SAMPLES, spread_of


def data_of(page):
    (text,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', page.read_text(), re.DOTALL)
    return json.loads(text)


def test_the_page_is_self_contained(tmp_path):
    """It refers to no other file and forbids all requests; the licences of the charts are inside."""
    page = tmp_path / "a" / "report.html"
    ran = asel("report", fill(tmp_path / "cache"), "-o", page)
    assert ran.code == 0
    assert ran.out.startswith(f"{page}: 2 keys, ")
    text = page.read_text()
    assert not re.search(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="(?!data:)', text)
    assert "default-src 'none'" in text
    assert "Copyright 2010-2026 Mike Bostock" in text
    assert "Copyright 2020-2025 Observable, Inc." in text


def test_every_candidate_is_in_the_page(tmp_path):
    """Measured candidates with samples, failed ones with errors, untried ones by reason."""
    tuned = report(512)
    untried = tuple(Skipped({"rows": rows}, "no time was left") for rows in range(5000, 5020))
    page = tmp_path / "report.html"
    asel("report", fill(tmp_path / "cache", replace(tuned, outcomes=(*tuned.outcomes, *untried))), "-o", page)
    (key,) = data_of(page)["keys"]
    assert [one["config"] for one in key["measured"]] == ["rows=64", "rows=32", "rows=8"]
    assert key["measured"][0] | {"samples_s": []} == {
        "config": "rows=64",
        "label": "rows=64",
        "winner": True,
        "heuristic": False,
        "ranked_s": 1e-4,
        "samples_s": [],
        "sample_count": 4,
        "compile_s": 0.1,
        "notes": ["winner"],
    }
    assert key["measured"][2]["notes"] == ["out after round 1"]
    assert (key["speedup"], key["noise"], key["heuristic"]) == (2.0, 0.02, "rows=32")
    assert [(one["config"], one["error"]) for one in key["failed"]] == [("rows=96", "TypeError")]
    assert [(one["count"], one["reason"]) for one in key["skipped"]] == [
        (1, "the tune's budget of 60 s was spent"),
        (20, "no time was left"),
    ]


def test_nothing_in_a_record_becomes_markup_or_shows_a_secret(tmp_path):
    """A kernel's error may hold anything."""
    message = "</script><script>alert(1)</script> from redis://me:hunter2@cache"
    tuned = report(512)
    failed = Failed({"rows": 1}, "compile", "ValueError", message)
    page = tmp_path / "report.html"
    asel("report", fill(tmp_path / "cache", replace(tuned, outcomes=(*tuned.outcomes, failed))), "-o", page)
    assert "alert(1)</script>" not in page.read_text()
    assert "hunter2" not in page.read_text()
    assert data_of(page)["keys"][0]["failed"][1]["message"].startswith("</script><script>alert(1)")


def test_configs_shortened_to_the_same_text_keep_their_own_rows(tmp_path):
    """Rows of a plot are identified by their labels."""
    long = "x" * 300
    outcomes = tuple(Measured({"tile": long + str(n)}, 1e-3, (1e-3,), 0.1, ranked_s=1e-3) for n in range(3))
    tuned = replace(report(512), outcomes=outcomes, winner={"tile": long + "0"}, incumbent=None)
    page = tmp_path / "report.html"
    asel("report", fill(tmp_path / "cache", tuned), "-o", page)
    assert len({one["label"] for one in data_of(page)["keys"][0]["measured"]}) == 3


def test_a_plot_shows_the_spread_of_many_samples():
    """The fastest and the slowest are included."""
    kept = spread_of([float(number) for number in range(10_000)], MAX_SAMPLES)
    assert (len(kept), kept[0], kept[-1]) == (MAX_SAMPLES, 0.0, 9999.0)
    assert spread_of([3.0, 1.0], MAX_SAMPLES) == [1.0, 3.0]


def test_records_that_cannot_be_read_are_named(tmp_path):
    """In the page and by the command; the page has all other records."""
    store = fill(tmp_path / "cache.json")
    page, document = tmp_path / "report.html", tmp_path / "cache.json"
    document.write_text(document.read_text().replace('"rows":64', '"rows":65', 1))
    ran = asel("report", store, "-o", page, "--json")
    assert (ran.code, ran.json["keys"], ran.json["unreadable"]) == (1, 1, 1)
    assert "do not match its digest" in ran.err
    (bad,) = data_of(page)["unreadable"]
    assert "do not match its digest" in bad["reason"]


def test_plots_are_saved_as_pictures(tmp_path):
    """An overview, and a picture for each key."""
    ran = asel("report", fill(tmp_path / "cache"), "-o", tmp_path / "report.html", "--png", tmp_path / "plots")
    assert ran.code == 0
    pictures = sorted((tmp_path / "plots").iterdir())
    assert [one.name for one in pictures] == [
        "00-matmul_v1-00000200.png",
        "01-matmul_v1-00000400.png",
        "overview.png",
    ]
    assert all(one.read_bytes().startswith(b"\x89PNG") for one in pictures)


def test_text_in_a_picture_is_not_a_formula(tmp_path):
    """A dollar sign in a call or a config is not parsed as mathematics, which could fail."""
    odd = r"$\frac{$"
    tuned = report(512)
    outcomes = tuple(Measured({"path": odd + str(n)}, 1e-3, (1e-3,), 0.1, ranked_s=1e-3) for n in range(2))
    key = CacheKey(*tuned.key, f"path='{odd}'")
    tuned = replace(tuned, key=key, outcomes=outcomes, winner={"path": odd + "0"}, incumbent=None)
    ran = asel("report", fill(tmp_path / "c", tuned), "-o", tmp_path / "r.html", "--png", tmp_path / "plots")
    assert (ran.code, ran.err) == (0, "")


def test_missing_records_and_libraries_are_errors_with_the_fix(tmp_path, monkeypatch):
    """No records, no such cache, no matplotlib: the exit code is 2."""
    store = fill(tmp_path / "cache")
    none = asel("report", store, "--op", "conv")
    assert (none.code, none.err) == (2, "asel: no records to report on: `asel cache ls` lists the existing records\n")
    assert "check the path" in asel("report", tmp_path / "no" / "cache").err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    without = asel("report", store, "-o", tmp_path / "report.html", "--png", tmp_path / "plots")
    assert (without.code, without.err) == (2, "asel: --png needs matplotlib: pip install 'asel[plots]'\n")
