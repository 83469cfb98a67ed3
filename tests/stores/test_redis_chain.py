"""A selector over a real Redis that is slow, refuses, restarts or is gone: in real time, on both backends."""

from __future__ import annotations

import anyio
import pytest
from support.kernels import BEST, COSTS, Bench, Blocks, Toy, call, scripted
from support.redis_server import RedisServer, black_hole, free_port

from asel import ConfigSelectorChain, PersistentCache
from asel.testing import CapturedTelemetry

QUICK = {cfg: cost / 1000 for cfg, cost in COSTS.items()}


@pytest.fixture
def server():
    with RedisServer() as server:
        yield server


def bench_over(url, **options) -> Bench:
    return Bench(persistent=PersistentCache("toy", url, cfg_type=Blocks), costs=QUICK, **options)


async def tier_of(bench, size=8) -> str:
    selection = await bench.chain.select(call(size), Toy())
    assert selection.cfg == BEST
    return selection.tier


def names(bench) -> list[str]:
    return [name for name in bench.sink.names if name in ("store_error", "store_recovered")]


def test_the_next_process_finds_a_tune_in_redis(server, real_backend):
    """The persistent tier over Redis."""

    async def scene():
        for tier in ("autotune", "persistent"):
            bench = bench_over(server.url())
            async with bench.chain:
                assert await tier_of(bench) == tier
        assert await bench_over(server.url()).chain.choose(call(), Toy()) == BEST  # without async with

    anyio.run(scene, backend=real_backend)


def test_an_outage_of_redis_and_its_end_are_one_event_each(server, real_backend):
    """Every call is answered meanwhile, and results are stored when Redis is back."""

    async def scene():
        bench = bench_over(server.url("timeout_s=0.3"))
        async with bench.chain:
            assert await tier_of(bench, 1) == "autotune"
            server.kill()
            for size in range(2, 8):
                with anyio.fail_after(2):
                    assert await tier_of(bench, size) == "autotune"
            assert names(bench) == ["store_error"]
            async with bench.chain.events() as stream:
                server.start()
                with anyio.fail_after(15):
                    for _ in range(6):
                        while (await stream.receive()).name != "persisted":
                            pass
            assert names(bench) == ["store_error", "store_recovered"]
        other = bench_over(server.url())
        async with other.chain:
            assert [await tier_of(other, size) for size in range(2, 8)] == ["persistent"] * 6

    anyio.run(scene, backend=real_backend)


def test_a_redis_that_stops_answering_costs_its_timeout_once(server, real_backend):
    """Of twenty cold keys, one waits."""

    async def scene():
        bench = bench_over(server.url("timeout_s=0.5"), allow={"cache_miss_fallback": "heuristics"})
        async with bench.chain as chain:
            with server.paused(), anyio.fail_after(3):
                for size in range(1, 21):
                    await chain.choose(call(size), Toy())
        assert names(bench) == ["store_error"]

    anyio.run(scene, backend=real_backend)


@pytest.mark.parametrize("kind", ["refusing", "black hole", "wrong password"])
def test_an_unreachable_redis_does_not_keep_a_selector_from_opening(kind, real_backend):
    """It opens, answers and closes in time, and reveals no secret."""

    async def scene(port):
        url = f"redis://user:s3cret@127.0.0.1:{port}/0?timeout_s=0.3"
        bench = bench_over(url)
        with anyio.fail_after(8):
            async with bench.chain:
                assert await tier_of(bench) == "autotune"
        assert names(bench) == ["store_error"]
        assert bench.sink.named("closed")[0].unsaved == 1
        assert "s3cret" not in repr(bench.sink.events) + repr(bench.chain.persistent)

    if kind == "refusing":
        anyio.run(scene, free_port(), backend=real_backend)
    elif kind == "black hole":
        with black_hole() as port:
            anyio.run(scene, port, backend=real_backend)
    else:
        with RedisServer(password="another") as server:
            anyio.run(scene, server.port, backend=real_backend)


def test_two_chains_share_one_cache_object(server, real_backend):
    """Each opens and closes it separately."""

    async def scene():
        shared = PersistentCache("toy", server.url(), cfg_type=Blocks)
        one, other = (Bench(persistent=shared, costs=QUICK) for _ in range(2))
        async with one.chain, anyio.create_task_group() as tasks:

            async def second():
                async with other.chain:
                    assert await tier_of(other, 1) in ("autotune", "persistent")

            tasks.start_soon(second)
            await tier_of(one, 1)
            await tier_of(one, 2)
        assert one.tunes + other.tunes == 2

    anyio.run(scene, backend=real_backend)


def test_moving_caches_works_in_redis_as_in_files(server, tmp_path):
    """Export, import and prune."""

    async def scene():
        here = PersistentCache("toy", server.url(), cfg_type=Blocks)
        there = PersistentCache("toy", tmp_path / "c.json", cfg_type=Blocks)
        async with bench_over(server.url()).chain as chain:
            await chain.choose(call(), Toy())
        document = await here.export()
        assert (await there.import_(document)).imported == 1
        assert (await here.import_(document)).imported == 0
        assert await here.prune(lambda record: True) == 1
        assert [record async for record in here.records()] == []
        assert (await here.import_(await there.export())).imported == 1

    anyio.run(scene)


def test_processes_that_tuned_during_a_partition_agree_afterwards(server, real_backend):
    """When Redis is back, all adopt the config that was stored first."""

    async def scene():
        url = server.url("timeout_s=0.3")
        server.kill()
        benches = []
        for favourite in (2, 3):
            costs = {cfg: 0.0001 if cfg.m == favourite else 0.001 for cfg in COSTS}
            benches.append(Bench(persistent=PersistentCache("toy", url, cfg_type=Blocks), costs=costs))
        one, other = benches
        async with one.chain, other.chain:
            found = [await bench.chain.choose(call(), Toy()) for bench in benches]
            assert found == [Blocks(2), Blocks(3)]
            async with one.chain.events() as first, other.chain.events() as second:
                server.start()
                with anyio.fail_after(15):
                    for stream in (first, second):
                        while (await stream.receive()).name != "persisted":
                            pass
            agreed = {await bench.chain.choose(call(), Toy()) for bench in benches}
            assert len(agreed) == 1
            async with bench_over(server.url()).chain as chain:
                assert {await chain.choose(call(), Toy())} == agreed

    anyio.run(scene, backend=real_backend)


def test_no_secret_reaches_a_span(real_backend):
    """Every failure is reported with the location of the store, and without its password."""
    captured = CapturedTelemetry()

    async def scene():
        url = f"redis://user:s3cret@127.0.0.1:{free_port()}/0?timeout_s=0.3"
        persistent = PersistentCache("toy", url, cfg_type=Blocks)
        tuner, _ = scripted(QUICK)
        async with ConfigSelectorChain(None, tuner=tuner, persistent=persistent, sinks=captured.sinks) as chain:
            with captured.tracer.start_as_current_span("request"):
                await chain.choose(call(), Toy())

    anyio.run(scene, backend=real_backend)
    told = "".join(span.to_json() for span in captured.spans)
    assert "asel.store.get" in told
    assert "s3cret" not in told
