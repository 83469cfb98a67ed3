"""A selector and a store that fails for a while: in virtual time, over a scripted store."""

from __future__ import annotations

from contextlib import asynccontextmanager

import anyio
import pytest
from support.kernels import BEST, TUNE_S, Toy, call
from support.store_doubles import Place, bench_over

from asel.stores.config_store import StoreQuery
from asel.stores.protocol import Claim

pytestmark = pytest.mark.anyio


def outage(bench) -> list[tuple[str, str]]:
    names = ("store_error", "store_recovered")
    return [(event.name, event.operation) for event in bench.sink.events if event.name in names]


# When an outage is over.


@pytest.mark.parametrize("broken", ["get", "put", "claim"])
async def test_recovery_is_reported_without_any_calls(broken):
    """An open selector probes a failed store by itself."""
    place = Place()
    place.broken = {broken}
    bench = bench_over(place)
    async with bench.chain as chain:
        assert await chain.choose(call(), Toy()) == BEST
        place.broken = set()
        await anyio.sleep(5)
    assert outage(bench) == [("store_error", broken), ("store_recovered", broken)]


async def test_a_probe_does_not_claim_the_key_that_failed():
    """To another process, the claim would look like a tune in progress."""

    class Noting(Place):
        def claim(self, query, wait_s, anew):
            claimed.append((query.key, query.checksum))
            return super().claim(query, wait_s, anew)

    claimed, place = [], Noting()
    place.broken = {"claim"}
    async with bench_over(place).chain as chain:
        await chain.choose(call(), Toy())
        await anyio.sleep(10)
    assert len(claimed) > 2
    assert claimed.count(claimed[0]) == 1


async def test_a_store_that_can_only_be_read_has_not_recovered():
    """Successful reads do not end an outage of claims or puts."""
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


async def test_without_async_with_the_next_read_probes_claims():
    """There is no background task, so a read of any key probes."""
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


async def test_recovery_from_a_failed_withdrawal_is_reported():
    """With no result waiting, a successful read is enough."""

    class Sticking(Place):
        can_withdraw = True

        async def withdraw(self, stored):
            raise OSError("it sticks")

    place = Sticking()
    bench = bench_over(place)
    async with bench.chain as chain:
        selection = await chain.select(call(), Toy())
        assert not await chain._store.resilient.withdraw(StoreQuery(selection.key, selection.checksum, {}), BEST, None)
        assert outage(bench) == [("store_error", "put")]
        await anyio.sleep(5)
    assert outage(bench) == [("store_error", "put"), ("store_recovered", "put")]


# A store that fails while another process tunes.


class Interrupted(Place):
    """Another process tunes for 10 s and stores its result. The store fails from second 5 on."""

    def __init__(self, record, fails_for_s: float) -> None:
        super().__init__()
        self._record, self._fails_for_s = record, fails_for_s
        self.began = anyio.current_time()

    @asynccontextmanager
    async def claim(self, query, wait_s, anew):
        self.asked.append("claim")
        until = anyio.current_time() + wait_s
        while True:
            since = anyio.current_time() - self.began
            if 5 <= since < 5 + self._fails_for_s:
                raise OSError("connection lost")
            if since >= 10:
                self.kept = self._record
                yield Claim(record=await self.find(query))
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


async def test_a_waiter_retries_through_a_short_store_failure():
    """It takes the other process's record when the store is back, and reports the outage and its end."""
    place = await interrupted(fails_for_s=3.0)
    bench = bench_over(place)
    async with bench.chain as chain:
        selection = await chain.select(call(), Toy())
    assert (selection.cfg, selection.tier, bench.tunes) == (BEST, "persistent", 0)
    assert outage(bench) == [("store_error", "claim"), ("store_recovered", "claim")]


async def test_a_waiter_tunes_by_itself_if_the_store_stays_away():
    """It retries for a few seconds."""
    place = await interrupted(fails_for_s=1000.0)
    bench = bench_over(place)
    async with bench.chain as chain:
        start = anyio.current_time()
        assert (await chain.select(call(), Toy())).tier == "autotune"
        assert 5 + TUNE_S < anyio.current_time() - start <= 5 + 5 + TUNE_S
    assert bench.tunes == 1


async def test_a_waiter_does_not_retry_beyond_wait_s():
    """`wait_s` limits the wait even if the store fails."""
    place = await interrupted(fails_for_s=1000.0)
    bench = bench_over(place, allow={"wait_s": 6.0})
    async with bench.chain as chain:
        start = anyio.current_time()
        await chain.choose(call(), Toy())
        assert anyio.current_time() - start <= 6
        await chain.settled()
        assert anyio.current_time() - start <= 6 + TUNE_S


# A store that is asked for much at once.


async def test_many_cold_keys_do_not_time_out_in_their_own_queue():
    """The time limit does not include the time in the queue."""

    class OneByOne(Place):
        async def find(self, query):
            async with turn:
                await anyio.sleep(0.05)
                return await super().find(query)

    turn = anyio.Lock()
    bench = bench_over(OneByOne(), allow={"cache_miss_fallback": "heuristics"}, store_timeout_s=5.0)
    async with bench.chain as chain, anyio.create_task_group() as tasks:
        for size in range(1, 301):
            tasks.start_soon(chain.choose, call(size), Toy())
    assert outage(bench) == []
    assert bench.sink.names.count("store_read") == 300


async def test_many_cold_keys_wait_for_a_hung_store_once():
    """Requests admitted after the first timeout find the circuit breaker open."""
    place = Place()
    place.hung = {"get"}
    bench = bench_over(place, allow={"cache_miss_fallback": "heuristics"}, store_timeout_s=5.0)
    async with bench.chain as chain:
        start = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            for size in range(1, 301):
                tasks.start_soon(chain.choose, call(size), Toy())
        assert anyio.current_time() - start == pytest.approx(5.0)
