"""Preloading: stored records answer the first call, even one that cannot wait."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import anyio
import pytest
from support.kernels import BEST, GUESS, H100, QUICK, Bench, Blocks, Picky, call
from support.paths import TESTS
from support.store_doubles import Place, directory
from support.traces import TOY

from asel import AutotunePolicy, ConfigCache, Executor, InvalidRequestError, Invocation, SelectorClosedError
from asel.kernels.devices import device_fingerprint, environment
from asel.selection import preload
from asel.stores.config_store import Stored
from asel.stores.summaries import RecordSummary

pytestmark = pytest.mark.anyio

HERE = environment(H100)


@pytest.fixture(autouse=True)
def _h100_is_local(monkeypatch):
    async def local_devices():
        return {device_fingerprint(H100): HERE}

    monkeypatch.setattr(preload, "local_devices", local_devices)


class Listing(Place):
    """A store that can list: one record for each call size, with a pause before each."""

    def __init__(self, *summaries):
        super().__init__()
        self.summaries_kept = summaries
        self.pause_s = 0.0
        self.rejecting = None

    async def summaries(self, device):
        await self._answer("list")
        for summary in self.summaries_kept:
            await anyio.sleep(self.pause_s)
            yield [summary]

    def read_summary(self, summary, query):
        cfg = Blocks(**json.loads(summary.cfg_json))
        if summary.checksum and query.among and cfg not in query.among:
            return None
        return Stored(cfg, foreign=bool(summary.environment) and dict(summary.environment) != dict(query.environment))


async def record_of(size=8, cfg=BEST, environment=HERE, **changes):
    """Return the summary of a record for a call."""
    explained = await Bench().chain.explain(call(size), TOY)
    cfg_json = json.dumps({"m": cfg.m, "n": cfg.n})
    return replace(RecordSummary(explained.key, explained.checksum, environment, cfg_json, 1.0), **changes)


async def test_the_first_call_of_a_process_has_the_tuned_config():
    """It is in memory when the block begins, for callers that wait and for callers that cannot."""
    place = Listing(await record_of(8), await record_of(16))
    bench = Bench(persistent=place)
    async with bench.chain as chain:
        assert chain.choose_nowait(call(8), TOY) == BEST
        selection = await chain.select(call(16), TOY)
        assert (selection.cfg, selection.tier) == (BEST, "memory")
    assert place.asked == ["list"]
    assert bench.sink.names == ["cache_hit", "cache_hit", "closed"]


async def test_without_preload_the_store_is_read_on_demand():
    """The same happens for records that preloading did not reach."""
    place = Listing(await record_of())
    async with Bench(persistent=place, preload=False).chain as chain:
        assert chain.choose_nowait(call(), TOY) == GUESS
    assert "list" not in place.asked


async def test_a_record_of_other_candidates_is_stale_and_costs_one_tune():
    """One miss, one `stale` event and one tune, for any number of callers."""
    bench = Bench(persistent=Listing(await record_of(checksum="another")))
    async with bench.chain as chain:
        async with anyio.create_task_group() as callers:
            for _ in range(5):
                callers.start_soon(chain.choose, call(), TOY)
        assert await chain.choose(call(), TOY) == BEST
    (stale,) = bench.sink.named("stale")
    assert (stale.cfg, stale.checksum) == ({"m": 3, "n": 1}, "another")
    assert bench.tunes == 1


async def test_a_preloaded_config_that_is_not_a_candidate_is_not_used():
    """A matching checksum is not enough."""
    bench = Bench(persistent=Listing(await record_of(cfg=Blocks(99))))
    async with bench.chain as chain:
        assert chain.choose_nowait(call(), TOY) == GUESS
        assert await chain.choose(call(), TOY) == BEST
    assert bench.tunes == 1


async def test_a_config_that_a_user_put_into_the_store_need_not_be_a_candidate():
    """It answers for any candidates, as it does when it is read on demand."""
    bench = Bench(persistent=Listing(await record_of(cfg=Blocks(99), checksum="", environment={})))
    async with bench.chain as chain:
        assert chain.choose_nowait(call(), TOY) == Blocks(99)


@pytest.mark.parametrize("order", [1, -1])
async def test_tunes_of_this_environment_precede_puts_and_puts_precede_other_tunes(order):
    """This is the order of a store that is read on demand, and does not depend on the listing."""
    ours = await record_of(cfg=Blocks(3))
    put = await record_of(cfg=Blocks(99), checksum="", environment={})
    other = await record_of(cfg=Blocks(2), environment={"jax": "0"})
    for records, best in (((ours, put, other), Blocks(3)), ((put, other), Blocks(99)), ((other,), Blocks(2))):
        async with Bench(persistent=Listing(*records[::order])).chain as chain:
            assert chain.choose_nowait(call(), TOY) == best


async def test_a_policy_may_refuse_records_of_other_environments():
    """`match_environment` applies to preloaded records too."""
    bench = Bench(persistent=Listing(await record_of(environment={"jax": "0"})), allow={"match_environment": "exact"})
    async with bench.chain as chain:
        assert chain.choose_nowait(call(), TOY) == GUESS
        chain.policy = AutotunePolicy()
        assert chain.choose_nowait(call(), TOY) == BEST


async def test_explain_shows_a_preloaded_record_without_verifying_it():
    """`explain` changes nothing, so the next call is still the first."""
    bench = Bench(persistent=Listing(await record_of()))
    async with bench.chain as chain:
        explained = await chain.explain(call(), TOY)
        assert (explained.answered_by, explained.tiers[2].cfg) == ("memory", BEST)
        generation = bench.cache.generation
        assert chain.choose_nowait(call(), TOY) == BEST
        assert bench.cache.generation == generation + 1


async def test_memory_takes_as_many_records_as_it_has_room_for():
    """Other records are read on demand; nothing is evicted for a preloaded one."""
    place = Listing(*[await record_of(size) for size in range(8, 16)])
    bench = Bench(cache=ConfigCache(max_entries=3), persistent=place)
    async with bench.chain:
        assert bench.cache.size() == 3


@pytest.mark.parametrize(("trouble", "events"), [("broken", ["store_error"]), ("hung", ["store_error"]), ("slow", [])])
async def test_a_chain_opens_over_a_store_that_fails_or_is_slow(trouble, events):
    """It opens within `store_timeout_s`, with the records that arrived in time; a failure has its event."""
    place = Listing(*[await record_of(size) for size in range(8, 16)])
    if trouble == "slow":
        place.pause_s = 2.0
    else:
        setattr(place, trouble, {"list"})
    bench = Bench(persistent=place, store_timeout_s=5.0)
    start = anyio.current_time()
    async with bench.chain:
        assert anyio.current_time() - start == pytest.approx(0.0 if trouble == "broken" else 5.0)
        assert bench.cache.size() == (2 if trouble == "slow" else 0)
        assert bench.sink.names == events


async def test_a_caller_cancelled_while_the_chain_opens_leaves_it_closed():
    """No task keeps running; the chain can be opened again."""
    place = Listing(await record_of())
    place.hung = {"list"}
    bench = Bench(persistent=place)
    with anyio.move_on_after(1.0) as scope:
        async with bench.chain:
            pytest.fail("it opened")
    assert scope.cancelled_caught
    assert place.listeners == []
    place.hung = set()
    async with bench.chain as chain:
        assert chain.choose_nowait(call(), TOY) == BEST


async def test_closing_interrupts_preloading():
    """Closing waits for neither the store nor its timeout, and opening raises."""
    place = Listing(await record_of())
    place.hung = {"list"}
    bench, start = Bench(persistent=place), anyio.current_time()
    async with anyio.create_task_group() as tasks:

        async def close_soon():
            await anyio.sleep(1.0)
            await bench.chain.aclose()

        tasks.start_soon(close_soon)
        with pytest.raises(SelectorClosedError, match="closed while it was being opened"):
            await bench.chain.aopen()
    assert anyio.current_time() - start == 1.0


async def test_preload_must_be_true_or_false():
    with pytest.raises(InvalidRequestError, match="preload='no'"):
        Bench(preload="no")


def test_a_preloaded_winner_that_fails_is_replaced_by_the_next_best_of_its_tune(tmp_path, real_backend):
    """Its report is read when it is needed, so the runners-up survive a restart."""
    x = H100.array((8, 128))
    picky = Picky()
    benches = [Bench(persistent=directory(tmp_path), costs=QUICK) for _ in range(3)]

    async def main():
        async with benches[0].chain as chain:
            await chain.choose(Invocation("picky", (x,), {}), picky)
        picky.breaks[3] = MemoryError("too large")
        async with benches[1].chain as chain:
            assert await Executor(chain, jit=False)(picky, x) == "ran 2"
            selection = await chain.select(Invocation("picky", (x,), {}), picky)
            assert (selection.cfg, selection.tier, len(selection.report.outcomes)) == (Blocks(2), "memory", 3)
        async with benches[2].chain as chain:
            assert chain.choose_nowait(Invocation("picky", (x,), {}), picky) == Blocks(2)

    anyio.run(main, backend=real_backend)
    assert [bench.tunes for bench in benches] == [1, 0, 0]
    assert benches[1].sink.named("winner_failed")[0].tier == "memory"


def test_a_restarted_process_traces_with_the_tuned_config(tmp_path):
    """The first trace of a second process has the first one's config, and keeps it."""
    first, second = (
        json.loads(
            subprocess.run(
                [sys.executable, "-m", "support.restarted_service", str(tmp_path)],
                cwd=TESTS, check=True, capture_output=True, text=True,
            ).stdout
        )
        for _ in range(2)
    )  # fmt: skip
    assert first == {"traced": 1, "then": 3, "events": ["heuristics", "autotune_start", "autotune_finish", "cache_hit"]}
    assert second == {"traced": 3, "then": 3, "events": ["cache_hit", "cache_hit"]}
