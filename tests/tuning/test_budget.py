"""A tune's budget: what is charged, what is free, and what happens when it is spent."""

from __future__ import annotations

import math
from contextlib import asynccontextmanager
from functools import partial

import anyio
import pytest
from support.kernels import GUESS, H100, Bench, Blocks, Toy, call
from support.measures import Checked, Lowering
from support.tunes import SamplerOf, kinds, tune_among, tuner_of

from asel import (
    Failed,
    Measured,
    Skipped,
    Tuner,
)
from asel.testing import RecordingSink, ScriptedMeasure


@pytest.mark.anyio
async def test_when_the_budget_is_spent_the_rest_are_skipped_and_the_best_so_far_wins():
    """When `tune_budget_s` is spent, untried candidates are Skipped with the reason."""
    sink = RecordingSink()
    tuner, measure = tuner_of({"a": 0.2, "b": 0.1, "slow": 10.0, "c": 0.01, "d": 0.01})
    state = tune_among("a", "b", "slow", "c", "d", tune_budget_s=4.0, emit=sink.emit)
    report = await tuner.tune(state)
    assert report.winner == "b"
    assert kinds(report.outcomes)[:2] == [Measured, Measured]
    assert report.outcomes[3:] == (
        Skipped("c", "the tune's budget of 4 s was spent"),
        Skipped("d", "the tune's budget of 4 s was spent"),
    )
    assert [(event.index, event.cfg) for event in sink.named("candidate_skipped")][-2:] == [(3, "c"), (4, "d")]
    assert set(measure.sampled) <= {"a", "b", "slow"}


@pytest.mark.anyio
@pytest.mark.parametrize("stage", ["compile", "measure"])
async def test_a_tune_is_no_longer_than_its_budget(stage):
    """`tune_budget_s` bounds a tune, compiling included, to within the current step."""
    slow = {"a": 0.0, "slow": 20.0, "c": 0.0}
    tuner, _ = tuner_of(slow) if stage == "measure" else tuner_of(0.0, compile_s=slow)
    start = anyio.current_time()
    report = await tuner.tune(tune_among("a", "slow", "c", tune_budget_s=4.0, candidate_timeout_s=30.0))
    assert anyio.current_time() - start == pytest.approx(20.0)
    assert report.winner == "a"
    why = "left no time to compile it" if stage == "compile" else "was spent"
    assert report.outcomes[2] == Skipped("c", f"the tune's budget of 4 s {why}")


@pytest.mark.anyio
@pytest.mark.parametrize(("cores", "compiled"), [(2, ["a"]), (8, ["a", "b", "c"])])
async def test_once_the_budget_is_spent_nothing_more_is_compiled(cores, compiled, monkeypatch):
    """Compilations that have begun finish; candidates in the queue are skipped and take no time."""
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    tuner, measure = tuner_of(0.0, compile_s=3.0)
    report = await tuner.tune(tune_among("a", "b", "c", "d", "e", tune_budget_s=2.0))
    assert sorted(measure.compiled) == compiled
    assert report.seconds == pytest.approx(3.0)
    late = "the tune's budget of 2 s left no time to compile it"
    assert report.outcomes[3:] == tuple(Skipped(cfg, late) for cfg in "de")


@pytest.mark.anyio
async def test_compiling_leaves_time_for_measuring():
    """It may take three quarters of the budget: a tune that only compiles is useless."""
    costs = {cfg: 0.3 - 0.02 * number for number, cfg in enumerate("abcdefgh")}
    tuner, measure = tuner_of(costs, compile_s=10.0)
    report = await tuner.tune(tune_among(*costs, incumbent=0, tune_budget_s=60.0))
    assert measure.compiled == list("abcde")
    assert kinds(report.outcomes) == [Measured] * 5 + [Skipped] * 3
    assert report.winner == "e"
    assert report.seconds < 60.0


@pytest.mark.anyio
async def test_compiling_a_group_may_take_three_quarters_of_the_remaining_budget():
    """After a group that failed, the next one has budget left to measure what it compiles."""
    tuner, measure = tuner_of(0.1, compile_s=10.0, run_errors={cfg: ValueError("no") for cfg in "abcd"})
    groups = tuple((int(cfg in "abcd"), 0) for cfg in "abcdefgh")
    report = await tuner.tune(tune_among(*"abcdefgh", groups=groups, tune_budget_s=48.0))
    assert measure.compiled == list("abcde")  # 36 s of 48 are over after the fourth, and 9 of 12 after the fifth
    assert kinds(report.outcomes) == [Failed] * 4 + [Measured] + [Skipped] * 3


@pytest.mark.anyio
@pytest.mark.usefixtures("_no_threads")
@pytest.mark.parametrize(("budget_s", "checked"), [(1.5, ["b", "a"]), (0.5, ["b"])])
async def test_once_the_budget_is_spent_nothing_more_is_checked(budget_s, checked):
    """The incumbent is checked in any case; unchecked candidates are skipped, and cannot win."""
    measure = Checked(0.1)
    state = tune_among("a", "b", "c", "d", incumbent=1, tune_budget_s=budget_s)
    report = await Tuner(0, 1, measure=measure, strategy="exhaustive", check=True).tune(state)
    assert measure.checked == checked
    assert report.winner == "b"
    assert report.seconds == pytest.approx(len(checked) + 0.1)
    unseen = f"the tune's budget of {budget_s:g} s was spent before it was checked"
    assert report.outcomes[2:] == (Skipped("c", unseen), Skipped("d", unseen))


@pytest.mark.anyio
@pytest.mark.parametrize("strategy", ["race", "exhaustive"])
async def test_with_a_spent_budget_candidates_are_tried_until_one_runs(strategy):
    """Until there is a measurement, candidates are tried one by one, whatever the budget."""
    measure = ScriptedMeasure(0.01, compile_s=1.0, run_errors={"a": ValueError("no")})
    state = tune_among("a", "b", "c", incumbent=0, tune_budget_s=2.5)
    report = await Tuner(measure=measure, strategy=strategy).tune(state)
    assert report.winner in ("b", "c")


@pytest.mark.anyio
@pytest.mark.parametrize("strategy", ["race", "exhaustive"])
@pytest.mark.parametrize("warmup", [0, 1, 5])
async def test_a_spent_budget_gives_the_first_candidate_one_run(strategy, warmup):
    """With any `warmup`: if no candidate has a sample any run counts, and one is enough for an answer."""
    measure = ScriptedMeasure(20.0, compile_s=5.0)
    start = anyio.current_time()
    state = tune_among("a", "b", tune_budget_s=4.0, candidate_timeout_s=30.0)
    report = await Tuner(warmup, 3, measure=measure, strategy=strategy).tune(state)
    assert anyio.current_time() - start == pytest.approx(25.0)
    assert (measure.compiled, measure.sampled) == (["a"], ["a"])
    assert (report.winner, report.best.samples_s) == ("a", (20.0,))
    assert report.outcomes[1] == Skipped("b", "the tune's budget of 4 s left no time to compile it")


@pytest.mark.anyio
async def test_making_example_inputs_counts_towards_the_budget(monkeypatch):
    """They are made for this tune alone. One candidate is still tried, however long they took."""

    async def in_no_thread(what, work, **facts):  # because a virtual clock jumps while a thread works
        await anyio.sleep(5.0)
        return work()

    monkeypatch.setattr("asel.tuning.tuner.run_in_thread", in_no_thread)
    tuner, measure = tuner_of(0.5, compile_s=1.0)
    state = tune_among("a", "b", "c", tune_budget_s=4.0, example=lambda: ((1,), {"x": 2}))
    report = await tuner.tune(state)
    assert (state.args, state.kwargs) == ((1,), {"x": 2})
    assert state.budget.spent_s == pytest.approx(5.0 + 1.0 + 0.5)
    assert measure.compiled == ["a"]
    assert kinds(report.outcomes) == [Measured, Skipped, Skipped]


@pytest.mark.anyio
async def test_compiling_counts_towards_the_budget():
    """What a tune costs is compiling as much as running."""
    tuner, _ = tuner_of(0.1, compile_s=3.0)
    report = await tuner.tune(tune_among("a", "b", "c", "d", tune_budget_s=6.0))
    assert kinds(report.outcomes)[0] is Measured
    assert kinds(report.outcomes)[2:] == [Skipped, Skipped]


@pytest.mark.anyio
@pytest.mark.parametrize("busy_with", ["compile", "measure"])
async def test_waiting_for_a_turn_is_free(busy_with, monkeypatch):
    """Waiting for the device or for a compile slot does not use up a tune's budget."""
    monkeypatch.setattr("os.cpu_count", lambda: 2)  # one compile slot
    hog, _ = tuner_of(100.0) if busy_with == "measure" else tuner_of(0.0, compile_s=100.0)
    modest, _ = tuner_of(0.1, compile_s=0.1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(hog.tune, tune_among("x", device=H100, tune_budget_s=1000.0, candidate_timeout_s=1000.0))
        await anyio.sleep(1)  # virtual: by now the hog is at its step
        report = await modest.tune(tune_among("a", "b", "c", device=H100, tune_budget_s=1.0))
    assert report.seconds > 99, "it did have to wait"
    assert kinds(report.outcomes) == [Measured, Measured, Measured]


@pytest.mark.anyio
async def test_overlapping_steps_are_charged_once(monkeypatch):
    """A budget is wall time: three candidates that compile at once for two seconds cost two seconds."""
    monkeypatch.setattr("os.cpu_count", lambda: 8)  # three compile slots
    tuner, _ = tuner_of(0.5, compile_s={"a": 2.0, "b": 2.0, "c": 1.0})
    state = tune_among("a", "b", "c", tune_budget_s=3.7)
    report = await tuner.tune(state)
    assert kinds(report.outcomes) == [Measured] * 3
    assert state.budget.spent_s == pytest.approx(2.0 + 3 * 0.5)
    assert report.seconds == pytest.approx(3.5)


class Shared(ScriptedMeasure):
    """A measure whose candidates wait for a shared resource before each step."""

    @asynccontextmanager
    async def turn(self, charge):
        await anyio.sleep(100.0)
        yield self

    async def compile(self, trial):
        sample = await super().compile(trial)
        return SamplerOf(sample, turn=self.turn)


@pytest.mark.anyio
async def test_a_measures_turn_is_free():
    """Waiting for a measure's turn counts neither for the candidate's timeout nor for the tune's budget."""
    state = tune_among("a", "b", candidate_timeout_s=1.0, tune_budget_s=1.0)
    report = await Tuner(0, 1, measure=Shared(0.1, compile_s=0.1), strategy="exhaustive").tune(state)
    assert kinds(report.outcomes) == [Measured, Measured]
    assert report.seconds == pytest.approx(400.4)
    assert state.budget.spent_s == pytest.approx(0.4)


class Readied(ScriptedMeasure):
    """A measure whose candidates must be made ready before each sample."""

    async def compile(self, trial):
        sample = await super().compile(trial)
        steps = [partial(anyio.sleep, 0.7), partial(anyio.sleep, 0.7 if trial.cfg != "stuck" else math.inf)]
        return SamplerOf(sample, ready=lambda: steps)


@pytest.mark.anyio
async def test_each_step_that_makes_a_candidate_ready_has_its_own_timeout():
    """Each step is bounded by the candidate's timeout, and charged to the tune."""
    state = tune_among("a", "stuck", candidate_timeout_s=1.0)
    report = await Tuner(0, 1, measure=Readied(0.7), strategy="exhaustive").tune(state)
    assert kinds(report.outcomes) == [Measured, Failed]
    assert report.outcomes[1].message == "took longer than 1 s"
    assert state.budget.spent_s == pytest.approx(3 * 0.7 + 0.7 + 1.0)


@pytest.mark.anyio
async def test_one_candidate_is_tried_though_lowering_it_took_the_whole_budget():
    """Otherwise there would be no answer."""
    report = await Tuner(0, 1, measure=Lowering()).tune(tune_among("a", "b", tune_budget_s=0.5))
    assert kinds(report.outcomes) == [Measured, Skipped]


@pytest.mark.anyio
async def test_a_tune_resumed_without_budget_still_tries_one_candidate():
    """Otherwise the caller that resumes it would have no answer."""
    state = tune_among("a", "b", tune_budget_s=1.5)
    with anyio.move_on_after(2.5):
        await Tuner(0, 1, measure=Lowering(compile_s=100.0)).tune(state)
    report = await Tuner(0, 1, measure=Lowering()).tune(state)
    assert kinds(report.outcomes) == [Measured, Skipped]


@pytest.mark.anyio
async def test_a_budget_that_ends_in_a_warm_up_lets_no_lesser_timing_mode_win():
    """The candidates in the best mode win by their warm-ups, and none is run in the next mode."""

    class Ways:
        async def compile(self, trial):
            how, seconds = trial.cfg

            async def sample():
                await anyio.sleep(seconds)
                return seconds

            return SamplerOf(sample, how=how)

    state = tune_among(("forward", 2.0), ("eager", 5.0), incumbent=0, tune_budget_s=1.0)
    report = await Tuner(measure=Ways()).tune(state)
    assert report.winner == ("forward", 2.0)
    assert kinds(report.outcomes) == [Measured, Skipped]
    assert report.seconds == pytest.approx(2.0)


@pytest.mark.anyio
async def test_a_spent_budget_ends_the_warm_ups_too():
    """Once the budget is spent, only one candidate goes on, until there is a measurement."""
    bench = Bench(
        costs=0.1, tuner=Tuner(measure=ScriptedMeasure(0.1)), allow={"tune_budget_s": 0.2}, script={"compile_s": 0.0}
    )

    class Many(Toy):
        candidates = tuple(map(Blocks, range(1, 25)))

    async with bench.chain as chain:
        start = anyio.current_time()
        report = (await chain.select(call(), Many())).report
        assert anyio.current_time() - start <= 0.45
    assert report.winner == GUESS
    assert sum(isinstance(o, Skipped) for o in report.outcomes) >= 20
