"""Choosing and running: threads, the caller's settings, and cancellation."""

from __future__ import annotations

import threading
from contextvars import ContextVar
from functools import partial
from types import SimpleNamespace

import anyio
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec
from support.kernels import H100, QUICK, Bench, Blocks, Picky, memory_of
from support.store_doubles import Removing

import asel
from asel import (
    ConfigSelectorChain,
    Invocation,
    NoConfigError,
    SelectorClosedError,
    kernel,
)
from asel.runtime.threads import run_in_thread

# These kernels count their runs in Python, or return values that no jitted function can; see also test_executor_jit.py.
Executor = partial(asel.Executor, jit=False)
X = H100.array((8, 128))
where: ContextVar[str] = ContextVar("where", default="nowhere")


# ---------------------------------------------------------------------------------------------
# Choosing and running.


@pytest.mark.anyio
@pytest.mark.parametrize("is_open", [True, False], ids=["open", "without async with"])
async def test_the_chosen_config_is_run(is_open):
    """First from a tune, then from memory; each call runs the kernel once."""
    bench, picky = Bench(), Picky()
    execute = Executor(bench.chain)

    async def scene():
        assert [await execute(picky, X) for _ in range(3)] == ["ran 3"] * 3

    if is_open:
        async with bench.chain:
            await scene()
    else:
        await scene()
    assert picky.ran == [3, 3, 3]
    assert bench.tunes == 1
    assert [event.level for event in bench.sink.named("cache_hit")] == ["memory", "memory"]


@pytest.mark.anyio
@pytest.mark.parametrize("fallback", ["autotune", "heuristics", "background"])
async def test_cfg_overrides_every_fallback(fallback):
    """ejKernel silently ignored it with "heuristics". It is not stored."""
    place, picky = Removing(), Picky()
    bench = Bench(persistent=place, allow={"cache_miss_fallback": fallback})
    async with bench.chain as chain:
        assert await Executor(chain)(picky, X, cfg=Blocks(9)) == "ran 9"
        assert Executor(chain).nowait(picky, X, cfg=Blocks(7)) == "ran 7"
    assert [event.cfg for event in bench.sink.named("override")] == [Blocks(9), Blocks(7)]
    assert bench.sink.names == ["override", "override", "closed"]
    assert (memory_of(bench), place.kept) == ([], {})


@pytest.mark.anyio
async def test_a_call_is_prepared_and_then_runs_in_its_platforms_variant():
    """The key is that of the prepared arguments; `run_gpu` is for arguments on a GPU."""

    class Prepared(Picky):
        def prepare(self, n, *, flip):
            return (H100.array((n, 1)),), {"flip": not flip}

        def run_gpu(self, x, *, flip, cfg):
            return x.shape, flip, cfg

    bench, op = Bench(), Prepared()
    async with bench.chain as chain:
        assert await Executor(chain)(op, 8, flip=False) == ((8, 1), True, Blocks(3))
        inv = Invocation("picky", (H100.array((8, 1)),), {"flip": True})
        assert (await chain.select(inv, op)).tier == "memory"
        assert Executor(chain).nowait(op, 8, flip=False) == ((8, 1), True, Blocks(3))


@pytest.mark.anyio
async def test_a_kernel_need_not_inherit_from_kernel():
    """It has no base class, no `prepare`, no version, and dicts as configs; its failing winner is withdrawn."""
    ran = []

    def run(x, *, cfg):
        ran.append(cfg["m"])
        if cfg["m"] == 3:
            raise ValueError("not divisible")
        return cfg

    configs = [{"m": 1}, {"m": 2}, {"m": 3}]
    duck = SimpleNamespace(
        op_id="duck", run=run, heuristic_cfg=lambda inv: configs[0], candidate_cfgs=lambda inv: configs
    )
    bench = Bench(costs=lambda cfg: 0.4 - cfg["m"] / 10)
    async with bench.chain as chain:
        assert await Executor(chain)(duck, X) == {"m": 2}
        assert await Executor(chain)(duck, X) == {"m": 2}
    assert ran == [3, 2, 3, 2]


def test_a_call_may_be_mapped_over_shards(real_backend):
    """With `method="shard_map"`, the mesh and its specs belong to the call, not to the kernel."""
    mesh, spec = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,)), PartitionSpec("x")

    class Sharded(Picky):
        def run_shard_map(self, x, *, by, cfg):
            return x * by + jax.lax.axis_index("x")

    async def main():
        call = partial(Executor(ConfigSelectorChain(sinks=())), Sharded(), jnp.ones(4), by=3, cfg=Blocks(1))
        return await call(method="shard_map", mesh=mesh, in_specs=(spec,), out_specs=spec)

    np.testing.assert_array_equal(anyio.run(main, backend=real_backend), np.full(4, 3.0))


@pytest.mark.anyio
async def test_an_error_of_choosing_is_raised_and_nothing_is_run():
    """For instance if there is no config, or the chain has closed."""
    bench, picky = Bench(allow={"allow_autotune": False, "allow_heuristics": False}), Picky()
    async with bench.chain as chain:
        with pytest.raises(NoConfigError):
            await Executor(chain)(picky, X)
        with pytest.raises(NoConfigError):
            Executor(chain).nowait(picky, X)
    with pytest.raises(SelectorClosedError):
        await Executor(chain)(picky, X)
    assert picky.ran == []


# ---------------------------------------------------------------------------------------------
# Where it runs.


def test_a_run_that_may_compile_does_not_block_the_loop(real_backend):
    """The kernel waits for a task of the loop; on the loop, it would wait forever."""
    opened = threading.Event()

    @kernel(op_id="waits", configs=[1], heuristic=1)
    def waits(x, *, cfg):
        assert opened.wait(10)
        return threading.current_thread().name

    async def main():
        async def open_soon():
            await anyio.sleep(0.01)
            opened.set()

        async with ConfigSelectorChain(sinks=()) as chain, anyio.create_task_group() as tasks:
            tasks.start_soon(open_soon)
            assert await Executor(chain)(waits, 1, cfg=1) == "asel: running waits@v0"

    anyio.run(main, backend=real_backend)


def test_a_quick_run_makes_the_next_one_run_on_the_loop(real_backend):
    """By signature and config; slow runs stay in a thread."""
    threads, slow = [], threading.Event()

    @kernel(op_id="where", configs=[1], heuristic=1)
    def op(x, *, cfg):
        threads.append(threading.current_thread() is threading.main_thread())
        if slow.is_set():
            threading.Event().wait(0.005)
        return x

    async def main():
        execute = Executor(ConfigSelectorChain(sinks=()))

        async def where_three_run(x, cfg):
            del threads[:]
            for _ in range(3):
                await execute(op, x, cfg=cfg)
            return list(threads)

        # A busy machine may take its time over anything, so there is more than one try.
        tries = [await where_three_run(np.zeros(n), 1) for n in range(1, 10)]
        assert [False, True, True] in tries
        n = tries.index([False, True, True]) + 1
        del threads[:]
        await execute(op, np.zeros(n), cfg=2)
        assert threads == [False], "with another config it may compile"
        slow.set()
        assert await where_three_run(np.zeros(20), 1) == [False] * 3, "slow, so never on the loop"

    anyio.run(main, backend=real_backend)


def test_a_kernel_with_a_key_builder_runs_in_a_thread_for_new_shapes(real_backend):
    """Its key may cover shapes that need separate programs."""
    threads = []

    class Keyed(Picky):
        key_builder = staticmethod(lambda inv: "one for all")

        def run(self, x, *, cfg):
            threads.append(threading.current_thread() is threading.main_thread())

    async def main():
        execute, op = Executor(ConfigSelectorChain(sinks=())), Keyed()
        for n in range(1, 5):
            await execute(op, np.zeros(n), cfg=Blocks(1))

    anyio.run(main, backend=real_backend)
    assert threads == [False] * 4


def test_concurrent_runs_in_threads_are_limited(real_backend, monkeypatch):
    """Cold calls wait their turn; a cancelled call gives up its turn immediately."""
    monkeypatch.setattr("asel.serving.runs._MAX_THREADS", 3)
    lock, most, now, full, opened = threading.Lock(), 0, 0, threading.Event(), threading.Event()

    @kernel(op_id="crowd", configs=[1], heuristic=1)
    def op(n, *, cfg):
        nonlocal most, now
        with lock:
            now += 1
            most = max(most, now)
            if most == 3:
                full.set()
        assert full.wait(10)
        opened.wait(10 if cfg == 2 else 0.003)
        with lock:
            now -= 1
        return n

    async def main():
        execute = Executor(ConfigSelectorChain(sinks=()))
        async with anyio.create_task_group() as tasks:
            for n in range(20):
                tasks.start_soon(partial(execute, op, n, cfg=1))
        assert most == 3
        with anyio.move_on_after(0.01):
            async with anyio.create_task_group() as tasks:
                for n in range(5):
                    tasks.start_soon(partial(execute, op, n, cfg=2))
        assert await execute(op, 99, cfg=1) == 99
        opened.set()

    anyio.run(main, backend=real_backend)


def test_a_thread_has_its_callers_settings(real_backend):
    """JAX keeps x64, precision, device and mesh by thread; context variables, and so traces, follow too."""
    seen = []
    device = jax.devices()[0]
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(AxisType.Auto,))

    class Looks(Picky):
        def look(self):
            config = jax.config
            assert threading.current_thread() is not threading.main_thread()
            seen.append(
                (
                    jnp.ones(1, "float64").dtype.name,
                    config.jax_default_matmul_precision,
                    config.jax_default_device,
                    jax.sharding.get_mesh(),
                    where.get(),
                )
            )

        def prepare(self, x):
            self.look()
            return (x,), {}

        def run(self, x, *, cfg):
            self.look()

    async def main():
        where.set("here")
        execute, precise = Executor(ConfigSelectorChain(sinks=())), jax.default_matmul_precision("highest")
        with jax.enable_x64(True), precise, jax.default_device(device), jax.set_mesh(mesh):
            await execute(Looks(), 1, cfg=Blocks(1))

    anyio.run(main, backend=real_backend)
    assert seen == [("float64", "highest", device, mesh, "here")] * 2


@pytest.mark.anyio
async def test_an_error_that_jax_raises_behind_a_run_is_caught_at_the_first():
    """A first run is waited for, so a winner that fails while it computes is withdrawn like one that fails at once.

    Later runs are not: JAX computes behind them. On a CPU it raises at once, so this result plays an accelerator's.
    """

    class Result:
        def __init__(self, picky, m):
            self.picky, self.m = picky, m

        def block_until_ready(self):
            self.picky.waited.append(self.m)
            if self.m == 3:
                raise ValueError("on the device")
            return self

    class Late(Picky):
        def run(self, x, *, cfg):
            super().run(x, cfg=cfg)
            return Result(self, cfg.m)

    bench, late = Bench(), Late()
    late.waited = []
    async with bench.chain as chain:
        execute = Executor(chain)
        assert [(await execute(late, X)).m for _ in range(3)] == [2, 2, 2]
    assert late.ran == [3, 2, 3, 2, 2]
    assert late.waited == [3, 2, 3]
    assert len(bench.sink.named("winner_failed")) == 1


# ---------------------------------------------------------------------------------------------
# Cancelled, at each await.


@pytest.mark.parametrize("step", ["prepare", "winner", "fallback"])
def test_a_cancelled_caller_leaves_its_run_to_the_thread(step, real_backend):
    """It returns immediately, and nothing is withdrawn; the next caller gets its usual result."""
    reached, opened = threading.Event(), threading.Event()

    class Stops(Picky):
        step = ""

        def at(self, name):
            if name == self.step:
                reached.set()
                assert opened.wait(10)

        def prepare(self, x):
            self.at("prepare")
            return (x,), {}

        def run(self, x, *, cfg):
            self.at("winner" if cfg.m == 3 else "fallback")
            return super().run(x, cfg=cfg)

    bench, op = Bench(costs=QUICK), Stops(m3=MemoryError("too large"))

    async def main():
        async with bench.chain as chain, anyio.create_task_group() as tasks:
            await chain.choose(Invocation("picky", (X,), {}), op)
            op.step = step
            tasks.start_soon(Executor(chain), op, X)
            await run_in_thread("waiting", lambda: reached.wait(10))
            tasks.cancel_scope.cancel()
        assert memory_of(bench) == [Blocks(3)]
        assert not bench.sink.named("winner_failed")
        opened.set()
        bench.chain._state.closed = False
        assert await Executor(bench.chain)(op, X) == "ran 2"

    anyio.run(main, backend=real_backend)
    assert len(bench.sink.named("winner_failed")) == 1


@pytest.mark.anyio
async def test_a_caller_cancelled_while_it_chooses_runs_nothing():
    """The tune continues for later callers."""
    bench, picky = Bench(), Picky()
    async with bench.chain as chain:
        with anyio.move_on_after(0.1):
            await Executor(chain)(picky, X)
        assert picky.ran == []
        await chain.settled()
        assert await Executor(chain)(picky, X) == "ran 3"
    assert bench.tunes == 1


@pytest.mark.anyio
async def test_a_caller_cancelled_during_the_store_write_has_withdrawn():
    """Another config has already worked by then."""
    reached = anyio.Event()

    class Hangs(Removing):
        async def withdraw(self, stored):
            reached.set()
            await anyio.sleep_forever()

    bench, picky = Bench(persistent=Hangs()), Picky(m3=MemoryError("too large"))
    async with bench.chain as chain:
        await chain.choose(Invocation("picky", (X,), {}), picky)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(Executor(chain), picky, X)
            await reached.wait()
            tasks.cancel_scope.cancel()
        assert await Executor(chain)(picky, X) == "ran 2"
    assert picky.ran == [3, 2, 3, 2]
    assert len(bench.sink.named("winner_failed")) == 1


# ---------------------------------------------------------------------------------------------
# Without waiting.


@pytest.mark.anyio
async def test_nowait_runs_while_jax_traces():
    """The first trace has the heuristic's config, and the next one the tuned config."""

    class Scales(Picky):
        def run(self, x, *, cfg):
            return x * cfg.m

    bench, op, x = Bench(), Scales(), jnp.ones((8, 128))
    async with bench.chain as chain:
        execute = Executor(chain)
        step = jax.jit(lambda x: execute.nowait(op, x))
        np.testing.assert_array_equal(step(x), x)
        await chain.settled()
        step.clear_cache()
        np.testing.assert_array_equal(step(x), x * 3)
        np.testing.assert_array_equal(jax.grad(lambda x: execute.nowait(op, x).sum())(x), np.full((8, 128), 3.0))


@pytest.mark.anyio
async def test_nowait_raises_the_kernels_error_and_withdraws_nothing():
    """A withdrawal has to wait for the store; `selector.withdraw` is for callers that can wait."""
    bench, picky = Bench(), Picky(m3=MemoryError("too large"))
    async with bench.chain as chain:
        await chain.choose(Invocation("picky", (X,), {}), picky)
        with pytest.raises(MemoryError):
            Executor(chain).nowait(picky, X)
    assert (picky.ran, memory_of(bench)) == ([3], [Blocks(3)])
