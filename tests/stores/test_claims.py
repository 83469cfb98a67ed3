"""Claims of a selector: one tune per fleet, and a store whose claims fail. In virtual time."""

from __future__ import annotations

from contextlib import asynccontextmanager

import anyio
import pytest
from support.kernels import BEST, GUESS, TUNE_S, Bench, Blocks, Toy, call
from support.store_doubles import Place, bench_over

from asel import (
    AutotunePolicy,
    ConfigCache,
    ConfigSelectorChain,
    SelectorClosedError,
)
from asel.stores.protocol import Claim

pytestmark = pytest.mark.anyio


async def test_a_waiter_for_another_process_takes_its_record():
    """The waiter does not tune; it reports its waiting time, and its tier is the store."""
    place = Place()
    async with bench_over(place).chain as chain:
        await chain.choose(call(), Toy())
    record, place.kept = place.kept, {}
    place.claimed_elsewhere = anyio.Event()
    bench = bench_over(place)

    async def finish():
        await anyio.sleep(7)
        place.kept = record
        place.claimed_elsewhere.set()

    async with bench.chain as chain, anyio.create_task_group() as tasks:
        tasks.start_soon(finish)
        selection = await chain.select(call(), Toy())
    assert (selection.cfg, selection.tier) == (BEST, "persistent")
    assert bench.tunes == 0
    [wait] = bench.sink.named("claim_wait")
    assert (wait.outcome, wait.waited_s) == ("record", pytest.approx(7.0))
    assert [hit.level for hit in bench.sink.named("cache_hit")] == ["persistent"]


@pytest.mark.parametrize(("allow", "patience"), [({"wait_s": 3.0}, 3.0), ({"tune_budget_s": 20.0}, 25.0)])
async def test_a_stuck_holder_delays_a_tune_by_wait_s_at_most(allow, patience):
    """After `wait_s`, or by default the budget and a grace period, this process tunes as well."""
    place = Place()
    place.claimed_elsewhere = anyio.Event()
    bench = bench_over(place, allow=allow)
    async with bench.chain as chain:
        start = anyio.current_time()
        await chain.choose(call(), Toy())
        await chain.settled()
        assert anyio.current_time() - start == pytest.approx(patience + TUNE_S)
        assert await chain.choose(call(), Toy()) == BEST
    assert bench.sink.named("claim_wait")[0].outcome == "timed_out"
    assert bench.tunes == 1


async def test_on_pending_heuristics_applies_to_other_processes_tunes():
    """With on_pending="heuristics", callers do not wait for another process, whose record is used once it is stored."""
    place = Place()
    async with bench_over(place).chain as chain:
        await chain.choose(call(), Toy())
    record, place.kept = place.kept, {}
    place.claimed_elsewhere = anyio.Event()
    bench = bench_over(place, allow={"on_pending": "heuristics"})
    async with bench.chain as chain:
        start = anyio.current_time()
        selection = await chain.select(call(), Toy())
        assert (selection.cfg, selection.tier, anyio.current_time()) == (GUESS, "heuristics", start)
        place.kept = record
        place.claimed_elsewhere.set()
        await chain.settled()
        assert (await chain.select(call(), Toy())).cfg == BEST
    assert bench.tunes == 0


async def test_a_retune_does_not_adopt_the_stored_record():
    """A retune measures again, even if another process has stored a record."""
    place = Place()
    async with bench_over(place).chain as chain:
        await chain.choose(call(), Toy())
    costs = {Blocks(1): 0.3, Blocks(2): 0.1, Blocks(3): 0.2}
    async with bench_over(place, costs=costs).chain as chain:
        assert await chain.retune(call(), Toy()) == Blocks(2)
    assert [stored.cfg for stored in place.kept.values()] == [Blocks(2)]


async def test_without_persist_autotune_nothing_is_claimed():
    """persist_autotune=False only reads the store."""
    place = Place()
    bench = Bench(persistent=place, persist_autotune=False)
    async with bench.chain as chain:
        await chain.choose(call(), Toy())
    assert place.asked == ["get"]


async def test_without_async_with_claims_and_saves_work_the_same():
    """The tune runs inside its caller, and so do the claim and the put."""
    place = Place()
    bench = bench_over(place)
    assert await bench.chain.choose(call(), Toy()) == BEST
    assert len(place.kept) == 1
    other = ConfigSelectorChain(ConfigCache(), AutotunePolicy(), persistent=place, sinks=[])
    assert (await other.select(call(), Toy())).tier == "persistent"


async def test_closing_ends_a_wait_for_another_process():
    """Waiters get the error immediately."""
    place = Place()
    place.claimed_elsewhere = anyio.Event()
    bench = bench_over(place)

    async def ask():
        with pytest.raises(SelectorClosedError):
            await bench.chain.choose(call(), Toy())

    async with anyio.create_task_group() as tasks:
        async with bench.chain:
            tasks.start_soon(ask)
            await anyio.sleep(1)
            start = anyio.current_time()
        assert anyio.current_time() == start


async def test_cancelling_a_caller_does_not_end_the_wait_for_another_process():
    """The tune belongs to the chain, and so does its claim."""
    place = Place()
    place.claimed_elsewhere = anyio.Event()
    bench = bench_over(place)
    async with bench.chain as chain:
        with anyio.move_on_after(1):
            await chain.choose(call(), Toy())
        place.claimed_elsewhere.set()
        await chain.settled()
        assert (await chain.select(call(), Toy())).tier == "memory"
    assert bench.tunes == 1


async def test_without_async_with_the_next_waiter_claims_anew():
    """A cancelled caller releases its claim; the waiter that continues the tune claims it again."""
    place = Place()
    bench = bench_over(place)
    answers = []

    async def ask():
        answers.append(await bench.chain.choose(call(), Toy()))

    async with anyio.create_task_group() as tasks:
        with anyio.move_on_after(TUNE_S / 2):
            tasks.start_soon(anyio.sleep, 0)
            async with anyio.create_task_group() as first:
                first.start_soon(ask)
                await anyio.sleep(TUNE_S / 4)
                tasks.start_soon(ask)
                await anyio.sleep_forever()
    assert answers == [BEST]
    assert (place.asked.count("claim"), place.held, bench.tunes) == (2, 0, 1)


@pytest.mark.parametrize("broken", ["compile", "put"])
async def test_a_claim_is_released_after_every_outcome_of_a_tune(broken):
    """Success, failure of every candidate, and failure of the put."""
    place = Place()
    script = {"compile_errors": lambda cfg: ValueError("no")} if broken == "compile" else {}
    place.broken = {broken}
    bench = bench_over(place, script=script)
    async with bench.chain as chain:
        await chain.choose(call(), Toy())
        await chain.settled()
        assert place.held == 0


async def test_a_claim_that_cannot_be_released_costs_no_answer():
    """The result of the tune is returned all the same."""

    class Sticky(Place):
        @asynccontextmanager
        async def claim(self, query, wait_s, anew):
            yield Claim(held=True)
            raise OSError("it sticks")

    bench = bench_over(Sticky())
    async with bench.chain as chain:
        assert await chain.choose(call(), Toy()) == BEST
    assert [event.operation for event in bench.sink.named("store_error")] == ["claim"]


@pytest.mark.parametrize("when", ["coming", "going", "shielded", "shielded and broken"])
async def test_a_claim_that_hangs_costs_one_timeout(when):
    """The tune is answered if the store hangs before or after the claim is held; then it is not tried for a while."""

    class Hanging(Place):
        @asynccontextmanager
        async def claim(self, query, wait_s, anew):
            if when == "coming":
                await anyio.sleep_forever()
            if when.startswith("shielded"):
                with anyio.CancelScope(shield=True):
                    await anyio.sleep(5.0)
            if when == "shielded and broken":
                raise OSError("no locks")
            yield Claim(held=True)
            if when == "going":
                await anyio.sleep_forever()

    bench = bench_over(Hanging(), store_timeout_s=5.0)
    async with bench.chain as chain:
        start = anyio.current_time()
        assert await chain.choose(call(1), Toy()) == BEST
        assert anyio.current_time() - start == pytest.approx(5.0 + TUNE_S)
    assert [event.operation for event in bench.sink.named("store_error")] == ["claim"]


async def test_an_invalid_record_with_a_claim_is_a_failure_of_the_store():
    """A faulty custom store costs its tier, not the tune."""

    class Odd(Place):
        @asynccontextmanager
        async def claim(self, query, wait_s, anew):
            yield Claim(held=True, record="nonsense")

        def read(self, record, query):
            return record.cfg

    bench = bench_over(Odd())
    async with bench.chain as chain:
        assert await chain.choose(call(), Toy()) == BEST
    assert [event.operation for event in bench.sink.named("store_error")] == ["claim"]


async def test_without_async_with_on_pending_heuristics_applies_as_well():
    """Callers do not wait for another process, and the next call tries again."""
    place = Place()
    place.claimed_elsewhere = anyio.Event()
    bench = bench_over(place, allow={"on_pending": "heuristics"})
    start = anyio.current_time()
    assert (await bench.chain.select(call(), Toy())).tier == "heuristics"
    assert anyio.current_time() == start
    place.claimed_elsewhere = None
    assert (await bench.chain.select(call(), Toy())).tier == "autotune"


@pytest.mark.parametrize("broken", ["claim", "get"])
async def test_a_failed_claim_does_not_count_as_another_process(broken):
    """If the store is broken, every process tunes, even with a policy that does not wait for others."""
    place = Place()
    place.broken = {broken}
    bench = bench_over(place, allow={"on_pending": "heuristics"})
    assert (await bench.chain.select(call(), Toy())).tier == "autotune"


async def test_a_retune_waits_for_another_process_despite_a_record():
    """The existing record is about to be replaced, so it does not end the wait."""
    place = Place()
    async with bench_over(place).chain as chain:
        await chain.choose(call(), Toy())
        place.claimed_elsewhere = anyio.Event()
        start = anyio.current_time()

        async def finish():
            await anyio.sleep(5)
            place.claimed_elsewhere.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(finish)
            await chain.retune(call(), Toy())
        assert anyio.current_time() - start == pytest.approx(5 + TUNE_S)
