"""Loading a device's records into memory: in virtual time, over a scripted store."""

from __future__ import annotations

import anyio
import pytest
from support.kernels import BEST
from support.store_doubles import Place, bench_over

from asel.kernels.keys import CacheKey
from asel.stores.config_store import Stored, StoreQuery
from asel.stores.summaries import RecordSummary

pytestmark = pytest.mark.anyio

SUMMARIES = [RecordSummary(CacheKey("dev", "toy@v1", str(n)), "c", {}, "1", 1.0) for n in range(10)]


class Listed(Place):
    """A place that lists ten records, two at a time, with a pause before each batch."""

    pause_s = 0.1

    async def summaries(self, device):
        await self._answer("list")
        for start in range(0, 10, 2):
            await anyio.sleep(self.pause_s)
            yield [one for one in SUMMARIES[start : start + 2] if one.key.device == device]

    def read_summary(self, summary, query):
        return Stored(BEST)


async def loaded(place, take=lambda batch: True, device="dev"):
    """Return the summaries that were loaded, and the store's events."""
    taken = []
    bench = bench_over(place, store_timeout_s=5.0, preload=False)
    async with bench.chain as chain:
        taken = []
        await chain._store.resilient.preload([device], lambda batch: taken.extend(batch) or take(batch))
    return taken, [event.name for event in bench.sink.events if event.name.startswith("store_")]


async def test_preload_gives_every_record_of_a_device():
    """A batch at a time, as they are read."""
    assert await loaded(Listed()) == (SUMMARIES, [])


async def test_preload_ends_when_memory_is_full():
    """Further records are read on demand."""
    assert await loaded(Listed(), lambda batch: False) == (SUMMARIES[:2], [])


async def test_a_preload_keeps_records_that_arrived_in_time():
    """It ends after `store_timeout_s`; a slow store does not count as failed."""
    place = Listed()
    place.pause_s = 2.0
    start = anyio.current_time()
    assert await loaded(place) == (SUMMARIES[:4], [])
    assert anyio.current_time() - start == pytest.approx(5.0)


@pytest.mark.parametrize("failing", ["broken", "hung"])
async def test_a_store_that_cannot_be_listed_is_reported(failing):
    """One event, nothing raised, and nothing in memory."""
    place = Listed()
    setattr(place, failing, {"list"})
    assert await loaded(place) == ([], ["store_error"])


async def test_a_preloaded_config_that_failed_in_a_real_call_is_not_used():
    """The same as for a record that is read on demand."""
    bench = bench_over(Listed())
    query = StoreQuery(SUMMARIES[0].key, "c", {})
    async with bench.chain as chain:
        store = chain._store.resilient
        assert store.read_summary(SUMMARIES[0], query).cfg == BEST
        store._is_barred = lambda key, cfg: cfg == BEST
        assert store.read_summary(SUMMARIES[0], query) is None
