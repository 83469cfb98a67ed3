"""Groups, aliases, checks, reused timings and reports: what a tune does beside timing."""

from __future__ import annotations

import threading
from statistics import median

import anyio
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels import BEST, GUESS, Bench, Blocks, Toy, call

from asel import Failed, Invocation, Measured, Skipped, Tuner, TuneReport, TuningError, kernel
from asel.checks import OutputCheck
from asel.jobs import TuneJob
from asel.keys import CacheKey
from asel.measure import Lowered
from asel.reporting import timings_in
from asel.testing import ScriptedMeasure

# ---------------------------------------------------------------------------------------------
# Groups.


class Grouped(Toy):
    candidates = tuple(map(Blocks, range(1, 7)))
    ranks = {1: (0, 0), 2: (2, 0), 3: (2, 1), 4: (1, 0), 5: (-1, 0), 6: (1, -1)}

    def candidate_priority(self, cfg, inv):
        return self.ranks[cfg.m]


@pytest.mark.anyio
async def test_higher_groups_go_first_and_a_success_ends_it():
    """Only the highest group and the incumbent are tried; the rest are Skipped, and say why."""
    bench = Bench(costs=lambda cfg: 1.0)
    async with bench.chain as chain:
        report = (await chain.select(call(), Grouped())).report
    assert [cfg.m for cfg in bench.measure.compiled] == [1, 3, 2]  # the incumbent, then by priority
    reasons = {o.cfg.m: o.reason for o in report.outcomes if isinstance(o, Skipped)}
    assert reasons == {
        4: "a group of higher priority had a success",
        5: "the kernel gives it a negative priority",
        6: "the kernel gives it a negative priority",
    }


@pytest.mark.anyio
async def test_a_group_that_fails_gives_way_to_the_next():
    """Where nothing of a group can be measured, the group below has its turn; the incumbent alone is no success."""
    bench = Bench(
        costs=lambda cfg: 1 / cfg.m, script={"compile_errors": lambda cfg: ValueError() if cfg.m in (2, 3) else None}
    )
    async with bench.chain as chain:
        assert await chain.choose(call(), Grouped()) == Blocks(4)
    assert [cfg.m for cfg in bench.measure.compiled] == [1, 3, 2, 4]


@pytest.mark.anyio
async def test_a_priority_alone_orders_one_group():
    """A plain number is a priority: all that is not negative is tried."""

    class Ordered(Toy):
        def candidate_priority(self, cfg, inv):
            return cfg.m if cfg.m != 2 else -1

    bench = Bench()
    async with bench.chain as chain:
        assert await chain.choose(call(), Ordered()) == BEST
    assert [cfg.m for cfg in bench.measure.compiled] == [1, 3]


@pytest.mark.anyio
@pytest.mark.parametrize("wrong", [None, "high", (), (1, 2, 3), (1, "high"), ValueError("no table")])
async def test_priorities_that_cannot_be_told_make_autotune_decline(wrong):
    """Whatever a candidate_priority does is no error of the caller's; what is already known still answers."""

    class Unsure(Toy):
        def candidate_priority(self, cfg, inv):
            if isinstance(wrong, Exception):
                raise wrong
            return wrong

    bench = Bench()
    async with bench.chain as chain:
        selection = await chain.select(call(), Unsure())
        assert selection.tier == "heuristics"
        assert "candidate_priority raised" in selection.declined["autotune"]
        assert await chain.choose(call(), Toy()) == BEST
        assert (await chain.select(call(), Unsure())).tier == "memory"


@pytest.mark.anyio
@pytest.mark.parametrize(("added", "compiled"), [((4,), [1]), ((3, 4), [1, 3])])
async def test_a_success_of_then_ends_it_as_one_of_today_does(added, compiled):
    """A group below one of which an earlier tune measured a candidate is not tried; new ones beside that are."""

    class Few(Grouped):
        candidates = (Blocks(1), Blocks(2))

    class More(Grouped):
        candidates = (*Few.candidates, *map(Blocks, added))

    bench = Bench(costs=lambda cfg: {1: 0.3, 2: 0.2, 3: 0.1, 4: 0.01}[cfg.m])
    async with bench.chain as chain:
        await chain.choose(call(), Few())
        bench.measure.compiled.clear()
        report = (await chain.select(call(), More())).report
    assert [cfg.m for cfg in bench.measure.compiled] == compiled
    assert report.outcomes[-1] == Skipped(Blocks(4), "a group of higher priority had a success")
    assert report.winner == (Blocks(3) if 3 in added else Blocks(2))


# ---------------------------------------------------------------------------------------------
# Aliases.


class Aliasing(ScriptedMeasure):
    """A measure that lowers: configs of the same parity have the same program."""

    async def lower(self, trial):
        return Lowered(str(trial.cfg.m % 2), lambda: self.compile(trial))


@pytest.mark.anyio
async def test_equal_programs_are_compiled_and_timed_once():
    """The alias gets the samples of the program it shares, and the report names it."""
    measure = Aliasing(lambda cfg: 0.1 * cfg.m)
    bench = Bench(tuner=Tuner(1, 1, measure=measure))
    async with bench.chain as chain:
        report = (await chain.select(call(), Toy())).report
    assert [cfg.m for cfg in measure.compiled] == [1, 2]
    first, _, alias = report.outcomes
    assert alias == Measured(Blocks(3), first.median_s, first.samples_s, 0.0, alias_of=Blocks(1))
    assert "same program as Blocks(m=1, n=1)" in str(report)


@pytest.mark.anyio
async def test_an_alias_is_told_to_its_end():
    """A candidate that was begun and is not compiled has a closing event, which names whose program it has."""
    bench = Bench(tuner=Tuner(1, 1, measure=Aliasing(0.1, compile_s=1.0)))
    async with bench.chain as chain:
        await chain.choose(call(), Toy())
    told = [event for event in bench.sink.events if event.name.startswith("candidate_") and event.index == 2]
    assert [event.name for event in told] == ["candidate_start", "candidate_skipped"]
    assert told[1].reason == "its program is that of Blocks(m=1, n=1)"
    assert told[0].start == told[1].start == pytest.approx(bench.sink.named("autotune_start")[0].start + 2.0)


@pytest.mark.anyio
async def test_an_alias_of_one_that_is_out_is_out_too():
    """It ran as long as the program it shares, so it comes no sooner among those that could take the winner's place."""

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
    assert [o.eliminated for o in report.outcomes] == [None, None, 1, 1, 1, 1]
    assert [cfg.m for cfg in report.runners_up([Blocks(1)])] == [2, 3, 7, 4, 8]


def test_programs_of_one_text_are_one_program(real_backend):
    """With JAX: two configs that lower to the same module are found out before they are compiled."""

    @kernel(op_id="alias", configs=["a", "b", "c"], heuristic="a")
    def add(x, *, cfg):
        return x + (2.0 if cfg == "c" else 1.0)

    async def main():
        async with Bench(tuner=Tuner(1, 1, strategy="exhaustive")).chain as chain:
            return (await chain.select(Invocation("alias", (jnp.ones(8),), {}), add)).report

    report = anyio.run(main, backend=real_backend)
    assert [o.alias_of for o in report.outcomes] == [None, "a", None]


class TwoGroups(Toy):
    """Odd configs first, which are the incumbent's program to `Aliasing`, or else even ones."""

    candidates = tuple(map(Blocks, range(1, 6)))

    def candidate_priority(self, cfg, inv):
        return (cfg.m % 2, 0)


@pytest.mark.anyio
async def test_an_alias_of_what_works_is_a_success():
    """A group whose only program is the incumbent's has had its success, and the group below is not tried."""
    measure = Aliasing()
    async with Bench(tuner=Tuner(1, 1, measure=measure)).chain as chain:
        report = (await chain.select(call(), TwoGroups())).report
    assert [cfg.m for cfg in measure.compiled] == [1]
    assert [type(o) for o in report.outcomes] == [Measured, Skipped, Measured, Skipped, Measured]


@pytest.mark.anyio
async def test_a_program_that_failed_in_one_group_is_not_compiled_in_the_next():
    """Equal programs are one, whichever groups they are in."""

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


# ---------------------------------------------------------------------------------------------
# Checks.


@kernel(op_id="sum", configs=["right", "wrong", "shape", "raises"], heuristic="right")
def total(x, *, cfg):
    match cfg:
        case "wrong":
            return x.sum(keepdims=True)[:0].sum() + 3.5
        case "shape":
            return x.sum(keepdims=True)
        case "raises":
            raise ValueError("no")
    return x.sum()


def tune_total(backend, check):
    async def main():
        async with Bench(tuner=Tuner(1, 1, check=check, strategy="exhaustive")).chain as chain:
            return (await chain.select(Invocation("sum", (jnp.arange(8.0),), {}), total)).report

    return anyio.run(main, backend=backend)


def test_a_candidate_that_computes_something_else_cannot_win(real_backend):
    """A wrong one is a Failed outcome with the largest difference (ejKernel's defect 13)."""
    report = tune_total(real_backend, True)
    assert report.winner == "right"
    assert report.outcomes[1] == Failed("wrong", "check", "OutputMismatch", "output 0 differs by up to 24.5")
    assert report.outcomes[2].message == "output 0 has shape (1,) in the place of ()"
    assert report.outcomes[3].stage == "compile"


@pytest.mark.parametrize(
    ("check", "failed"),
    [
        (OutputCheck(rtol=10.0), {"shape"}),
        (lambda expected, actual: True, set()),
        (lambda expected, actual: np.allclose(expected[0], actual[0]), {"wrong"}),
        (lambda expected, actual: "not today", {"wrong", "shape"}),
        (None, set()),
    ],
)
def test_the_check_is_the_users_own(real_backend, check, failed):
    """Tolerances, or any function of both outputs that says yes, no, or what is wrong."""
    outcomes = tune_total(real_backend, check).outcomes
    assert {o.cfg for o in outcomes if isinstance(o, Failed) and o.stage == "check"} == failed


def array(*values):
    return np.array(values)


@pytest.mark.parametrize(
    ("expected", "actual", "wrong"),
    [
        ([array(1.0, 1.0), array(0.0, 0.0)], [array(1.5, 1.0), array(0.25, 3.0)], "output 1 differs by up to 3"),
        ([array(0.0, 0.0), array(1.0, 1.0)], [array(0.25, 3.0), array(1.5, 1.0)], "output 0 differs by up to 3"),
        ([array(1.0), array(1.0)], [array(1.0), array(np.nan)], "output 1 is nan where the other is not"),
        ([array(5.0), array(1.0)], [array(9.0), array(np.nan)], "output 1 is nan where the other is not"),
        (
            [array(1.0, 1.0)],
            [array(np.nan, 3.5)],
            "output 0 is nan where the other is not, and differs by up to 2.5 elsewhere",
        ),
        ([array(1 + 1j)], [array(1 - 1j)], "output 0 differs by up to 2"),
        ([array(3.0)], [array(3 + 4j)], "output 0 differs by up to 4"),
        ([array(1 + 1j)], [array(1 + 1j)], None),
        ([array(1.0)], [], "0 outputs in the place of 1"),
        ([array(1, 2)], [array(True, True)], "output 0 differs by up to 1"),
    ],
)
def test_a_check_names_the_largest_difference(expected, actual, wrong):
    """Over all outputs and all their parts, the imaginary ones included; a nan is worse than any number."""
    assert OutputCheck()(expected, actual) == wrong


@pytest.mark.parametrize(
    ("check", "off", "passes"),
    [
        (OutputCheck(rtol=0.0, atol=0.5), 0.4, True),
        (OutputCheck(rtol=0.0, atol=0.5), 0.6, False),
        (OutputCheck(rtol=0.5, atol=0.0), 4.0, True),
        (OutputCheck(rtol=0.5, atol=0.0), 6.0, False),
        (OutputCheck(rtol=0.0, atol=0.0), 1e-9, False),
    ],
)
def test_both_tolerances_are_honoured(check, off, passes):
    """What is allowed is a part of the value, and so much beside it."""
    assert (check([array(10.0)], [array(10.0 + off)]) is None) is passes


def checked_among(configs, run, *args, check=True, **allow):
    """Tune real candidates whose outputs are checked; return the outcomes."""

    async def main():
        op = kernel(op_id="checked", configs=configs, heuristic=configs[0])(run)
        async with Bench(tuner=Tuner(0, 1, check=check), allow=allow).chain as chain:
            return (await chain.select(Invocation("checked", args, {}), op)).report.outcomes

    return anyio.run(main)


def test_what_is_compared_is_what_a_forward_run_returns():
    """Whatever is timed, the outputs that are checked are the kernel's own: neither its loss nor its gradients."""
    seen = []

    def check(expected, actual):
        seen.append([output.tolist() for output in actual])
        return True

    def run(x, *, cfg):
        return {"doubled": x * cfg, "order": jnp.argsort(x)}

    outcomes = checked_among([2.0, 3.0], run, jnp.arange(2.0), check=check, validate_backward=True)
    assert [o.how for o in outcomes] == ["forward+backward"] * 2
    assert seen == [[[0.0, 3.0], [0, 1]]]


def test_random_keys_can_be_checked():
    """A PRNG key among the outputs is compared by its data."""

    def run(key, *, cfg):
        return jax.random.fold_in(key, 1 if cfg == "wrong" else 0), jnp.float32(0 if cfg == "first" else 1e-7)

    first, same, wrong = checked_among(["first", "same", "wrong"], run, jax.random.key(0))
    assert [type(first), type(same)] == [Measured, Measured]
    assert (wrong.stage, wrong.error_type) == ("check", "OutputMismatch")
    assert wrong.message.startswith("output 0 differs by up to ")


class Computing(ScriptedMeasure):
    """A scripted measure whose candidates compute something: "wrong" ones something else."""

    async def compile(self, trial):
        sample = await super().compile(trial)

        async def outputs():
            return [np.array(float("wrong" in trial.cfg))]

        sample.outputs = outputs
        return sample


def job_of(*candidates, **facts) -> TuneJob:
    return TuneJob(candidates, lambda cfg: lambda: cfg, (), {}, **facts)


def test_outputs_are_compared_off_the_loop(real_backend):
    """Large outputs take their time to compare, and the event loop is not to wait for it."""
    threads = []

    def check(expected, actual):
        threads.append(threading.current_thread())
        return True

    anyio.run(Tuner(measure=Computing(), check=check).tune, job_of("a", "b"), backend=real_backend)
    assert len(threads) == 1
    assert threading.main_thread() not in threads


def test_a_comparison_that_hangs_is_one_outcome(real_backend):
    """After the candidate's timeout it has failed its check; the others are measured, and its thread is named."""
    release = threading.Event()

    def check(expected, actual):
        return release.wait(10) if actual[0] else True

    job = job_of("a", "wrong", "c", candidate_timeout_s=0.3)
    try:
        report = anyio.run(Tuner(measure=Computing(), check=check).tune, job, backend=real_backend)
    finally:
        release.set()
    assert [type(o) for o in report.outcomes] == [Measured, Failed, Measured]
    assert (report.outcomes[1].stage, report.outcomes[1].error_type) == ("check", "TimeoutError")
    assert report.outcomes[1].message == "took longer than 0.3 s; its thread is still busy"
    assert [busy.what for busy in job.left_behind] == ["comparing the outputs of 'wrong'"]


# ---------------------------------------------------------------------------------------------
# Reused timings.


class Wider(Toy):
    candidates = (*Toy.candidates, Blocks(4))


@pytest.mark.anyio
async def test_a_new_candidate_costs_its_own_measurement_and_the_incumbents():
    """Adding one candidate reuses what the tune before it found of the others."""
    bench = Bench(costs=lambda cfg: {1: 0.3, 2: 0.2, 3: 0.1, 4: 0.15}[cfg.m] * bench.slowness)
    bench.slowness = 1.0
    async with bench.chain as chain:
        await chain.choose(call(), Toy())
        bench.slowness = 2.0  # a busier day: old timings must be read in today's terms
        bench.measure.compiled.clear()
        report = (await chain.select(call(), Wider())).report
    assert [cfg.m for cfg in bench.measure.compiled] == [1, 4]
    assert report.winner == BEST
    assert [(o.median_s, o.reused) for o in report.outcomes] == [
        (pytest.approx(0.6), False),
        (pytest.approx(0.4), True),
        (pytest.approx(0.2), True),
        (pytest.approx(0.3), False),
    ]


def earlier(**samples: tuple[float, ...]) -> dict[int, Measured]:
    """Return what a tune found; who has fewer samples than the first was out."""
    most = len(next(iter(samples.values())))
    outs = {cfg: None if len(taken) == most else len(taken) for cfg, taken in samples.items()}
    return {
        index: Measured(cfg, median(taken), taken, 1.0, eliminated=outs[cfg])
        for index, (cfg, taken) in enumerate(samples.items())
    }


@pytest.mark.anyio
async def test_who_was_out_then_is_out_today():
    """It had but the first, calm rounds, beside which the others' samples of busier ones look slow."""
    known = earlier(a=(0.3,) * 3 + (0.6,) * 9, b=(0.1,) * 3 + (0.2,) * 9, out=(0.15,) * 3)
    job = job_of("a", "b", "out", "new", incumbent=0, known=known)
    report = await Tuner(measure=ScriptedMeasure({"a": 0.3, "new": 0.2})).tune(job)
    assert [o.reused for o in report.outcomes] == [False, True, True, False]
    assert report.outcomes[2].median_s == pytest.approx(0.15), "of the incumbent's 0.3 in these rounds"
    assert (report.winner, report.outcomes[2].eliminated) == ("b", 3)


@pytest.mark.anyio
async def test_who_was_out_then_is_back_where_nobody_it_lost_to_is_left():
    """The winner of then is no candidate any more: the best of those it beat may be better than all that are new."""
    known = earlier(a=(0.3,) * 12, out=(0.1,) * 3)
    job = job_of("a", "out", "new", incumbent=0, known=known)
    report = await Tuner(measure=ScriptedMeasure({"a": 0.3, "new": 0.2})).tune(job)
    assert report.winner == "out"


@pytest.mark.anyio
async def test_who_was_out_then_is_back_where_the_others_of_today_are_slower_than_it_was():
    """That one who lasted is here, of another tune, does not mean that it was that one who beat it."""
    known = earlier(a=(0.5,) * 12, out=(0.16,) * 3, slow=(5.0,) * 12)
    job = job_of("a", "out", "slow", "new", incumbent=0, known=known)
    report = await Tuner(measure=ScriptedMeasure({"a": 0.5, "new": 0.6})).tune(job)
    assert report.winner == "out"
    assert report.outcomes[1].eliminated is None, "and so it is for the next tune"


@pytest.mark.anyio
async def test_who_lost_to_the_incumbent_stays_out():
    known = earlier(a=(0.1,) * 3 + (0.2,) * 9, out=(0.15,) * 3)
    job = job_of("a", "out", "new", incumbent=0, known=known)
    report = await Tuner(measure=ScriptedMeasure({"a": 0.1, "new": 0.2})).tune(job)
    assert report.winner == "a"
    assert report.outcomes[1].eliminated == 3


@pytest.mark.anyio
async def test_who_was_out_stays_out_however_often_timings_are_reused():
    """They are compared over the rounds that both were in; once they are in another tune's terms, as they are."""
    known = earlier(a=(0.1,) * 3 + (0.2,) * 9, out=(0.15,) * 3)
    tuner = Tuner(measure=ScriptedMeasure({"a": 0.1, "new": 0.2, "newer": 0.2}))
    report = await tuner.tune(job_of("a", "out", "new", incumbent=0, known=known))
    assert report.outcomes[1].median_s == pytest.approx(0.15), "of the incumbent's 0.1 in these rounds"
    report = await tuner.tune(job_of("a", "out", "new", "newer", incumbent=0, known=dict(enumerate(report.outcomes))))
    assert (report.winner, report.outcomes[1].eliminated) == ("a", 3)
    assert report.outcomes[1].median_s == pytest.approx(0.15)


@pytest.mark.anyio
async def test_who_is_barred_today_keeps_nobody_out():
    """The one that others lost to then may not win today: what its kernel gives a negative priority is not tried."""
    known = earlier(a=(0.3,) * 12, barred=(0.05,) * 12, out=(0.15,) * 3)
    groups = ((0, 0), (-1, 0), (0, 0), (0, 0))
    job = job_of("a", "barred", "out", "new", incumbent=0, known=known, groups=groups)
    report = await Tuner(measure=ScriptedMeasure({"a": 0.3, "new": 0.29})).tune(job)
    assert report.winner == "out"


@pytest.mark.anyio
@pytest.mark.parametrize("then", [(0.0,) * 12, (0.0,) * 3 + (0.1,) * 9])
async def test_an_incumbent_that_the_timer_did_not_see_then_is_no_yardstick(then):
    """All are measured anew where nothing was seen of it; where it was in some rounds only, those tell."""
    known = earlier(a=then, b=(0.2,) * 12, out=(0.3,) * 3)
    job = job_of("a", "b", "out", "new", incumbent=0, known=known)
    report = await Tuner(measure=ScriptedMeasure({"a": 0.1, "b": 0.05, "out": 0.3, "new": 0.4})).tune(job)
    seen = any(then)
    assert [o.reused for o in report.outcomes] == [False, seen, seen, False]
    assert report.winner == ("a" if seen else "b")


def test_a_timing_without_samples_is_none():
    """A record that was written by hand, or by another program, is no reason for a tune to fail."""
    report = TuneReport(CacheKey("d", "op", "key"), "a", (Measured("a", 0.1, (), 1.0),), 1.0, {})
    assert timings_in([report], ["a"], "forward", {}) == {}


@pytest.mark.anyio
@pytest.mark.parametrize("stage", ["compile", "run"])
async def test_without_the_incumbent_old_timings_are_taken_anew(stage):
    """What was measured earlier is read in the incumbent's terms; where it fails now, all are measured again."""
    broken = set()
    errors = {f"{stage}_errors": lambda cfg: ValueError("no") if cfg in broken else None}
    bench = Bench(costs=lambda cfg: {1: 0.3, 2: 0.2, 3: 0.1, 4: 0.15}[cfg.m], script=errors)
    async with bench.chain as chain:
        assert await chain.choose(call(), Toy()) == BEST
        broken.add(GUESS)
        bench.measure.compiled.clear()
        report = (await chain.select(call(), Wider())).report
    assert [cfg.m for cfg in bench.measure.compiled] == [1, 4, 2, 3]
    assert [type(o) for o in report.outcomes] == [Failed, Measured, Measured, Measured]
    assert not any(o.reused for o in report.outcomes[1:])
    assert report.winner == BEST


@pytest.mark.anyio
async def test_old_timings_of_another_way_are_reported_and_cannot_win():
    """Where the new candidate is timed in a better way than the incumbent, it has nobody to be held against."""

    class Better(ScriptedMeasure):
        async def compile(self, trial):
            sample = await super().compile(trial)
            sample.how = "forward+backward" if trial.cfg.m == 4 else "forward"
            return sample

    measure = Better(lambda cfg: {1: 0.3, 2: 0.2, 3: 0.1, 4: 0.5}[cfg.m])
    bench = Bench(tuner=Tuner(measure=measure), allow={"validate_backward": True})
    async with bench.chain as chain:
        assert await chain.choose(call(), Toy()) == BEST
        report = (await chain.select(call(), Wider())).report
    assert report.winner == Blocks(4)
    assert [o.reused for o in report.outcomes] == [False, True, True, False]


@pytest.mark.anyio
async def test_old_timings_of_another_way_than_the_incumbents_are_taken_anew():
    """What was timed forward is nothing to hold against an incumbent that was timed both ways: it is compiled again."""
    measure = Mixed(lambda cfg: {1: 0.3, 2: 0.2, 3: 0.01, 4: 0.25}[cfg.m])
    bench = Bench(tuner=Tuner(measure=measure), allow={"validate_backward": True})
    async with bench.chain as chain:
        assert await chain.choose(call(), Toy()) == Blocks(2)
        measure.compiled.clear()
        report = (await chain.select(call(), Wider())).report
    assert [cfg.m for cfg in measure.compiled] == [1, 3, 4]
    assert [o.reused for o in report.outcomes] == [False, True, False, False]
    assert report.winner == Blocks(2)


@pytest.mark.parametrize(
    ("objective", "software", "found"),
    [
        ("forward", {"jax": "1"}, [0, 2]),
        ("forward+backward", {"jax": "1"}, []),
        ("forward", {"jax": "2"}, []),
    ],
)
def test_timings_of_another_objective_are_not_reused(objective, software, found):
    """Nor are those of other software; of the same, those of the candidates that are still there."""
    outcomes = (
        Measured("a", 0.1, (0.1,), 0.0),
        Failed("b", "compile", "ValueError", "no"),
        Measured("c", 0.2, (0.2,), 0.0),
    )
    report = TuneReport(CacheKey("", "", ""), "a", outcomes, 1.0, {"jax": "1"}, objective="forward")
    timings = timings_in([report], ["c", "b", "a", "new"], objective, software)
    assert {index: timing.cfg for index, timing in timings.items()} == {i: "cba"[i] for i in found}


@pytest.mark.parametrize("check", [None, True])
def test_with_a_check_nothing_wins_by_an_old_timing(real_backend, check):
    """Nobody knows what an old winner computed, so all are compiled and checked; without a check it wins as it did."""
    known = {0: Measured("a", 0.003, (0.003,), 0.0), 1: Measured("wrong", 0.001, (0.001,), 0.0)}
    measure = Computing({"a": 0.003, "wrong": 0.001, "c": 0.002})
    job = job_of("a", "wrong", "c", incumbent=0, known=known)
    report = anyio.run(Tuner(measure=measure, check=check).tune, job, backend=real_backend)
    if check is None:
        assert (report.winner, measure.compiled) == ("wrong", ["a", "c"])
    else:
        assert (report.winner, measure.compiled) == ("c", ["a", "wrong", "c"])
        assert report.outcomes[1].error_type == "OutputMismatch"


@pytest.mark.anyio
async def test_a_retune_measures_everything_again():
    """On purpose means on purpose."""
    bench = Bench()
    async with bench.chain as chain:
        await chain.choose(call(), Toy())
        bench.measure.compiled.clear()
        await chain.retune(call(), Toy())
    assert len(bench.measure.compiled) == 3


@pytest.mark.anyio
async def test_timings_of_another_environment_are_not_reused(monkeypatch):
    """Another jaxlib may have changed what is fast."""
    bench = Bench(costs=0.1)
    async with bench.chain as chain:
        await chain.choose(call(), Toy())
        bench.measure.compiled.clear()
        monkeypatch.setattr("asel.misses.environment", lambda device: {"jax": "another"})
        await chain.choose(call(), Wider())
    assert len(bench.measure.compiled) == 4


# ---------------------------------------------------------------------------------------------
# The report.


@pytest.mark.anyio
async def test_a_report_prints_as_a_table_with_bars():
    """Fastest first, a bar each, and who won by how much."""
    bench = Bench(script={"compile_errors": {Blocks(2): ValueError("no tile")}})
    async with bench.chain as chain:
        report = (await chain.select(call(), Toy())).report
    assert str(report).splitlines() == [
        "toy@v1: Blocks(m=3, n=1) wins by 66.7% over Blocks(m=1, n=1), noise 2.0%, 0.80 s of tuning",
        "  Blocks(m=3, n=1)     100 ms  ████████                  winner",
        "  Blocks(m=1, n=1)     300 ms  ████████████████████████  incumbent",
        "  Blocks(m=2, n=1)  ValueError in compile: no tile",
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
async def test_who_was_out_and_who_was_timed_earlier_is_in_the_table_and_in_json():
    """An elimination of then and one of today read alike; only the earlier timing says that it is one."""
    costs = {1: 0.0010, 2: 0.0011, 3: 0.1, 4: 0.2, 5: 0.0012, 6: 0.3}
    bench = Bench(tuner=Tuner(measure=ScriptedMeasure(lambda cfg: costs[cfg.m])))

    class Widest(Wider):
        candidates = (*Wider.candidates, Blocks(5), Blocks(6))

    async with bench.chain as chain:
        await chain.choose(call(), Toy())
        report = (await chain.select(call(), Widest())).report
    assert [(o.eliminated, o.reused) for o in report.outcomes] == [
        (None, False),
        (None, True),
        (1, True),
        (1, False),
        (None, False),
        (1, False),
    ]
    assert TuneReport.from_json(report.to_json(), load=lambda value: Blocks(**value)) == report
    marks = {int(line.split("m=")[1][0]): line.split("\u2588")[-1].strip() for line in str(report).splitlines()[1:]}
    assert marks == {
        1: "winner, incumbent",
        2: "timed earlier",
        3: "out in round 1, timed earlier",
        4: "out in round 1",
        5: "",
        6: "out in round 1",
    }


class Lowering(ScriptedMeasure):
    """A measure that lowers for two seconds, and takes four more for a sample than it says."""

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
async def test_a_report_tells_what_compiling_and_measuring_took():
    """`compile_s` is with lowering; `measure_s` is with warm-ups, and with all that went into a sample."""
    tuner = Tuner(2, 1, measure=Lowering(1.0, compile_s=3.0), strategy="exhaustive")
    bench = Bench(tuner=tuner, allow={"candidate_timeout_s": 60.0})
    async with bench.chain as chain:
        report = (await chain.select(call(), Toy())).report
    assert [o.compile_s for o in report.outcomes] == pytest.approx([5.0] * 3)
    assert [o.measure_s for o in report.outcomes] == pytest.approx([15.0] * 3)
    assert [o.samples_s for o in report.outcomes] == [(1.0,)] * 3


@pytest.mark.anyio
async def test_the_headline_says_where_the_incumbent_was_not_measured():
    """There is no margin over what failed."""
    bench = Bench(script={"run_errors": {GUESS: ValueError("no tile")}})
    async with bench.chain as chain:
        report = (await chain.select(call(), Toy())).report
    [headline, *_] = str(report).splitlines()
    assert headline.startswith("toy@v1: Blocks(m=3, n=1) wins over Blocks(m=1, n=1), which was not measured, ")
    assert report.margin == 0


class Mixed(ScriptedMeasure):
    """A measure that times the third candidate forward and all others both ways."""

    async def compile(self, trial):
        sample = await super().compile(trial)
        sample.how = "forward" if trial.cfg.m == 3 else "forward+backward"
        return sample


async def tune_mixed(costs, kernel_=None, **script):
    measure = Mixed(costs, **script)
    bench = Bench(tuner=Tuner(measure=measure), allow={"validate_backward": True})
    async with bench.chain as chain:
        return (await chain.select(call(), kernel_ or Toy())).report, measure


@pytest.mark.anyio
async def test_candidates_timed_in_different_ways_are_not_ranked_as_equals():
    """A fast time that leaves out the backward pass does not beat a slower one that has it."""
    report, _ = await tune_mixed({Blocks(1): 0.3, Blocks(2): 0.2, Blocks(3): 0.01})
    assert report.winner == Blocks(2)
    assert [o.how for o in report.outcomes] == ["forward+backward", "forward+backward", "forward"]
    assert "timed forward, so not ranked" in str(report)


@pytest.mark.anyio
async def test_candidates_timed_in_different_ways_do_not_race_each_other():
    """One that leaves out the backward pass drives nobody out; its time is taken once, for the report."""
    costs = {1: 0.30, 2: 0.26, 3: 0.01, 4: 0.27}
    report, measure = await tune_mixed(lambda cfg: costs[cfg.m], Wider())
    assert report.winner == Blocks(2)
    assert [len(o.samples_s) for o in report.outcomes] == [3, 3, 1, 3]
    assert [o.eliminated for o in report.outcomes] == [None] * 4
    assert measure.sampled[-2:] == [Blocks(3)] * 2, "after the race"


@pytest.mark.anyio
async def test_where_the_best_way_fails_the_next_best_has_its_race():
    """Candidates that compiled both ways and never ran leave the field to what is timed forward."""
    script = {"run_errors": lambda cfg: ValueError("no") if cfg.m != 3 else None}
    report, _ = await tune_mixed(0.1, **script)
    assert report.winner == Blocks(3)
    assert [type(o) for o in report.outcomes] == [Failed, Failed, Measured]
    assert len(report.outcomes[2].samples_s) == 3


@pytest.mark.anyio
async def test_a_spent_budget_ends_the_warm_ups_too():
    """Once the budget is spent only one candidate goes on, until there is a measurement to answer with."""
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


@pytest.mark.anyio
async def test_what_is_never_tried_does_not_win_by_an_old_timing():
    """A negative priority is a no, whatever was measured before it was given."""

    class Banned(Wider):
        def candidate_priority(self, cfg, inv):
            return -1 if cfg.m == 3 else 0

    bench = Bench(costs=lambda cfg: {1: 0.3, 2: 0.2, 3: 0.01, 4: 0.15}[cfg.m])
    async with bench.chain as chain:
        assert await chain.choose(call(), Toy()) == Blocks(3)
        assert await chain.choose(call(), Banned()) == Blocks(4)


@pytest.mark.parametrize("verdict", [np.True_, np.bool_(True), 1, None])
def test_a_check_may_answer_with_any_truth(real_backend, verdict):
    """NumPy's True is true."""
    outcomes = tune_total(real_backend, lambda expected, actual: verdict).outcomes
    assert not [o for o in outcomes if isinstance(o, Failed) and o.stage == "check"]


def test_nan_on_one_side_is_a_difference():
    """Equal infinities and equal nans agree; a nan on one side does not."""
    check = OutputCheck()
    infinite, nan = np.array([np.inf, 1.0]), np.array([np.nan, 1.0])
    assert check([infinite], [infinite]) is None
    assert check([nan], [nan]) is None
    assert check([infinite], [nan]) == "output 0 is nan where the other is not"
    assert check([np.ones(2)], [np.ones(2) * 3]) == "output 0 differs by up to 2"


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
async def test_where_all_fail_nothing_is_stored():
    """A heuristic that stands in for a tune in which everything failed reaches no store."""

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
