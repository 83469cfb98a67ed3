"""A candidate that raises, hangs or returns nonsense is one outcome, and does not affect the others."""

from __future__ import annotations

import math
from functools import partial

import anyio
import pytest
from support.kernels import Bench, Toy, call
from support.tunes import kinds, tune_among, tuner_of

from asel import (
    Failed,
    Measured,
    Tuner,
    TuningError,
)
from asel.kernels.keys import CacheKey
from asel.testing import RecordingSink, ScriptedMeasure
from asel.tuning.measure import Lowered


class Fixed:
    """A measure that takes no time and returns given values."""

    def __init__(self, seconds) -> None:
        self._seconds = seconds

    async def compile(self, trial):
        async def sample():
            return self._seconds[trial.cfg]

        return sample


@pytest.mark.anyio
@pytest.mark.parametrize("stage", ["build", "compile", "measure"])
@pytest.mark.parametrize("incumbent", [None, 1])
async def test_a_failing_candidate_is_one_outcome(stage, incumbent):
    """A candidate that breaks is data: one outcome with stage, type and message, and the others are measured."""
    error = LookupError("no such tile")
    script = {"compile": {"compile_errors": {"bad": error}}, "measure": {"run_errors": {"bad": error}}}
    tuner, _ = tuner_of({"a": 0.2, "bad": 0.0001, "c": 0.1}, **script.get(stage, {}))

    def make_fn(cfg):
        if stage == "build" and cfg == "bad":
            raise error
        return print

    sink = RecordingSink()
    state = tune_among("a", "bad", "c", incumbent=incumbent, emit=sink.emit, make_fn=make_fn)
    report = await tuner.tune(state)
    assert kinds(report.outcomes) == [Measured, Failed, Measured]
    failed = report.outcomes[1]
    assert (failed.stage, failed.error_type, failed.message) == (stage, "LookupError", "no such tile")
    assert failed.error is None, "a report is kept for long, and keeps no traceback alive"
    assert report.winner == "c", "the failed one would have been the fastest"
    [event] = sink.named("candidate_failed")
    assert (event.index, event.cfg, event.stage) == (1, "bad", stage)
    assert (event.error_type, event.message, event.still_busy) == ("LookupError", "no such tile", False)


@pytest.mark.anyio
async def test_candidates_rejoin_if_the_one_they_lost_to_fails_late():
    """A rival that was dropped for being slower than a candidate that then fails is measured further, and wins."""

    class Flaky(ScriptedMeasure):
        async def compile(self, trial):
            sample = await super().compile(trial)

            async def flaky():
                if trial.cfg.startswith("flaky") and self.sampled.count(trial.cfg) == 3:
                    raise ValueError("no more")
                return await sample()

            return flaky

    told = []
    state = tune_among("default", "good", "flaky", "flaky too", incumbent=0, emit=told.append)
    measure = Flaky({"default": 1.4e-3, "good": 1e-3, "flaky": 0.5e-3, "flaky too": 0.5e-3})
    report = await Tuner(measure=measure).tune(state)
    assert "good" in [event.cfg for event in told if event.name == "candidate_eliminated"]
    assert kinds(report.outcomes) == [Measured, Measured, Failed, Failed]
    assert (report.winner, report.best.eliminated) == ("good", None)
    assert len(report.best.samples_s) >= 3


@pytest.mark.anyio
@pytest.mark.parametrize("stage", ["compile", "measure"])
async def test_a_hanging_candidate_times_out_and_harms_no_other(stage):
    """A candidate that hangs is a Failed TimeoutError after `candidate_timeout_s`; the others are unaffected."""
    script = {"compile": {"compile_s": {"a": 0, "hangs": 1e9, "c": 0}}, "measure": {"hangs": {"hangs"}}}
    tuner, _ = tuner_of({"a": 0.2, "hangs": 0.2, "c": 0.1}, **script[stage])
    start = anyio.current_time()
    report = await tuner.tune(tune_among("a", "hangs", "c", candidate_timeout_s=7.0))
    assert report.outcomes[1] == Failed("hangs", stage, "TimeoutError", "took longer than 7 s")
    assert kinds(report.outcomes) == [Measured, Failed, Measured]
    assert report.winner == "c"
    assert anyio.current_time() - start == pytest.approx(7.3)


@pytest.mark.anyio
async def test_the_timeout_is_for_one_sample():
    """`candidate_timeout_s` bounds a compile, or one sample, and not their sum."""
    tuner, _ = tuner_of(4.0, compile_s=4.0, warmup=1, iters=3)
    report = await tuner.tune(tune_among("a", candidate_timeout_s=5.0))
    assert report.winner == "a"


class TwoSteps(ScriptedMeasure):
    """A measure that lowers for five seconds before it compiles."""

    async def lower(self, trial):
        await anyio.sleep(5.0)
        return Lowered(None, partial(self.compile, trial))


@pytest.mark.anyio
@pytest.mark.parametrize(("timeout_s", "made"), [(7.0, False), (11.0, True)])
async def test_the_timeout_is_for_lowering_and_compiling_together(timeout_s, made):
    """One timeout covers all steps that make a candidate ready."""
    sink = RecordingSink()
    state = tune_among("slow", "b", emit=sink.emit, candidate_timeout_s=timeout_s)
    measure = TwoSteps(0.1, compile_s={"slow": 5.0, "b": 0.0})
    start = anyio.current_time()
    report = await Tuner(0, 1, measure=measure, strategy="exhaustive").tune(state)
    assert kinds(report.outcomes) == [Measured if made else Failed, Measured]
    if not made:
        assert report.outcomes[0] == Failed("slow", "compile", "TimeoutError", "took longer than 7 s")
        [failed] = sink.named("candidate_failed")
        assert failed.end - start == pytest.approx(7.0)


@pytest.mark.anyio
@pytest.mark.parametrize("seconds", [math.nan, -1.0, -math.inf, math.inf])
async def test_a_sample_that_is_not_a_duration_is_a_failure(seconds):
    """A measure that returns nonsense has not measured: the candidate failed, and cannot win."""
    report = await Tuner(warmup=0, iters=1, measure=Fixed({"odd": seconds, "b": 0.5})).tune(tune_among("odd", "b"))
    assert kinds(report.outcomes) == [Failed, Measured]
    assert (report.outcomes[0].stage, report.outcomes[0].error_type) == ("measure", "ValueError")
    assert repr(seconds) in report.outcomes[0].message
    assert report.winner == "b"


@pytest.mark.anyio
async def test_zero_is_a_duration():
    """A coarse clock may measure zero, which is a valid measurement."""
    report = await Tuner(warmup=0, iters=1, measure=Fixed({"a": 0.5, "b": 0})).tune(tune_among("a", "b", incumbent=0))
    assert report.winner == "b"
    assert set(report.outcomes[1].samples_s) == {0.0}


@pytest.mark.anyio
async def test_when_all_fail_the_error_carries_everything():
    """A tune without a measurement raises a TuningError with all outcomes, caused by a group of the errors."""
    key = CacheKey("dev", "op@v1", "call")
    errors = {"a": LookupError("first"), "b": ArithmeticError("second")}
    tuner, _ = tuner_of(compile_errors={"a": errors["a"]}, run_errors={"b": errors["b"]}, hangs={"c"})
    with pytest.raises(TuningError, match=r"none of the 3 candidates of 'op@v1' .* 3 failed, 0 were skipped") as caught:
        await tuner.tune(tune_among("a", "b", "c", key=key, candidate_timeout_s=1.0))
    error = caught.value
    assert isinstance(error, RuntimeError)
    assert "LookupError in the compile stage: first" in str(error)
    assert error.key == key
    assert [(failed.cfg, failed.stage) for failed in error.outcomes] == [
        ("a", "compile"),
        ("b", "measure"),
        ("c", "measure"),
    ]
    assert isinstance(error.__cause__, ExceptionGroup)
    assert error.__cause__.exceptions[:2] == (errors["a"], errors["b"])
    assert isinstance(error.__cause__.exceptions[2], TimeoutError)


@pytest.mark.anyio
async def test_a_candidate_that_exits_ends_itself_alone():
    """SystemExit from a candidate is that candidate's outcome, not the service's end."""

    class Exits(ScriptedMeasure):
        async def compile(self, trial):
            if trial.cfg.m == 2:
                raise SystemExit(3)
            return await super().compile(trial)

    bench = Bench(tuner=Tuner(measure=Exits(0.1)))
    async with bench.chain as chain:
        report = (await chain.select(call(), Toy())).report
    assert report.outcomes[1].message == "SystemExit: 3"


@pytest.mark.anyio
async def test_a_tune_in_which_all_fail_stores_nothing():
    """The heuristic that answers after a failed tune is not stored."""

    class Shelf:
        put_calls = 0

        async def get(self, *key):
            return None

        async def put(self, *record):
            self.put_calls += 1

    shelf = Shelf()
    bench = Bench(script={"run_errors": lambda cfg: ValueError("no")}, persistent=shelf)
    async with bench.chain as chain:
        selection = await chain.select(call(), Toy())
    assert (selection.tier, shelf.put_calls) == ("heuristics", 0)
    assert "none of the 3 candidates" in selection.declined["autotune"]
