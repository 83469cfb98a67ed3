"""Reports survive serialisation."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf

import numpy as np
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
def test_configs_are_known_by_what_they_are_and_not_by_their_equality(make, dump):
    """A report that was read again knows its winner, and prints, whatever class its configs are of."""
    configs = [make(m) for m in (1, 2)]
    outcomes = tuple(Measured(cfg, 0.5 - m / 10, (0.5,), 1.0) for m, cfg in enumerate(configs))
    report = replace(REPORT, winner=configs[1], incumbent=configs[0], outcomes=outcomes, margin=0.2)
    again = TuneReport.from_json(report.to_json(dump), load=make)
    assert again.best is again.outcomes[1]
    first, *rows = str(again).splitlines()
    assert f"{configs[1]} wins by 20.0% over {configs[0]}" in first
    assert [row.split()[-1] for row in rows] == ["winner", "incumbent"]


@pytest.mark.anyio
async def test_a_tune_without_limits_can_be_written():
    """JSON knows no infinity; a limit that is none is None."""
    async with Bench(allow={"tune_budget_s": inf, "candidate_timeout_s": inf}).chain as chain:
        report = (await chain.select(call(), Toy())).report
    assert (report.tune_budget_s, report.candidate_timeout_s) == (None, None)
    json.loads(report.to_json(), parse_constant=pytest.fail)
