"""The persistent tier: reading, writing, and stores that fail."""

from __future__ import annotations

import threading

import anyio
import pytest
from support.kernels import BEST, COSTS, GUESS, TUNE_S, Bench, Blocks, Toy, call
from support.store_doubles import DictStore, GetPut

from asel import AutotunePolicy, InvalidRequestError
from asel.stores.config_store import Stored

pytestmark = pytest.mark.anyio
QUICK = {cfg: cost / 1000 for cfg, cost in COSTS.items()}


async def test_a_record_of_another_process_is_loaded_into_memory():
    """A record of the right key and checksum is read once; then memory has it."""
    store = DictStore()
    async with Bench(persistent=store).chain as earlier:
        await earlier.choose(call(), Toy())
    bench = Bench(persistent=store)
    async with bench.chain as chain:
        assert (await chain.select(call(), Toy())).tier == "persistent"
        assert (await chain.select(call(), Toy())).tier == "memory"
    assert bench.tunes == 0
    assert [hit.level for hit in bench.sink.named("cache_hit")] == ["persistent", "memory"]


async def test_a_record_of_another_checksum_is_not_an_answer():
    """Other candidates mean another checksum, so the stored record does not count."""

    class Wider(Toy):
        candidates = (*Toy.candidates, Blocks(4))

    store = DictStore()
    async with Bench(persistent=store).chain as chain:
        await chain.choose(call(), Toy())
    bench = Bench(persistent=store, costs=lambda cfg: 1 / cfg.m)
    async with bench.chain as chain:
        selection = await chain.select(call(), Wider())
    assert (selection.cfg, selection.tier) == (Blocks(4), "autotune")
    assert len(store.records) == 2


async def test_a_tune_is_stored_unless_persist_autotune_is_false():
    """persist_autotune decides whether a tune's result reaches the store."""
    kept, unkept = DictStore(), DictStore()
    async with Bench(persistent=kept).chain as chain:
        await chain.choose(call(), Toy())
    async with Bench(persistent=unkept, persist_autotune=False).chain as chain:
        await chain.choose(call(), Toy())
    assert [stored.cfg for stored in kept.records.values()] == [BEST]
    assert not unkept.records


@pytest.mark.parametrize("exact", ["any", "exact"])
async def test_an_evicted_config_is_read_from_the_store(exact):
    """Immediately, even though the store missed a moment ago: a tune has stored the config since."""
    bench = Bench(persistent=DictStore(), policy=AutotunePolicy(match_environment=exact))
    async with bench.chain as chain:
        assert (await chain.select(call(), Toy())).tier == "autotune"
        chain.cache.clear()
        assert (await chain.select(call(), Toy())).tier == "persistent"
    assert bench.tunes == 1


async def test_plain_get_and_put_are_enough_for_a_store():
    """Any object with get and put can stand behind the persistent tier."""
    cache = GetPut()
    async with Bench(persistent=cache).chain as chain:
        assert await chain.choose(call(), Toy()) == BEST
    assert list(cache.data.values()) == [BEST]
    async with Bench(persistent=cache).chain as chain:
        assert (await chain.select(call(), Toy())).tier == "persistent"


async def test_an_object_that_is_not_a_store_is_refused_by_name():
    """The constructor refuses it."""
    with pytest.raises(InvalidRequestError, match="neither get and put nor load and save"):
        Bench(persistent=object())
    with pytest.raises(InvalidRequestError, match="pass a Tuner"):
        Bench(tuner=object())


async def test_a_failing_store_makes_its_tier_decline():
    """The chain keeps answering while the store is down, and reports it once."""
    store = DictStore()
    store.fails = OSError("disk on fire")
    bench = Bench(persistent=store)
    async with bench.chain as chain:
        selection = await chain.select(call(), Toy())
    assert (selection.cfg, selection.tier) == (BEST, "autotune")
    assert "disk on fire" in selection.declined["persistent"]
    assert [e.operation for e in bench.sink.named("store_error")] == ["get"]


async def test_a_hanging_store_does_not_hang_the_tune():
    """Callers get the result although storing it exceeds its timeout."""

    class Hangs(DictStore):
        async def save(self, report, *, replace):
            await anyio.sleep_forever()

    bench = Bench(persistent=Hangs(), store_timeout_s=5.0)
    async with bench.chain as chain:
        start = anyio.current_time()
        assert await chain.choose(call(), Toy()) == BEST
        assert anyio.current_time() - start == pytest.approx(TUNE_S + 5.0)
    assert [e.error_type for e in bench.sink.named("store_error")] == ["TimeoutError"]


async def test_a_second_writer_adopts_the_result_of_the_first():
    """All callers get the same answer, even if two processes tuned concurrently."""

    class OtherWasFirst(DictStore):
        async def save(self, report, *, replace):
            return Stored(Blocks(2), None, adopted=True)

    bench = Bench(persistent=OtherWasFirst())
    async with bench.chain as chain:
        assert await chain.choose(call(), Toy()) == Blocks(2)
        assert await chain.choose(call(), Toy()) == Blocks(2)
    assert [e.adopted for e in bench.sink.named("persisted")] == [True]


async def test_choose_nowait_takes_the_stored_record_before_it_tunes():
    """The background reads the store first, so a warm restart tunes nothing."""
    store = DictStore()
    async with Bench(persistent=store).chain as chain:
        await chain.choose(call(), Toy())
    bench = Bench(persistent=store)
    async with bench.chain as chain:
        assert chain.choose_nowait(call(), Toy()) == GUESS
        await chain.settled()
        assert chain.choose_nowait(call(), Toy()) == BEST
    assert bench.tunes == 0


async def test_wait_s_includes_the_wait_for_the_store():
    """The limit applies to the store and the tune together."""
    store = DictStore()
    store.load_s = 1000.0
    bench = Bench(persistent=store, allow={"wait_s": 0.5}, store_timeout_s=5000.0)
    async with bench.chain as chain:
        start = anyio.current_time()
        selection = await chain.select(call(), Toy())
        assert anyio.current_time() - start == pytest.approx(0.5)
    assert selection.tier == "heuristics"
    assert selection.declined["persistent"] == "no answer within wait_s=0.5"


async def test_a_read_of_the_store_is_bounded():
    """After store_timeout_s the tune begins."""
    store = DictStore()
    store.load_s = 1000.0
    bench = Bench(persistent=store, store_timeout_s=3.0)
    async with bench.chain as chain:
        start = anyio.current_time()
        selection = await chain.select(call(), Toy())
        assert anyio.current_time() - start == pytest.approx(3.0 + TUNE_S)
    assert selection.tier == "autotune"
    assert "within 3 s" in selection.declined["persistent"]
    assert [event.operation for event in bench.sink.named("store_error")] == ["get"]


async def test_a_slow_read_does_not_undo_a_retune():
    """A record read before the retune ended is older than the retune's result."""
    store = DictStore()
    async with Bench(persistent=store, costs=lambda cfg: 1 / (5 - cfg.m)).chain as chain:
        assert await chain.choose(call(), Toy()) == Blocks(1)
    store.load_s = 50.0
    bench = Bench(persistent=store, store_timeout_s=100.0)
    answers = []

    async def ask(chain):
        answers.append(await chain.choose(call(), Toy()))

    async with bench.chain as chain, anyio.create_task_group() as tasks:
        tasks.start_soon(ask, chain)
        await anyio.sleep(1)
        assert await chain.retune(call(), Toy()) == BEST
        await anyio.sleep(100)
        assert await chain.choose(call(), Toy()) == BEST
    assert answers == [BEST]


@pytest.mark.parametrize("answer", ["not a record", 7])
async def test_an_invalid_answer_of_a_store_is_a_failure(answer):
    """Only the store's tier declines because of it."""

    class Nonsense:
        async def load(self, key, checksum):
            return answer

        async def save(self, report, *, replace):
            return None

    bench = Bench(persistent=Nonsense())
    async with bench.chain as chain:
        assert (await chain.select(call(), Toy())).tier == "autotune"
        assert chain.choose_nowait(call(16), Toy()) == GUESS
        await chain.settled()
    assert [event.operation for event in bench.sink.named("store_error")] == ["get"]


def test_a_get_that_returns_an_awaitable_is_awaited(real_backend):
    """Not every awaitable method is a coroutine function."""

    class Wrapped(GetPut):
        def __init__(self):
            super().__init__()
            inner = super().get
            self.get = lambda *key: inner(*key)

    async def main():
        cache = Wrapped()
        async with Bench(persistent=cache, costs=QUICK).chain as chain:
            assert await chain.choose(call(), Toy()) == BEST
        async with Bench(persistent=cache, costs=QUICK).chain as chain:
            assert (await chain.select(call(), Toy())).tier == "persistent"

    anyio.run(main, backend=real_backend)


def test_a_store_that_blocks_forever_is_abandoned(real_backend):
    """It is called in a thread, with the same timeout as any store."""
    release = threading.Event()

    class Blocked:
        def get(self, *key):
            release.wait(20)

        def put(self, *key_and_cfg):
            release.wait(20)

    async def main():
        bench = Bench(persistent=Blocked(), costs=QUICK, store_timeout_s=0.1)
        async with bench.chain as chain:
            selection = await chain.select(call(), Toy())
        assert not release.is_set()
        assert (selection.cfg, selection.tier) == (BEST, "autotune")
        assert selection.declined["persistent"].startswith("store failed: TimeoutError")

    try:
        anyio.run(main, backend=real_backend)
    finally:
        release.set()
