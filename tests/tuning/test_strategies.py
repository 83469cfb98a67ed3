"""The steps that a strategy may ask for, and its view: configs, times and failures."""

from __future__ import annotations

import threading

import anyio
import pytest
from support.tunes import play, tune_of

from asel import Failed, InvalidRequestError, Measured, Skipped, Tuner
from asel.testing import RecordingSink, ScriptedMeasure
from asel.tuning.race import Race
from asel.tuning.strategies import Compile, Compute, Drop, Exhaustive, Leave, Sample, Wait


class Planned:
    """A strategy made of a function."""

    def __init__(self, plan) -> None:
        self.plan = plan


def test_exhaustive_samples_every_candidate_equally_often():
    """Each candidate gets its warm-up and its samples, one after the other, the incumbent first."""
    order = []
    play(Exhaustive(3), lambda index: order.append(index) or 1.0, 3, incumbent=1)
    assert order == [1] * 4 + [0] * 4 + [2] * 4


def test_a_strategy_is_named_or_made():
    """A name, or any object with a plan; everything else is refused by name."""
    assert Tuner(strategy=Race(iters=2)) is not None
    with pytest.raises(InvalidRequestError, match="strategy='fastest'"):
        Tuner(strategy="fastest")


@pytest.mark.anyio
async def test_samples_are_taken_while_others_are_compiled():
    """A plan continues after it has asked for candidates, and waits only for those it needs."""
    seen = []

    def plan(board):
        yield Compile((0, 1, 2))
        yield Wait()
        for _ in range(4):
            yield Sample(tuple(board.candidates))
            seen.append(sorted(board.candidates))
        while board.compiling:
            yield Wait()
        yield Sample((0, 1, 2))

    measure = ScriptedMeasure(1.0, compile_s={"a": 1.0, "b": 2.7, "c": 9.0})
    tune = tune_of(("a", "b", "c"))
    start = anyio.current_time()
    report = await Tuner(0, 1, measure=measure, strategy=Planned(plan), compile_width=1).tune(tune)
    assert seen == [[0], [0], [0, 1], [0, 1]]
    assert [len(one.samples_s) for one in report.outcomes] == [5, 2, 1]
    assert anyio.current_time() - start == 1.0 + 2.7 + 9.0 + 3.0
    assert tune.budget.spent_s == 1.0 + 2.7 + 9.0 + 3.0, "steps that overlap are paid once"


@pytest.mark.anyio
async def test_a_strategy_sees_configs_failures_and_aliases():
    """And the compile width, all of which it needs to choose the next candidates."""
    looks = []

    def plan(board):
        assert (board.configs, board.incumbent, board.compile_width) == (("a", "bad", "c"), 2, 1)
        assert list(board.untried) == [2, 0, 1]
        yield Compile((2, 1))
        looks.append(set(board.compiling))
        while board.compiling:
            yield Wait()
        looks.append((list(board.candidates), {i: one.message for i, one in board.failed.items()}, list(board.untried)))
        yield Sample((2,))

    measure = ScriptedMeasure(1.0, compile_errors={"bad": ValueError("no tile")})
    tuner = Tuner(0, 1, measure=measure, strategy=Planned(plan), compile_width=1)
    report = await tuner.tune(tune_of(("a", "bad", "c"), incumbent=2))
    assert looks == [{1, 2}, ([2], {1: "no tile"}, [0])]
    assert report.outcomes[0] == Skipped("a", "the strategy did not ask for it")


@pytest.mark.anyio
async def test_candidates_that_a_strategy_leaves_are_skipped_without_events():
    """A search leaves thousands of candidates: each has its outcome, and no event of its own."""

    def plan(board):
        yield Compile((0,))
        yield Wait()
        yield Sample((0,))
        yield Leave({index: f"expected to take {index} s" for index in board.untried})

    sink = RecordingSink()
    tune = tune_of(tuple(range(2000)), emit=sink.emit)
    report = await Tuner(0, 1, measure=ScriptedMeasure(1.0), strategy=Planned(plan)).tune(tune)
    assert report.outcomes[1999] == Skipped(1999, "expected to take 1999 s")
    assert sink.named("candidate_skipped") == []


@pytest.mark.anyio
async def test_a_plan_that_ends_abandons_candidates_that_still_compile():
    """It has its winner and does not wait; the rest are skipped."""

    def plan(board):
        yield Compile((0, 1, 2))
        yield Wait()
        yield Sample((0,))

    measure = ScriptedMeasure(1.0, compile_s={"a": 1.0, "b": 100.0, "c": 1.0})
    tuner = Tuner(0, 1, measure=measure, strategy=Planned(plan), compile_width=1)
    report = await tuner.tune(tune_of(("a", "b", "c"), tune_budget_s=1000.0, candidate_timeout_s=1000.0))
    assert report.seconds == 2.0
    assert report.outcomes[1:] == tuple(Skipped(cfg, "the tune ended before it was compiled") for cfg in "bc")


@pytest.mark.anyio
async def test_invalid_steps_of_a_strategy_are_ignored():
    """Candidates that are unknown, asked for twice, failed or not compiled are ignored."""

    def plan(board):
        yield Compile((0, 0, 7, 1))
        yield Sample((0, 1, 7))
        yield Wait()
        yield Wait()
        yield Wait()
        yield Sample((0, 1, 7))

    measure = ScriptedMeasure(1.0, compile_errors={"b": ValueError("no")})
    report = await Tuner(0, 1, measure=measure, strategy=Planned(plan)).tune(tune_of(("a", "b")))
    assert measure.compiled == ["a", "b"]
    assert [type(one) for one in report.outcomes] == [Measured, Failed]


def test_a_strategys_computation_runs_in_a_thread(real_backend):
    """A model takes long, and must not block the event loop; its error ends the tune like any error in a plan."""
    threads = []

    def plan(board):
        found = yield Compute(lambda: threads.append(threading.current_thread()) or (1,))
        yield Compile(found)
        yield Wait()
        yield Sample(found)
        yield Compute(lambda: 1 / 0)

    tune = tune_of(("a", "b"))
    with pytest.raises(ZeroDivisionError):
        anyio.run(Tuner(0, 1, measure=ScriptedMeasure(0.001), strategy=Planned(plan)).tune, tune, backend=real_backend)
    assert threading.main_thread() not in threads
    assert len(tune.board.samples[1]) == 1


@pytest.mark.anyio
async def test_each_group_has_a_plan_on_the_same_board():
    """If a group fails, the next one gets a plan on the same board."""
    boards = []

    def plan(board):
        boards.append((list(board.untried), sorted(board.failed)))
        yield from Exhaustive(1).plan(board)

    measure = ScriptedMeasure(1.0, compile_errors={"a": ValueError("no")})
    tune = tune_of(("a", "b", "c"), groups=((2, 0), (1, 0), (1, 5)))
    await Tuner(0, 1, measure=measure, strategy=Planned(plan)).tune(tune)
    assert boards == [([0], []), ([2, 1], [0])]


@pytest.mark.anyio
async def test_a_dropped_candidate_has_an_event():
    """With the round, and only once."""

    def plan(board):
        yield from Exhaustive(1).plan(board)
        yield Drop(1, 4, 0)

    sink = RecordingSink()
    tuner = Tuner(0, 1, measure=ScriptedMeasure(1.0), strategy=Planned(plan))
    report = await tuner.tune(tune_of(("a", "b"), emit=sink.emit))
    assert [(event.index, event.round) for event in sink.named("candidate_eliminated")] == [(1, 4)]
    assert report.outcomes[1].eliminated == 4


@pytest.mark.anyio
@pytest.mark.parametrize("step", [Sample((0, 7)), Compile(()), Wait(), Compute(lambda: None)], ids=type)
async def test_a_plan_that_goes_in_circles_is_ended(step):
    """Otherwise it would never end, and block its loop."""

    def plan(board):
        while True:
            yield step

    beside = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: _note_after_checkpoints(beside))
        with pytest.raises(InvalidRequestError, match="the strategy goes in circles: 1000 steps changed nothing"):
            await Tuner(measure=ScriptedMeasure(1.0), strategy=Planned(plan)).tune(tune_of(("a", "b")))
        assert beside, "others were served meanwhile"


async def _note_after_checkpoints(served):
    for _ in range(9):
        await anyio.lowlevel.checkpoint()
    served.append(True)
