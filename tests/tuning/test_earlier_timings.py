"""Earlier timings: which candidates are measured again, and which keep their recorded timings."""

from __future__ import annotations

import pytest
from support.kernels import BEST, Bench, Blocks, Toy, call
from support.measures import Computing, Wider
from support.tunes import tune_among

from asel import Failed, Measured, Skipped, Tuner, TuneReport
from asel.kernels.devices import environment
from asel.kernels.keys import CacheKey
from asel.testing import ScriptedMeasure
from asel.tuning.report import recorded_timings


@pytest.mark.anyio
async def test_adding_a_candidate_measures_it_and_the_incumbent_and_the_earlier_winner():
    """Earlier losers are not measured again: they keep their recorded timings, and cannot win."""
    bench = Bench(costs=lambda cfg: {1: 0.3, 2: 0.2, 3: 0.1, 4: 0.15}[cfg.m] * bench.slowness)
    bench.slowness = 1.0
    async with bench.chain as chain:
        await chain.choose(call(), Toy())
        bench.slowness = 4.0  # a busier machine: earlier timings look fast
        bench.measure.compiled.clear()
        report = (await chain.select(call(), Wider())).report
    assert [cfg.m for cfg in bench.measure.compiled] == [1, 3, 4]
    assert report.winner == BEST
    assert [(o.median_s, o.reused) for o in report.outcomes] == [
        (pytest.approx(1.2), False),
        (pytest.approx(0.2), True),
        (pytest.approx(0.4), False),
        (pytest.approx(0.6), False),
    ]


def earlier(winner: str, **seconds: float) -> TuneReport:
    """Return the report of a tune that measured these candidates."""
    outcomes = tuple(Measured(cfg, taken, (taken,) * 3, 1.0) for cfg, taken in seconds.items())
    return TuneReport(CacheKey("", "", ""), winner, outcomes, 1.0, environment(None))


@pytest.mark.anyio
@pytest.mark.parametrize("why", ["no candidate", "negative priority", "failed in a call"])
async def test_without_the_earlier_winner_all_are_measured_anew(why):
    """A candidate that lost to it may be the best of the rest."""
    measure = ScriptedMeasure({"a": 0.3, "b": 0.1, "new": 0.2})
    candidates = ["a", "b", "new", *([] if why == "no candidate" else ["won"])]
    groups = [(0, 0)] * 3 + [(-1, 0)] if why == "negative priority" else None
    settled = {3: Skipped("won", "it failed in a call")} if why == "failed in a call" else {}
    report = earlier("won", a=0.3, b=0.1, won=0.05)
    state = tune_among(*candidates, incumbent=0, earlier=(report,), groups=groups, settled=settled)
    report = await Tuner(measure=measure).tune(state)
    assert (report.winner, measure.compiled) == ("b", ["a", "b", "new"])


@pytest.mark.anyio
async def test_without_an_incumbent_the_earlier_winner_and_the_new_candidates_are_measured():
    measure = ScriptedMeasure({"b": 0.1, "new": 0.2})
    report = await Tuner(measure=measure).tune(tune_among("a", "b", "new", earlier=(earlier("b", a=0.3, b=0.1),)))
    assert (report.winner, measure.compiled) == ("b", ["b", "new"])


@pytest.mark.anyio
@pytest.mark.parametrize("stage", ["compile", "run"])
async def test_if_all_that_is_measured_anew_fails_the_others_are_measured_too(stage):
    """A recorded timing is not enough to win: the winner has run in this tune."""
    errors = {f"{stage}_errors": lambda cfg: ValueError("no") if cfg != "b" else None}
    measure = ScriptedMeasure(0.1, **errors)
    state = tune_among("a", "b", "c", "new", incumbent=0, earlier=(earlier("c", a=0.3, b=0.2, c=0.1),))
    report = await Tuner(measure=measure).tune(state)
    assert measure.compiled == ["a", "c", "new", "b"]
    assert [type(o) for o in report.outcomes] == [Failed, Measured, Failed, Failed]
    assert (report.winner, report.outcomes[1].reused) == ("b", False)


@pytest.mark.parametrize(
    ("objective", "software", "found"),
    [
        ("forward", {}, {0: "c", 2: "a"}),
        ("forward+backward", {}, {}),
        ("forward", {"jax": "2"}, {}),
    ],
)
def test_timings_of_another_objective_are_not_reused(objective, software, found):
    """Nor are those of other software; otherwise, those of the candidates that are still listed and did not win."""
    outcomes = (
        Measured("a", 0.1, (0.1,), 0.0),
        Failed("b", "compile", "ValueError", "no"),
        Measured("c", 0.2, (0.2,), 0.0),
        Measured("won", 0.05, (0.05,), 0.0),
        Measured("by hand", 0.1, (), 0.0),
    )
    report = TuneReport(CacheKey("", "", ""), "won", outcomes, 1.0, environment(None) | software)
    state = tune_among("c", "b", "a", "new", "won", "by hand", earlier=(report,), objective=objective)
    assert {index: timing.cfg for index, timing in recorded_timings(state).items()} == found


@pytest.mark.anyio
async def test_with_a_check_nothing_is_reused(monkeypatch):
    """The outputs of earlier candidates are not recorded, so all are compiled and checked."""
    measure = Computing({"a": 0.003, "wrong": 0.001, "c": 0.002})
    report = earlier("a", a=0.003, wrong=0.004)
    state = tune_among("a", "wrong", "c", incumbent=0, earlier=(report,))
    monkeypatch.setattr("asel.tuning.sampling.run_in_thread", _at_once)
    report = await Tuner(measure=measure, check=True).tune(state)
    assert (report.winner, measure.compiled) == ("c", ["a", "wrong", "c"])
    assert report.outcomes[1].error_type == "OutputMismatch"


async def _at_once(what, work, **options):
    return work()


@pytest.mark.anyio
async def test_a_retune_measures_everything_again():
    """An explicit `retune` reuses nothing."""
    bench = Bench()
    async with bench.chain as chain:
        await chain.choose(call(), Toy())
        bench.measure.compiled.clear()
        await chain.retune(call(), Toy())
    assert len(bench.measure.compiled) == 3


@pytest.mark.anyio
async def test_timings_of_another_environment_are_not_reused(monkeypatch):
    """Another jaxlib may have changed which candidate is fast."""
    bench = Bench(costs=0.1)
    async with bench.chain as chain:
        await chain.choose(call(), Toy())
        bench.measure.compiled.clear()
        monkeypatch.setattr("asel.tuning.report.environment", lambda device: {"jax": "another"})
        await chain.choose(call(), Wider())
    assert len(bench.measure.compiled) == 4


@pytest.mark.anyio
async def test_a_candidate_with_a_negative_priority_does_not_win_by_an_old_timing():
    """A negative priority excludes a candidate, even if it was measured before."""

    class Banned(Wider):
        def candidate_priority(self, cfg, inv):
            return -1 if cfg.m == 3 else 0

    bench = Bench(costs=lambda cfg: {1: 0.3, 2: 0.2, 3: 0.01, 4: 0.15}[cfg.m])
    async with bench.chain as chain:
        assert await chain.choose(call(), Toy()) == Blocks(3)
        assert await chain.choose(call(), Banned()) == Blocks(4)
