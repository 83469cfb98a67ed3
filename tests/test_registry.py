"""Calls recorded for later, and batches of them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from kernels import BEST, GUESS, H100, Bench, Toy, call

from asel import (
    autotune_recorded,
    clear_invocations,
    device_fingerprint,
    get_invocations,
    overlay_cache,
    record_invocation,
    registry,
    warm_up,
)

DEV = device_fingerprint(H100)


def test_recorded_calls_come_back_by_device_op_and_key():
    """device -> op -> call key -> (kernel, args, kwargs), as ejKernel has it."""
    kernel = Toy()
    record_invocation("dev", "op@v1", "k1", kernel, [1, 2], {"x": 3})
    record_invocation("dev", "op@v1", "k2", kernel, (), {})
    record_invocation("other", "op@v1", "k1", kernel, (), {})
    assert get_invocations("dev") == {"op@v1": {"k1": (kernel, (1, 2), {"x": 3}), "k2": (kernel, (), {})}}
    assert get_invocations("nowhere") == {}


def test_what_comes_back_is_a_copy():
    """Neither the caller's dict nor the returned one is the registry's own."""
    kwargs = {"x": 1}
    record_invocation("dev", "op", "k", None, (), kwargs)
    kwargs["x"] = 2
    found = get_invocations("dev")
    found["op"]["k"][2]["x"] = 3
    found["op"].clear()
    assert get_invocations("dev") == {"op": {"k": (None, (), {"x": 1})}}


def test_the_registry_is_bounded(monkeypatch):
    """The least recently recorded go first."""
    monkeypatch.setattr(registry, "_MAX_RECORDED", 2)
    for name in ("a", "b", "a", "c"):
        record_invocation("dev", "op", name, None, (), {})
    assert list(get_invocations("dev")["op"]) == ["a", "c"]


def test_the_registry_can_be_cleared_for_one_device_or_all():
    """Clearing a device leaves the others."""
    for dev in ("a", "b"):
        record_invocation(dev, "op", "k", None, (), {})
    clear_invocations("a")
    assert (get_invocations("a"), len(get_invocations("b"))) == ({}, 1)
    clear_invocations()
    assert get_invocations("b") == {}


def test_many_threads_may_record():
    """No lost call, no error while another thread reads."""
    start = threading.Barrier(4)

    def record(n):
        start.wait()
        for i in range(500):
            record_invocation("dev", f"op{n}", str(i), None, (), {})
            if i % 50 == 0:
                get_invocations("dev")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(record, range(4)))
    assert [len(calls) for calls in get_invocations("dev").values()] == [500] * 4


@pytest.mark.anyio
async def test_a_batch_tunes_what_was_recorded():
    """autotune_recorded waits for every tune, whatever the policy's fallback, and tells what came of it."""
    bench = Bench(allow={"cache_miss_fallback": "background"})
    kernel = Toy()
    for size in (8, 16):
        inv = call(size)
        record_invocation(*bench.chain._keys.resolve(inv, kernel).key, kernel, inv.args, inv.kwargs)
    async with bench.chain as chain:
        summary = await autotune_recorded(chain, DEV)
        assert list(summary.chosen.values()) == [BEST, BEST]
        assert summary.failed == []
        assert (await chain.select(call(8), kernel)).tier == "memory"
    with overlay_cache(summary.as_overlay()):
        assert await Bench().chain.choose(call(16), kernel) == BEST
    assert bench.tunes == 2


@pytest.mark.anyio
async def test_a_batch_goes_on_past_a_failure():
    """One call that cannot be answered is data, not the end of the batch."""
    bench = Bench(script={"run_errors": lambda cfg: ValueError("bad")}, allow={"allow_heuristics": False})
    async with bench.chain as chain:
        summary = await warm_up(chain, [(Toy(), call(8)), (Toy(), (H100.array((16, 128)),))])
    assert summary.chosen == {}
    assert [op for op, _ in summary.failed] == ["toy", "toy"]


@pytest.mark.anyio
async def test_warm_up_prepares_plain_arguments():
    """An example is an invocation, or the arguments a user would pass, through the kernel's prepare."""

    class Prepared(Toy):
        def prepare(self, x):
            return (x, "extra"), {"scale": 2}

        def heuristic_cfg(self, inv):
            assert inv.args[1] == "extra"
            assert inv.kwargs == {"scale": 2}
            return GUESS

    bench = Bench()
    async with bench.chain as chain:
        summary = await warm_up(chain, [(Prepared(), (H100.array((8, 128)),))])
    assert list(summary.chosen.values()) == [BEST]
