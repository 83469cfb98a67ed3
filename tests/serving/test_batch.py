"""Recorded calls, and batches of them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest
from support.kernels import BEST, GUESS, H100, TUNE_S, Bench, Toy, call
from support.store_doubles import Removing

from asel import (
    AutotunePolicy,
    InvalidRequestError,
    TuningError,
    autotune_recorded,
    clear_invocations,
    device_fingerprint,
    get_invocations,
    overlay_cache,
    record_invocation,
    warm_up,
)
from asel.kernels import call_registry

DEV = device_fingerprint(H100)


def test_recorded_calls_come_back_by_device_op_and_key():
    """device -> op -> call key -> (kernel, args, kwargs), as ejKernel has it."""
    kernel = Toy()
    record_invocation("dev", "op@v1", "k1", kernel, [1, 2], {"x": 3})
    record_invocation("dev", "op@v1", "k2", kernel, (), {})
    record_invocation("other", "op@v1", "k1", kernel, (), {})
    assert get_invocations("dev") == {"op@v1": {"k1": (kernel, (1, 2), {"x": 3}), "k2": (kernel, (), {})}}
    assert get_invocations("nowhere") == {}


def test_recorded_calls_are_returned_as_copies():
    """Neither the caller's dict nor the returned one is the registry's own."""
    kwargs = {"x": 1}
    record_invocation("dev", "op", "k", None, (), kwargs)
    kwargs["x"] = 2
    found = get_invocations("dev")
    found["op"]["k"][2]["x"] = 3
    found["op"].clear()
    assert get_invocations("dev") == {"op": {"k": (None, (), {"x": 1})}}


def test_the_registry_is_bounded(monkeypatch):
    """The least recently recorded calls are dropped first."""
    monkeypatch.setattr(call_registry, "_MAX_RECORDED", 2)
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
    """No call is lost, and a thread that reads meanwhile gets no error."""
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
async def test_a_batch_tunes_recorded_calls():
    """autotune_recorded waits for every tune, under any fallback of the policy, and returns the results."""
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
async def test_a_batch_compiles_on_every_core(monkeypatch):
    """Before there is traffic, the event loop needs no core of its own; during traffic it does."""
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    bench = Bench(script={"compile_s": 10.0})
    async with bench.chain as chain:
        batch = await warm_up(chain, [(Toy(), call(8))])
        alone = await chain.select(call(16), Toy())
    assert [10.0 < seconds < 20.0 for seconds in (batch.seconds, alone.report.seconds)] == [True, False]
    assert alone.report.seconds > 30.0


@pytest.mark.anyio
@pytest.mark.parametrize("place", [None, Removing()], ids=["no store", "a store"])
async def test_a_batch_continues_after_a_failure(place):
    """A call without an answer is a line of the summary; with a store, too, it is tuned once."""
    script = {"run_errors": lambda cfg: ValueError("bad")}
    bench = Bench(script=script, allow={"allow_heuristics": False}, persistent=place)
    async with bench.chain as chain:
        summary = await warm_up(chain, [(Toy(), call(8)), (Toy(), (H100.array((16, 128)),))])
    assert summary.chosen == {}
    assert [(op, type(error)) for op, error in summary.failed] == [("toy", TuningError)] * 2
    assert bench.tunes == 2


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


@pytest.mark.anyio
async def test_a_summary_prints_a_table_and_is_an_overlay():
    """The overlay leaves out heuristics, which would hide a later tune."""
    bench = Bench(script={"run_errors": lambda cfg: None})
    async with bench.chain as chain:
        await chain.choose(call(8), Toy())
        done = await warm_up(chain, [(Toy(), call(8)), (Toy(), call(16))])
        chain.policy = AutotunePolicy(allow_autotune=False)
        guessed = await warm_up(chain, [(Toy(), call(32))])
        chain.policy = AutotunePolicy(allow_autotune=False, allow_heuristics=False)
        failed = await warm_up(chain, [(Toy(), call(64))])
    assert str(done).splitlines() == [
        "2 calls: 1 tuned, 1 known, 0 heuristic, 0 failed, 0 left",
        "  known         0.00 s  toy@v1(x=f32[8,128])   Blocks(m=3, n=1)",
        "  tuned         1.20 s  toy@v1(x=f32[16,128])  Blocks(m=3, n=1)",
    ]
    assert [op for _, op, _ in done.as_overlay()] == ["toy@v1", "toy@v1"]
    assert (list(guessed.chosen.values()), guessed.as_overlay()) == ([GUESS], {})
    first, line = str(failed).splitlines()
    assert first == "1 call: 0 tuned, 0 known, 0 heuristic, 1 failed, 0 left"
    assert "toy@v1(x=f32[64,128])  NoConfigError: no config for 'toy@v1' on " in line


@pytest.mark.anyio
async def test_one_bad_kernel_does_not_stop_a_batch():
    """Any exception in any method fails only its own call; the others get their configs."""

    class Unprepared(Toy):
        def prepare(self, x):
            raise ZeroDivisionError("as it prepares")

    class Unkeyed(Toy):
        def key_builder(self, inv):
            raise KeyError("as it builds its key")

    examples = [(Unprepared(), (H100.array((8, 128)),)), (Unkeyed(), call(8)), (Toy(), call(8))]
    async with Bench().chain as chain:
        summary = await warm_up(chain, examples)
    assert [type(error) for _, error in summary.failed] == [ZeroDivisionError, KeyError]
    assert list(summary.chosen.values()) == [BEST]


@pytest.mark.anyio
async def test_a_batch_begins_with_the_most_frequent_calls_and_reports_progress():
    """If time runs out, the least frequent calls are left; `progress` is called twice for each call."""
    bench, reported = Bench(), []
    for size, times in ((8, 1), (16, 3), (32, 2)):
        for _ in range(times):
            inv = call(size)
            record_invocation(*bench.chain.resolve(inv, Toy()).key, Toy(), inv.args, inv.kwargs)
    async with bench.chain as chain:
        summary = await autotune_recorded(chain, DEV, progress=reported.append, budget_s=TUNE_S * 1.5)
        assert [(item.call, item.outcome) for item in summary.items] == [
            ("x=f32[16,128]", "tuned"),
            ("x=f32[32,128]", "tuned"),  # began in time, and so it ends
            ("x=f32[8,128]", "left"),
        ]
        assert [(p.begun, p.done, p.ended and p.ended.outcome) for p in reported] == [
            ("toy(x=f32[16,128])", 0, None),
            ("", 1, "tuned"),
            ("toy(x=f32[32,128])", 1, None),
            ("", 2, "tuned"),
            ("", 2, "left"),
        ]
        again = await autotune_recorded(chain, DEV)
    assert [item.outcome for item in again.items] == ["known", "known", "tuned"]


@pytest.mark.anyio
async def test_a_batch_may_show_a_bar(capsys):
    """The bar is on stderr; an invalid `progress` is refused before anything is tuned."""
    bench = Bench()
    async with bench.chain as chain:
        with pytest.raises(InvalidRequestError, match='"bar" or a function'):
            await warm_up(chain, [(Toy(), call(8))], progress="dots")
        assert bench.tunes == 0
        await warm_up(chain, [(Toy(), call(8))], progress="bar")
    captured = capsys.readouterr()
    assert "1/1" in captured.err
    assert captured.out == ""


@pytest.mark.anyio
async def test_a_recorded_call_is_tuned_under_the_settings_it_was_seen_with():
    """The settings are part of its key: under others, a batch would tune a key that no call has."""
    bench, kernel = Bench(), Toy()
    inv = call()
    with jax.default_matmul_precision("highest"):
        key = bench.chain.resolve(inv, kernel).key
        record_invocation(*key, kernel, inv.args, inv.kwargs)
    async with bench.chain as chain:
        assert list((await autotune_recorded(chain, DEV)).chosen) == [key]
