"""A chain and a store that fails: in virtual time, over a store that does as it is told."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace

import anyio
import pytest
from kernels import BEST, COSTS, GUESS, TUNE_S, Bench, Blocks, Toy, call

from asel import (
    AutotunePolicy,
    ConfigCache,
    ConfigSelectorChain,
    InvalidRequestError,
    SelectorClosedError,
    policy_override,
)
from asel.persistence import Stored
from asel.stores.protocol import Claim

pytestmark = pytest.mark.anyio


class Place:
    """A `Persistence` in memory. Operations named in `broken` fail, those in `hung` never answer."""

    has_claims = True

    def __init__(self) -> None:
        self.kept = {}
        self.broken = set()
        self.hung = set()
        self.asked = []
        self.claimed_elsewhere = None
        self.held = 0
        self.listeners = []

    async def _answer(self, operation):
        self.asked.append(operation)
        if operation in self.hung:
            await anyio.sleep_forever()
        if operation in self.broken:
            raise OSError(f"{operation} is broken")

    async def find(self, sought):
        await self._answer("get")
        return self.kept.get((sought.key, sought.checksum))

    async def keep(self, report, *, replace, claim=None):
        await self._answer("put")
        first = self.kept.get((report.key, report.checksum))
        if first is not None and not replace:
            return Stored(first.cfg, first.report, adopted=True, conflict="key_out_of_sync")
        self.kept[report.key, report.checksum] = Stored(report.winner, report)
        return self.kept[report.key, report.checksum]

    @asynccontextmanager
    async def claim(self, sought, wait_s, anew):
        await self._answer("claim")
        if self.claimed_elsewhere is None:
            self.held += 1
            try:
                yield Claim(held=True)
            finally:
                self.held -= 1
            return
        with anyio.move_on_after(wait_s):
            await self.claimed_elsewhere.wait()
            stored = None if anew else await self.find(sought)
            yield Claim(held=stored is None, record=stored)
            return
        yield Claim()

    def read(self, record, sought):
        return record

    async def reports(self, sought):
        await self._answer("get")
        return [stored.report for (key, _), stored in self.kept.items() if key == sought.key]

    @asynccontextmanager
    async def told(self, listener):
        self.listeners.append(listener)
        try:
            yield
        finally:
            self.listeners.remove(listener)


def bench_over(place, **options) -> Bench:
    return Bench(persistent=place, **options)


async def test_an_outage_is_told_once_and_so_is_its_end():
    """One event per change of state, however many calls were made meanwhile."""
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
    """A store that does not answer is left alone for a while; other tiers answer at once."""
    place = Place()
    place.hung = {"get", "put", "claim"}
    bench = bench_over(place, store_timeout_s=5.0, allow={"cache_miss_fallback": "heuristics"})
    async with bench.chain as chain:
        start = anyio.current_time()
        for size in range(1, 20):
            assert await chain.choose(call(size), Toy()) == GUESS
        assert anyio.current_time() - start == pytest.approx(5.0)


async def test_the_rest_grows_while_the_store_stays_dead():
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
async def test_after_a_rest_no_more_than_one_caller_waits_for_the_next_try(is_open, longest):
    """A store that hangs again holds up one caller, or none if the open chain probes it."""
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


async def test_without_claims_everyone_tunes():
    """Where locks do not work, the fleet loses its economy and nothing else."""
    place = Place()
    place.broken = {"claim"}
    bench = bench_over(place)
    async with bench.chain as chain:
        assert (await chain.select(call(), Toy())).tier == "autotune"
    assert len(place.kept) == 1
    assert [event.operation for event in bench.sink.named("store_error")] == ["claim"]


async def test_what_could_not_be_stored_is_stored_later():
    """In the order in which it was found, with what was found since; it answers from memory meanwhile."""
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
    """What waited for the store gets a last chance, whatever the store did before."""
    place = Place()
    place.broken = {"put"}
    bench = bench_over(place)
    async with bench.chain as chain:
        await chain.choose(call(), Toy())
        place.broken = set()
    assert len(place.kept) == 1


async def test_closing_over_a_dead_store_takes_no_longer_than_its_grace():
    """And the last event says how many results were lost."""
    place = Place()
    place.broken = {"put"}
    bench = bench_over(place, store_timeout_s=100.0, close_grace_s=2.0)
    async with bench.chain as chain:
        await chain.choose(call(), Toy())
        place.hung = {"put"}
        start = anyio.current_time()
    assert anyio.current_time() - start <= 2.0
    assert bench.sink.named("closed")[0].unsaved == 1


async def test_after_a_partition_everyone_has_the_config_that_was_stored_first():
    """Two that tuned while they could not see each other end with the same answer."""
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


async def test_a_config_that_cannot_be_stored_is_no_fault_of_the_store():
    """It is told, it is not tried again, and the next one is stored."""
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


# One tune per fleet.


async def test_whoever_waits_for_another_process_takes_its_record():
    """It does not tune, it says how long it waited, and its tier is the store."""
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
async def test_a_stuck_holder_delays_a_tune_so_long_and_no_longer(allow, patience):
    """By `wait_s`, or where that is None by the budget and a grace; then this process tunes as well."""
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


async def test_heuristics_meanwhile_is_a_policy():
    """With on_pending="heuristics" nobody waits for another process; its record is taken in when it comes."""
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


async def test_a_retune_does_not_take_what_is_there():
    """On purpose means measured again, whoever else has a record."""
    place = Place()
    async with bench_over(place).chain as chain:
        await chain.choose(call(), Toy())
    costs = {Blocks(1): 0.3, Blocks(2): 0.1, Blocks(3): 0.2}
    async with bench_over(place, costs=costs).chain as chain:
        assert await chain.retune(call(), Toy()) == Blocks(2)
    assert [stored.cfg for stored in place.kept.values()] == [Blocks(2)]


async def test_the_timings_of_other_candidate_lists_are_reused_from_the_store():
    """A new process that adds a candidate measures the new one and the incumbent."""
    place = Place()
    async with bench_over(place).chain as chain:
        await chain.choose(call(), Toy())

    class More(Toy):
        candidates = (*Toy.candidates, Blocks(4))

    bench = bench_over(place, costs=lambda cfg: 0.4 - cfg.m / 10 if cfg.m < 4 else 0.05)
    async with bench.chain as chain:
        assert await chain.choose(call(), More()) == Blocks(4)
    assert set(bench.measure.compiled) == {GUESS, Blocks(4)}


async def test_a_miss_is_believed_for_a_moment():
    """A policy that never tunes does not read the store at every call; what appears is seen soon."""
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
    """Whoever traces a chain sees what its store could not use."""
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


async def test_a_chain_that_does_not_persist_claims_nothing():
    """persist_autotune=False reads the store and leaves it alone otherwise."""
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
    """Whoever waited is told that the chain closed, at once."""
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


async def test_a_cancelled_caller_leaves_the_wait_for_another_process_to_the_chain():
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
    """A cancelled carrier gives its claim back; who carries on asks for it again."""
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
async def test_a_claim_is_given_back_however_the_tune_ends(broken):
    """Success, failure of every candidate, failure of the put."""
    place = Place()
    script = {"compile_errors": lambda cfg: ValueError("no")} if broken == "compile" else {}
    place.broken = {broken}
    bench = bench_over(place, script=script)
    async with bench.chain as chain:
        await chain.choose(call(), Toy())
        await chain.settled()
        assert place.held == 0


async def test_a_claim_that_cannot_be_given_back_harms_nobody():
    """What was found is found."""

    class Sticky(Place):
        @asynccontextmanager
        async def claim(self, sought, wait_s, anew):
            yield Claim(held=True)
            raise OSError("it sticks")

    bench = bench_over(Sticky())
    async with bench.chain as chain:
        assert await chain.choose(call(), Toy()) == BEST
    assert [event.operation for event in bench.sink.named("store_error")] == ["claim"]


async def test_what_proves_unstorable_later_does_not_hold_up_the_rest():
    """It was found while the store rested, so nobody knew; it is told once, and what waits behind it is stored."""

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
async def test_a_newer_result_is_not_lost_to_an_older_one_that_is_being_stored(ends):
    """Found while the store is being tried again, it waits its turn, however the trial ends."""

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


def test_asyncios_own_cancellation_while_storing_costs_neither_the_result_nor_the_store():
    """It knows no shields. The store is tried again by the next, and the result waits."""

    async def scene():
        place = Place()
        place.broken = {"put"}
        chain = bench_over(place, costs=dict.fromkeys(COSTS, 0.0)).chain
        await chain.choose(call(1), Toy())
        place.broken, place.hung = set(), {"put"}
        chain._keeper._health.forgive()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(chain.choose(call(2), Toy()), 0.1)
        place.hung = set()
        assert chain._keeper.unsaved == 2
        await chain.choose(call(3), Toy())
        assert len(place.kept) == 3

    asyncio.run(scene())


@pytest.mark.parametrize("when", ["coming", "going", "shielded", "shielded and broken"])
async def test_a_claim_that_hangs_costs_its_bound_once(when):
    """Whether it hangs before it is held or after, the tune is answered and the store left alone."""

    class Hanging(Place):
        @asynccontextmanager
        async def claim(self, sought, wait_s, anew):
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


async def test_nonsense_that_comes_with_a_claim_is_the_stores_failure():
    """A store of somebody else's making costs its tier, and no tune."""

    class Odd(Place):
        @asynccontextmanager
        async def claim(self, sought, wait_s, anew):
            yield Claim(held=True, record="nonsense")

        def read(self, record, sought):
            return record.cfg

    bench = bench_over(Odd())
    async with bench.chain as chain:
        assert await chain.choose(call(), Toy()) == BEST
    assert [event.operation for event in bench.sink.named("store_error")] == ["claim"]


# What an adversary found.


@pytest.mark.parametrize("allow", [{"allow_autotune": False}, {"cache_miss_fallback": "heuristics"}, {}])
async def test_a_call_that_cannot_wait_has_the_store_read_for_the_next(allow):
    """Also where nothing may be tuned: the record is there."""
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


async def test_a_caller_that_waits_for_nothing_still_gets_what_is_stored_in_the_end():
    """wait_s is short for a store, too; what it says late is there for the next call."""
    place = Place()
    async with bench_over(place).chain as chain:
        await chain.choose(call(), Toy())
    bench = bench_over(place, allow={"wait_s": 0.0, "allow_autotune": False})
    async with bench.chain as chain:
        await chain.choose(call(), Toy())
        await chain.settled()
        assert await chain.choose(call(), Toy()) == BEST


async def test_without_async_with_heuristics_meanwhile_hold_as_well():
    """Nobody waits for another process who does not want to; and nothing keeps the next call from trying."""
    place = Place()
    place.claimed_elsewhere = anyio.Event()
    bench = bench_over(place, allow={"on_pending": "heuristics"})
    start = anyio.current_time()
    assert (await bench.chain.select(call(), Toy())).tier == "heuristics"
    assert anyio.current_time() == start
    place.claimed_elsewhere = None
    assert (await bench.chain.select(call(), Toy())).tier == "autotune"


@pytest.mark.parametrize("broken", ["claim", "get"])
async def test_a_claim_that_fails_is_not_another_process_at_work(broken):
    """Where the store is broken everybody tunes, also those who would not wait for anyone."""
    place = Place()
    place.broken = {broken}
    bench = bench_over(place, allow={"on_pending": "heuristics"})
    assert (await bench.chain.select(call(), Toy())).tier == "autotune"


async def test_without_async_with_what_could_not_be_stored_goes_with_the_next_that_can():
    """Nobody is there to try again, so whoever succeeds takes the rest along."""
    place = Place()
    place.broken = {"put"}
    bench = bench_over(place)
    for size in (1, 2):
        await bench.chain.choose(call(size), Toy())
    place.broken = set()
    await anyio.sleep(60)
    await bench.chain.choose(call(3), Toy())
    assert len(place.kept) == 3


async def test_exact_is_exact_in_memory_as_well():
    """What another policy loaded from another environment is no answer to it."""
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


async def test_a_retune_waits_for_another_process_whatever_is_stored():
    """The record that is there is about to be replaced, so it does not end the wait."""
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


async def test_explaining_does_not_wait_longer_than_the_store_may_take():
    """It tells of a store that hangs, in time."""
    place = Place()
    place.hung = {"get"}
    bench = bench_over(place, store_timeout_s=3.0)
    async with bench.chain as chain:
        start = anyio.current_time()
        said = str(await chain.explain(call(), Toy()))
        assert anyio.current_time() - start == pytest.approx(3.0)
    assert "store failed: TimeoutError" in said
    assert not bench.sink.named("store_error")
