"""Reports survive serialisation."""

from __future__ import annotations

import json

import pytest
from kernels import BEST, Bench, Blocks, Toy, call

from asel import Failed, Measured, Skipped, TuneReport
from asel.keys import CacheKey

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
    """What was read is equal to what was written; only the live exception objects stay behind."""
    text = REPORT.to_json()
    again = TuneReport.from_json(text, load=lambda value: Blocks(**value))
    assert again == REPORT
    assert again.outcomes[1].error is None
    assert json.loads(text)["outcomes"][0]["kind"] == "measured"


def test_configs_are_dumped_as_the_caller_likes():
    """`dump` and `load` stand in where a config is neither a dataclass nor JSON."""
    text = REPORT.to_json(dump=lambda cfg: cfg.m)
    assert json.loads(text)["winner"] == 2
    assert TuneReport.from_json(text, load=Blocks) == REPORT


def test_best_is_the_winners_measurement():
    """A report names its winner and where to find how fast it was."""
    assert REPORT.best is REPORT.outcomes[0]


@pytest.mark.anyio
async def test_a_real_tunes_report_round_trips():
    """Not only hand-made ones."""
    async with Bench().chain as chain:
        report = (await chain.select(call(), Toy())).report
    assert report.winner == BEST
    assert TuneReport.from_json(report.to_json(), load=lambda value: Blocks(**value)) == report
