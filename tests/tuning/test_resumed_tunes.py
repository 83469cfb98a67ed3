"""A cancelled tune resumes with the results it had."""

from __future__ import annotations

import anyio
import pytest
from support.measures import Checked, Lowering
from support.tunes import kinds, tune_among, tuner_of

from asel import (
    Failed,
    Measured,
    Skipped,
    Tuner,
)


@pytest.mark.anyio
async def test_a_resumed_tune_goes_on_from_its_outcomes():
    """After its carrier was cancelled, the next waiter resumes the tune: nothing is measured twice."""
    tuner, measure = tuner_of({"a": 1.0, "b": 2.0, "c": 0.5}, compile_errors={"bad": LookupError()})
    state = tune_among("bad", "a", "b", "c")
    with anyio.move_on_after(2.0) as scope:
        await tuner.tune(state)
    assert scope.cancelled_caught
    assert kinds(state.outcomes.values()) == [Failed]

    report = await tuner.tune(state)
    assert report.winner == "c"
    assert kinds(report.outcomes) == [Failed, Measured, Measured, Measured]
    assert (measure.compiled.count("bad"), measure.compiled.count("a"), measure.sampled.count("a")) == (1, 1, 1)


@pytest.mark.anyio
async def test_a_resumed_tune_has_less_budget_left():
    """The budget is the tune's, not its carrier's."""
    tuner, _ = tuner_of({"a": 0.1, "b": 10.0, "c": 0.1})
    state = tune_among("a", "b", "c", tune_budget_s=4.0)
    with anyio.move_on_after(3.0):
        await tuner.tune(state)
    assert state.budget.spent_s == pytest.approx(3.0)
    report = await tuner.tune(state)
    assert isinstance(report.outcomes[2], Skipped)


@pytest.mark.anyio
@pytest.mark.usefixtures("_no_threads")
async def test_a_tune_resumed_past_its_budget_answers_with_its_measurements():
    """Checks and measurements from before the cancellation are kept."""
    measure = Checked({"a": 1.0, "b": 0.9, "c": 10.0})
    tuner = Tuner(0, 1, measure=measure, strategy="exhaustive", check=True)
    state = tune_among("a", "b", "c", tune_budget_s=5.0)
    with anyio.move_on_after(5.5) as scope:
        await tuner.tune(state)
    assert scope.cancelled_caught
    assert state.budget.is_spent
    report = await tuner.tune(state)
    assert report.winner == "b"
    assert kinds(report.outcomes) == [Measured, Measured, Skipped]
    assert measure.checked == ["a", "b", "c"]


@pytest.mark.anyio
async def test_a_finished_tune_is_not_measured_again():
    """A state that has all its outcomes is only reported."""
    tuner, measure = tuner_of({"a": 1.0, "b": 2.0})
    state = tune_among("a", "b")
    first = await tuner.tune(state)
    measure.compiled.clear()
    again = await tuner.tune(state)
    assert (again.winner, again.outcomes) == (first.winner, first.outcomes)
    assert measure.compiled == []


@pytest.mark.anyio
@pytest.mark.parametrize("after_s", [0.5, 1.5, 2.5, 3.5, 4.5, 5.5])
async def test_a_tune_cancelled_at_any_step_can_be_resumed(after_s):
    """Only candidates that were compiled have begun."""
    measure, state = Lowering(compile_s=2.0), tune_among("a", "b", "c")
    with anyio.move_on_after(after_s):
        await Tuner(0, 1, measure=measure, compile_width=1).tune(state)
    assert not state.outcomes
    report = await Tuner(0, 1, measure=measure, compile_width=1).tune(state)
    assert kinds(report.outcomes) == [Measured] * 3
