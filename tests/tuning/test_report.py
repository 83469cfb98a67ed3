"""The contents and the printed form of a report, and candidates timed in different modes."""

from __future__ import annotations

import anyio
import pytest
from support.kernels import GUESS, Bench, Blocks, Toy, call
from support.measures import Aliasing, Wider
from support.tunes import SamplerOf

from asel import Failed, Measured, Tuner, TuneReport
from asel.testing import ScriptedMeasure
from asel.tuning.measure import Lowered


@pytest.mark.anyio
async def test_a_report_prints_as_a_table_with_bars():
    """Fastest first, with a bar each, and the winner's margin."""
    bench = Bench(script={"compile_errors": {Blocks(2): ValueError("no tile")}})
    async with bench.chain as chain:
        report = (await chain.select(call(), Toy())).report
    assert str(report).splitlines() == [
        "toy@v1(x=f32[8,128])",
        "  Blocks(m=3, ...) wins by 66.7% over Blocks(m=1, ...), noise 2.0%, 0.80 s of tuning",
        "  Blocks(m=3, ...)     100 ms  ████████                  winner",
        "  Blocks(m=1, ...)     300 ms  ████████████████████████  incumbent",
        "  Blocks(m=2, ...)  ValueError in compile: no tile",
        "  all with n=1",
    ]
    assert report.margin == pytest.approx(2 / 3)


@pytest.mark.anyio
async def test_eliminations_and_aliases_survive_json():
    """The whole report round-trips, with rounds, aliases and ways of timing."""
    measure = Aliasing(lambda cfg: {1: 0.1, 2: 0.5}.get(cfg.m, 0.1))
    bench = Bench(tuner=Tuner(measure=measure))
    async with bench.chain as chain:
        report = (await chain.select(call(), Wider())).report
    assert TuneReport.from_json(report.to_json(), load=lambda value: Blocks(**value)) == report
    assert report.winner == GUESS
    first = report.outcomes[0]
    assert (len(first.samples_s), first.measure_s) == (3, pytest.approx(0.4)), "with the warm-up"
    assert set(report.environment) >= {"jax", "jaxlib"}


@pytest.mark.anyio
async def test_eliminations_and_earlier_timings_are_in_the_table_and_in_json():
    """Earlier and present eliminations look the same; an earlier timing is marked as such."""
    costs = {1: 0.0010, 2: 0.0011, 3: 0.1, 4: 0.2, 5: 0.0012, 6: 0.3}
    bench = Bench(tuner=Tuner(measure=ScriptedMeasure(lambda cfg: costs[cfg.m])))

    class Widest(Wider):
        candidates = (*Wider.candidates, Blocks(5), Blocks(6))

    async with bench.chain as chain:
        await chain.choose(call(), Toy())
        report = (await chain.select(call(), Widest())).report
    assert [(o.eliminated, o.reused) for o in report.outcomes] == [
        (None, False),
        (2, True),
        (2, True),
        (2, False),
        (2, False),
        (2, False),
    ]
    assert TuneReport.from_json(report.to_json(), load=lambda value: Blocks(**value)) == report
    marks = {int(line.split("m=")[1][0]): line.split("\u2588")[-1].strip() for line in str(report).splitlines()[2:-1]}
    assert marks == {
        1: "winner, incumbent",
        2: "out in round 2, timed earlier",
        3: "out in round 2, timed earlier",
        4: "out in round 2",
        5: "out in round 2",
        6: "out in round 2",
    }


class Lowering(ScriptedMeasure):
    """A measure that lowers for two seconds, and whose samples take four seconds longer than they report."""

    async def lower(self, trial):
        await anyio.sleep(2.0)
        return Lowered(None, lambda: self.compile(trial))

    async def compile(self, trial):
        sample = await super().compile(trial)

        async def repeated() -> float:
            await anyio.sleep(4.0)
            return await sample()

        return repeated


@pytest.mark.anyio
async def test_a_report_has_the_seconds_of_compiling_and_measuring():
    """`compile_s` includes lowering; `measure_s` includes warm-ups and the overhead of samples."""
    tuner = Tuner(2, 1, measure=Lowering(1.0, compile_s=3.0), strategy="exhaustive")
    bench = Bench(tuner=tuner, allow={"candidate_timeout_s": 60.0})
    async with bench.chain as chain:
        report = (await chain.select(call(), Toy())).report
    assert [o.compile_s for o in report.outcomes] == pytest.approx([5.0] * 3)
    assert [o.measure_s for o in report.outcomes] == pytest.approx([15.0] * 3)
    assert [o.samples_s for o in report.outcomes] == [(1.0,)] * 3


@pytest.mark.anyio
async def test_the_headline_says_that_the_incumbent_was_not_measured():
    """There is no margin over a candidate that failed."""
    bench = Bench(script={"run_errors": {GUESS: ValueError("no tile")}})
    async with bench.chain as chain:
        report = (await chain.select(call(), Toy())).report
    [_, headline, *_] = str(report).splitlines()
    assert headline.startswith("  Blocks(m=3, ...) wins over Blocks(m=1, ...), which was not measured, ")
    assert report.margin == 0


class Mixed(ScriptedMeasure):
    """A measure that times the third candidate forward and all others both ways."""

    async def compile(self, trial):
        sample = await super().compile(trial)
        return SamplerOf(sample, how="forward" if trial.cfg.m == 3 else "forward+backward")


async def tune_mixed(costs, kernel_=None, **script):
    measure = Mixed(costs, **script)
    bench = Bench(tuner=Tuner(measure=measure), allow={"validate_backward": True})
    async with bench.chain as chain:
        return (await chain.select(call(), kernel_ or Toy())).report, measure


@pytest.mark.anyio
async def test_candidates_of_different_timing_modes_are_not_ranked_together():
    """A fast time without the backward pass does not beat a slower one with it."""
    report, _ = await tune_mixed({Blocks(1): 0.3, Blocks(2): 0.2, Blocks(3): 0.01})
    assert report.winner == Blocks(2)
    assert [o.how for o in report.outcomes] == ["forward+backward", "forward+backward", "forward"]
    assert "timed forward, so not ranked" in str(report)


@pytest.mark.anyio
async def test_candidates_of_different_timing_modes_do_not_race():
    """A candidate timed without the backward pass eliminates no other; it is timed once, for the report."""
    costs = {1: 0.30, 2: 0.26, 3: 0.01, 4: 0.27}
    report, measure = await tune_mixed(lambda cfg: costs[cfg.m], Wider())
    assert report.winner == Blocks(2)
    assert [len(o.samples_s) for o in report.outcomes] == [2, 3, 1, 2]
    assert [o.eliminated for o in report.outcomes] == [2, None, None, 2]
    assert measure.sampled[-2:] == [Blocks(3)] * 2, "after the race"


@pytest.mark.anyio
async def test_if_the_best_timing_mode_fails_the_next_best_races():
    """If the candidates that compiled in both modes all fail to run, those timed forward race."""
    script = {"run_errors": lambda cfg: ValueError("no") if cfg.m != 3 else None}
    report, _ = await tune_mixed(0.1, **script)
    assert report.winner == Blocks(3)
    assert [type(o) for o in report.outcomes] == [Failed, Failed, Measured]
    assert len(report.outcomes[2].samples_s) == 3
