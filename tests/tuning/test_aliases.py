"""Equal programs are compiled and timed once."""

from __future__ import annotations

import anyio
import jax.numpy as jnp
import pytest
from support.kernels import Bench, Blocks, Toy, call
from support.measures import Aliasing

from asel import Failed, Invocation, Measured, Skipped, Tuner, TuningError, kernel
from asel.testing import ScriptedMeasure
from asel.tuning.measure import Lowered


@pytest.mark.anyio
async def test_equal_programs_are_compiled_and_timed_once():
    """The alias gets the samples of the program it shares, and the report names it."""
    measure = Aliasing(lambda cfg: 0.1 * cfg.m)
    bench = Bench(tuner=Tuner(1, 1, measure=measure))
    async with bench.chain as chain:
        report = (await chain.select(call(), Toy())).report
    assert [cfg.m for cfg in measure.compiled] == [1, 2]
    first, _, alias = report.outcomes
    assert alias == Measured(
        Blocks(3), first.median_s, first.samples_s, 0.0, alias_of=Blocks(1), ranked_s=first.ranked_s
    )
    assert "same program as Blocks(m=1, ...)" in str(report)


@pytest.mark.anyio
async def test_an_alias_has_a_start_and_an_end_event():
    """A candidate that was begun but not compiled has a closing event, which names the candidate with that program."""
    bench = Bench(tuner=Tuner(1, 1, measure=Aliasing(0.1, compile_s=1.0)))
    async with bench.chain as chain:
        await chain.choose(call(), Toy())
    told = [event for event in bench.sink.events if event.name.startswith("candidate_") and event.index == 2]
    assert [event.name for event in told] == ["candidate_start", "candidate_skipped"]
    assert told[1].reason == "its program is that of Blocks(m=1, n=1)"
    assert told[0].start == told[1].start == pytest.approx(bench.sink.named("autotune_start")[0].start + 2.0)


@pytest.mark.anyio
async def test_an_alias_of_an_eliminated_candidate_is_eliminated():
    """It left the race with the program it shares, so it ranks no higher as a replacement of the winner."""

    class Paired(ScriptedMeasure):
        async def lower(self, trial):
            return Lowered(str(trial.cfg.m % 4), lambda: self.compile(trial))

    costs = {1: 0.0010, 2: 0.0011, 3: 0.1, 4: 0.2}
    bench = Bench(tuner=Tuner(measure=Paired(lambda cfg: costs[cfg.m])))

    class Many(Toy):
        candidates = tuple(map(Blocks, (1, 2, 3, 4, 8, 7)))

    async with bench.chain as chain:
        report = (await chain.select(call(), Many())).report
    assert [o.alias_of for o in report.outcomes] == [None] * 4 + [Blocks(4), Blocks(3)]
    assert [o.eliminated for o in report.outcomes] == [None, 2, 2, 2, 2, 2]
    assert [cfg.m for cfg in report.runners_up([Blocks(1)])] == [2, 3, 7, 4, 8]


def test_programs_of_one_text_are_one_program(real_backend):
    """With JAX: two configs that lower to the same module are recognised before they are compiled."""

    @kernel(op_id="alias", configs=["a", "b", "c"], heuristic="a")
    def add(x, *, cfg):
        return x + (2.0 if cfg == "c" else 1.0)

    async def main():
        async with Bench(tuner=Tuner(1, 1, strategy="exhaustive")).chain as chain:
            return (await chain.select(Invocation("alias", (jnp.ones(8),), {}), add)).report

    report = anyio.run(main, backend=real_backend)
    assert [o.alias_of for o in report.outcomes] == [None, "a", None]


class TwoGroups(Toy):
    """Put odd configs first, which `Aliasing` gives the incumbent's program, or else even ones."""

    candidates = tuple(map(Blocks, range(1, 6)))

    def candidate_priority(self, cfg, inv):
        return (cfg.m % 2, 0)


@pytest.mark.anyio
async def test_an_alias_of_a_working_candidate_is_a_success():
    """If a group's only program is the incumbent's, the group succeeds, and the group below is not tried."""
    measure = Aliasing()
    async with Bench(tuner=Tuner(1, 1, measure=measure)).chain as chain:
        report = (await chain.select(call(), TwoGroups())).report
    assert [cfg.m for cfg in measure.compiled] == [1]
    assert [type(o) for o in report.outcomes] == [Measured, Skipped, Measured, Skipped, Measured]


@pytest.mark.anyio
async def test_a_program_that_failed_in_one_group_is_not_compiled_in_the_next():
    """Equal programs are compiled once, also across groups."""

    class Mixed(TwoGroups):
        def candidate_priority(self, cfg, inv):
            return (0, 0) if cfg.m == 5 else (1, 0)

    measure = Aliasing(run_errors=lambda cfg: ValueError("no"))
    bench = Bench(tuner=Tuner(1, 1, measure=measure), allow={"allow_heuristics": False})
    async with bench.chain as chain:
        with pytest.raises(TuningError) as caught:
            await chain.select(call(), Mixed())
    assert [cfg.m for cfg in measure.compiled] == [1, 2]
    assert [type(o) for o in caught.value.outcomes] == [Failed] * 5
