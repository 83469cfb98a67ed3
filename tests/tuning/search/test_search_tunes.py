"""Tunes of many candidates: what is compiled, what is skipped and why, in virtual time."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from functools import partial

import anyio
import pytest
from support.kernels import BEST, Bench, Blocks, Toy, call
from support.tunes import tune_of

from asel import Failed, InvalidRequestError, Measured, Skipped, Space, Tuner, device_fingerprint
from asel.testing import ScriptedMeasure


@pytest.fixture(autouse=True, scope="module")
def _jax_has_begun():
    """JAX looks for its plugins when it is first asked for devices: no business of the event loop."""
    device_fingerprint()


GRID = [Blocks(m, n) for m, n in itertools.product(range(1, 21), range(1, 21))]


def cost(c):
    return 1e-3 * (1 + 0.05 * abs(c.m - 13) + 0.03 * abs(c.n - 6))


def search_tuner(costs=cost, *, strategy="search", max_compiles=None, seed=0, **script):
    measure = ScriptedMeasure(costs, **script)
    return Tuner(measure=measure, strategy=strategy, max_compiles=max_compiles, seed=seed), measure


@pytest.mark.anyio
async def test_a_search_compiles_a_few_and_finds_the_best():
    """Of 400 candidates it compiles 40 at most, ends when more would gain less than a tie, and races the best."""
    tuner, measure = search_tuner(compile_s=1.0)
    report = await tuner.tune(tune_of(GRID, incumbent=399, tune_budget_s=600.0))
    assert cost(report.winner) <= 1.02 * cost(Blocks(13, 6))
    assert measure.compiled[0] == GRID[399]  # the incumbent
    assert len(measure.compiled) <= 60
    skipped = [o for o in report.outcomes if isinstance(o, Skipped)]
    assert len(skipped) == 400 - len(measure.compiled)
    assert all(o.reason.startswith("it is not expected to win: the model expects ") for o in skipped)
    lines = str(report).splitlines()
    assert lines[-1] == f"  {len(skipped)} skipped: it is not expected to win"
    assert len(lines) == len(measure.compiled) + 3


@pytest.mark.anyio
async def test_searches_with_equal_seeds_are_equal():
    """The seed decides what is compiled, in which order."""

    async def compiled(seed):
        tuner, measure = search_tuner(max_compiles=20, seed=seed)
        await tuner.tune(tune_of(GRID))
        return measure.compiled

    assert await compiled(1) == await compiled(1)
    assert await compiled(1) != await compiled(2)


@pytest.mark.anyio
@pytest.mark.parametrize("most", [1, 7, 25])
async def test_max_compiles_is_kept(most):
    """No more than `max_compiles` candidates are compiled, failures and the incumbent among them."""
    tuner, measure = search_tuner(
        max_compiles=most, compile_errors=lambda c: ValueError("odd") if c.m % 3 == 0 else None
    )
    report = await tuner.tune(tune_of(GRID, incumbent=0))
    assert len(measure.compiled) == most
    tried = [o for o in report.outcomes if isinstance(o, Measured | Failed)]
    assert len(tried) == most
    assert f"max_compiles={most}" in next(o.reason for o in report.outcomes if isinstance(o, Skipped))


@pytest.mark.anyio
async def test_a_search_ends_with_its_budget():
    """Three quarters of the budget are for compiling; the best so far wins, and the rest says why it was not tried."""
    tuner, measure = search_tuner(compile_s=1.0)
    start = anyio.current_time()
    report = await tuner.tune(tune_of(GRID, tune_budget_s=20.0))
    assert anyio.current_time() - start <= 22.0
    assert 12 <= len(measure.compiled) <= 17
    assert cost(report.winner) == min(map(cost, measure.compiled))
    assert any("the tune's budget of 20 s" in o.reason for o in report.outcomes if isinstance(o, Skipped))


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("count", "compile_s", "budget_s", "all_compiled"),
    [(24, 0.5, 60.0, True), (24, 5.0, 60.0, False), (400, 0.0, 60.0, False)],
    ids=["few and quick", "too slow for the budget", "too many"],
)
async def test_auto_races_what_can_be_compiled_in_time_and_searches_the_rest(count, compile_s, budget_s, all_compiled):
    """The default compiles all of a small list that fits the budget, and searches any other."""
    tuner, measure = search_tuner(strategy="auto", compile_s=compile_s)
    await tuner.tune(tune_of(GRID[:count], tune_budget_s=budget_s))
    assert (len(measure.compiled) == count) is all_compiled


@pytest.mark.anyio
async def test_groups_come_first_and_negative_priorities_never():
    """A search stays in the highest group that runs; what the kernel rules out is never tried."""
    ranks = [(1, 0) if c.m <= 5 else (0, -1) if c.m >= 18 else (0, 0) for c in GRID]
    tuner, measure = search_tuner()
    report = await tuner.tune(tune_of(GRID, groups=ranks, incumbent=399))
    assert all(c.m <= 5 for c in measure.compiled if c != GRID[399])
    assert report.winner.m <= 5


@pytest.mark.anyio
async def test_where_all_fail_all_are_tried():
    """A search does not stop on failures before any candidate has run."""
    tuner, measure = search_tuner(compile_errors=lambda c: None if c == Blocks(4, 2) else MemoryError("out of memory"))
    report = await tuner.tune(tune_of(GRID[:80]))
    assert report.winner == Blocks(4, 2)
    assert len(set(measure.compiled)) == len(measure.compiled) <= 80


@pytest.mark.anyio
async def test_what_is_larger_than_what_ran_out_of_memory_is_skipped():
    """It is not compiled even if nothing else is left to try, and its reason says so."""
    candidates = GRID[:100]
    tuner, _ = search_tuner(compile_errors=lambda c: MemoryError("out of memory") if c.m * c.n > 30 else None)
    report = await tuner.tune(tune_of(candidates))
    assert cost(report.winner) == min(cost(c) for c in candidates if c.m * c.n <= 30)
    failed = [o.cfg for o in report.outcomes if isinstance(o, Failed)]
    ruled_out = [
        o
        for o in report.outcomes
        if any(o.cfg != c and o.cfg.m >= c.m and o.cfg.n >= c.n for c in failed) and o.cfg not in failed
    ]
    assert ruled_out
    assert all("ran out of memory: the model expects" in o.reason for o in ruled_out)


@pytest.mark.anyio
async def test_a_search_that_its_budget_ended_says_so(monkeypatch):
    """The reason is not a small expected gain, if that was too seldom small to end the search."""
    monkeypatch.setattr("asel.tuning.search.strategy._PATIENCE", 1_000)
    tuner, _ = search_tuner(compile_s=1.0)
    report = await tuner.tune(tune_of(GRID, tune_budget_s=60.0))
    reasons = {o.reason.partition(":")[0] for o in report.outcomes if isinstance(o, Skipped)}
    assert reasons == {"the tune's budget of 60 s left no time to compile it"}


@pytest.mark.anyio
@pytest.mark.parametrize("moment_s", [0.0, 0.5, 1.0, 1.0005, 3.7, 20.2])
async def test_a_cancelled_search_goes_on_where_it_was(moment_s):
    """Cancelled in a compile, in a sample or between: the next to carry it on compiles nothing twice."""
    tuner, measure = search_tuner(compile_s=1.0, max_compiles=30)
    state = tune_of(GRID, tune_budget_s=600.0)
    with anyio.move_on_after(moment_s):
        await tuner.tune(state)
    report = await tuner.tune(state)
    assert cost(report.winner) <= 1.1 * cost(Blocks(13, 6))
    again = [c for c in set(measure.compiled) if measure.compiled.count(c) > 1]
    assert len(again) <= 1  # what was being compiled when it was cancelled
    assert len(set(measure.compiled)) <= 31


@pytest.mark.anyio
@pytest.mark.timeout(60)  # seconds of computing, more on a busy machine
@pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)
async def test_twenty_thousand_candidates_from_a_generator():
    """Only what is tried is built, and the loop is free meanwhile: proposals are made in threads."""
    built = []

    def make_fn(cfg):
        built.append(cfg)
        return lambda: cfg

    space = Space(Blocks, m=range(1, 201), n=range(1, 101))
    measure = ScriptedMeasure(lambda c: 1e-3 * (1 + abs(c.m - 77) / 50 + abs(c.n - 31) / 50))
    winner = await Tuner(measure=measure, max_compiles=60).autotune(make_fn, (), {}, iter(space))
    assert abs(winner.m - 77) <= 8
    assert abs(winner.n - 31) <= 8
    assert len(built) <= 60


@pytest.mark.timeout(60)  # seconds of computing, more on a busy machine
def test_twenty_thousand_candidates_take_little_of_the_event_loops_time():
    """Listing them, their checksum and leaving them out costs its thread a fixed multiple of building them.

    On two cores: building 0.02 s, the rest 0.4 s for the first key and less for the next, model and all. A hit
    afterwards costs what it always does.
    """

    class Vast(Toy):
        def candidate_cfgs(self, inv) -> Iterator[Blocks]:
            return iter(Space(Blocks, m=range(1, 201), n=range(1, 101)))

    async def main():
        kernel, begun = Vast(), time.thread_time()
        assert len(list(kernel.candidate_cfgs(None))) == 20_000
        building_s = time.thread_time() - begun
        async with Bench(tuner=Tuner(measure=ScriptedMeasure(lambda c: 1e-3), max_compiles=16)).chain as chain:
            for size in (8, 16):
                begun = time.thread_time()
                selection = await chain.select(call(size), kernel)
                loop_s.append((time.thread_time() - begun) / building_s)
                assert len(selection.report.outcomes) == 20_000
            begun = time.thread_time()
            await chain.select(call(8), kernel)
            assert time.thread_time() - begun < building_s
        assert max(loop_s) <= 100  # about 20, and thousands if any of it were quadratic

    loop_s: list[float] = []
    anyio.run(main)


@pytest.mark.anyio
async def test_a_selector_searches_a_kernels_space():
    """`candidate_cfgs` may return a space, or a generator; the selection's report has every config of it."""

    class Spacious(Toy):
        def candidate_cfgs(self, inv) -> Iterator[Blocks]:
            return iter(Space(Blocks, m=range(1, 21), n=range(1, 6), where=lambda c: c.m >= c["n"]))

    bench = Bench(tuner=Tuner(measure=ScriptedMeasure(cost)))
    async with bench.chain as chain:
        selection = await chain.select(call(), Spacious())
    assert selection.cfg in (Blocks(13, 5), Blocks(12, 5), Blocks(14, 5))
    assert len(selection.report.outcomes) == 90


def test_a_space_is_its_product_without_what_the_condition_rules_out():
    """Dicts or a config type, values as attributes and items, in the order of a nested loop, again and again."""
    space = Space(block_m=[16, 32], stages=(2, 3), where=lambda c: c.block_m * c["stages"] <= 64)
    expected = [{"block_m": 16, "stages": 2}, {"block_m": 16, "stages": 3}, {"block_m": 32, "stages": 2}]
    assert list(space) == list(space) == expected
    assert list(Space(Blocks, m=[3])) == [BEST]
    assert repr(space) == "Space(block_m=[16, 32], stages=[2, 3], where=...)"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: Space(m=5), "m=5 must be"),
        (lambda: Space(m="ab"), "m='ab' must be"),
        (lambda: Space(m=[]), "m has no values"),
        (lambda: Tuner(max_compiles=0), "max_compiles=0"),
        (lambda: Tuner(strategy="race", max_compiles=3), "strategy='auto' or 'search'"),
        (partial(Tuner, strategy="guess"), "strategy='guess'"),
    ],
)
def test_wrong_arguments_are_named(wrong, said):
    """An argument that cannot be used is refused with its value."""
    with pytest.raises(InvalidRequestError) as caught:
        wrong()
    assert said in str(caught.value)
