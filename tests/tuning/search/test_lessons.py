"""What a tune learns from those of a kernel's other calls, in virtual time."""

from __future__ import annotations

import math
import random
from itertools import product
from statistics import fmean

import anyio
import pytest
from support.kernels import A100, H100, Bench, Blocks, Toy, call

from asel import AutotunePolicy, Failed, Measured, PersistentCache, Tuner, TuneReport
from asel.kernels.keys import CacheKey
from asel.testing import ScriptedMeasure
from asel.tuning.search.lessons import lessons_for

CONFIGS = [Blocks(m, n) for m, n in product((8, 16, 32, 64, 128, 256), (1, 2, 4, 8))]


class Family(Toy):
    candidates = CONFIGS

    def heuristic_cfg(self, inv):
        return Blocks(64, 8)


class Unlucky(Family):
    def heuristic_cfg(self, inv):
        return Blocks(16, 8)


def larger_is_faster(c):
    return 1e-3 * math.exp(-0.4 * math.log2(c.m) + 0.1 * math.log2(c.n))


class Times:
    """A measure of which tests say what each call costs."""

    def __init__(self, compile_s=1.0, compile_errors=None, **tuner):
        self.costs = None
        script = {"compile_errors": compile_errors} if compile_errors else {}
        self.measure = ScriptedMeasure(lambda cfg: self.costs(cfg), compile_s=compile_s, **script)
        self.bench = Bench(tuner=Tuner(measure=self.measure, **tuner))

    async def tune(self, chain, size, costs, kernel=None, **where):
        """Tune a call; return how many candidates that compiled, the regret, and the selection."""
        self.costs, before = costs, len(self.measure.compiled)
        selection = await chain.select(call(size, **where), kernel or Family())
        regret = costs(selection.cfg) / min(map(costs, CONFIGS)) - 1
        return len(self.measure.compiled) - before, regret, selection


def at(size):
    """The best block grows with the size of the call."""
    best = math.log2(size) / 4 + 3

    def cost(c):
        return 1e-5 * size * math.exp(0.3 * abs(math.log2(c.m) - best) + 0.2 * abs(math.log2(c.n) - 1))

    return cost


@pytest.mark.anyio
async def test_later_shapes_compile_a_third_at_most():
    """The first shape compiles all; each later one the incumbent, the best guesses, and what may still win."""
    times = Times()
    async with times.bench.chain as chain:
        first, _, selection = await times.tune(chain, 64, at(64))
        assert (first, selection.report.learned_from) == (24, ())
        later = []
        for size in (128, 256, 1024, 4096):
            compiled, regret, selection = await times.tune(chain, size, at(size))
            later.append(compiled)
            assert regret <= 0.03
        assert fmean(later) <= first / 3
    report = selection.report
    assert len(report.learned_from) == 4
    assert "toy@v1(x=f32[1024,128])" in report.learned_from[0]  # the nearest
    measured = [o for o in report.outcomes if isinstance(o, Measured)]
    assert all(0.5 < o.predicted_s / o.median_s < 2 for o in measured)
    assert "learned from 4 earlier tunes: toy@v1(x=f32[1024,128]); " in str(report)
    finish = times.bench.sink.named("autotune_finish")[-1]
    assert (finish.learned_from, finish.prediction_error) == (4, report.prediction_error)


@pytest.mark.anyio
async def test_wrong_knowledge_costs_time_and_not_the_answer():
    """Earlier tunes that say other things than what is measured are found out, and more candidates are tried."""
    times = Times()
    shuffled = [at(512)(c) for c in CONFIGS]
    random.Random(7).shuffle(shuffled)
    other = dict(zip(CONFIGS, shuffled, strict=True)).__getitem__

    async with times.bench.chain as chain:
        for size in (64, 128, 256):
            await times.tune(chain, size, at(size))
        compiled, regret, selection = await times.tune(chain, 512, other)
    assert regret <= 0.03
    assert compiled > 8
    assert selection.report.prediction_error > 0.3


@pytest.mark.anyio
async def test_a_field_value_that_was_slow_for_all_earlier_calls_is_tried_again():
    """A later call may be fastest with what earlier ones agreed is slow, however well the rest is predicted."""
    times = Times()

    def fastest_with(n):
        return lambda c: 1e-3 * (1 + 0.1 * abs(math.log2(c.m / 64))) * (1 if c.n == n else 2)

    async with times.bench.chain as chain:
        for size in (64, 128, 256):
            await times.tune(chain, size, fastest_with(8))
        _, regret, _ = await times.tune(chain, 512, fastest_with(2))
    assert regret == 0.0


@pytest.mark.anyio
@pytest.mark.parametrize("why", ["learn", "device", "environment", "objective", "fields"])
async def test_nothing_is_learned_from_what_does_not_compare(why, monkeypatch):
    """`learn=False`, another device, software, objective, and configs with other fields: the tune begins anew."""
    times = Times(learn=why != "learn")

    class Other(Family):
        candidates = [{"m": c.m, "n": c.n, "more": 1} for c in CONFIGS]
        heuristic_cfg = Toy.heuristic_cfg

    async with times.bench.chain as chain:
        await times.tune(chain, 64, at(64))
        if why == "objective":
            chain.policy = AutotunePolicy(validate_backward=True)
        if why == "environment":
            for place in ("asel.tuning.tuner.environment", "asel.selection.tunes.environment"):
                monkeypatch.setattr(place, lambda device: {"jax": "another"})
        times.costs, before = lambda c: 1e-3, len(times.measure.compiled)
        other = Other() if why == "fields" else Family()
        invocation = call(128, A100 if why == "device" else H100)
        explained = {one.tier: one.says for one in (await chain.explain(invocation, other)).tiers}
        assert explained["autotune"].startswith("would tune ")
        assert "learning" not in explained["autotune"]
        selection = await chain.select(invocation, other)
    assert selection.report.learned_from == ()
    assert len(times.measure.compiled) - before >= 24


@pytest.mark.anyio
@pytest.mark.parametrize("largest", [64, 128, 256])
async def test_what_failed_for_other_shapes_does_not_hide_what_is_fastest_beside_it(largest):
    """Failures teach where configs fail, and not that those beside them, the earlier winner too, are slow."""

    times = Times(compile_errors=lambda c: ValueError("too large") if c.m * c.n > largest else None)
    async with times.bench.chain as chain:
        for size in (64, 128, 256, 1024):
            compiled, _, selection = await times.tune(chain, size, larger_is_faster, Unlucky())
            assert selection.cfg == Blocks(largest)
            assert size == 64 or compiled <= 8


def test_out_of_memory_in_a_larger_call_is_no_lesson():
    """What a large call has no memory for may be best for a small one; other failures are expected to recur."""
    large, small = "x=f32[1024,128]", "x=f32[64,128]"
    for error, earlier, call_now, failures in (
        ("MemoryError", large, small, 0),
        ("MemoryError", small, large, 1),
        ("ValueError", large, small, 1),
    ):
        outcomes = [*map(timed, CONFIGS[:3]), Failed(CONFIGS[3], "run", error, "")]
        lessons = lessons_for(CONFIGS, call_now, [report_on(earlier, outcomes)])
        assert lessons.log_times.count(math.inf) == failures


@pytest.mark.anyio
async def test_most_candidates_being_far_from_the_best_is_not_taken_for_an_error():
    """Times beyond twice the best are predicted as bad, not how bad: they do not tell what the best takes."""

    times = Times()
    async with times.bench.chain as chain:
        await times.tune(chain, 64, larger_is_faster, Unlucky())
        for size in (128, 256, 1024):
            compiled, regret, selection = await times.tune(chain, size, larger_is_faster, Unlucky())
            assert (compiled <= 8, regret) == (True, 0.0)
            assert selection.report.prediction_error < 0.3


def timed(cfg, seconds=1e-3, how="forward"):
    return Measured(cfg, seconds, (seconds,), 1.0, how=how)


def report_on(call, outcomes):
    return TuneReport(CacheKey("d", "toy@v1", call, call), outcomes[0].cfg, tuple(outcomes), 1.0, {})


def test_a_long_search_teaches_its_best_and_some_of_the_rest():
    """However much a tune measured, it is learned from; half of the model's room is for other calls."""
    configs = [Blocks(m, n) for m, n in product(range(1, 31), range(1, 31))]
    long = [timed(c, 1e-3 * (1 + place)) for place, c in enumerate(configs[:300])]
    reports = [report_on(f"x=f32[{size},128]", long) for size in (128, 256)]
    lessons = lessons_for(configs, "x=f32[64,128]", reports)
    assert len(lessons.calls) == 2
    assert lessons.log_times[:3] == (0.0, math.log(2), math.log(3))
    assert max(lessons.log_times) == math.log(300)
    assert len(lessons.log_times) == 128


def test_calls_of_other_dtypes_are_no_equals():
    """The dtype belongs to the form of a call: the nearest calls have the same one."""
    outcomes = [timed(CONFIGS[0]), timed(CONFIGS[1], 2e-3)]
    reports = [report_on(call, outcomes) for call in ("x=f64[64,128]", "x=f32[512,128]", "x=f32[128,128]")]
    lessons = lessons_for(CONFIGS, "x=f32[64,128]", reports)
    assert lessons.calls == ("toy@v1(x=f32[128,128])", "toy@v1(x=f32[512,128])", "toy@v1(x=f64[64,128])")


def test_only_what_was_timed_as_the_winner_was_is_learned_from():
    """A candidate that had to be timed in another way has a time that compares with nothing."""
    outcomes = [timed(CONFIGS[0]), timed(CONFIGS[1], 2e-3), timed(CONFIGS[2], 1e-9, how="eager")]
    lessons = lessons_for(CONFIGS, "x=f32[64,128]", [report_on("x=f32[8,128]", outcomes)])
    assert lessons.log_times == (0.0, math.log(2))


def test_a_store_remembers_other_shapes_and_versions(tmp_path, real_backend):
    """A new process learns from the store's reports, of the kernel's earlier version too; `explain` says so."""

    class Next(Family):
        version = "2"

    async def main():
        times = Times(compile_s=0.0)
        times.bench = bench_over(times)
        async with times.bench.chain as chain:
            await times.tune(chain, 64, at(64))
            await times.tune(chain, 256, at(256))
        async with bench_over(times).chain as chain:
            explained = {one.tier: one.says for one in (await chain.explain(call(128), Next())).tiers}
            compiled, regret, selection = await times.tune(chain, 128, at(128), Next())
        assert explained["autotune"] == "would tune 24 candidates, learning from 2 earlier tunes of the kernel"
        assert compiled <= 8
        assert regret <= 0.03
        assert sorted(selection.report.learned_from) == ["toy@v1(x=f32[256,128])", "toy@v1(x=f32[64,128])"]

    def bench_over(times):
        store = PersistentCache("toy", tmp_path, cfg_type=Blocks)
        return Bench(tuner=Tuner(measure=times.measure), persistent=store)

    anyio.run(main, backend=real_backend)


@pytest.mark.anyio
async def test_a_retune_measures_again():
    """A tune on purpose does not believe what others found."""
    times = Times()
    async with times.bench.chain as chain:
        await times.tune(chain, 64, at(64))
        await times.tune(chain, 128, at(128))
        before = len(times.measure.compiled)
        await chain.retune(call(128), Family())
    assert len(times.measure.compiled) - before == 24
