"""How a chain gets over a store that fails for a while: in virtual time, over a store that does as it is told."""

from __future__ import annotations

from contextlib import asynccontextmanager

import anyio
import pytest
from kernels import BEST, TUNE_S, Toy, call
from test_keeper import Place, bench_over

from asel.persistence import Sought
from asel.stores.protocol import Claim

pytestmark = pytest.mark.anyio


def outage(bench) -> list[tuple[str, str]]:
    names = ("store_error", "store_recovered")
    return [(event.name, event.operation) for event in bench.sink.events if event.name in names]


# When an outage is over.


@pytest.mark.parametrize("broken", ["get", "put", "claim"])
async def test_the_end_of_an_outage_is_told_although_nothing_is_asked(broken):
    """An open chain tries what failed by itself: it does not take the next cold key."""
    place = Place()
    place.broken = {broken}
    bench = bench_over(place)
    async with bench.chain as chain:
        assert await chain.choose(call(), Toy()) == BEST
        place.broken = set()
        await anyio.sleep(5)
    assert outage(bench) == [("store_error", broken), ("store_recovered", broken)]


async def test_a_claim_that_is_tried_again_is_nobody_elses():
    """Another process that wants the key which failed must not take it for being tuned."""

    class Noting(Place):
        def claim(self, sought, wait_s, anew):
            claimed.append((sought.key, sought.checksum))
            return super().claim(sought, wait_s, anew)

    claimed, place = [], Noting()
    place.broken = {"claim"}
    async with bench_over(place).chain as chain:
        await chain.choose(call(), Toy())
        await anyio.sleep(10)
    assert len(claimed) > 2
    assert claimed.count(claimed[0]) == 1


async def test_a_store_that_is_read_and_not_written_has_not_recovered():
    """Reads that work, however many, end neither the trouble of claims nor that of puts."""
    place = Place()
    async with bench_over(place).chain as chain:
        for size in range(1, 101):
            await chain.choose(call(size), Toy())
    place.broken = {"put", "claim"}
    bench = bench_over(place)
    async with bench.chain as chain:
        await chain.choose(call(200), Toy())
        for size in range(1, 101):
            assert (await chain.select(call(size), Toy())).tier == "persistent"
            await anyio.sleep(1)
        assert outage(bench) == [("store_error", "claim")]
        place.broken = set()
        await anyio.sleep(60)
    assert [name for name, _ in outage(bench)] == ["store_error", "store_recovered"]
    assert len(place.kept) == 101


async def test_without_async_with_the_next_read_tells_that_claims_work_again():
    """Nobody else is there to try; a key that is stored is enough, and it need not be a cold one."""
    place = Place()
    async with bench_over(place).chain as chain:
        await chain.choose(call(1), Toy())
    place.broken = {"claim"}
    bench = bench_over(place)
    await bench.chain.choose(call(2), Toy())
    place.broken = set()
    await anyio.sleep(5)
    assert (await bench.chain.select(call(1), Toy())).tier == "persistent"
    assert outage(bench) == [("store_error", "claim"), ("store_recovered", "claim")]


async def test_a_record_that_could_not_be_withdrawn_is_no_outage_for_ever():
    """No result waits to be stored, so nothing but a read can show that the store is back."""

    class Sticking(Place):
        async def withdraw(self, stored):
            raise OSError("it sticks")

    place = Sticking()
    bench = bench_over(place)
    async with bench.chain as chain:
        selection = await chain.select(call(), Toy())
        assert not await chain._keeper.withdraw(Sought(selection.key, selection.checksum, {}), BEST, None)
        assert outage(bench) == [("store_error", "put")]
        await anyio.sleep(5)
    assert outage(bench) == [("store_error", "put"), ("store_recovered", "put")]


# A store that fails while another process tunes.


class Interrupted(Place):
    """Another process tunes for ten seconds and stores its result. The store fails from second 5 on."""

    def __init__(self, record, fails_for_s: float) -> None:
        super().__init__()
        self._record, self._fails_for_s = record, fails_for_s
        self.began = anyio.current_time()

    @asynccontextmanager
    async def claim(self, sought, wait_s, anew):
        self.asked.append("claim")
        until = anyio.current_time() + wait_s
        while True:
            since = anyio.current_time() - self.began
            if 5 <= since < 5 + self._fails_for_s:
                raise OSError("connection lost")
            if since >= 10:
                self.kept = self._record
                yield Claim(record=await self.find(sought))
                return
            if anyio.current_time() >= until:
                yield Claim()
                return
            await anyio.sleep(0.1)


async def interrupted(fails_for_s: float) -> Interrupted:
    place = Place()
    async with bench_over(place).chain as chain:
        await chain.choose(call(), Toy())
    return Interrupted(place.kept, fails_for_s)


async def test_a_process_that_waits_for_anothers_tune_bears_with_a_store_that_fails_shortly():
    """It waits on when the store is back, takes the other's record, and tells of both."""
    place = await interrupted(fails_for_s=3.0)
    bench = bench_over(place)
    async with bench.chain as chain:
        selection = await chain.select(call(), Toy())
    assert (selection.cfg, selection.tier, bench.tunes) == (BEST, "persistent", 0)
    assert outage(bench) == [("store_error", "claim"), ("store_recovered", "claim")]


async def test_a_process_that_waits_for_anothers_tune_does_not_wait_for_a_store_that_stays_away():
    """After some seconds it tunes itself."""
    place = await interrupted(fails_for_s=1000.0)
    bench = bench_over(place)
    async with bench.chain as chain:
        start = anyio.current_time()
        assert (await chain.select(call(), Toy())).tier == "autotune"
        assert 5 + TUNE_S < anyio.current_time() - start <= 5 + 5 + TUNE_S
    assert bench.tunes == 1


async def test_whoever_waits_briefly_does_not_bear_with_a_store_for_longer():
    """`wait_s` holds, whatever the store does."""
    place = await interrupted(fails_for_s=1000.0)
    bench = bench_over(place, allow={"wait_s": 6.0})
    async with bench.chain as chain:
        start = anyio.current_time()
        await chain.choose(call(), Toy())
        assert anyio.current_time() - start <= 6
        await chain.settled()
        assert anyio.current_time() - start <= 6 + TUNE_S


# A store that is asked for much at once.


async def test_a_crowd_of_cold_keys_does_not_time_out_behind_itself():
    """The store takes one at a time and works; the bound is for the store, and not for the queue in front of it."""

    class OneByOne(Place):
        async def find(self, sought):
            async with turn:
                await anyio.sleep(0.05)
                return await super().find(sought)

    turn = anyio.Lock()
    bench = bench_over(OneByOne(), allow={"cache_miss_fallback": "heuristics"}, store_timeout_s=5.0)
    async with bench.chain as chain, anyio.create_task_group() as tasks:
        for size in range(1, 301):
            tasks.start_soon(chain.choose, call(size), Toy())
    assert outage(bench) == []
    assert bench.sink.names.count("store_read") == 300


async def test_a_crowd_behind_a_store_that_hangs_waits_for_one_timeout():
    """Whoever comes to its turn after that finds the store left alone."""
    place = Place()
    place.hung = {"get"}
    bench = bench_over(place, allow={"cache_miss_fallback": "heuristics"}, store_timeout_s=5.0)
    async with bench.chain as chain:
        start = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            for size in range(1, 301):
                tasks.start_soon(chain.choose, call(size), Toy())
        assert anyio.current_time() - start == pytest.approx(5.0)
