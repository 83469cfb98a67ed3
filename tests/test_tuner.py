"""Finding the fastest candidate, in virtual time; and the contract that every measure keeps."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import anyio
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels import A100, BEST, GUESS, H100, Bench, Blocks, NoHeuristic, Toy, call

from asel import (
    AutotunePolicy,
    ConfigCache,
    ConfigSelectorChain,
    Failed,
    InvalidRequestError,
    Measured,
    Skipped,
    Tuner,
    TuningError,
    device_fingerprint,
)
from asel.adapters import as_tuner
from asel.benchmark import JaxMeasure
from asel.jobs import TuneJob
from asel.keys import CacheKey, call_key
from asel.measure import Lowered, Trial
from asel.testing import RecordingSink, ScriptedMeasure
from asel.traffic import LoopTraffic


@pytest.fixture(autouse=True)
def _first_call_is_behind_us():
    """Asel learns of JAX and of the machine at its first call; what that costs the loop is a test of its own."""
    call_key(call(), Toy())
    device_fingerprint()


def job_of(*candidates, **facts) -> TuneJob:
    return TuneJob(candidates, lambda cfg: lambda: cfg, (), {}, **facts)


def tuner_of(costs=0.001, *, warmup=0, iters=1, **script) -> tuple[Tuner, ScriptedMeasure]:
    measure = ScriptedMeasure(costs, **script)
    return Tuner(warmup=warmup, iters=iters, measure=measure, strategy="exhaustive"), measure


async def tune(costs, *, job=None, **script):
    tuner, _ = tuner_of(costs, **script)
    return await tuner.tune(job_of(*costs) if job is None else job)


def kinds(outcomes) -> list[type]:
    return [type(outcome) for outcome in outcomes]


class Fixed:
    """A measure that takes no time and returns what it is told to."""

    def __init__(self, seconds) -> None:
        self._seconds = seconds

    async def compile(self, trial):
        async def sample():
            return self._seconds[trial.cfg]

        return sample


# ---------------------------------------------------------------------------------------------
# Who wins.


@pytest.mark.anyio
@pytest.mark.parametrize("fastest", ["a", "b", "c"])
async def test_the_fastest_wins(fastest):
    """The winner is the candidate with the least time, wherever it stands in the list."""
    costs = {"a": 0.3, "b": 0.2, "c": 0.4} | {fastest: 0.1}
    report = await tune(costs)
    assert report.winner == fastest
    assert report.best.median_s == pytest.approx(0.1)
    assert [outcome.cfg for outcome in report.outcomes] == ["a", "b", "c"]


@pytest.mark.anyio
async def test_autotune_returns_the_winner():
    """`autotune` is ejKernel's call with an await: factory, arguments and candidates in, the fastest out."""
    tuner, measure = tuner_of({"a": 0.2, "b": 0.1})
    made = []
    best = await tuner.autotune(lambda cfg: made.append(cfg) or print, (1,), {"x": 2}, iter(["a", "b"]))
    assert best == "b"
    assert sorted(made) == sorted(measure.compiled) == ["a", "b"]


@pytest.mark.anyio
async def test_the_incumbent_goes_first():
    """A tune that is cut short still knows the default, because the default is tried before anything else."""
    tuner, measure = tuner_of({"a": 0.1, "default": 0.2, "c": 0.3})
    report = await tuner.tune(job_of("a", "default", "c", incumbent=1))
    assert measure.compiled[0] == measure.sampled[0] == "default"
    assert report.incumbent == "default"
    assert [outcome.cfg for outcome in report.outcomes] == ["a", "default", "c"], "outcomes keep the declared order"


@pytest.mark.anyio
@pytest.mark.parametrize("incumbent", [0, 1])
async def test_the_incumbent_wins_ties_within_the_noise(incumbent):
    """A challenger that is faster by less than the noise does not take the title: never worse, and never by luck."""
    costs = {0: 0.1, 1: 0.1}
    costs[incumbent] = 0.1005
    report = await tune(costs, job=job_of(0, 1, incumbent=incumbent))
    assert report.winner == incumbent
    assert report.noise == pytest.approx(0.02)


@pytest.mark.anyio
async def test_the_incumbent_loses_to_a_clear_winner():
    """A challenger that is faster by more than the noise takes the title."""
    report = await tune({"default": 0.103, "b": 0.1}, job=job_of("default", "b", incumbent=0))
    assert report.winner == "b"


@pytest.mark.anyio
async def test_noise_is_seen_in_the_samples():
    """The wider a candidate's samples scatter, the larger the lead that counts as a tie."""
    samples = {"default": [0.105, 0.110, 0.108], "calm": [0.10, 0.10, 0.10]}

    async def winner(wild) -> tuple[str, float]:
        turns = {cfg: iter(times) for cfg, times in (samples | wild).items()}
        tuner, _ = tuner_of(lambda cfg: next(turns[cfg]), iters=3)
        report = await tuner.tune(job_of("default", *(samples | wild).keys() - {"default"}, incumbent=0))
        return report.winner, report.noise

    # 8% slower, and its own samples lie 2% apart: that is a clear defeat.
    assert (await winner({}))[0] == "calm"
    # About the same lead, but the challenger's samples lie 25% apart: that is a tie.
    best, noise = await winner({"calm": [0.096, 0.10, 0.12]})
    assert best == "default"
    assert noise == pytest.approx(0.1)  # McGill's notch is wider, and more than a tenth is no tie


@pytest.mark.anyio
@pytest.mark.parametrize("facts", [{}, {"incumbent": 0}])
async def test_other_ties_go_to_declared_order(facts):
    """Among equals that are not the incumbent, the one declared first wins, so that a tie has one answer."""
    report = await tune({"slow": 0.5, "b": 0.1, "c": 0.1, "d": 0.1}, job=job_of("slow", "b", "c", "d", **facts))
    assert report.winner == "b"


@pytest.mark.anyio
async def test_a_tuners_seed_is_its_races():
    """The order in which candidates are sampled is the seed's: the same again with the same, another with another."""

    async def order(seed) -> tuple[int, ...]:
        measure = ScriptedMeasure()
        await Tuner(warmup=0, measure=measure, seed=seed).tune(job_of(*range(8)))
        return tuple(measure.sampled)

    assert await order(1) == await order(1)
    assert len({(await order(seed))[:8] for seed in range(5)}) == 5


@pytest.mark.anyio
async def test_who_is_eliminated_is_told_with_the_round():
    """An event for each, as it happens, and the same round in the report."""
    told = []
    job = job_of("fast", "second", "slow", "slower", incumbent=0, emit=told.append)
    costs = {"fast": 0.001, "second": 0.0011, "slow": 0.1, "slower": 0.2}
    report = await Tuner(iters=3, measure=ScriptedMeasure(costs)).tune(job)
    eliminated = [event for event in told if event.name == "candidate_eliminated"]
    assert [(event.index, event.cfg, event.round) for event in eliminated] == [(2, "slow", 1), (3, "slower", 1)]
    assert {event.tune_id for event in eliminated} == {report.tune_id}
    assert [outcome.eliminated for outcome in report.outcomes] == [None, None, 1, 1]


class Clingy(ScriptedMeasure):
    """Samplers that can be released, and say so; `error` is what that raises."""

    def __init__(self, *args, error=None, **script) -> None:
        super().__init__(*args, **script)
        self.released, self._error = [], error

    async def compile(self, trial):
        sample = await super().compile(trial)

        def release() -> None:
            self.released.append((trial.cfg, threading.current_thread()))
            if self._error is not None:
                raise self._error

        sample.release = release
        return sample


def eventually(count, expected: int) -> bool:
    """Wait for a thread that nobody waits for."""
    deadline = time.monotonic() + 10
    while count() < expected and time.monotonic() < deadline:
        time.sleep(0.001)
    return count() == expected


@pytest.mark.parametrize("error", [None, OSError("busy")])
def test_every_candidate_is_let_go_of_in_a_thread(real_backend, error, caplog):
    """Losers, failures and the winner alike, never on the loop; what that raises is logged and harms nobody."""
    costs = {"fast": 0.001, "second": 0.0011, "slow": 0.05, "broken": 0.001}
    measure = Clingy(costs, error=error, run_errors={"broken": ValueError("no")})
    report = anyio.run(Tuner(measure=measure).tune, job_of(*costs, incumbent=0), backend=real_backend)
    assert report.winner == "fast"
    assert eventually(lambda: len(measure.released), 4)
    assert sorted(cfg for cfg, _ in measure.released) == sorted(costs)
    assert threading.main_thread() not in {thread for _, thread in measure.released}
    assert eventually(lambda: len(caplog.records), 0 if error is None else 4)


def test_a_group_is_let_go_of_before_the_next_is_compiled(real_backend):
    """What failed holds no memory that those which are tried instead may need."""
    order = []

    class Ordered(Clingy):
        async def compile(self, trial):
            if trial.cfg == "next":
                await anyio.to_thread.run_sync(eventually, lambda: len(self.released), 2)
            order.append((trial.cfg, [cfg for cfg, _ in self.released]))
            return await super().compile(trial)

    measure = Ordered(run_errors={"broken": ValueError("no"), "too": ValueError("no")})
    job = job_of("broken", "too", "next", groups=((2, 0), (2, 0), (1, 0)))
    assert anyio.run(Tuner(measure=measure).tune, job, backend=real_backend).winner == "next"
    assert [(cfg, sorted(released)) for cfg, released in order] == [
        ("broken", []),
        ("too", []),
        ("next", ["broken", "too"]),
    ]


def test_an_answer_is_not_lost_where_no_thread_can_be_started(real_backend, monkeypatch, caplog):
    """Letting go is nobody's business any more: it is logged, and the report is there."""

    def refuse(what, work):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("asel.tuner.leave_to_thread", refuse)
    report = anyio.run(Tuner(measure=Clingy({"a": 0.02, "b": 0.01})).tune, job_of("a", "b"), backend=real_backend)
    assert report.winner == "b"
    assert [record.message for record in caplog.records] == ["candidates could not be let go of"]


def test_a_tune_that_fails_lets_go_of_everything_too(real_backend):
    """All raise as they are measured: nothing is kept for a report that there is not."""
    measure = Clingy(run_errors=lambda cfg: ValueError("no"))
    with pytest.raises(TuningError):
        anyio.run(Tuner(measure=measure).tune, job_of("a", "b"), backend=real_backend)
    assert eventually(lambda: len(measure.released), 2)
    assert sorted(cfg for cfg, _ in measure.released) == ["a", "b"]


@pytest.mark.anyio
async def test_warm_ups_do_not_count():
    """The median is over the samples after the warm-up."""
    times = iter([9.0, 9.0, 1.0, 3.0, 2.0])
    tuner, measure = tuner_of(lambda cfg: next(times), warmup=2, iters=3)
    [outcome] = (await tuner.tune(job_of("a"))).outcomes
    assert outcome.median_s == pytest.approx(2.0)
    assert sorted(outcome.samples_s) == pytest.approx([1.0, 2.0, 3.0])
    assert len(measure.sampled) == 5


@pytest.mark.anyio
async def test_a_report_tells_what_was_done():
    """A report carries its job's identity and limits, and what each candidate's compiling cost."""
    key = CacheKey("dev", "op@v1", "call")
    tuner, _ = tuner_of(0.5, compile_s={"a": 2.0, "b": 1.0})
    job = job_of("a", "b", key=key, checksum="c0ffee", objective="forward+backward", tune_budget_s=50.0, device=H100)
    report = await tuner.tune(job)
    assert [outcome.compile_s for outcome in report.outcomes] == pytest.approx([2.0, 1.0])
    assert report.seconds == pytest.approx(4.0)
    assert (report.key, report.checksum, report.objective) == (key, "c0ffee", "forward+backward")
    assert (report.tune_id, report.tune_budget_s, report.candidate_timeout_s) == (job.id, 50.0, 30.0)
    assert (report.incumbent, report.environment["platform_version"]) == (None, "fake")


# ---------------------------------------------------------------------------------------------
# Who fails.


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
    job = replace(job_of("a", "bad", "c", incumbent=incumbent, emit=sink.emit), make_fn=make_fn)
    report = await tuner.tune(job)
    assert kinds(report.outcomes) == [Measured, Failed, Measured]
    failed = report.outcomes[1]
    assert (failed.stage, failed.error_type, failed.message) == (stage, "LookupError", "no such tile")
    assert failed.error is None, "a report is kept for long, and keeps no traceback alive"
    assert report.winner == "c", "the failed one would have been the fastest"
    [event] = sink.named("candidate_failed")
    assert (event.index, event.cfg, event.stage) == (1, "bad", stage)
    assert (event.error_type, event.message, event.still_busy) == ("LookupError", "no such tile", False)


@pytest.mark.anyio
async def test_who_lost_to_a_candidate_that_fails_late_is_not_lost():
    """A rival that was dropped for being slower than what then broke is measured on, and wins."""

    class Flaky(ScriptedMeasure):
        async def compile(self, trial):
            sample = await super().compile(trial)

            async def flaky():
                if trial.cfg.startswith("flaky") and self.sampled.count(trial.cfg) == 3:
                    raise ValueError("no more")
                return await sample()

            return flaky

    told = []
    job = job_of("default", "good", "flaky", "flaky too", incumbent=0, emit=told.append)
    measure = Flaky({"default": 1.4e-3, "good": 1e-3, "flaky": 0.5e-3, "flaky too": 0.5e-3})
    report = await Tuner(measure=measure).tune(job)
    assert "good" in [event.cfg for event in told if event.name == "candidate_eliminated"]
    assert kinds(report.outcomes) == [Measured, Measured, Failed, Failed]
    assert (report.winner, report.best.eliminated) == ("good", None)
    assert len(report.best.samples_s) >= 3


@pytest.mark.anyio
@pytest.mark.parametrize("stage", ["compile", "measure"])
async def test_a_hanging_candidate_times_out_and_harms_nobody(stage):
    """A candidate that hangs is a Failed TimeoutError after `candidate_timeout_s`; the rest go on as if it were not."""
    script = {"compile": {"compile_s": {"a": 0, "hangs": 1e9, "c": 0}}, "measure": {"hangs": {"hangs"}}}
    tuner, _ = tuner_of({"a": 0.2, "hangs": 0.2, "c": 0.1}, **script[stage])
    start = anyio.current_time()
    report = await tuner.tune(job_of("a", "hangs", "c", candidate_timeout_s=7.0))
    assert report.outcomes[1] == Failed("hangs", stage, "TimeoutError", "took longer than 7 s")
    assert kinds(report.outcomes) == [Measured, Failed, Measured]
    assert report.winner == "c"
    assert anyio.current_time() - start == pytest.approx(7.3)


@pytest.mark.anyio
async def test_the_timeout_is_for_one_sample():
    """`candidate_timeout_s` bounds a compile, or one sample, and not their sum."""
    tuner, _ = tuner_of(4.0, compile_s=4.0, warmup=1, iters=3)
    report = await tuner.tune(job_of("a", candidate_timeout_s=5.0))
    assert report.winner == "a"


class TwoSteps(ScriptedMeasure):
    """A measure that lowers for five seconds before it compiles."""

    async def lower(self, trial):
        await anyio.sleep(5.0)
        return Lowered(None, partial(self.compile, trial))


@pytest.mark.anyio
@pytest.mark.parametrize(("timeout_s", "made"), [(7.0, False), (11.0, True)])
async def test_the_timeout_is_for_lowering_and_compiling_together(timeout_s, made):
    """A candidate has one timeout to be made ready in, in however many steps; it fails when that is over."""
    sink = RecordingSink()
    job = job_of("slow", "b", emit=sink.emit, candidate_timeout_s=timeout_s)
    measure = TwoSteps(0.1, compile_s={"slow": 5.0, "b": 0.0})
    start = anyio.current_time()
    report = await Tuner(0, 1, measure=measure, strategy="exhaustive").tune(job)
    assert kinds(report.outcomes) == [Measured if made else Failed, Measured]
    if not made:
        assert report.outcomes[0] == Failed("slow", "compile", "TimeoutError", "took longer than 7 s")
        [failed] = sink.named("candidate_failed")
        assert failed.end - start == pytest.approx(7.0)


@pytest.mark.anyio
@pytest.mark.parametrize("seconds", [math.nan, -1.0, -math.inf, math.inf])
async def test_what_is_not_a_duration_is_a_failure(seconds):
    """A measure that returns nonsense has not measured: the candidate failed, and cannot win."""
    report = await Tuner(warmup=0, iters=1, measure=Fixed({"odd": seconds, "b": 0.5})).tune(job_of("odd", "b"))
    assert kinds(report.outcomes) == [Failed, Measured]
    assert (report.outcomes[0].stage, report.outcomes[0].error_type) == ("measure", "ValueError")
    assert repr(seconds) in report.outcomes[0].message
    assert report.winner == "b"


@pytest.mark.anyio
async def test_no_time_at_all_is_a_duration():
    """A clock too coarse to see the candidate run says zero, which is a measurement."""
    report = await Tuner(warmup=0, iters=1, measure=Fixed({"a": 0.5, "b": 0})).tune(job_of("a", "b", incumbent=0))
    assert report.winner == "b"
    assert set(report.outcomes[1].samples_s) == {0.0}


@pytest.mark.anyio
async def test_when_all_fail_the_error_carries_everything():
    """A tune without a single measurement is a TuningError with every outcome, caused by a group of what was raised."""
    key = CacheKey("dev", "op@v1", "call")
    errors = {"a": LookupError("first"), "b": ArithmeticError("second")}
    tuner, _ = tuner_of(compile_errors={"a": errors["a"]}, run_errors={"b": errors["b"]}, hangs={"c"})
    with pytest.raises(TuningError, match=r"none of the 3 candidates of 'op@v1' .* 3 failed, 0 were skipped") as caught:
        await tuner.tune(job_of("a", "b", "c", key=key, candidate_timeout_s=1.0))
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
async def test_no_candidates_is_an_error():
    """There is no fastest of none: ejKernel's RuntimeError, and nothing is measured."""
    tuner, measure = tuner_of()
    with pytest.raises(RuntimeError, match="no candidates"):
        await tuner.autotune(lambda cfg: print, (), {}, [])
    with pytest.raises(TuningError):
        await tuner.tune(job_of())
    assert measure.compiled == []


@pytest.mark.anyio
async def test_configs_may_be_unhashable():
    """A config may be a dict, in a tune and in the script of a scripted measure."""
    tuner, measure = tuner_of(lambda cfg: cfg["seconds"], run_errors=lambda cfg: None)
    candidates = {"seconds": 0.2}, {"seconds": 0.1}
    assert (await tuner.tune(job_of(*candidates))).winner == {"seconds": 0.1}
    assert measure.sampled == list(candidates)


@pytest.mark.anyio
async def test_measuring_one_function_gives_its_median_or_says_why_not():
    """`measure` is a tune of one: its median seconds, or a TuningError caused by what the function raised."""
    times = iter([9.0, 1.0, 3.0, 2.0])
    tuner, _ = tuner_of(lambda cfg: next(times), warmup=1, iters=3)
    assert await tuner.measure(print, 1, end="") == pytest.approx(2.0)

    error = LookupError("no such tile")
    tuner, _ = tuner_of(compile_errors=lambda cfg: error)
    with pytest.raises(TuningError, match="LookupError in the compile stage: no such tile") as caught:
        await tuner.measure(print)
    assert caught.value.__cause__ is error
    assert kinds(caught.value.outcomes) == [Failed]


@pytest.mark.parametrize(("warmup", "iters"), [(-1, 1), (0, 0), (1, -3)])
def test_bad_counts_are_refused(warmup, iters):
    """A tuner without a sample to take is refused where it is made, with the numbers in the message."""
    with pytest.raises(InvalidRequestError, match=rf"warmup={warmup} .* iters={iters} "):
        Tuner(warmup=warmup, iters=iters)


# ---------------------------------------------------------------------------------------------
# The budget.


@pytest.mark.anyio
async def test_when_the_budget_is_spent_the_rest_are_skipped_and_the_best_so_far_wins():
    """`tune_budget_s` ends a tune with what it has: those not tried are Skipped, and say so."""
    sink = RecordingSink()
    tuner, measure = tuner_of({"a": 0.2, "b": 0.1, "slow": 10.0, "c": 0.01, "d": 0.01})
    job = job_of("a", "b", "slow", "c", "d", tune_budget_s=4.0, emit=sink.emit)
    report = await tuner.tune(job)
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
    """`tune_budget_s` is a tune's length, compiling included, to within the one step that is under way."""
    slow = {"a": 0.0, "slow": 20.0, "c": 0.0}
    tuner, _ = tuner_of(slow) if stage == "measure" else tuner_of(0.0, compile_s=slow)
    start = anyio.current_time()
    report = await tuner.tune(job_of("a", "slow", "c", tune_budget_s=4.0, candidate_timeout_s=30.0))
    assert anyio.current_time() - start == pytest.approx(20.0)
    assert report.winner == "a"
    why = "left no time to compile it" if stage == "compile" else "was spent"
    assert report.outcomes[2] == Skipped("c", f"the tune's budget of 4 s {why}")


@pytest.mark.anyio
@pytest.mark.parametrize(("cores", "compiled"), [(2, ["a"]), (8, ["a", "b", "c"])])
async def test_once_the_budget_is_spent_nothing_more_is_compiled(cores, compiled, monkeypatch):
    """What is under way ends; what still waits for its turn to compile is skipped, and takes no time."""
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    tuner, measure = tuner_of(0.0, compile_s=3.0)
    report = await tuner.tune(job_of("a", "b", "c", "d", "e", tune_budget_s=2.0))
    assert sorted(measure.compiled) == compiled
    assert report.seconds == pytest.approx(3.0)
    late = "the tune's budget of 2 s left no time to compile it"
    assert report.outcomes[3:] == tuple(Skipped(cfg, late) for cfg in "de")


@pytest.mark.anyio
async def test_compiling_leaves_time_to_measure_what_was_compiled():
    """It may take three quarters of the budget: a tune that only compiles, and measures nobody, was for nothing."""
    costs = {cfg: 0.3 - 0.02 * number for number, cfg in enumerate("abcdefgh")}
    tuner, measure = tuner_of(costs, compile_s=10.0)
    report = await tuner.tune(job_of(*costs, incumbent=0, tune_budget_s=60.0))
    assert measure.compiled == list("abcde")
    assert kinds(report.outcomes) == [Measured] * 5 + [Skipped] * 3
    assert report.winner == "e"
    assert report.seconds < 60.0


@pytest.mark.anyio
async def test_a_group_has_three_quarters_of_what_those_before_it_left():
    """A group that fails leaves the next a part of the budget, and that one measures what it compiles too."""
    tuner, measure = tuner_of(0.1, compile_s=10.0, run_errors={cfg: ValueError("no") for cfg in "abcd"})
    groups = tuple((int(cfg in "abcd"), 0) for cfg in "abcdefgh")
    report = await tuner.tune(job_of(*"abcdefgh", groups=groups, tune_budget_s=48.0))
    assert measure.compiled == list("abcde")  # 36 s of 48 are over after the fourth, and 9 of 12 after the fifth
    assert kinds(report.outcomes) == [Failed] * 4 + [Measured] + [Skipped] * 3


class Checked(ScriptedMeasure):
    """A measure whose candidates take a second to show their outputs, and all compute the same."""

    def __init__(self, *args, **script) -> None:
        super().__init__(*args, **script)
        self.checked = []

    async def compile(self, trial):
        sample = await super().compile(trial)

        async def outputs():
            self.checked.append(trial.cfg)
            await anyio.sleep(1.0)
            return [np.ones(2)]

        sample.outputs = outputs
        return sample


@pytest.fixture
def _no_threads(monkeypatch):
    """A virtual clock would jump while a thread compares outputs."""

    async def at_once(what, work, **options):
        return work()

    monkeypatch.setattr("asel.readying.run_in_thread", at_once)


@pytest.mark.anyio
@pytest.mark.usefixtures("_no_threads")
@pytest.mark.parametrize(("budget_s", "checked"), [(1.5, ["b", "a"]), (0.5, ["b"])])
async def test_once_the_budget_is_spent_nothing_more_is_checked(budget_s, checked):
    """The incumbent is, whatever is left; those whose outputs nobody has seen are skipped, and cannot win."""
    measure = Checked(0.1)
    job = job_of("a", "b", "c", "d", incumbent=1, tune_budget_s=budget_s)
    report = await Tuner(0, 1, measure=measure, strategy="exhaustive", check=True).tune(job)
    assert measure.checked == checked
    assert report.winner == "b"
    assert report.seconds == pytest.approx(len(checked) + 0.1)
    unseen = f"the tune's budget of {budget_s:g} s was spent before it was checked"
    assert report.outcomes[2:] == (Skipped("c", unseen), Skipped("d", unseen))


@pytest.mark.anyio
@pytest.mark.parametrize("strategy", ["race", "exhaustive"])
async def test_a_spent_budget_and_a_first_candidate_that_fails_end_all_the_same(strategy):
    """Until something is measured one candidate goes on, whatever the budget says: where it fails, the next."""
    measure = ScriptedMeasure(0.01, compile_s=1.0, run_errors={"a": ValueError("no")})
    job = job_of("a", "b", "c", incumbent=0, tune_budget_s=2.5)
    report = await Tuner(measure=measure, strategy=strategy).tune(job)
    assert report.winner in ("b", "c")


@pytest.mark.anyio
@pytest.mark.parametrize("strategy", ["race", "exhaustive"])
@pytest.mark.parametrize("warmup", [0, 1, 5])
async def test_a_spent_budget_gives_the_first_candidate_one_run(strategy, warmup):
    """Whatever `warmup` asks for: where nobody has a sample any run counts, and one is enough for an answer."""
    measure = ScriptedMeasure(20.0, compile_s=5.0)
    start = anyio.current_time()
    job = job_of("a", "b", tune_budget_s=4.0, candidate_timeout_s=30.0)
    report = await Tuner(warmup, 3, measure=measure, strategy=strategy).tune(job)
    assert anyio.current_time() - start == pytest.approx(25.0)
    assert (measure.compiled, measure.sampled) == (["a"], ["a"])
    assert (report.winner, report.best.samples_s) == ("a", (20.0,))
    assert report.outcomes[1] == Skipped("b", "the tune's budget of 4 s left no time to compile it")


@pytest.mark.anyio
async def test_making_example_inputs_counts_towards_the_budget(monkeypatch):
    """They are made for this tune alone; and one candidate is tried all the same, whatever they took."""

    async def in_no_thread(what, work, **facts):  # for a virtual clock jumps while a thread works
        await anyio.sleep(5.0)
        return work()

    monkeypatch.setattr("asel.tuner.run_in_thread", in_no_thread)
    tuner, measure = tuner_of(0.5, compile_s=1.0)
    job = job_of("a", "b", "c", tune_budget_s=4.0, example=lambda: ((1,), {"x": 2}))
    report = await tuner.tune(job)
    assert (job.args, job.kwargs) == ((1,), {"x": 2})
    assert job.spent_s == pytest.approx(5.0 + 1.0 + 0.5)
    assert measure.compiled == ["a"]
    assert kinds(report.outcomes) == [Measured, Skipped, Skipped]


@pytest.mark.anyio
async def test_compiling_counts_towards_the_budget():
    """What a tune costs is compiling as much as running."""
    tuner, _ = tuner_of(0.1, compile_s=3.0)
    report = await tuner.tune(job_of("a", "b", "c", "d", tune_budget_s=6.0))
    assert kinds(report.outcomes)[0] is Measured
    assert kinds(report.outcomes)[2:] == [Skipped, Skipped]


@pytest.mark.anyio
@pytest.mark.parametrize("busy_with", ["compile", "measure"])
async def test_waiting_for_ones_turn_is_free(busy_with, monkeypatch):
    """Waiting for the device, or for a compile slot, does not burn a tune's budget."""
    monkeypatch.setattr("os.cpu_count", lambda: 2)  # one compile slot
    hog, _ = tuner_of(100.0) if busy_with == "measure" else tuner_of(0.0, compile_s=100.0)
    modest, _ = tuner_of(0.1, compile_s=0.1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(hog.tune, job_of("x", device=H100, tune_budget_s=1000.0, candidate_timeout_s=1000.0))
        await anyio.sleep(1)  # virtual: by now the hog is at its step
        report = await modest.tune(job_of("a", "b", "c", device=H100, tune_budget_s=1.0))
    assert report.seconds > 99, "it did have to wait"
    assert kinds(report.outcomes) == [Measured, Measured, Measured]


@pytest.mark.anyio
async def test_steps_that_overlap_are_paid_once(monkeypatch):
    """A budget is wall time: three candidates that compile at once for two seconds cost two seconds."""
    monkeypatch.setattr("os.cpu_count", lambda: 8)  # three compile slots
    tuner, _ = tuner_of(0.5, compile_s={"a": 2.0, "b": 2.0, "c": 1.0})
    job = job_of("a", "b", "c", tune_budget_s=3.7)
    report = await tuner.tune(job)
    assert kinds(report.outcomes) == [Measured] * 3
    assert job.spent_s == pytest.approx(2.0 + 3 * 0.5)
    assert report.seconds == pytest.approx(3.5)


class Shared(ScriptedMeasure):
    """A measure whose candidates wait for something that others hold, before each step and without being asked."""

    @asynccontextmanager
    async def turn(self, charge):
        await anyio.sleep(100.0)
        yield self

    async def compile(self, trial):
        sample = await super().compile(trial)
        sample.turn = self.turn
        return sample


@pytest.mark.anyio
async def test_a_measures_turn_is_free():
    """What a measure waits for before it is asked is nobody's time: neither the candidate's nor the tune's."""
    job = job_of("a", "b", candidate_timeout_s=1.0, tune_budget_s=1.0)
    report = await Tuner(0, 1, measure=Shared(0.1, compile_s=0.1), strategy="exhaustive").tune(job)
    assert kinds(report.outcomes) == [Measured, Measured]
    assert report.seconds == pytest.approx(400.4)
    assert job.spent_s == pytest.approx(0.4)


class Readied(ScriptedMeasure):
    """A measure whose candidates must be made ready anew before each sample."""

    async def compile(self, trial):
        sample = await super().compile(trial)
        sample.ready = lambda: [
            partial(anyio.sleep, 0.7),
            partial(anyio.sleep, 0.7 if trial.cfg != "stuck" else math.inf),
        ]
        return sample


@pytest.mark.anyio
async def test_making_ready_is_a_step_of_its_own():
    """Each of its steps has the candidate's timeout to itself, and is charged to the tune."""
    job = job_of("a", "stuck", candidate_timeout_s=1.0)
    report = await Tuner(0, 1, measure=Readied(0.7), strategy="exhaustive").tune(job)
    assert kinds(report.outcomes) == [Measured, Failed]
    assert report.outcomes[1].message == "took longer than 1 s"
    assert job.spent_s == pytest.approx(3 * 0.7 + 0.7 + 1.0)


# ---------------------------------------------------------------------------------------------
# Going on.


@pytest.mark.anyio
async def test_a_job_called_again_goes_on_from_its_outcomes():
    """A tune whose carrier was cancelled is carried on by the next: what was measured is not measured again."""
    tuner, measure = tuner_of({"a": 1.0, "b": 2.0, "c": 0.5}, compile_errors={"bad": LookupError()})
    job = job_of("bad", "a", "b", "c")
    with anyio.move_on_after(2.0) as scope:
        await tuner.tune(job)
    assert scope.cancelled_caught
    assert kinds(job.outcomes.values()) == [Failed]

    report = await tuner.tune(job)
    assert report.winner == "c"
    assert kinds(report.outcomes) == [Failed, Measured, Measured, Measured]
    assert (measure.compiled.count("bad"), measure.compiled.count("a"), measure.sampled.count("a")) == (1, 1, 1)


@pytest.mark.anyio
async def test_what_a_cancelled_carrier_spent_stays_spent():
    """The budget is the tune's, not its carrier's."""
    tuner, _ = tuner_of({"a": 0.1, "b": 10.0, "c": 0.1})
    job = job_of("a", "b", "c", tune_budget_s=4.0)
    with anyio.move_on_after(3.0):
        await tuner.tune(job)
    assert job.spent_s == pytest.approx(3.0)
    report = await tuner.tune(job)
    assert isinstance(report.outcomes[2], Skipped)


@pytest.mark.anyio
@pytest.mark.usefixtures("_no_threads")
async def test_a_job_called_again_past_its_budget_answers_with_what_was_measured():
    """What was checked stays checked: those that were measured before the carrier was cancelled are not lost."""
    measure = Checked({"a": 1.0, "b": 0.9, "c": 10.0})
    tuner = Tuner(0, 1, measure=measure, strategy="exhaustive", check=True)
    job = job_of("a", "b", "c", tune_budget_s=5.0)
    with anyio.move_on_after(5.5) as scope:
        await tuner.tune(job)
    assert scope.cancelled_caught
    assert job.is_broke
    report = await tuner.tune(job)
    assert report.winner == "b"
    assert kinds(report.outcomes) == [Measured, Measured, Skipped]
    assert measure.checked == ["a", "b", "c"]


@pytest.mark.anyio
async def test_a_finished_job_is_not_measured_again():
    """Calling with a job that has all its outcomes only reports."""
    tuner, measure = tuner_of({"a": 1.0, "b": 2.0})
    job = job_of("a", "b")
    first = await tuner.tune(job)
    measure.compiled.clear()
    again = await tuner.tune(job)
    assert (again.winner, again.outcomes) == (first.winner, first.outcomes)
    assert measure.compiled == []


# ---------------------------------------------------------------------------------------------
# Alone.


class Watched:
    """A measure whose every step takes a second, and which sees how many run at once."""

    def __init__(self, compile_s: float = 1.0) -> None:
        self._compile_s = compile_s
        self._now: Counter = Counter()
        self.most: Counter = Counter()

    async def _step(self, *places, seconds: float = 1.0) -> None:
        self._now.update(places)
        for place in places:
            self.most[place] = max(self.most[place], self._now[place])
        await anyio.sleep(seconds)
        self._now.subtract(places)

    async def compile(self, trial):
        await self._step("compiling", seconds=self._compile_s)

        async def sample() -> float:
            await self._step("sampling", trial.device)
            return 1.0

        return sample


@pytest.mark.anyio
async def test_two_tunes_on_one_device_never_sample_at_once():
    """Timings are taken alone: one lane per device, whoever's tune it is."""
    measure = Watched()
    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(Tuner(warmup=1, iters=2, measure=measure).tune, job_of("a", "b", device=H100))
    assert measure.most["sampling"] == 1


@pytest.mark.anyio
async def test_two_devices_sample_at_the_same_time():
    """Devices do not wait for each other."""
    measure = Watched()
    async with anyio.create_task_group() as tasks:
        for device in (H100, A100):
            tasks.start_soon(Tuner(warmup=1, iters=2, measure=measure).tune, job_of("a", "b", device=device))
    assert (measure.most["sampling"], measure.most[H100], measure.most[A100]) == (2, 1, 1)


@pytest.mark.anyio
async def test_chains_share_the_lanes():
    """Two chains in one event loop take turns on a device too."""
    measure = Watched()
    tuner = Tuner(warmup=0, iters=2, measure=measure)
    async with Bench(tuner=tuner).chain as one, Bench(tuner=tuner).chain as other, anyio.create_task_group() as tasks:
        for chain in (one, other):
            tasks.start_soon(chain.choose, call(8), Toy())
            tasks.start_soon(chain.choose, call(16), Toy())
    assert measure.most[H100] == 1


@pytest.mark.anyio
async def test_a_tuner_on_its_own_shares_the_lanes():
    """`Tuner.autotune` measures on its arguments' device, so it takes turns with the chains that tune there."""
    measure = Watched()
    tuner = Tuner(warmup=0, iters=2, measure=measure)
    async with Bench(tuner=tuner).chain as chain, anyio.create_task_group() as tasks:
        tasks.start_soon(chain.choose, call(8), Toy())
        tasks.start_soon(tuner.autotune, lambda cfg: print, (H100.array((8, 128)),), {}, ["a", "b", "c"])
    assert measure.most["sampling"] == 1


@pytest.mark.anyio
@pytest.mark.parametrize(("cores", "slots"), [(2, 1), (8, 3)])
async def test_compiling_keeps_to_its_slots(cores, slots, monkeypatch):
    """However many tunes there are, no more compile at once than leave the event loop its share of the cores."""
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    measure = Watched()
    async with anyio.create_task_group() as tasks:
        for device in range(8):
            tasks.start_soon(Tuner(warmup=0, iters=1, measure=measure).tune, job_of("a", "b", device=device))
    assert measure.most["compiling"] == slots


class Lowering(Watched):
    """One that lowers, too."""

    def __init__(self, compile_s: float = 1.0) -> None:
        super().__init__(compile_s)
        self.let_go: list[str] = []
        self.gone = threading.Event()

    async def lower(self, trial):
        await self._step("lowering")

        def release() -> None:
            self.let_go.append(trial.cfg)
            self.gone.set()

        return Lowered(None, partial(self.compile, trial), release)


@pytest.mark.anyio
@pytest.mark.parametrize("tunes", [1, 2])
async def test_one_candidate_is_lowered_at_a_time(tunes, monkeypatch):
    """Lowering holds the interpreter: whoever's tunes they are and however many may compile at once, one lowers."""
    monkeypatch.setattr("os.cpu_count", lambda: 16)  # seven compile slots
    measure = Lowering(compile_s=2.5)
    async with anyio.create_task_group() as tasks:
        for device in range(tunes):
            job = job_of("a", "b", "c", "d", device=device)
            tasks.start_soon(Tuner(warmup=0, iters=1, measure=measure).tune, job)
    assert measure.most["lowering"] == 1
    assert measure.most["compiling"] > 1, "compiling does not wait for it"


@pytest.fixture(params=[True, False], ids=["quiet", "in use"])
def is_quiet(request, monkeypatch):
    """Two cores, and a loop that nobody else uses, or somebody does."""
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("asel.readying.loop_traffic", lambda: FixedTraffic(request.param))
    return request.param


class FixedTraffic(LoopTraffic):
    """In virtual time the real one has nothing to learn from."""

    is_quiet = False

    def __init__(self, is_quiet: bool) -> None:
        super().__init__()
        self.is_quiet = is_quiet


@pytest.mark.anyio
async def test_the_next_candidate_is_lowered_while_one_is_compiled_if_nobody_else_uses_the_loop(is_quiet):
    """Lowering holds the interpreter, which a loop that serves others needs; a core is idle meanwhile if none does."""
    measure, start = Lowering(compile_s=2.0), anyio.current_time()
    report = await Tuner(0, 1, measure=measure, strategy="exhaustive").tune(job_of("a", "b", "c", "d"))
    assert (measure.most["lowering"], measure.most["compiling"]) == (1, 1)
    lowering_s = 1.0 if is_quiet else 4.0  # what of it is waited for
    assert anyio.current_time() - start == lowering_s + 4 * 2.0 + 4 * 1.0
    assert [outcome.compile_s for outcome in report.outcomes] == [3.0] * 4, "waiting for a slot is no compiling"


@pytest.mark.anyio
async def test_a_candidate_that_waits_for_its_slot_has_not_begun(is_quiet):
    """What is told of it starts when it is lowered: until then it may still be skipped, or go to nobody."""
    sink = RecordingSink()
    await Tuner(0, 1, measure=Lowering(compile_s=2.0)).tune(job_of("a", "b", "c", emit=sink.emit))
    started = [event.start for event in sink.named("candidate_start")]
    assert [start - started[0] for start in started] == ([0.0, 0.0, 3.0] if is_quiet else [0.0, 3.0, 6.0])


@pytest.mark.anyio
async def test_a_measure_that_takes_turns_lowers_and_compiles_in_one(is_quiet):
    """A worker process does one thing at a time: a second one would have to be started to lower in."""

    class Desks(Lowering):
        @asynccontextmanager
        async def turn(self, charge):
            self._now.update(["turn"])
            self.most["turn"] = max(self.most["turn"], self._now["turn"])
            yield self
            self._now.subtract(["turn"])

    measure = Desks()
    async with anyio.create_task_group() as tasks:
        for device in range(3):
            job = job_of("a", "b", "c", device=device)
            tasks.start_soon(Tuner(0, 1, measure=measure, strategy="exhaustive").tune, job)
    assert measure.most["turn"] == 1


@pytest.mark.anyio
async def test_what_was_lowered_ahead_is_not_compiled_past_the_budget(is_quiet):
    """The budget is honoured within one compile: a candidate that waited for the slot until it was spent is skipped."""
    measure = Lowering(compile_s=5.0)
    tuner = Tuner(0, 1, measure=measure, strategy="exhaustive")
    report = await tuner.tune(job := job_of("a", "b", "c", tune_budget_s=7.0))  # of which 5.25 s are for compiling
    late = "the tune's budget of 7 s left no time to compile it"
    assert report.outcomes[1:] == (Skipped("b", late), Skipped("c", late))
    assert job.spent_s == 1.0 + 5.0 + 1.0
    if is_quiet:
        assert measure.gone.wait(5)  # it is let go of in a thread, in real time
    assert measure.let_go == (["b"] if is_quiet else [])


@pytest.mark.anyio
async def test_one_candidate_is_tried_though_lowering_it_took_the_whole_budget(is_quiet):
    """There is no answer otherwise."""
    report = await Tuner(0, 1, measure=Lowering()).tune(job_of("a", "b", tune_budget_s=0.5))
    assert kinds(report.outcomes) == [Measured, Skipped]


@pytest.mark.anyio
async def test_one_candidate_is_tried_though_the_budget_went_into_lowering_while_another_had_the_slot(is_quiet):
    """That others were lowered is no answer either."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(Tuner(0, 1, measure=Lowering(compile_s=20.0)).tune, job_of("hog", device=H100))
        await anyio.sleep(1.5)  # virtual: by now the slot is taken
        report = await Tuner(0, 1, measure=Lowering()).tune(job_of("a", "b", "c", tune_budget_s=1.5))
    assert kinds(report.outcomes) == [Measured, Skipped, Skipped]


@pytest.mark.anyio
async def test_nothing_more_is_lowered_past_the_budget_while_the_first_waits_for_its_slot(is_quiet):
    """Though nothing is compiled yet: the one that waits will be."""
    modest = Lowering()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(Tuner(0, 1, measure=Lowering(compile_s=20.0)).tune, job_of("hog", device=H100))
        await anyio.sleep(1.5)  # virtual: by now the slot is taken
        job = job_of(*"abcdefgh", tune_budget_s=3.0)
        await Tuner(0, 1, measure=modest).tune(job)
    assert job.spent_s < 6.0, "three were lowered, one compiled and sampled"


@pytest.mark.anyio
@pytest.mark.parametrize("after_s", [0.5, 1.5, 2.5, 3.5, 4.5, 5.5])
async def test_cancelled_at_any_step_a_job_can_be_taken_up_again(after_s, is_quiet):
    """What was not compiled is not begun; and what was lowered ahead is let go of, and lowered again."""
    measure, job = Lowering(compile_s=2.0), job_of("a", "b", "c")
    with anyio.move_on_after(after_s):
        await Tuner(0, 1, measure=measure).tune(job)
    assert not job.outcomes
    report = await Tuner(0, 1, measure=measure).tune(job)
    assert kinds(report.outcomes) == [Measured] * 3
    waited = {2.5: ["b"], 4.5: ["c"]}.get(after_s, []) if is_quiet else []
    assert measure.gone.wait(5 if waited else 0) is bool(waited)  # it is let go of in a thread, in real time
    assert measure.let_go == waited


@pytest.mark.anyio
async def test_a_job_whose_budget_went_before_anything_was_compiled_still_tries_one(is_quiet):
    """Whoever takes it up has no answer otherwise."""
    job = job_of("a", "b", tune_budget_s=1.5)
    with anyio.move_on_after(2.5):
        await Tuner(0, 1, measure=Lowering(compile_s=100.0)).tune(job)
    report = await Tuner(0, 1, measure=Lowering()).tune(job)
    assert kinds(report.outcomes) == [Measured, Skipped]


@pytest.mark.anyio
async def test_a_program_that_was_lowered_and_skipped_is_nobodys_first(is_quiet):
    """The next group may have an equal one, and time to compile it."""

    class Equals(Lowering):
        async def lower(self, trial):
            lowered = await super().lower(trial)
            return replace(lowered, fingerprint="a" if trial.cfg == "a" else "equal")

        async def compile(self, trial):
            sample = await super().compile(trial)
            if trial.cfg == "a":
                raise ValueError("no")
            return sample

    job = job_of("a", "b", "c", groups=((1, 0), (1, 0), (0, 0)), tune_budget_s=9.0)
    report = await Tuner(0, 1, measure=Equals(compile_s=6.0)).tune(job)
    assert kinds(report.outcomes) == [Failed, Skipped, Measured]


@pytest.mark.anyio
async def test_a_tune_that_is_ready_does_not_wait_for_other_tunes_slots(is_quiet):
    """Its last candidate is compiled; that others still queue for theirs is not its business."""
    ready_s = {}

    async def tune(name: str, count: int) -> None:
        job = job_of(*range(count), device=name)
        await Tuner(0, 1, measure=Lowering(compile_s=10.0), strategy="exhaustive").tune(job)
        ready_s[name] = anyio.current_time() - max(
            end for (_, step), (_, end) in job.steps.items() if step == "compile"
        )

    async with anyio.create_task_group() as tasks:
        for name, count in {"first": 2, "second": 4, "third": 4, "fourth": 4}.items():
            tasks.start_soon(tune, name, count)
    assert ready_s == {"first": 2.0, "second": 4.0, "third": 4.0, "fourth": 4.0}, "a second for each sample"


# ---------------------------------------------------------------------------------------------
# Telling.


@pytest.mark.anyio
async def test_candidate_events_come_in_order():
    """Candidates are compiled one after the other, and told as measured once they are known to be done."""
    bench = Bench(script={"compile_errors": {Blocks(2): LookupError("no")}, "compile_s": 1.0})
    async with bench.chain:
        start = anyio.current_time()
        await bench.chain.choose(call(), Toy())
    told = [event for event in bench.sink.events if event.name.startswith("candidate_")]
    assert [(event.name, event.index, event.cfg) for event in told] == [
        ("candidate_start", 0, Blocks(1)),
        ("candidate_start", 1, Blocks(2)),
        ("candidate_failed", 1, Blocks(2)),
        ("candidate_start", 2, Blocks(3)),
        ("candidate_measured", 0, Blocks(1)),
        ("candidate_measured", 2, Blocks(3)),
    ]
    [tune_id] = {event.tune_id for event in told}
    [begun], [ended] = bench.sink.named("autotune_start"), bench.sink.named("autotune_finish")
    assert begun.tune_id == ended.tune_id == tune_id
    assert {event.key for event in told} == {begun.key}
    # Compiling takes one second each; then come a warm-up and a sample of 0.3 seconds, and the same of 0.1.
    assert [event.end - start for event in told] == pytest.approx([0, 1, 2, 2, 3.6, 3.8])
    assert [event.start - start for event in told] == pytest.approx([0, 1, 1, 2, 0, 2])
    first = told[4]
    assert (first.median_s, first.compile_s, first.samples) == (pytest.approx(0.3), pytest.approx(1.0), 1)
    assert (ended.measured, ended.failed, ended.skipped) == (2, 1, 0)


@pytest.mark.anyio
async def test_a_chains_report_has_every_outcome():
    """What the tuner found reaches the caller whole: winner, incumbent, and the failure beside the measurements."""
    bench = Bench(script={"compile_errors": {Blocks(2): LookupError("no")}}, allow={"tune_budget_s": 45.0})
    async with bench.chain as chain:
        selection = await chain.select(call(), Toy())
    report = selection.report
    assert (selection.tier, selection.cfg, report.winner) == ("autotune", BEST, BEST)
    assert (report.key, report.checksum) == (selection.key, selection.checksum)
    assert kinds(report.outcomes) == [Measured, Failed, Measured]
    assert (report.incumbent, report.tune_budget_s) == (GUESS, 45.0)


@pytest.mark.anyio
async def test_a_chains_waiters_get_the_tuning_error_with_its_outcomes():
    """Where heuristics are not allowed, all who wait for a tune in which everything failed get its error."""
    bench = Bench(script={"run_errors": lambda cfg: LookupError(f"no {cfg}")}, allow={"allow_heuristics": False})
    caught = []

    async def wait() -> None:
        with pytest.raises(TuningError) as raised:
            await bench.chain.choose(call(), NoHeuristic())
        caught.append(raised.value)

    async with bench.chain, anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        tasks.start_soon(wait)
    assert bench.tunes == 1
    assert [kinds(error.outcomes) for error in caught] == [[Failed] * 3] * 2
    assert caught[0] is not caught[1]
    assert all(isinstance(error.__cause__.__cause__, ExceptionGroup) for error in caught)


# ---------------------------------------------------------------------------------------------
# Tuners that only have `autotune`.


class AsyncOnly:
    """Somebody's own tuner, async."""

    def __init__(self, found=BEST, takes_s: float = 1.0) -> None:
        self._found, self._takes_s = found, takes_s
        self.asked = []
        self.at_once = self.most_at_once = 0

    async def autotune(self, make_fn, args, kwargs, candidates):
        self.asked.append((args, kwargs, tuple(candidates), [make_fn(cfg)(*args, **kwargs) for cfg in candidates]))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await anyio.sleep(self._takes_s)
        self.at_once -= 1
        if isinstance(self._found, Exception):
            raise self._found
        return self._found


class SyncOnly:
    """Somebody's own tuner, blocking, as ejKernel's is."""

    def __init__(self, found=BEST) -> None:
        self._found = found
        self.asked = []
        self.threads = []
        self.x64 = []

    def autotune(self, make_fn, args, kwargs, candidates):
        self.threads.append(threading.get_ident())
        self.x64.append(jax.config.jax_enable_x64)
        self.asked.append((args, kwargs, tuple(candidates), [make_fn(cfg)(*args, **kwargs) for cfg in candidates]))
        return self._found


@pytest.mark.anyio
async def test_a_tuner_with_only_an_async_autotune_will_do():
    """A chain takes any object with ejKernel's `autotune`: it is given the call, and what it names is the answer."""
    tuner, inv = AsyncOnly(), call()
    bench = Bench(tuner=tuner)
    async with bench.chain as chain:
        selection = await chain.select(inv, Toy())
        again = await chain.select(inv, Toy())
    assert (selection.cfg, selection.tier, again.cfg, again.tier) == (BEST, "autotune", BEST, "memory")
    assert tuner.asked == [(inv.args, {}, (Blocks(1), Blocks(2), Blocks(3)), [inv.args[0]] * 3)]
    report = selection.report
    assert (report.winner, report.outcomes, report.seconds) == (BEST, (), pytest.approx(1.0))
    assert (report.key, report.checksum) == (selection.key, selection.checksum)


def test_a_tuner_with_only_a_blocking_autotune_works_in_a_thread(real_backend):
    """A blocking `autotune` does not hold up the event loop."""
    tuner, inv = SyncOnly(), call()

    async def main():
        async with Bench(tuner=tuner).chain as chain:
            selection = await chain.select(inv, Toy())
        assert (selection.cfg, selection.tier) == (BEST, "autotune")
        assert tuner.asked == [(inv.args, {}, (Blocks(1), Blocks(2), Blocks(3)), [inv.args[0]] * 3)]
        assert tuner.threads != [threading.get_ident()]

    anyio.run(main, backend=real_backend)


def test_a_blocking_autotune_runs_with_the_callers_jax_settings(real_backend):
    """JAX's settings are per thread, so the thread a blocking tuner works in gets the caller's."""
    tuner = SyncOnly()

    async def main():
        async with Bench(tuner=tuner).chain as chain:
            with jax.enable_x64(True):
                await chain.choose(call(), Toy())

    anyio.run(main, backend=real_backend)
    assert tuner.x64 == [True]


@pytest.mark.anyio
async def test_a_tuner_with_only_autotune_is_alone_on_its_device():
    """Whatever measures, measures alone: the lane is held for tuners that do not know of lanes."""
    tuner = AsyncOnly()
    async with Bench(tuner=tuner).chain as chain, anyio.create_task_group() as tasks:
        tasks.start_soon(chain.choose, call(8), Toy())
        tasks.start_soon(chain.choose, call(16), Toy())
    assert len(tuner.asked) == 2
    assert tuner.most_at_once == 1


@pytest.mark.anyio
async def test_a_tuner_with_only_autotune_ends_with_the_budget():
    """A pending tune always ends, whoever measures: after `tune_budget_s` it has failed and the heuristic answers."""
    bench = Bench(tuner=AsyncOnly(takes_s=math.inf), allow={"tune_budget_s": 20.0})
    async with bench.chain as chain:
        with anyio.fail_after(1000):
            selection = await chain.select(call(), Toy())
    assert (selection.cfg, selection.tier) == (GUESS, "heuristics")


@pytest.mark.anyio
@pytest.mark.parametrize("found", [None, LookupError("no such tile")])
async def test_a_tuner_that_finds_nothing_has_failed(found):
    """No answer from somebody's own tuner, or an error, is a failed tune: the heuristic answers and says why."""
    bench = Bench(tuner=AsyncOnly(found))
    async with bench.chain as chain:
        selection = await chain.select(call(), Toy())
    assert (selection.cfg, selection.tier) == (GUESS, "heuristics")
    assert ("no such tile" if found else "found no config") in selection.declined["autotune"]
    assert "autotune_failed" in bench.sink.names


def test_a_tuner_is_taken_for_what_it_can_do():
    """What has `tune` is used as it is, and what can neither `tune` nor `autotune` is refused with its name."""
    tuner = Tuner()
    assert as_tuner(tuner) is tuner
    with pytest.raises(InvalidRequestError, match=r"tuner=42 .* pass a Tuner"):
        ConfigSelectorChain(ConfigCache(), AutotunePolicy(), tuner=42)


# ---------------------------------------------------------------------------------------------
# The contract of a measure: what the tuner relies on, whoever does the timing. In real time, with real threads.


class ScriptedRig:
    """The scripted measure, told how each candidate behaves."""

    def __init__(self) -> None:
        self.measure = ScriptedMeasure(
            0.0,
            compile_s=lambda cfg: math.inf if cfg == "slow compile" else 0.0,
            compile_errors={"bad compile": LookupError("no such tile")},
            run_errors={"bad run": LookupError("no such tile")},
            hangs={"slow run"},
        )

    def trial(self, cfg: str) -> Trial:
        return Trial(cfg, print, (), {})

    def close(self) -> None:
        pass


class JaxRig:
    """The JAX measure, with candidates that behave that way."""

    def __init__(self) -> None:
        self.measure = JaxMeasure()
        self._gate = threading.Event()

    def trial(self, cfg: str) -> Trial:
        return Trial(cfg, partial(self._run, cfg), (jnp.ones(3),), {})

    def _run(self, cfg: str, x):
        if cfg == "bad compile":
            raise LookupError("no such tile")
        if cfg == "slow compile":
            assert self._gate.wait(10)
        if cfg.endswith("run"):
            return jax.pure_callback(partial(self._called, cfg), x, x)
        return x + 1

    def _called(self, cfg: str, x):
        if cfg == "bad run":
            raise LookupError("no such tile")
        assert self._gate.wait(10)
        return x

    def close(self) -> None:
        self._gate.set()


@pytest.fixture(params=[ScriptedRig, JaxRig])
def rig(request):
    rig = request.param()
    yield rig
    rig.close()


def test_contract_a_sampler_returns_seconds_each_time_it_is_called(rig, real_backend):
    """Compiling gives a function that may be called again and again, each time for one duration."""

    async def main():
        sample = await rig.measure.compile(rig.trial("good"))
        return [await sample() for _ in range(3)]

    samples = anyio.run(main, backend=real_backend)
    assert all(isinstance(seconds, float) and 0 <= seconds < math.inf for seconds in samples)


def test_contract_what_a_candidate_raises_is_raised_at_its_stage(rig, real_backend):
    """What cannot be compiled raises from `compile`; what cannot run compiles, and raises from its sampler."""

    async def main():
        with pytest.raises(LookupError, match="no such tile"):
            await rig.measure.compile(rig.trial("bad compile"))
        sample = await rig.measure.compile(rig.trial("bad run"))
        with pytest.raises(Exception, match="no such tile"):
            await sample()

    anyio.run(main, backend=real_backend)


@pytest.mark.parametrize("stage", ["compile", "run"])
def test_contract_every_step_can_be_cancelled(rig, stage, real_backend):
    """Cancelling a step returns at once, however long the candidate would take."""

    async def main():
        step = partial(rig.measure.compile, rig.trial(f"slow {stage}"))
        if stage == "run":
            step = await step()
        with anyio.move_on_after(0) as scope:
            await step()
        return scope.cancelled_caught

    assert anyio.run(main, backend=real_backend)


def test_contract_a_tuner_finds_the_same_with_either(rig, real_backend):
    """Whichever measure a tuner has, the same behaviour becomes the same kind of outcome."""

    async def main():
        cfgs = ("good", "bad compile", "bad run")
        job = replace(job_of(*cfgs), make_fn=lambda cfg: rig.trial(cfg).fn, args=rig.trial("good").args)
        return await Tuner(warmup=0, iters=1, measure=rig.measure).tune(job)

    report = anyio.run(main, backend=real_backend)
    assert report.winner == "good"
    assert kinds(report.outcomes) == [Measured, Failed, Failed]
    assert [failed.stage for failed in report.outcomes[1:]] == ["compile", "measure"]


@pytest.mark.anyio
async def test_where_the_budget_ends_in_a_warm_up_no_worse_way_wins():
    """What ran in the best way answers with its warm-up, and nothing is run in the next way any more."""

    class Ways:
        async def compile(self, trial):
            how, seconds = trial.cfg

            async def sample():
                await anyio.sleep(seconds)
                return seconds

            sample.how = how
            return sample

    job = job_of(("forward", 2.0), ("eager", 5.0), incumbent=0, tune_budget_s=1.0)
    report = await Tuner(measure=Ways()).tune(job)
    assert report.winner == ("forward", 2.0)
    assert kinds(report.outcomes) == [Measured, Skipped]
    assert report.seconds == pytest.approx(2.0)


def test_the_default_device_may_be_a_platforms_name(real_backend):
    """`jax.default_device("cpu")` is as good as its first device."""

    async def main():
        with jax.default_device("cpu"):
            return await Tuner().measure(lambda x: x + 1, jax.ShapeDtypeStruct((8,), "float32"))

    assert anyio.run(main, backend=real_backend) > 0
