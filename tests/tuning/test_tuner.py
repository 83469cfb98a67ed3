"""A tuner's winners, reports, events and refusals."""

from __future__ import annotations

import anyio
import jax
import pytest
from support.kernels import BEST, GUESS, H100, Bench, Blocks, NoHeuristic, Toy, call
from support.tunes import kinds, tune_among, tuner_of

from asel import (
    Failed,
    InvalidRequestError,
    Measured,
    Tuner,
    TuningError,
)
from asel.kernels.keys import CacheKey
from asel.testing import ScriptedMeasure


async def tune(costs, *, state=None, **script):
    tuner, _ = tuner_of(costs, **script)
    return await tuner.tune(tune_among(*costs) if state is None else state)


@pytest.mark.anyio
@pytest.mark.parametrize("fastest", ["a", "b", "c"])
async def test_the_fastest_wins(fastest):
    """The winner is the candidate with the least time, at any place in the list."""
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
    """A tune that is cut short has timed the default, because that is tried first."""
    tuner, measure = tuner_of({"a": 0.1, "default": 0.2, "c": 0.3})
    report = await tuner.tune(tune_among("a", "default", "c", incumbent=1))
    assert measure.compiled[0] == measure.sampled[0] == "default"
    assert report.incumbent == "default"
    assert [outcome.cfg for outcome in report.outcomes] == ["a", "default", "c"], "outcomes keep the declared order"


@pytest.mark.anyio
@pytest.mark.parametrize("incumbent", [0, 1])
async def test_the_incumbent_wins_ties_within_the_noise(incumbent):
    """A challenger that is faster by less than the noise does not take the title: never worse, and never by luck."""
    costs = {0: 0.1, 1: 0.1}
    costs[incumbent] = 0.1005
    report = await tune(costs, state=tune_among(0, 1, incumbent=incumbent))
    assert report.winner == incumbent
    assert report.noise == pytest.approx(0.02)


@pytest.mark.anyio
async def test_the_incumbent_loses_to_a_clear_winner():
    """A challenger that is faster by more than the noise takes the title."""
    report = await tune({"default": 0.103, "b": 0.1}, state=tune_among("default", "b", incumbent=0))
    assert report.winner == "b"


@pytest.mark.anyio
async def test_noise_is_seen_in_the_samples():
    """The higher the variance of samples, the larger the difference that counts as a tie."""
    samples = {"default": [0.107, 0.108] * 3, "calm": [0.10] * 6}

    async def winner(wild) -> tuple[str, float]:
        turns = {cfg: iter(times) for cfg, times in (samples | wild).items()}
        tuner, _ = tuner_of(lambda cfg: next(turns[cfg]), iters=6)
        report = await tuner.tune(tune_among("default", *(samples | wild).keys() - {"default"}, incumbent=0))
        return report.winner, report.noise

    # 7% slower, and its own samples lie 1% apart: that is a clear defeat.
    assert (await winner({}))[0] == "calm"
    # About the same lead, but the challenger's samples lie 25% apart: that is a tie.
    best, noise = await winner({"calm": [0.096, 0.10, 0.12] * 2})
    assert best == "default"
    assert noise == pytest.approx(0.1)  # more than a tenth is not a tie


@pytest.mark.anyio
@pytest.mark.parametrize("facts", [{}, {"incumbent": 0}])
async def test_other_ties_go_to_declared_order(facts):
    """Among equals that are not the incumbent, the one declared first wins, so that a tie has one answer."""
    report = await tune({"slow": 0.5, "b": 0.1, "c": 0.1, "d": 0.1}, state=tune_among("slow", "b", "c", "d", **facts))
    assert report.winner == "b"


@pytest.mark.anyio
async def test_the_tuners_seed_decides_the_order_of_samples():
    """Equal seeds give equal orders, and different seeds different ones."""

    async def order(seed) -> tuple[int, ...]:
        measure = ScriptedMeasure()
        await Tuner(warmup=0, measure=measure, seed=seed).tune(tune_among(*range(8)))
        return tuple(measure.sampled)

    assert await order(1) == await order(1)
    assert len({(await order(seed))[:8] for seed in range(5)}) == 5


@pytest.mark.anyio
async def test_eliminations_have_an_event_with_their_round():
    """An event for each, as it happens, and the same round in the report."""
    told = []
    state = tune_among("fast", "second", "slow", "slower", incumbent=0, emit=told.append)
    costs = {"fast": 0.001, "second": 0.0011, "slow": 0.1, "slower": 0.2}
    report = await Tuner(iters=3, measure=ScriptedMeasure(costs)).tune(state)
    eliminated = [event for event in told if event.name == "candidate_eliminated"]
    assert [(event.index, event.cfg, event.round) for event in eliminated] == [
        (1, "second", 2),
        (2, "slow", 2),
        (3, "slower", 2),
    ]
    assert {event.tune_id for event in eliminated} == {report.tune_id}
    assert [outcome.eliminated for outcome in report.outcomes] == [None, 2, 2, 2]


@pytest.mark.anyio
async def test_warm_ups_do_not_count():
    """The median is over the samples after the warm-up."""
    times = iter([9.0, 9.0, 1.0, 3.0, 2.0])
    tuner, measure = tuner_of(lambda cfg: next(times), warmup=2, iters=3)
    [outcome] = (await tuner.tune(tune_among("a"))).outcomes
    assert outcome.median_s == pytest.approx(2.0)
    assert sorted(outcome.samples_s) == pytest.approx([1.0, 2.0, 3.0])
    assert len(measure.sampled) == 5


@pytest.mark.anyio
async def test_a_report_has_the_identity_and_limits_of_its_tune():
    """A report has its tune's identity and limits, and the compile time of each candidate."""
    key = CacheKey("dev", "op@v1", "call")
    tuner, _ = tuner_of(0.5, compile_s={"a": 2.0, "b": 1.0})
    state = tune_among(
        "a", "b", key=key, checksum="c0ffee", objective="forward+backward", tune_budget_s=50.0, device=H100
    )
    report = await tuner.tune(state)
    assert [outcome.compile_s for outcome in report.outcomes] == pytest.approx([2.0, 1.0])
    assert report.seconds == pytest.approx(4.0)
    assert (report.key, report.checksum, report.objective) == (key, "c0ffee", "forward+backward")
    assert (report.tune_id, report.tune_budget_s, report.candidate_timeout_s) == (state.request.id, 50.0, 30.0)
    assert (report.incumbent, report.environment["platform_version"]) == (None, "fake")


@pytest.mark.anyio
async def test_no_candidates_is_an_error():
    """ejKernel's RuntimeError, and nothing is measured."""
    tuner, measure = tuner_of()
    with pytest.raises(RuntimeError, match="no candidates"):
        await tuner.autotune(lambda cfg: print, (), {}, [])
    with pytest.raises(TuningError):
        await tuner.tune(tune_among())
    assert measure.compiled == []


@pytest.mark.anyio
async def test_configs_may_be_unhashable():
    """A config may be a dict, in a tune and in the script of a scripted measure."""
    tuner, measure = tuner_of(lambda cfg: cfg["seconds"], run_errors=lambda cfg: None)
    candidates = {"seconds": 0.2}, {"seconds": 0.1}
    assert (await tuner.tune(tune_among(*candidates))).winner == {"seconds": 0.1}
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


@pytest.mark.anyio
async def test_candidate_events_come_in_order():
    """Start events come as candidates are compiled, and measured events at the end."""
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
async def test_a_selections_report_has_every_outcome():
    """The caller gets the whole report: winner, incumbent, measurements and failures."""
    bench = Bench(script={"compile_errors": {Blocks(2): LookupError("no")}}, allow={"tune_budget_s": 45.0})
    async with bench.chain as chain:
        selection = await chain.select(call(), Toy())
    report = selection.report
    assert (selection.tier, selection.cfg, report.winner) == ("autotune", BEST, BEST)
    assert (report.key, report.checksum) == (selection.key, selection.checksum)
    assert kinds(report.outcomes) == [Measured, Failed, Measured]
    assert (report.incumbent, report.tune_budget_s) == (GUESS, 45.0)


@pytest.mark.anyio
async def test_a_selectors_waiters_get_the_tuning_error_with_its_outcomes():
    """If heuristics are not allowed, all waiters of a failed tune get its error."""
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


def test_the_default_device_may_be_a_platforms_name(real_backend):
    """`jax.default_device("cpu")` means its first device."""

    async def main():
        with jax.default_device("cpu"):
            return await Tuner().measure(lambda x: x + 1, jax.ShapeDtypeStruct((8,), "float32"))

    assert anyio.run(main, backend=real_backend) > 0
