"""A selector and a store that fails: in virtual time, over a scripted store."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import replace

import anyio
import pytest
from support.kernels import BEST, COSTS, GUESS, Blocks, Toy, call
from support.store_doubles import Place, bench_over

from asel import (
    InvalidRequestError,
    policy_override,
)

pytestmark = pytest.mark.anyio


async def test_an_outage_and_its_end_are_reported_once():
    """One event for each change of state, for any number of calls."""
    place = Place()
    place.broken = {"get", "put", "claim"}
    bench = bench_over(place)
    async with bench.chain as chain:
        for size in range(1, 6):
            assert await chain.choose(call(size), Toy()) == BEST
        place.broken = set()
        await anyio.sleep(60)
        assert await chain.choose(call(9), Toy()) == BEST
    assert [event.operation for event in bench.sink.named("store_error")] == ["get"]
    [recovered] = bench.sink.named("store_recovered")
    assert recovered.failing_s > 0


async def test_a_dead_store_costs_one_timeout_and_not_one_for_each_call():
    """After a timeout the store is not tried for a while, and other tiers answer immediately."""
    place = Place()
    place.hung = {"get", "put", "claim"}
    bench = bench_over(place, store_timeout_s=5.0, allow={"cache_miss_fallback": "heuristics"})
    async with bench.chain as chain:
        start = anyio.current_time()
        for size in range(1, 20):
            assert await chain.choose(call(size), Toy()) == GUESS
        assert anyio.current_time() - start == pytest.approx(5.0)


async def test_the_back_off_grows_while_the_store_stays_dead():
    """The longer it is down, the less often it is asked."""
    place = Place()
    place.broken = {"get"}
    bench = bench_over(place, allow={"cache_miss_fallback": "heuristics"})
    async with bench.chain as chain:
        for size in range(1, 1001):
            await chain.choose(call(size), Toy())
            await anyio.sleep(0.1)
    assert 5 <= len(place.asked) <= 10  # 1 + 2 + 4 + 8 + 16 + 30 + 30 seconds of rest in a hundred


@pytest.mark.parametrize(("is_open", "longest"), [(True, 0.0), (False, 5.0)], ids=["open", "not open"])
async def test_after_the_back_off_at_most_one_caller_waits(is_open, longest):
    """If the store hangs again, only that caller waits, or none if the open selector probes it."""
    place = Place()
    place.hung = {"get"}
    bench = bench_over(place, store_timeout_s=5.0, allow={"cache_miss_fallback": "heuristics"})
    async with bench.chain if is_open else nullcontext(bench.chain) as chain:
        await chain.choose(call(1), Toy())
        await anyio.sleep(2)
        waited = []

        async def ask(size):
            start = anyio.current_time()
            await chain.choose(call(size), Toy())
            waited.append(anyio.current_time() - start)

        async with anyio.create_task_group() as tasks:
            for size in range(2, 12):
                tasks.start_soon(ask, size)
    assert sorted(waited) == pytest.approx([0.0] * 9 + [longest])


async def test_a_store_that_cannot_be_written_is_still_read():
    """A full disk costs no reads."""
    place = Place()
    async with bench_over(place).chain as chain:
        await chain.choose(call(1), Toy())
    place.broken = {"put"}
    bench = bench_over(place)
    async with bench.chain as chain:
        assert (await chain.select(call(2), Toy())).tier == "autotune"
        assert (await chain.select(call(1), Toy())).tier == "persistent"


async def test_without_claims_every_process_tunes():
    """Without locks the fleet tunes more often, and nothing else changes."""
    place = Place()
    place.broken = {"claim"}
    bench = bench_over(place)
    async with bench.chain as chain:
        assert (await chain.select(call(), Toy())).tier == "autotune"
    assert len(place.kept) == 1
    assert [event.operation for event in bench.sink.named("store_error")] == ["claim"]


async def test_unsaved_results_are_stored_later():
    """In order, with newer results; until then memory answers."""
    place = Place()
    place.broken = {"put"}
    bench = bench_over(place)
    async with bench.chain as chain:
        for size in (1, 2, 3):
            assert await chain.choose(call(size), Toy()) == BEST
            assert (await chain.select(call(size), Toy())).tier == "memory"
        assert not place.kept
        place.broken = set()
        await anyio.sleep(60)
        assert len(place.kept) == 3
    assert len(bench.sink.named("persisted")) == 3
    assert bench.sink.named("closed")[0].unsaved == 0


async def test_closing_tries_once_more():
    """Unsaved results get a last attempt, even during a back-off."""
    place = Place()
    place.broken = {"put"}
    bench = bench_over(place)
    async with bench.chain as chain:
        await chain.choose(call(), Toy())
        place.broken = set()
    assert len(place.kept) == 1


async def test_closing_over_a_dead_store_takes_no_longer_than_its_grace():
    """The last event has the number of lost results."""
    place = Place()
    place.broken = {"put"}
    bench = bench_over(place, store_timeout_s=100.0, close_grace_s=2.0)
    async with bench.chain as chain:
        await chain.choose(call(), Toy())
        place.hung = {"put"}
        start = anyio.current_time()
    assert anyio.current_time() - start <= 2.0
    assert bench.sink.named("closed")[0].unsaved == 1


async def test_after_a_partition_all_have_the_config_that_was_stored_first():
    """Two processes that tuned separately end with the same answer."""
    place, other = Place(), Place()
    place.broken = {"get", "put", "claim"}
    bench = bench_over(place)
    async with bench.chain as chain:
        assert await chain.choose(call(), Toy()) == BEST
        async with bench_over(other, costs={Blocks(1): 0.3, Blocks(2): 0.1, Blocks(3): 0.2}).chain as elsewhere:
            assert await elsewhere.choose(call(), Toy()) == Blocks(2)
        place.kept, place.broken = other.kept, set()
        await anyio.sleep(60)
        selection = await chain.select(call(), Toy())
    assert (selection.cfg, selection.tier) == (Blocks(2), "memory")
    assert bench.sink.named("persisted")[0].conflict == "key_out_of_sync"


async def test_a_config_that_cannot_be_stored_does_not_count_as_an_outage():
    """It is reported and not tried again, and the next result is stored."""
    from asel.errors import InvalidRequestError

    class Picky(Place):
        async def keep(self, report, *, replace, claim=None):
            if "1," in str(report.key.call_key) or not self.asked.count("put"):
                self.asked.append("put")
                raise InvalidRequestError("no JSON form")
            return await super().keep(report, replace=replace, claim=claim)

    place = Picky()
    bench = bench_over(place)
    async with bench.chain as chain:
        assert await chain.choose(call(1), Toy()) == BEST
        assert await chain.choose(call(2), Toy()) == BEST
    assert [event.error_type for event in bench.sink.named("store_error")] == ["InvalidRequestError"]
    assert len(place.kept) == 1
    assert bench.sink.named("closed")[0].unsaved == 0


async def test_the_timings_of_other_candidate_lists_are_reused_from_the_store():
    """A new process that adds a candidate measures the new one, the incumbent and the earlier winner."""
    place = Place()
    async with bench_over(place).chain as chain:
        await chain.choose(call(), Toy())

    class More(Toy):
        candidates = (*Toy.candidates, Blocks(4))

    bench = bench_over(place, costs=lambda cfg: 0.4 - cfg.m / 10 if cfg.m < 4 else 0.05)
    async with bench.chain as chain:
        assert await chain.choose(call(), More()) == Blocks(4)
    assert set(bench.measure.compiled) == {GUESS, BEST, Blocks(4)}


async def test_a_miss_is_remembered_for_a_moment():
    """A policy that never tunes does not read the store at every call; a new record is found soon."""
    place = Place()
    async with bench_over(place).chain as chain:
        await chain.choose(call(), Toy())
    record, place.kept, place.asked = place.kept, {}, []
    async with bench_over(place, allow={"cache_miss_fallback": "heuristics"}).chain as chain:
        for _ in range(100):
            assert await chain.choose(call(), Toy()) == GUESS
        assert place.asked == ["get"]
        place.kept = record
        await anyio.sleep(10)
        assert await chain.choose(call(), Toy()) == BEST


async def test_rejected_records_become_events():
    """The events of a chain include the records that its store could not use."""
    from asel.stores.records import Rejected

    place = Place()
    bench = bench_over(place)
    async with bench.chain as chain:
        await chain.choose(call(), Toy())
        [listener] = place.listeners
        listener(Rejected("/cache/x.json", "it is empty"))
    [rejected] = bench.sink.named("record_rejected")
    assert (rejected.where, rejected.reason) == ("/cache/x.json", "it is empty")
    assert not place.listeners


async def test_an_unsaved_config_that_cannot_be_stored_does_not_delay_others():
    """It is refused after a back-off, which is reported once, and the results behind it are stored."""

    class Refusing(Place):
        async def keep(self, report, *, replace, claim=None):
            if report.key == odd.key and not self.broken:
                raise InvalidRequestError("this one cannot be stored")
            return await super().keep(report, replace=replace, claim=claim)

    place = Refusing()
    place.broken = {"put"}
    bench = bench_over(place)
    async with bench.chain as chain:
        await chain.choose(call(1), Toy())
        odd = await chain.select(call(2), Toy())
        await chain.choose(call(3), Toy())
        place.broken = set()
        await anyio.sleep(60)
        assert len(place.kept) == 2
    assert [event.operation for event in bench.sink.named("store_error")] == ["put", "put"]
    assert bench.sink.named("closed")[0].unsaved == 0


@pytest.mark.parametrize("ends", ["well", "badly"])
async def test_a_newer_result_is_kept_while_an_older_one_is_being_stored(ends):
    """Whether or not storing the older one succeeds."""

    class Slow(Place):
        gate = None

        async def keep(self, report, *, replace, claim=None):
            if self.gate is not None:
                await self.gate.wait()
            return await super().keep(report, replace=replace, claim=claim)

    place = Slow()
    place.broken = {"put"}
    costs = dict(COSTS)
    async with bench_over(place, costs=costs).chain as chain:
        await chain.choose(call(), Toy())
        gate = place.gate = anyio.Event()
        place.broken = {"put"} if ends == "badly" else set()
        await anyio.sleep(1.5)  # what was found is on its way into the store
        costs[GUESS] = 0.001
        assert await chain.retune(call(), Toy()) == GUESS
        place.gate = None
        gate.set()
        await anyio.wait_all_tasks_blocked()
        place.broken = set()
        await anyio.sleep(60)
    assert [stored.cfg for stored in place.kept.values()] == [GUESS]


def test_asyncio_cancellation_during_a_put_keeps_the_result():
    """asyncio's own cancellation ignores shields. The next caller tries the store, and the result is stored later."""

    async def scene():
        place = Place()
        place.broken = {"put"}
        chain = bench_over(place, costs=dict.fromkeys(COSTS, 0.0)).chain
        await chain.choose(call(1), Toy())
        place.broken, place.hung = set(), {"put"}
        chain._store.resilient._breaker.allow_all()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(chain.choose(call(2), Toy()), 0.1)
        place.hung = set()
        assert chain._store.resilient.unsaved == 2
        await chain.choose(call(3), Toy())
        assert len(place.kept) == 3

    asyncio.run(scene())


@pytest.mark.parametrize("allow", [{"allow_autotune": False}, {"cache_miss_fallback": "heuristics"}, {}])
async def test_choose_nowait_reads_the_store_for_the_next_call(allow):
    """Even if tuning is off."""
    place = Place()
    async with bench_over(place).chain as chain:
        await chain.choose(call(), Toy())
    bench = bench_over(place, allow=allow)
    async with bench.chain as chain:
        if not allow:
            chain.freeze()
        assert chain.choose_nowait(call(), Toy()) == GUESS
        await chain.settled()
        assert chain.choose_nowait(call(), Toy()) == BEST
    assert bench.tunes == 0


async def test_with_wait_s_zero_a_stored_config_answers_the_next_call():
    """wait_s limits a store, too; a late answer is used by the next call."""
    place = Place()
    async with bench_over(place).chain as chain:
        await chain.choose(call(), Toy())
    bench = bench_over(place, allow={"wait_s": 0.0, "allow_autotune": False})
    async with bench.chain as chain:
        await chain.choose(call(), Toy())
        await chain.settled()
        assert await chain.choose(call(), Toy()) == BEST


async def test_without_async_with_the_next_put_stores_unsaved_results():
    """No background task retries, so the next successful put stores them."""
    place = Place()
    place.broken = {"put"}
    bench = bench_over(place)
    for size in (1, 2):
        await bench.chain.choose(call(size), Toy())
    place.broken = set()
    await anyio.sleep(60)
    await bench.chain.choose(call(3), Toy())
    assert len(place.kept) == 3


async def test_match_environment_exact_applies_to_memory():
    """A record that another policy loaded from another environment is not used."""
    place = Place()
    async with bench_over(place).chain as chain:
        await chain.choose(call(), Toy())
    [(address, stored)] = place.kept.items()
    place.kept[address] = replace(stored, cfg=Blocks(2), foreign=True)
    bench = bench_over(place)
    async with bench.chain as chain:
        assert await chain.choose(call(), Toy()) == Blocks(2)
        place.kept[address] = stored
        with policy_override(chain, match_environment="exact"):
            selection = await chain.select(call(), Toy())
        assert (selection.cfg, selection.tier) == (BEST, "persistent")
        assert (await chain.select(call(), Toy())).cfg == BEST


async def test_explain_waits_store_timeout_s_at_most():
    """It reports a store that hangs."""
    place = Place()
    place.hung = {"get"}
    bench = bench_over(place, store_timeout_s=3.0)
    async with bench.chain as chain:
        start = anyio.current_time()
        said = str(await chain.explain(call(), Toy()))
        assert anyio.current_time() - start == pytest.approx(3.0)
    assert "store failed: TimeoutError" in said
    assert not bench.sink.named("store_error")
