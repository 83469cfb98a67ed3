"""The executor runs what the tuner measured: jitted, compiled once, in a thread, and warm within microseconds."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from contextlib import nullcontext
from functools import partial

import anyio
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from asel import (
    AutotunePolicy,
    BlockingExecutor,
    BlockingSelector,
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    Invocation,
    Kernel,
    Tuner,
    kernel,
)
from asel.runtime.jax_settings import current_settings, settings_held
from asel.runtime.threads import run_in_thread
from asel.serving import executor, preparation, runs

SETTINGS = {
    "nothing set": nullcontext,
    "x64": partial(jax.enable_x64, True),
    "matmul precision": partial(jax.default_matmul_precision, "highest"),
    "default device": lambda: jax.default_device(jax.devices()[0]),
    "guard host to device": partial(jax.transfer_guard_host_to_device, "allow"),
    "guard device to device": partial(jax.transfer_guard_device_to_device, "log"),
    "guard device to host": partial(jax.transfer_guard_device_to_host, "allow"),
    "random numbers": lambda: jax.default_prng_impl("rbg"),
    "partitionable": lambda: jax.threefry_partitionable(False),
    "promotion of dtypes": lambda: jax.numpy_dtype_promotion("strict"),
    "promotion of ranks": lambda: jax.numpy_rank_promotion("raise"),
    "nan": lambda: jax.debug_nans(True),
    "infinity": lambda: jax.debug_infs(True),
    "mesh": lambda: jax.set_mesh(jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))),
    "key reuse": lambda: jax.debug_key_reuse(True),
    "mesh entered": lambda: jax.sharding.Mesh(np.array(jax.devices()[:1]), ("rows",)),
}


class Scaled(Kernel):
    """Counts the runs in Python, which are the traces if it is jitted, and their threads."""

    op_id = "scaled"
    candidates = (1, 2)

    def __init__(self) -> None:
        super().__init__()
        self.traced = []
        self.on_loop = []

    def run(self, x, *, cfg, by=3):
        self.traced.append(cfg)
        self.on_loop.append(threading.current_thread() is threading.main_thread())
        assert isinstance(by, int)
        return x * by if cfg == 1 else x + x * (by - 1)

    def heuristic_cfg(self, inv):
        return self.candidates[0]

    def candidate_cfgs(self, inv):
        return self.candidates


def chain(fallback="heuristics", **given) -> ConfigSelectorChain:
    return ConfigSelectorChain(ConfigCache(), AutotunePolicy(cache_miss_fallback=fallback), sinks=(), **given)


class Compiles:
    """Counts the programs that XLA compiles, by thread."""

    def __init__(self) -> None:
        self.on_loop = self.elsewhere = 0

    def note(self, event, seconds, **facts) -> None:
        if "backend_compile" in event:
            if threading.current_thread() is threading.main_thread():
                self.on_loop += 1
            else:
                self.elsewhere += 1


@pytest.fixture(scope="module")
def listener():
    """One for the whole module: JAX has no public way to take a listener away."""
    heard = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda *event, **facts: [one.note(*event, **facts) for one in heard]
    )
    return heard


@pytest.fixture
def compiles(listener):
    counts = Compiles()
    listener[:] = [counts]
    yield counts
    listener.clear()


# ---------------------------------------------------------------------------------------------
# Compiled in a thread, and not again on the loop.


@pytest.mark.filterwarnings("ignore:.with mesh.. context manager:DeprecationWarning")
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_run_in_a_thread_is_not_traced_again_on_the_loop(real_backend, setting):
    """`jit` sees each of the caller's settings in a thread as it does on the loop."""
    traced = []

    @jax.jit
    def fn(x):
        traced.append(threading.current_thread() is threading.main_thread())
        return x + 1

    async def main():
        with SETTINGS[setting]():
            x = jnp.ones(3)

            def work():
                with settings_held(settings):
                    return fn(x)

            settings = current_settings()
            await run_in_thread("tracing", work)
            fn(x)

    anyio.run(main, backend=real_backend)
    assert traced == [False]


def test_a_mesh_set_in_a_thread_does_not_outlive_its_work(real_backend):
    """`jax.set_mesh` has no end of its own; the next work in that thread must see neither it nor an empty mesh."""
    mesh, found = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,)), []

    async def main():
        settings = current_settings()

        def leave():
            with settings_held(settings):
                jax.set_mesh(mesh)

        def look():
            found.append((threading.current_thread().name, jax.sharding.get_mesh().empty))

        await run_in_thread("meshing", leave)
        await run_in_thread("meshing", look)

    anyio.run(main, backend=real_backend)
    assert found == [("asel: meshing", True)]


@pytest.mark.parametrize("fallback", ["autotune", "heuristics"])
def test_a_jitted_kernel_is_compiled_once_and_in_a_thread(real_backend, fallback, compiles):
    """One call in a thread, then calls on the loop, with one compilation."""

    class Jitted(Scaled):
        op_id = "jitted"
        candidates = (1,)

    op = Jitted()
    op.run = jax.jit(op.run, static_argnames=("cfg", "by"))

    async def main():
        execute, x = Executor(chain(fallback)), jax.block_until_ready(jnp.ones(5))
        before = compiles.on_loop
        for _ in range(4):
            await execute(op, x)
        return compiles.on_loop - before

    assert anyio.run(main, backend=real_backend) == 0
    assert not any(op.on_loop)


# ---------------------------------------------------------------------------------------------
# Jitted in the form the tuner measured.


def test_kernels_are_jitted_with_arrays_dynamic_and_all_else_static():
    """There is one trace for each signature and config, for all values of the arrays."""
    op = Scaled()

    async def main():
        execute = Executor(chain())
        for value in (1.0, 2.0, 3.0):
            np.testing.assert_array_equal(await execute(op, jnp.full(4, value), by=3), np.full(4, 3 * value))
        await execute(op, jnp.ones(4), by=5)
        await execute(op, np.ones(4, "float32"), by=5)

    anyio.run(main)
    assert op.traced == [1, 1, 1]


def test_with_jit_false_a_kernel_is_not_jitted():
    """`jit=False` is for kernels that must not be traced: Python runs them every time."""
    op = Scaled()

    async def main():
        execute = Executor(chain(), jit=False)
        for _ in range(3):
            await execute(op, jnp.ones(4))
        execute.nowait(op, jnp.ones(4))

    anyio.run(main)
    assert op.traced == [1] * 4


def test_a_kernel_that_is_jitted_already_is_not_jitted_again():
    """Its own jit may donate its input, which an outer one would prevent."""
    donating = jax.jit(lambda x, *, cfg: x + cfg, static_argnames="cfg", donate_argnums=0)
    op = kernel(op_id="donating", configs=[1], heuristic=1)(donating)

    async def main():
        execute, given = Executor(chain()), [jnp.ones(4) for _ in range(3)]
        for x in given:
            await execute(op, x)
        return given

    assert [x.is_deleted() for x in anyio.run(main)] == [True] * 3


def test_a_kernel_that_cannot_be_traced_is_not_jitted():
    """Its trace fails because it reads values; tracing is tried once."""
    attempts = []

    @kernel(op_id="untraceable", configs=[1], heuristic=1)
    def op(x, *, cfg):
        attempts.append(isinstance(x, jax.core.Tracer))
        return float(x.sum()) * cfg

    async def main():
        execute = Executor(chain())
        return [await execute(op, jnp.ones(4)) for _ in range(3)]

    assert anyio.run(main) == [4.0] * 3
    assert attempts == [True, False, False, False]


def test_an_invalid_call_raises_the_kernels_error():
    """Not the error of its trace."""

    @kernel(op_id="picky", configs=[1], heuristic=1)
    def op(x, *, cfg):
        if np.asarray(x).sum() > 0:
            raise ValueError("too much")

    with pytest.raises(ValueError, match="too much"):
        anyio.run(partial(Executor(chain()), op, jnp.ones(4)))


def test_nowait_inside_a_trace_is_part_of_that_trace():
    """Tracers pass through the kernel itself, also for gradients."""
    op = Scaled()
    execute = Executor(chain())
    fn = jax.jit(jax.grad(lambda x: execute.nowait(op, x).sum()))
    np.testing.assert_array_equal(fn(jnp.ones(4)), np.full(4, 3.0))
    np.testing.assert_array_equal(execute.nowait(op, jnp.ones(4)), np.full(4, 3.0))
    del op.traced[:]
    execute.nowait(op, jnp.ones(4))
    assert op.traced == []


def test_calls_that_share_a_built_key_run_with_their_own_constants():
    """A built key may leave out a constant that is part of the program."""

    class Keyed(Scaled):
        key_builder = staticmethod(lambda inv: "one for all")

    async def main():
        execute, op = Executor(chain("autotune", tuner=Tuner())), Keyed()
        return [float((await execute(op, jnp.ones(n), by=by))[0]) for n in (2, 3) for by in (3, 4, 3)]

    assert anyio.run(main) == [3, 4, 3] * 2


# ---------------------------------------------------------------------------------------------
# What a tune has compiled.


@pytest.mark.parametrize("objective", ["forward", "backward"])
def test_the_winner_is_not_compiled_again_after_its_tune(compiles, objective):
    """Calls run the program that was measured; with gradients, the tune compiles the program that calls need."""
    op, x = Scaled(), jnp.ones((7, 3))
    jax.block_until_ready(x)

    async def main():
        policy = AutotunePolicy(validate_backward=objective == "backward")
        async with ConfigSelectorChain(ConfigCache(), policy, sinks=()) as selector:
            execute = Executor(selector)
            await selector.choose(Invocation("scaled", (x,), {}), op)
            before = (compiles.on_loop + compiles.elsewhere, len(op.traced))
            for _ in range(3):
                np.testing.assert_array_equal(await execute(op, x), np.full((7, 3), 3.0))
            return before

    before = anyio.run(main)
    assert (compiles.on_loop + compiles.elsewhere, len(op.traced)) == before


def test_a_blocking_executor_runs_the_program_of_its_tune(compiles):
    """It was measured in another thread, and is not compiled again in the caller's."""
    x = jnp.ones(4)
    with BlockingSelector(tuner=Tuner(warmup=0, iters=1), sinks=()) as selector:
        before = compiles.on_loop
        np.testing.assert_allclose(BlockingExecutor(selector)(Scaled(), x), np.full(4, 3.0))
        assert (compiles.on_loop, compiles.elsewhere > 0) == (before, True)


def test_a_jitted_winner_is_not_compiled_again_after_its_tune(compiles):
    """The tune runs a kernel with its own jit once in the same way as calls do."""
    op, x = Scaled(), jnp.ones((7, 4))
    op.run = jax.jit(op.run, static_argnames=("cfg", "by"))
    jax.block_until_ready(x)

    async def main():
        async with chain("autotune") as selector:
            execute = Executor(selector)
            await selector.choose(Invocation("scaled", (x,), {}), op)
            before = compiles.on_loop + compiles.elsewhere
            for _ in range(3):
                await execute(op, x)
            return before

    assert anyio.run(main) == compiles.on_loop + compiles.elsewhere


def test_a_kept_program_keeps_no_argument_alive():
    """The arrays of a tune belong to its callers, and its winner's program does not need them."""
    op = Scaled()

    async def main():
        async with chain("autotune") as selector:
            execute, x = Executor(selector), jnp.ones((5, 3))
            await execute(op, x)
            await execute(op, x)
            gone = weakref.ref(x)
            del x
            with anyio.fail_after(10):
                while gone() is not None:  # a thread releases the tune's objects
                    gc.collect()
                    await anyio.sleep(0.001)

    anyio.run(main)


def test_programs_of_old_configs_are_released():
    """Only the programs of a few configs are kept for each signature."""
    op = Scaled()

    async def main():
        execute, x = Executor(chain()), jnp.ones(3)
        for cfg in range(1, 9):
            await execute(op, x, cfg=cfg)
        del op.traced[:]
        for cfg in (8, 7, 6, 5, 1):
            await execute(op, x, cfg=cfg)

    anyio.run(main)
    assert op.traced == [1]


def test_a_background_tune_begins_after_the_first_run(real_backend):
    """A cold request has the cores to itself, and no call has to compile the winner."""
    order, x = [], jnp.ones((6, 2))

    class Ordered(Scaled):
        def run(self, x, *, cfg, by=3):
            name = threading.current_thread().name
            order.append("call" if name.startswith("asel: running") else "tune")
            return super().run(x, cfg=cfg, by=by)

    op, running, opened = Ordered(), threading.Event(), threading.Event()

    @kernel(op_id="held", configs=[1, 2], heuristic=1)
    def held(x, *, cfg):
        if threading.current_thread().name.startswith("asel: running"):
            running.set()
            assert opened.wait(10)
        return x * cfg

    async def main():
        async with chain("background") as selector, anyio.create_task_group() as tasks:
            execute = Executor(selector)
            tasks.start_soon(execute, held, x)
            await run_in_thread("waiting", partial(running.wait, 10))
            assert not selector.statistics().pending, "the first answer is still running"
            opened.set()
            await execute(op, x)
            assert selector.statistics().pending["scaled@v0"] == 1
            await selector.settled()
            assert order[0] == "call"
            assert set(order[1:]) == {"tune"}
            await execute(op, x)
            assert (await selector.select(Invocation("scaled", (x,), {}), op)).tier == "memory"
        assert "call" not in order[1:]

    anyio.run(main, backend=real_backend)


def test_a_background_tune_begins_even_if_its_caller_is_cancelled(real_backend):
    """The tune is for later callers."""
    running, opened = threading.Event(), threading.Event()

    @kernel(op_id="held", configs=[1, 2], heuristic=1)
    def held(x, *, cfg):
        if threading.current_thread().name.startswith("asel: running"):
            running.set()
            assert opened.wait(10)
        return x * cfg

    async def main():
        async with chain("background") as selector:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(Executor(selector), held, jnp.ones(2))
                await run_in_thread("waiting", partial(running.wait, 10))
                tasks.cancel_scope.cancel()
            opened.set()
            await selector.settled()
            return (await selector.select(Invocation("held", (jnp.ones(2),), {}), held)).tier

    assert anyio.run(main, backend=real_backend) == "memory"


# ---------------------------------------------------------------------------------------------
# Warm.


@pytest.mark.parametrize("prepares", [False, True], ids=["plain", "with prepare"])
def test_a_warm_call_does_not_leave_the_loop(real_backend, prepares, monkeypatch):
    """Neither its run nor a `prepare` that was quick for this signature uses a thread or waits."""

    class Prepared(Scaled):
        def prepare(self, x):
            return (x,), {"by": 3}

    op, x, threads = (Prepared() if prepares else Scaled()), jnp.ones(4), []
    in_a_thread = runs.in_a_thread

    async def counted(what, work):
        threads.append(what)
        return await in_a_thread(what, work)

    for module in (executor, preparation, runs):
        monkeypatch.setattr(module, "in_a_thread", counted)

    async def main():
        async with chain("autotune") as selector:
            execute = Executor(selector)
            for _ in range(50):  # a busy machine may take its time over anything
                del threads[:]
                await execute(op, x)
                if not threads:
                    return

    anyio.run(main, backend=real_backend)
    assert not threads


def test_a_slow_prepare_stays_in_a_thread(real_backend):
    """A `prepare` that was slow for this signature never runs on the loop."""
    on_loop = []

    class Slow(Scaled):
        def prepare(self, x):
            on_loop.append(threading.current_thread() is threading.main_thread())
            time.sleep(0.002)
            return (x,), {}

    async def main():
        execute, op, x = Executor(chain()), Slow(), jnp.ones(4)
        for _ in range(3):
            await execute(op, x)

    anyio.run(main, backend=real_backend)
    assert on_loop == [False] * 3


def test_a_warm_call_follows_changes_of_the_chains_answer(real_backend):
    """The warm path gives way to another config in memory, an override, and a closed chain."""
    op, x = Scaled(), jnp.ones(4)

    async def main():
        async with chain("autotune") as selector:
            execute = Executor(selector)
            for _ in range(3):
                await execute(op, x)
            key = (await selector.explain(Invocation("scaled", (x,), {}), op)).key
            winner = selector.cache.get(*key)
            other = 3 - winner
            selector.cache.put(*key, other)
            del op.traced[:]
            await execute(op, x)
            await execute(op, x)
            assert op.traced == [other]
            await execute(op, x, cfg=7)
            assert op.traced == [other, 7]
        with pytest.raises(RuntimeError, match="closed"):
            await execute(op, x)

    anyio.run(main, backend=real_backend)


def test_a_warm_winner_that_fails_is_replaced(real_backend):
    """Failures on the warm path are handled like all others."""
    broken = threading.Event()

    class Breaks(Scaled):
        candidates = (1, 2)

        def run(self, x, *, cfg):
            if broken.is_set() and cfg == winner[0]:
                raise MemoryError("too large")
            return super().run(x, cfg=cfg)

    winner = [0]

    async def main():
        async with chain("autotune") as selector:
            execute, op, x = Executor(selector, jit=False), Breaks(), jnp.ones(4)
            for _ in range(3):
                await execute(op, x)
            inv = Invocation("scaled", (x,), {})
            winner[0] = await selector.choose(inv, op)
            broken.set()
            np.testing.assert_array_equal(await execute(op, x), np.full(4, 3.0))
            return await selector.choose(inv, op)

    assert anyio.run(main, backend=real_backend) == 3 - winner[0]
