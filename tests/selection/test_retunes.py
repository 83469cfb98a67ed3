"""Keys that are tuned again, or not: after a failure, a removal, an eviction, or by `retune`."""

from __future__ import annotations

import anyio
import pytest
from support.kernels import BEST, COSTS, Bench, Blocks, Toy, call
from support.store_doubles import DictStore

from asel import (
    ConfigCache,
    NoConfigError,
    TuningError,
    policy_override,
)

pytestmark = pytest.mark.anyio
QUICK = {cfg: cost / 1000 for cfg, cost in COSTS.items()}


async def test_a_failed_tune_waits_before_it_is_tried_again():
    """If all candidates fail, the heuristic answers for retry_after_s; then one more tune begins."""
    bench = Bench(
        allow={"retry_after_s": 100.0}, script={"run_errors": lambda cfg: ValueError("bad") if bench.broken else None}
    )
    bench.broken = True
    async with bench.chain as chain:
        first = await chain.select(call(), Toy())
        assert first.tier == "heuristics"
        assert "none of the 3 candidates" in first.declined["autotune"]
        await anyio.sleep(99)
        again = await chain.select(call(), Toy())
        assert again.tier == "heuristics"
        assert "tried again in 1 s" in again.declined["autotune"]
        assert bench.tunes == 1
        bench.broken = False
        await anyio.sleep(2)
        assert (await chain.select(call(), Toy())).cfg == BEST
    assert bench.tunes == 2


async def test_without_heuristics_each_waiter_of_a_failed_tune_gets_its_own_error():
    """Each waiter raises its own copy; calls during the pause get a NoConfigError with the reason."""
    bench = Bench(allow={"allow_heuristics": False}, script={"run_errors": lambda cfg: ValueError("bad")})
    errors = []

    async def ask(chain):
        with pytest.raises(TuningError) as caught:
            await chain.choose(call(), Toy())
        errors.append(caught.value)

    async with bench.chain as chain:
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(ask, chain)
        with pytest.raises(NoConfigError, match="the last tune failed"):
            await chain.choose(call(), Toy())
    assert len({id(error) for error in errors}) == 3
    for error in errors:
        assert error.key == bench.sink.events[0].key
        assert len(error.outcomes) == 3
        assert [type(e) for e in error.__cause__.__cause__.exceptions] == [ValueError] * 3
    assert bench.tunes == 1


async def test_an_error_of_a_tuner_is_a_failed_tune():
    """Any exception of a tuner ends the tune, wakes the waiters and becomes a TuningError."""

    class Broken:
        async def tune(self, job):
            raise ZeroDivisionError("oops")

    bench = Bench(tuner=Broken(), allow={"allow_heuristics": False})
    async with bench.chain as chain:
        with pytest.raises(TuningError, match="ZeroDivisionError: oops"):
            await chain.choose(call(), Toy())
    assert bench.sink.named("autotune_failed")[0].error_type == "ZeroDivisionError"
    assert bench.cache.pending() == []


async def test_a_cleared_key_is_only_tuned_again_by_retune():
    """forbid_reautotune: a key that the user removed stays removed (ejKernel's defect 6 cannot happen)."""
    bench = Bench()
    async with bench.chain as chain:
        await chain.choose(call(), Toy())
        bench.cache.clear()
        selection = await chain.select(call(), Toy())
        assert selection.tier == "heuristics"
        assert "use retune" in selection.declined["autotune"]
        assert await chain.retune(call(), Toy()) == BEST
        assert (await chain.select(call(), Toy())).tier == "memory"
    assert bench.tunes == 2


async def test_a_cleared_key_is_tuned_again_if_that_is_allowed():
    """forbid_reautotune=False: clearing the cache is enough."""
    bench = Bench(forbid_reautotune=False)
    async with bench.chain as chain:
        await chain.choose(call(), Toy())
        bench.cache.clear()
        assert (await chain.select(call(), Toy())).tier == "autotune"


async def test_eviction_does_not_forbid_a_tune():
    """An evicted key is tuned again, since the user did not remove it."""
    bench = Bench(cache=ConfigCache(max_entries=1))
    async with bench.chain as chain:
        for size in (8, 16, 8):
            assert (await chain.select(call(size), Toy())).tier == "autotune"
    assert bench.tunes == 3


async def test_retune_replaces_the_record_and_the_old_answer_serves_meanwhile():
    """During a `retune`, calls get the old answer."""
    store = DictStore()
    bench = Bench(costs=lambda cfg: bench.costs[cfg.m], persistent=store)
    bench.costs = {1: 0.3, 2: 0.2, 3: 0.1}
    async with bench.chain as chain, anyio.create_task_group() as tasks:
        await chain.choose(call(), Toy())
        bench.costs = {1: 0.3, 2: 0.1, 3: 0.2}
        tasks.start_soon(chain.retune, call(), Toy())
        await anyio.wait_all_tasks_blocked()
        assert await chain.choose(call(), Toy()) == Blocks(3)
        assert chain.choose_nowait(call(), Toy()) == Blocks(3)
        await chain.settled()
        assert await chain.choose(call(), Toy()) == Blocks(2)
    assert [stored.cfg for stored in store.records.values()] == [Blocks(2)]


async def test_a_failed_retune_loses_nothing():
    """The old answer stays in force after a retune that failed."""
    bench = Bench(script={"run_errors": lambda cfg: bench.error})
    bench.error = None
    async with bench.chain as chain:
        await chain.choose(call(), Toy())
        bench.error = ValueError("bad")
        with pytest.raises(TuningError):
            await chain.retune(call(), Toy())
        assert await chain.choose(call(), Toy()) == BEST


async def test_retune_raises_the_reason_if_tuning_is_not_allowed():
    """`retune` respects the policy, the environment and a freeze."""
    bench = Bench()
    async with bench.chain as chain:
        with policy_override(chain, allow_autotune=False), pytest.raises(NoConfigError, match="autotuning is off"):
            await chain.retune(call(), Toy())
        chain.freeze()
        with pytest.raises(NoConfigError, match="frozen"):
            await chain.retune(call(), Toy())


@pytest.mark.parametrize("value", ["off", "OFF", "0", "false", "no"])
async def test_the_environment_turns_tuning_off_everywhere(monkeypatch, value):
    """With ASEL_AUTOTUNE=off no chain tunes, under any policy."""
    monkeypatch.setenv("ASEL_AUTOTUNE", value)
    bench = Bench()
    async with bench.chain as chain:
        selection = await chain.select(call(), Toy())
        assert selection.tier == "heuristics"
        assert "ASEL_AUTOTUNE" in selection.declined["autotune"]
        chain.choose_nowait(call(), Toy())
        await chain.settled()
        with pytest.raises(NoConfigError, match="ASEL_AUTOTUNE"):
            await chain.retune(call(), Toy())
    assert bench.tunes == 0


async def test_a_frozen_chain_tunes_nothing_and_reports_late_calls():
    """After `freeze` a new key gets the heuristic with a `late_tune` event; other keys are unaffected."""
    bench = Bench()
    async with bench.chain as chain:
        await chain.choose(call(), Toy())
        chain.freeze()
        assert await chain.choose(call(), Toy()) == BEST
        selection = await chain.select(call(16), Toy())
    assert selection.tier == "heuristics"
    assert [e.key for e in bench.sink.named("late_tune")] == [selection.key]


async def test_only_a_call_that_freezing_stopped_is_late():
    """`late_tune` is emitted for calls that would have been tuned, not if the policy forbids tuning."""
    bench = Bench(allow={"allow_autotune": False})
    async with bench.chain as chain:
        chain.freeze()
        await chain.choose(call(), Toy())
        chain.choose_nowait(call(), Toy())
    assert bench.sink.named("late_tune") == []


async def test_clearing_a_put_config_of_a_tuned_key_still_forbids_a_tune():
    """The key was tuned, and the user removed it."""
    bench = Bench()
    async with bench.chain as chain:
        await chain.choose(call(), Toy())
        bench.cache.put(*bench.cache.keys()[0], Blocks(9))
        bench.cache.clear()
        assert (await chain.select(call(), Toy())).tier == "heuristics"
    assert bench.tunes == 1
