"""The programs that an executor runs, and their threads: placements, equal kernels, keys without a heuristic."""

from __future__ import annotations

import threading

import anyio
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from asel import AutotunePolicy, ConfigCache, ConfigSelectorChain, Executor, Kernel, NoConfigError, kernel


def chain(fallback="heuristics") -> ConfigSelectorChain:
    return ConfigSelectorChain(ConfigCache(), AutotunePolicy(cache_miss_fallback=fallback), sinks=())


class Counter(Kernel):
    """Counts its own runs, which jit would not."""

    op_id = "counter"

    def __init__(self) -> None:
        super().__init__()
        self.runs = 0

    def run(self, x, *, cfg):
        self.runs += 1
        return x + self.runs

    def heuristic_cfg(self, inv):
        return 1

    def candidate_cfgs(self, inv):
        return [1]


class Untraceable(Counter):
    """Reads the values of its arguments, so that no executor can jit it."""

    op_id = "untraceable"

    def run(self, x, *, cfg):
        x.sum().item()
        return super().run(x, cfg=cfg)


# ---------------------------------------------------------------------------------------------
# What `jax.jit` compiles apart.


@pytest.fixture(scope="module")
def compiled_in():
    """The names of the threads in which XLA compiled: JAX has no public way to take a listener away."""
    names = []

    def note(event, seconds, **facts):
        if "backend_compile" in event:
            names.append(threading.current_thread().name)

    jax.monitoring.register_event_duration_secs_listener(note)
    return names


def placements():
    """Return two arrays with one key that `jit` compiles separately: on the default device, and committed."""
    return {"default": jnp.ones(6), "committed": jax.device_put(jnp.ones(6), jax.devices()[0])}


@pytest.mark.parametrize("fallback", ["heuristics", "autotune"])
@pytest.mark.parametrize("first", ["default", "committed"])
@pytest.mark.parametrize("form", ["plain", "pytree", "keyword", "jitted", "prepared", "own key"])
def test_a_new_placement_of_an_array_is_compiled_in_a_thread(compiled_in, fallback, first, form):
    """A program for arrays on the default device is compiled again for committed ones."""

    class Placed(Kernel):
        op_id = "placed"

        def run(self, x, *, cfg):
            return (x["x"] if isinstance(x, dict) else x) * cfg

        def heuristic_cfg(self, inv):
            return 1

        def candidate_cfgs(self, inv):
            return [1, 2]

    op = Placed()
    if form == "jitted":
        op.run = jax.jit(op.run, static_argnames="cfg")
    if form == "prepared":
        op.prepare = lambda x: ((jnp.negative(x),), {})
    if form == "own key":
        op.key_builder = lambda inv: "one for all"

    async def call(execute, x):
        return await (execute(op, x={"x": x}) if form in ("pytree", "keyword") else execute(op, x))

    async def main():
        arrays = placements()
        x, other = arrays.pop(first), *arrays.values()
        async with chain(fallback) as selector:
            execute = Executor(selector)
            for _ in range(4):
                await call(execute, x)
            jax.block_until_ready((x, other))
            del compiled_in[:]
            np.testing.assert_array_equal(await call(execute, other), await call(execute, x))
            await call(execute, other)

    anyio.run(main)
    assert threading.main_thread().name not in compiled_in


# ---------------------------------------------------------------------------------------------
# Kernels of one class and state, which share their compiled programs.


@pytest.mark.parametrize("fallback", ["heuristics", "autotune"])
@pytest.mark.parametrize(("kind", "jit"), [(Counter, False), (Untraceable, True)])
def test_a_kernel_that_is_not_jitted_runs_itself_and_not_an_equal_one(real_backend, fallback, kind, jit):
    """Kernels that were equal when they were first seen may differ after they have run."""

    async def main():
        one, other, x = kind(), kind(), jnp.zeros(2)
        async with chain(fallback) as selector:
            execute = Executor(selector, jit=jit)
            for _ in range(3):
                await execute(one, x)
            before = one.runs
            np.testing.assert_array_equal(await execute(other, x), x + 1)
            np.testing.assert_array_equal(execute.nowait(other, x), x + 2)
            np.testing.assert_array_equal(await execute(other, x), x + 3)
            np.testing.assert_array_equal(await execute(one, x), x + before + 1)
            return one.runs - before, other.runs

    assert anyio.run(main, backend=real_backend) == (1, 3)


def test_equal_kernels_share_a_compiled_program(real_backend):
    """A kernel that is made for every call is compiled once."""
    traced = []

    class Made(Kernel):
        op_id = "made"

        def run(self, x, *, cfg):
            traced.append(cfg)
            return x * cfg

        def heuristic_cfg(self, inv):
            return 3

    async def main():
        execute, x = Executor(chain()), jnp.ones(2)
        for _ in range(5):
            np.testing.assert_array_equal(await execute(Made(), x), x * 3)

    anyio.run(main, backend=real_backend)
    assert traced == [3]


# ---------------------------------------------------------------------------------------------
# A background tune, and a caller without an answer.


def test_a_background_tune_begins_even_if_its_caller_got_no_config(real_backend):
    """Without a heuristic the first call fails; its tune answers the next one."""

    @kernel(op_id="guessless", configs=[2, 2])
    def op(x, *, cfg):
        return x * cfg

    async def main():
        async with chain("background") as selector:
            execute, x = Executor(selector), jnp.ones(3)
            with pytest.raises(NoConfigError):
                await execute(op, x)
            await selector.settled()
            np.testing.assert_array_equal(await execute(op, x), x * 2)

    anyio.run(main, backend=real_backend)


def test_nowait_takes_the_warm_path_once_memory_has_its_config(real_backend, monkeypatch):
    """The first run had the heuristic's config, which then won; later runs need no look-up."""

    @kernel(op_id="guessed", configs=[2], heuristic=2)
    def op(x, *, cfg):
        return x * cfg

    async def main():
        async with chain("autotune") as selector:
            execute, x = Executor(selector), jnp.ones(3)
            execute.nowait(op, x)
            await selector.settled()
            execute.nowait(op, x)
            monkeypatch.setattr(selector, "choose_nowait", None)
            np.testing.assert_array_equal(execute.nowait(op, x), x * 2)

    anyio.run(main, backend=real_backend)
