"""Callers that wait for a tune, those that do not, and those that cannot."""

from __future__ import annotations

import anyio
import pytest
from support.kernels import BEST, COSTS, GUESS, TUNE_S, Bench, Blocks, NoHeuristic, Toy, call

from asel import (
    NoConfigError,
)

pytestmark = pytest.mark.anyio
QUICK = {cfg: cost / 1000 for cfg, cost in COSTS.items()}


async def test_background_answers_immediately_and_then_with_the_winner():
    """`background`: the heuristic answers first, the winner later, and no request waits."""
    bench = Bench(allow={"cache_miss_fallback": "background"})
    async with bench.chain as chain:
        start = anyio.current_time()
        selections = [await chain.select(call(), Toy()) for _ in range(3)]
        assert anyio.current_time() == start
        assert [s.tier for s in selections] == ["heuristics"] * 3
        assert selections[0].declined["autotune"] == "tuning in the background"
        await chain.settled()
        assert anyio.current_time() - start == pytest.approx(TUNE_S)
        assert (await chain.select(call(), Toy())).cfg == BEST
    assert bench.tunes == 1
    assert bench.sink.named("autotune_start")[0].background is True


async def test_background_needs_an_open_chain():
    """Without `async with` no task can own a background tune, so none begins, and the reason is given."""
    bench = Bench(allow={"cache_miss_fallback": "background"})
    selection = await bench.chain.select(call(), Toy())
    assert selection.tier == "heuristics"
    assert "async with" in selection.declined["autotune"]
    assert bench.tunes == 0


async def test_on_pending_heuristics_answers_while_another_caller_tunes():
    """Only the first caller waits; callers that find a tune pending do not."""
    bench = Bench(allow={"on_pending": "heuristics"})
    async with bench.chain as chain, anyio.create_task_group() as tasks:
        tiers = []

        async def ask():
            tiers.append((await chain.select(call(), Toy())).tier)

        for _ in range(3):
            tasks.start_soon(ask)
    assert tiers == ["heuristics", "heuristics", "autotune"]


async def test_wait_s_bounds_the_wait_and_the_tune_goes_on():
    """A caller waits for at most `wait_s`; the tune's answer is there for the next one."""
    bench = Bench(allow={"wait_s": 0.5})
    async with bench.chain as chain:
        start = anyio.current_time()
        selection = await chain.select(call(), Toy())
        assert anyio.current_time() - start == pytest.approx(0.5)
        assert selection.tier == "heuristics"
        assert selection.declined["autotune"] == "no answer within wait_s=0.5"
        await chain.settled()
        assert (await chain.select(call(), Toy())).tier == "memory"
    assert bench.tunes == 1


async def test_choose_nowait_never_waits_and_queues_a_background_tune():
    """A plain function: it answers from memory or the heuristic, and the rest happens in the background."""
    bench = Bench()
    async with bench.chain as chain:
        assert [chain.choose_nowait(call(), Toy()) for _ in range(3)] == [GUESS] * 3
        assert bench.measure.compiled == []
        await chain.settled()
        assert chain.choose_nowait(call(), Toy()) == BEST
        assert chain.choose_nowait(call(override_cfg=Blocks(9)), Toy()) == Blocks(9)
    assert bench.tunes == 1


async def test_choose_nowait_queues_nothing_if_tuning_is_not_allowed():
    """The policy applies in the background too."""
    bench = Bench(allow={"allow_autotune": False})
    async with bench.chain as chain:
        assert chain.choose_nowait(call(), Toy()) == GUESS
        await chain.settled()
        assert bench.tunes == 0
        with pytest.raises(NoConfigError, match="cannot wait"):
            chain.choose_nowait(call(), NoHeuristic())


def test_choose_nowait_works_without_an_event_loop():
    """A script gets memory's answer or the kernel's heuristic."""
    bench = Bench()
    assert bench.chain.choose_nowait(call(), Toy()) == GUESS
    assert bench.sink.names == ["heuristics"]
    bench.cache.put(*bench.sink.events[0].key, Blocks(5))
    assert bench.chain.choose_nowait(call(), Toy()) == Blocks(5)


async def test_a_tune_in_flight_may_be_joined_even_if_none_may_begin():
    """In a frozen chain, or in the pause after a failure, a running tune still gives an answer."""
    bench = Bench()
    tiers = []

    async def ask(chain):
        tiers.append((await chain.select(call(), Toy())).tier)

    async with bench.chain as chain, anyio.create_task_group() as tasks:
        tasks.start_soon(ask, chain)
        await anyio.wait_all_tasks_blocked()
        chain.freeze()
        tasks.start_soon(ask, chain)
    assert tiers == ["autotune", "autotune"]
    assert bench.sink.named("late_tune") == []
