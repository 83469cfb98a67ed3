"""Winners that fail are detected, withdrawn, and tuned again later."""

from __future__ import annotations

import random
import threading
from contextlib import suppress
from functools import partial

import anyio
import jax
import jax.numpy as jnp
import pytest
from support.kernels import H100, QUICK, Bench, Blocks, Picky, memory_of
from support.store_doubles import Removing, directory

import asel
from asel import (
    ConfigCache,
    ConfigSelectorChain,
    Invocation,
    overlay_cache,
    policy_override,
    powers_of_two,
)
from asel.testing import CapturedTelemetry

# These kernels count their runs in Python, or return values that no jitted function can; see also test_executor_jit.py.
Executor = partial(asel.Executor, jit=False)
X = H100.array((8, 128))


# ---------------------------------------------------------------------------------------------
# A winner that fails.


@pytest.mark.anyio
@pytest.mark.parametrize("tier", ["autotune", "persistent", "memory"])
@pytest.mark.parametrize("is_frozen", [False, True], ids=["open", "frozen"])
async def test_a_winner_that_fails_is_withdrawn_and_the_next_best_answers(tier, is_frozen):
    """From any tier. The caller gets its result, and later callers do not meet the failure."""
    place, picky = Removing(), Picky(m3=MemoryError("too large"))
    async with Bench(persistent=place).chain as chain:
        if tier != "autotune":
            await chain.choose(Invocation("picky", (X,), {}), picky)
    bench = Bench(persistent=place)
    async with bench.chain as chain:
        if tier == "memory":
            await chain.choose(Invocation("picky", (X,), {}), picky)
        if is_frozen and tier != "autotune":
            chain.freeze()
        assert [await Executor(chain)(picky, X) for _ in range(2)] == ["ran 2", "ran 2"]
    assert picky.ran == [3, 2, 3, 2]
    [event] = bench.sink.named("winner_failed")
    assert (event.cfg, event.tier, event.instead) == (Blocks(3), tier, Blocks(2))
    assert (event.error_type, event.message) == ("MemoryError", "too large")
    assert event.evidence == f"failed twice, before and after {Blocks(2)!r} ran with the same arguments"
    assert event.retry_after_s == 300.0
    assert memory_of(bench) == place.configs == [Blocks(2)]
    assert bench.tunes == (tier == "autotune")


@pytest.mark.anyio
async def test_an_invalid_call_withdraws_nothing():
    """Bad arguments fail with every config, even the heuristic's: the first error is raised, and every record stays."""
    errors = [ValueError("rank 3, expected 2") for _ in range(3)]
    place, picky = Removing(), Picky(m1=errors[0], m2=errors[1], m3=errors[2])
    bench = Bench(persistent=place)
    async with bench.chain as chain:
        for _ in range(2):
            with pytest.raises(ValueError, match="rank 3") as caught:
                await Executor(chain)(picky, X)
            assert caught.value is errors[2]
    assert picky.ran == [3, 2, 1, 3, 2, 1]
    assert not bench.sink.named("winner_failed")
    assert memory_of(bench) == place.configs == [Blocks(3)]


@pytest.mark.anyio
async def test_after_another_type_of_error_the_next_config_is_tried():
    """The next best fails with another error; the third works, so the winner was at fault."""
    bench, picky = Bench(), Picky(m3=MemoryError("too large"), m2=ValueError("not divisible"))
    async with bench.chain as chain:
        assert await Executor(chain)(picky, X) == "ran 1"
        assert await Executor(chain)(picky, X) == "ran 1"
    assert picky.ran == [3, 2, 1, 3, 1]
    assert [event.instead for event in bench.sink.named("winner_failed")] == [Blocks(1)]


@pytest.mark.anyio
async def test_after_two_errors_of_one_type_the_heuristic_decides():
    """On an accelerator most errors have the same type, so two of them do not prove that the call is at fault."""
    full = MemoryError("too large")
    bench, picky = Bench(), Picky(m3=full, m2=full)
    async with bench.chain as chain:
        assert await Executor(chain)(picky, X) == "ran 1"
    assert picky.ran == [3, 2, 1, 3]
    assert [event.instead for event in bench.sink.named("winner_failed")] == [Blocks(1)]


@pytest.mark.anyio
async def test_if_the_heuristic_fails_too_the_call_is_at_fault():
    """With any error: the heuristic's config should work for every call."""
    bench, picky = Bench(), Picky(m3=MemoryError("too large"), m2=ValueError("a"), m1=TypeError("b"))
    async with bench.chain as chain:
        with pytest.raises(MemoryError, match="too large"):
            await Executor(chain)(picky, X)
    assert picky.ran == [3, 2, 1]
    assert (memory_of(bench), bench.sink.named("winner_failed")) == ([Blocks(3)], [])


@pytest.mark.anyio
async def test_the_heuristic_decides_at_any_place_in_the_order():
    """Configs slower than the heuristic's are not tried after it."""

    class Middling(Picky):
        def heuristic_cfg(self, inv):
            return Blocks(2)

    bench, picky = Bench(), Middling(m3=MemoryError("too large"), m2=ValueError("a"))
    async with bench.chain as chain:
        with pytest.raises(MemoryError, match="too large"):
            await Executor(chain)(picky, X)
    assert picky.ran == [3, 2]


@pytest.mark.anyio
async def test_without_a_report_the_heuristic_runs_in_place_of_the_winner():
    """A failing config that a user put is withdrawn, and the next call tunes without it."""
    bench, picky = Bench(), Picky(m3=MemoryError("too large"))
    async with bench.chain as chain:
        bench.cache.put(*(await chain.explain(Invocation("picky", (X,), {}), picky)).key, Blocks(3))
        assert await Executor(chain)(picky, X) == "ran 1"
        assert await Executor(chain)(picky, X) == "ran 2"
    assert picky.ran == [3, 1, 3, 2]
    assert bench.tunes == 1
    assert Blocks(3) not in bench.measure.compiled


@pytest.mark.anyio
async def test_without_heuristics_the_heuristic_is_not_run():
    """The policy also applies to the configs that run in a winner's place."""
    bench, picky = Bench(allow={"allow_heuristics": False}), Picky(m3=MemoryError("too large"))
    async with bench.chain as chain:
        bench.cache.put(*(await chain.explain(Invocation("picky", (X,), {}), picky)).key, Blocks(3))
        with pytest.raises(MemoryError):
            await Executor(chain)(picky, X)
    assert picky.ran == [3]
    assert memory_of(bench) == [Blocks(3)]


@pytest.mark.anyio
@pytest.mark.parametrize("tier", ["override", "overlay", "heuristics"])
async def test_a_config_that_did_not_win_a_tune_is_not_replaced(tier):
    """It is the caller's own or the heuristic's, so its error is raised."""
    fallback = "heuristics" if tier == "heuristics" else "autotune"
    broken = MemoryError("too large")
    bench, picky = (
        Bench(allow={"cache_miss_fallback": fallback}),
        Picky(m1=broken if tier == "heuristics" else None, m9=broken),
    )
    async with bench.chain as chain:
        key = (await chain.explain(Invocation("picky", (X,), {}), picky)).key
        with overlay_cache({key: Blocks(9)} if tier == "overlay" else {}), pytest.raises(MemoryError):
            await Executor(chain)(picky, X, cfg=Blocks(9) if tier == "override" else None)
    assert picky.ran == [1 if tier == "heuristics" else 9]
    assert not bench.sink.named("winner_failed")


@pytest.mark.anyio
@pytest.mark.parametrize("count", [2, 50])
async def test_concurrent_failures_of_a_winner_cause_one_withdrawal(count):
    """There is one event and one removal, and every caller gets a result."""
    place, picky = Removing(), Picky(m3=MemoryError("too large"))
    bench, results = Bench(persistent=place), []
    everyone = threading.Barrier(2)

    class Together(Picky):
        def run(self, x, *, cfg):
            if cfg.m == 3 and count == 2:
                everyone.wait(10)  # both have chosen the winner before either fails
            return super().run(x, cfg=cfg)

    together = Together(m3=MemoryError("too large"))
    async with bench.chain as chain:
        execute = Executor(chain)
        await chain.choose(Invocation("picky", (X,), {}), picky)

        async def caller():
            results.append(await execute(together, X))

        async with anyio.create_task_group() as tasks:
            for _ in range(count):
                tasks.start_soon(caller)
    assert results == ["ran 2"] * count
    assert len(bench.sink.named("winner_failed")) == 1
    assert (place.removed, place.configs) == ([Blocks(3)], [Blocks(2)])


@pytest.mark.anyio
@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
async def test_an_error_that_ends_the_program_is_not_a_failed_winner(kind):
    """It is raised from its thread as an error, and no other config runs."""
    bench, picky = Bench(), Picky(m3=kind("enough"))
    async with bench.chain as chain:
        with pytest.raises(RuntimeError, match=f"{kind.__name__}: enough"):
            await Executor(chain)(picky, X)
    assert picky.ran == [3]
    assert memory_of(bench) == [Blocks(3)]


def test_donated_arguments_are_not_used_again(real_backend):
    """A winner consumes its input and then fails: its error is raised, and nothing is withdrawn."""
    eats = jax.jit(lambda x: x + 1, donate_argnums=0)

    class Eats(Picky):
        def run(self, x, *, cfg):
            self.ran.append(cfg.m)
            eats(x)
            raise MemoryError("too large")

    bench, op, x = Bench(costs=QUICK), Eats(), jnp.ones(3)

    async def main():
        async with bench.chain as chain:
            with pytest.raises(MemoryError):
                await Executor(chain)(op, x)

    anyio.run(main, backend=real_backend)
    assert x.is_deleted()
    assert op.ran == [3]
    assert memory_of(bench) == [Blocks(3)]


def test_over_real_files_the_next_process_runs_the_config_that_worked(tmp_path, real_backend):
    """The failed config's record is replaced by one of the config that worked."""
    picky = Picky(m3=MemoryError("too large"))

    benches = [Bench(persistent=directory(tmp_path), costs=QUICK) for _ in range(2)]

    async def main():
        for bench in benches:
            async with bench.chain as chain:
                assert await Executor(chain)(picky, X) == "ran 2"

    anyio.run(main, backend=real_backend)
    assert picky.ran == [3, 2, 3, 2]
    assert benches[1].tunes == 0
    assert [event.level for event in benches[1].sink.named("cache_hit")] == ["persistent"]


def test_a_winner_that_does_not_fit_a_shape_of_its_bucket_is_replaced(real_backend):
    """Tuned at 128 rows, called with 96: blocks of 64 do not divide them, the next best does (burn#5352)."""

    class Bucketed(Picky):
        buckets = {"x.shape[0]": powers_of_two(64, 256)}
        candidates = (Blocks(16), Blocks(32), Blocks(64))

        def run(self, x, *, cfg):
            self.ran.append((x.shape[0], cfg.m))
            return in_blocks(x, cfg.m)

        def heuristic_cfg(self, inv):
            return Blocks(16)

    in_blocks = jax.jit(lambda x, m: x.reshape(-1, m).sum(1), static_argnums=1)
    bench, op = Bench(costs=lambda cfg: 0.001 - cfg.m / 1e5), Bucketed()

    async def main():
        async with bench.chain as chain:
            execute = Executor(chain)
            return [await execute(op, jnp.ones(rows)) for rows in (128, 96, 128)]

    outs = anyio.run(main, backend=real_backend)
    assert [out.shape for out in outs] == [(2,), (3,), (4,)]
    assert op.ran == [(128, 64), (96, 64), (96, 32), (96, 64), (128, 32)]
    assert bench.tunes == 1
    assert [event.error_type for event in bench.sink.named("winner_failed")] == ["TypeError"]


@pytest.mark.anyio
async def test_a_caller_gets_its_result_even_if_the_chain_closes():
    """The winner fails, the chain is closed, and the result of the other config is returned."""
    place = Removing()
    bench = Bench(persistent=place)

    class Closes(Picky):
        def run(self, x, *, cfg):
            if cfg.m == 2:
                bench.chain._state.closed = True
            return super().run(x, cfg=cfg)

    async with bench.chain as chain:
        assert await Executor(chain)(Closes(m3=MemoryError("too large")), X) == "ran 2"
    assert len(bench.sink.named("winner_failed")) == 1


@pytest.mark.anyio
async def test_a_caller_gets_its_result_even_if_a_sink_raises():
    """Telemetry never breaks a call."""

    def on_event(event):
        raise ValueError("not today")

    bench, picky = Bench(on_event=on_event), Picky(m3=MemoryError("too large"))
    async with bench.chain as chain:
        assert await Executor(chain)(picky, X) == "ran 2"


def test_a_withdrawal_is_in_the_trace_of_its_request(real_backend):
    """The failure is an error span under the request, next to the span of the choice."""
    captured = CapturedTelemetry()
    cache = ConfigCache()

    async def main():
        inv, picky = Invocation("picky", (X,), {}), Picky(m3=MemoryError("too large"))
        async with Bench(cache=cache, costs=QUICK).chain as chain:
            await chain.choose(inv, picky)
        async with ConfigSelectorChain(cache, sinks=captured.sinks) as chain:
            with captured.tracer.start_as_current_span("request"):
                await Executor(chain)(picky, X)

    anyio.run(main, backend=real_backend)
    [tree] = captured.trees
    assert [(span.name, span.status) for span in tree.children] == [
        ("asel.choose", "UNSET"),
        ("asel.withdraw", "ERROR"),
    ]


# ---------------------------------------------------------------------------------------------
# Errors that pass.


@pytest.mark.anyio
async def test_a_winner_that_works_when_run_again_is_not_withdrawn():
    """Its first error was temporary, as the second run shows."""
    place = Removing()
    bench = Bench(persistent=place)

    class Recovers(Picky):
        def run(self, x, *, cfg):
            try:
                return super().run(x, cfg=cfg)
            finally:
                self.breaks.clear()

    recovers = Recovers(m3=MemoryError("for a moment"))
    async with bench.chain as chain:
        assert [await Executor(chain)(recovers, X) for _ in range(2)] == ["ran 2", "ran 3"]
    assert recovers.ran == [3, 2, 3, 3]
    assert not bench.sink.named("winner_failed")
    assert memory_of(bench) == place.configs == [Blocks(3)]


@pytest.mark.anyio
@pytest.mark.parametrize("seed", range(5))
async def test_random_errors_never_withdraw_a_winner_permanently(seed):
    """3% of 400 calls raise with any config. A winner that failed twice by chance is tuned again later."""
    chance = random.Random(seed)

    class Unlucky(Picky):
        def run(self, x, *, cfg):
            if chance.random() < 0.03:
                raise MemoryError("by chance")
            return super().run(x, cfg=cfg)

    place, unlucky = Removing(), Unlucky()
    bench = Bench(persistent=place)
    bench.cache.quarantine.clock = anyio.current_time
    async with bench.chain as chain:
        execute = Executor(chain)
        for _ in range(400):
            with suppress(MemoryError):
                await execute(unlucky, X)
        await anyio.sleep(3600)
        await chain.choose(Invocation("picky", (X,), {}), unlucky)
        await chain.settled()
        assert memory_of(bench) == place.configs == [Blocks(3)]


@pytest.mark.anyio
async def test_a_withdrawn_config_is_tuned_again_after_a_while():
    """The next best answers meanwhile and during that tune; a second withdrawal lasts twice as long."""
    place, picky = Removing(), Picky(m3=MemoryError("too large"))
    bench = Bench(persistent=place)
    bench.cache.quarantine.clock = anyio.current_time
    async with bench.chain as chain:
        execute, inv = Executor(chain), Invocation("picky", (X,), {})
        assert await execute(picky, X) == "ran 2"
        await anyio.sleep(301)
        assert await chain.choose(inv, picky) == Blocks(2)
        await chain.settled()
        assert memory_of(bench) == place.configs == [Blocks(3)]
        assert await execute(picky, X) == "ran 2"
    assert [event.retry_after_s for event in bench.sink.named("winner_failed")] == [300.0, 600.0]
    assert bench.tunes == 2


@pytest.mark.anyio
async def test_a_caller_that_cannot_wait_has_a_withdrawn_config_tuned_again_too():
    """Otherwise a service that only calls while JAX traces would never use its winner again."""
    picky = Picky(m3=MemoryError("too large"))
    bench = Bench()
    bench.cache.quarantine.clock = anyio.current_time
    async with bench.chain as chain:
        execute, inv = Executor(chain), Invocation("picky", (X,), {})
        assert await execute(picky, X) == "ran 2"
        await anyio.sleep(301)
        assert chain.choose_nowait(inv, picky) == Blocks(2)
        await chain.settled()
        assert chain.choose_nowait(inv, picky) == Blocks(3)
    assert bench.tunes == 2


@pytest.mark.anyio
@pytest.mark.parametrize("first", ["a caller who may not tune", "a chain that is not open"])
async def test_a_call_that_may_not_tune_leaves_a_due_retune_to_another(first):
    """The retune stays due."""
    picky = Picky(m3=MemoryError("too large"))
    bench = Bench()
    bench.cache.quarantine.clock = anyio.current_time
    other = Bench(cache=bench.cache)
    async with bench.chain as chain:
        execute, inv = Executor(chain), Invocation("picky", (X,), {})
        assert await execute(picky, X) == "ran 2"
        await anyio.sleep(301)
        if first == "a chain that is not open":
            assert await other.chain.choose(inv, picky) == Blocks(2)
        else:
            with policy_override(chain, allow_autotune=False):
                assert await chain.choose(inv, picky) == Blocks(2)
        assert (bench.tunes, other.tunes) == (1, 0)
        await chain.choose(inv, picky)
        await chain.settled()
        assert memory_of(bench) == [Blocks(3)]
