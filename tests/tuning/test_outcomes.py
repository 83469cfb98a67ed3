"""Reports survive serialisation."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from math import inf

import numpy as np
import pytest
from support.kernels import BEST, GUESS, Bench, Blocks, Toy, call

from asel import Failed, Measured, Skipped, Tuner, TuneReport, TuningError
from asel.kernels.config_text import MAX_CONFIG_CHARS, config_texts
from asel.kernels.keys import CacheKey
from asel.testing import ReplayMeasure
from asel.tuning.outcomes import in_words, text_of
from asel.tuning.report_text import MAX_LINE_CHARS

REPORT = TuneReport(
    key=CacheKey("dev", "op@v1", "key"),
    winner=Blocks(2),
    outcomes=(
        Measured(Blocks(2), 0.5, (0.4, 0.5, 0.6), 1.0),
        Failed(Blocks(3), "compile", "ValueError", "bad block", ValueError("bad block")),
        Skipped(Blocks(4), "out of budget"),
    ),
    seconds=3.0,
    environment={"jax": "1"},
    tune_id="t1",
    checksum="c1",
    incumbent=Blocks(2),
)


def test_a_report_round_trips_through_json():
    """A report that was written and read is equal, except for live exception objects."""
    text = REPORT.to_json()
    again = TuneReport.from_json(text, load=lambda value: Blocks(**value))
    assert again == REPORT
    assert again.outcomes[1].error is None
    assert json.loads(text)["outcomes"][0]["kind"] == "measured"


def test_a_caller_may_dump_and_load_configs_itself():
    """`dump` and `load` are for configs that are neither dataclasses nor JSON."""
    text = REPORT.to_json(dump=lambda cfg: cfg.m)
    assert json.loads(text)["winner"] == 2
    assert TuneReport.from_json(text, load=Blocks) == REPORT


def test_best_is_the_winners_measurement():
    """A report has its winner and the winner's measurement."""
    assert REPORT.best is REPORT.outcomes[0]


@pytest.mark.anyio
async def test_a_real_tunes_report_round_trips():
    """Not only hand-made ones."""
    async with Bench().chain as chain:
        report = (await chain.select(call(), Toy())).report
    assert report.winner == BEST
    assert TuneReport.from_json(report.to_json(), load=lambda value: Blocks(**value)) == report


class Plain:
    """A config that is equal to nothing but itself."""

    def __init__(self, m):
        self.m = m

    def __repr__(self):
        return f"Plain({self.m})"


@pytest.mark.parametrize(
    ("make", "dump"),
    [(Plain, lambda cfg: cfg.m), (lambda m: {"w": np.array([m, m])}, lambda cfg: int(cfg["w"][0]))],
    ids=["no equality", "arrays"],
)
def test_configs_are_compared_by_value_and_not_by_their_own_equality(make, dump):
    """A report that was read again finds its winner and prints, with configs of any class."""
    configs = [make(m) for m in (1, 2)]
    outcomes = tuple(Measured(cfg, 0.5 - m / 10, (0.5,), 1.0) for m, cfg in enumerate(configs))
    report = replace(REPORT, winner=configs[1], incumbent=configs[0], outcomes=outcomes, margin=0.2)
    again = TuneReport.from_json(report.to_json(dump), load=make)
    assert again.best is again.outcomes[1]
    _, headline, *rows = str(again).splitlines()
    assert f"{configs[1]} wins by 20.0% over {configs[0]}" in headline
    assert [row.split()[-1] for row in rows] == ["winner", "incumbent"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ns"),
        (3e-9, "3 ns"),
        (999.6e-9, "1 us"),
        (12.34e-6, "12.3 us"),
        (999.4e-6, "999 us"),
        (999.6e-6, "1 ms"),
        (0.9996, "1 s"),
        (0.02, "20 ms"),
        (59.96, "60 s"),
        (1234.5, "1234 s"),
    ],
)
def test_a_duration_is_written_without_exponents(seconds, text):
    """The unit is the one in which the rounded number has at most three digits before the point."""
    assert in_words(seconds) == text


@pytest.mark.anyio
async def test_the_printed_margin_is_that_of_the_printed_times():
    """A reader who divides the two times gets the margin: the printed times are those that rank candidates."""
    slowed = {GUESS: (3.0, 3.0, 6.0, 6.0, 6.0), BEST: (2.0, 2.0, 2.0, 2.0, 2.0), Blocks(2): (7.0,) * 5}
    tuner = Tuner(0, 5, measure=ReplayMeasure(slowed), strategy="exhaustive")
    async with Bench(tuner=tuner).chain as chain:
        report = (await chain.select(call(), Toy())).report
    lines = str(report).splitlines()
    by_mark = {line.split()[-1]: float(line.split(" s ")[0].split()[-1]) for line in lines if "\u2588" in line}
    printed = float(lines[1].split("wins by ")[1].split("%")[0]) / 100
    assert printed == pytest.approx(1 - by_mark["winner"] / by_mark["incumbent"], abs=0.002)
    assert printed == pytest.approx(report.margin, abs=0.0006)
    assert TuneReport.from_json(report.to_json(), load=lambda value: Blocks(**value)) == report


@dataclass(frozen=True)
class Wide:
    """A config with many fields."""

    block_q: int
    block_k: int
    a_rather_long_name_of_a_field_0: int = 128
    a_rather_long_name_of_a_field_1: int = 128
    a_rather_long_name_of_a_field_2: int = 128
    a_rather_long_name_of_a_field_3: int = 128
    a_rather_long_name_of_a_field_4: int = 128


@pytest.mark.parametrize("make", [Wide, lambda q, k: asdict(Wide(q, k))], ids=["a dataclass", "a dict"])
def test_the_lines_of_a_report_show_the_fields_that_differ(make):
    """Lines are bounded, however long configs and errors are; fields that all configs share are printed once."""
    one, two, bad, same, last = (make(m, 2 * m) for m in (1, 2, 3, 4, 5))
    outcomes = (
        Measured(one, 0.5, (0.5,), 1.0),
        Measured(two, 0.4, (0.4,), 1.0),
        Failed(bad, "compile", "XlaRuntimeError", "RESOURCE_EXHAUSTED:\n  out of shared memory " * 50),
        Measured(same, 0.5, (0.5,), 0.0, alias_of=one),
        Skipped(last, f"its program is that of {bad!r}, which was not measured"),
    )
    key = CacheKey("dev", "op@v1", "key", "x=f32[8,128]")
    text = str(replace(REPORT, key=key, winner=two, incumbent=one, outcomes=outcomes, margin=0.2))
    lines = text.splitlines()
    assert max(map(len, lines)) <= MAX_LINE_CHARS
    assert len(lines) == 8, "the call, the headline, a line for each candidate, the shared fields"
    assert lines[0] == "op@v1(x=f32[8,128])"
    assert "wins by 20.0% over" in lines[1]
    shown = [line for line in lines[1:-1] if "field_4" in line.split("skipped")[0]]
    assert shown == []
    assert all("block_q" in line for line in lines[1:-1])
    assert "a_rather_long_name_of_a_field_3=128" in lines[-1]


def test_a_long_value_hides_no_field_after_it():
    """A long value is shortened only in print; comparisons use all of it."""
    same, longer = "x" * 100, "x" * 100 + "y"
    texts, shared = config_texts([{"name": same, "rows": 1, "cols": 1}, {"name": longer, "rows": 2, "cols": 1}])
    assert [text.partition("'rows': ")[2][:2] for text in texts] == ["1,", "2,"]
    assert all("'name': 'xxx" in text for text in texts)
    assert shared == "cols=1"


@pytest.mark.anyio
async def test_the_lines_of_an_explanation_are_bounded():
    """A config may be of any length."""
    wide = Blocks(1, "x" * 1000)
    bench = Bench(allow={"allow_autotune": False})
    toy = Toy()
    toy.heuristic_cfg = lambda inv: wide
    explained = await bench.chain.explain(call(), toy)
    assert explained.tiers[-1].cfg == wide
    assert str(explained).splitlines()[-1].startswith("> heuristics the kernel's guess: Blocks(m=1, n='xxx")
    assert len(str(explained).splitlines()[-1]) < MAX_CONFIG_CHARS + 40


def test_the_errors_in_a_group_are_shown():
    """The message of an exception group itself has only their number."""
    inner = ExceptionGroup("deeper", [KeyError("tile")])
    group = ExceptionGroup("two of the tasks failed", [ValueError("no room"), inner])
    assert text_of(group) == (
        "two of the tasks failed (2 sub-exceptions): ValueError: no room; "
        "ExceptionGroup: deeper (1 sub-exception): KeyError: 'tile'"
    )
    many = text_of(ExceptionGroup("many", [ValueError(str(n)) for n in range(50)]))
    assert many == "many (50 sub-exceptions): ValueError: 0; ValueError: 1; ValueError: 2; and 47 more"


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("never")


def test_a_group_with_an_error_that_cannot_be_printed_is_shown():
    """One bad `__str__` does not hide its neighbours."""
    shown = text_of(ExceptionGroup("two", [Unprintable(), ValueError("no room at https://me:hunter2@host/")]))
    assert "Unprintable" in shown
    assert "ValueError: no room at https://***@host/" in shown


@pytest.mark.anyio
async def test_a_tune_in_which_all_fail_lists_their_errors():
    """All errors are listed, including those inside a group: the first may explain the least."""
    errors = {
        Blocks(1): ExceptionGroup("in tasks", [ValueError("inner")]),
        Blocks(2): OSError("no device"),
        Blocks(3): OSError("no device"),
    }
    async with Bench(script={"run_errors": errors}, allow={"allow_heuristics": False}).chain as chain:
        with pytest.raises(TuningError) as caught:
            await chain.choose(call(), Toy())
    text = str(caught.value)
    assert "ValueError: inner" in text
    assert text.count("OSError in the measure stage: no device") == 1
    assert "2 of them: OSError" in text


@pytest.mark.anyio
async def test_a_tune_without_limits_can_be_written():
    """JSON has no infinity, so an infinite limit is None."""
    async with Bench(allow={"tune_budget_s": inf, "candidate_timeout_s": inf}).chain as chain:
        report = (await chain.select(call(), Toy())).report
    assert (report.tune_budget_s, report.candidate_timeout_s) == (None, None)
    json.loads(report.to_json(), parse_constant=pytest.fail)
