"""Kernels that are made for every call are not kept alive, and do not slow down hits."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from typing import Any

import anyio
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.kernels import Blocks

from asel import AutotunePolicy, ConfigCache, ConfigSelectorChain, Executor, Invocation, Kernel, Tuner, kernel

pytestmark = pytest.mark.anyio
HEURISTICS_ONLY = AutotunePolicy(allow_autotune=False)


class Made(Kernel[Blocks, Any]):
    """A kernel whose attribute is part of its identity."""

    op_id = "made"

    def __init__(self, held: Any) -> None:
        self.held = held

    def run(self, x, *, cfg):
        return x * cfg.m

    def heuristic_cfg(self, inv):
        return Blocks(2)

    def candidate_cfgs(self, inv):
        return [Blocks(2), Blocks(3)]


def function_kernel(held: Any) -> Any:
    @kernel(op_id="made", configs=[Blocks(2)], heuristic=Blocks(2))
    def made(x: Any, *, cfg: Blocks) -> Any:
        return x * cfg.m if held is not made else x

    return made


# Known by class and state, and known by themselves alone.
STATES = {"a number": lambda: 1, "a lock": threading.Lock, "an array": lambda: np.zeros(3)}
X = np.zeros(3, np.float32)


@pytest.fixture(autouse=True, scope="module")
def _devices() -> None:
    jax.devices()


def chain(policy: AutotunePolicy = HEURISTICS_ONLY, **options: Any) -> ConfigSelectorChain[Any, Any]:
    return ConfigSelectorChain(ConfigCache(), policy, sinks=(), **options)


def alive(kernels: weakref.WeakSet[Any]) -> int:
    gc.collect()
    return len(kernels)


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
async def test_choosing_keeps_no_kernel_alive(state: Any) -> None:
    """Of three thousand kernels none is kept, with or without an entry in memory."""
    made: weakref.WeakSet[Any] = weakref.WeakSet()
    inv: Invocation[Any, Any] = Invocation("made", (X,), {})
    async with chain() as selector:
        selector.cache.put(*selector.resolve(inv, Made(1)).key, Blocks(3))
        for _ in range(3000):
            one = Made(state())
            made.add(one)
            assert selector.choose_nowait(inv, one) == Blocks(3)
            del one
        assert alive(made) == 0


@pytest.mark.parametrize("jit", [True, False])
async def test_executing_keeps_one_of_several_equal_kernels(jit: bool) -> None:
    """The others run its program, on the warm path too."""
    made: weakref.WeakSet[Any] = weakref.WeakSet()
    async with chain() as selector:
        execute: Executor[Any, Any] = Executor(selector, jit=jit)
        selector.cache.put(*selector.resolve(Invocation("made", (X,), {}), Made(1)).key, Blocks(3))
        for _ in range(3000):
            one = Made(1)
            made.add(one)
            execute.nowait(one, X)
            del one
        assert alive(made) == 1


@pytest.mark.parametrize("held", [jnp.bfloat16, np.float32, np.dtype("int8"), np.float32(2)], ids=str)
async def test_kernels_that_hold_a_dtype_or_a_numpy_scalar_share_a_program(held: Any) -> None:
    """Dtypes and NumPy scalars have an array's attributes, but are immutable."""
    made: weakref.WeakSet[Any] = weakref.WeakSet()
    async with chain() as selector:
        execute: Executor[Any, Any] = Executor(selector)
        for _ in range(3):
            one = Made(held)
            made.add(one)
            await execute(one, X)
            del one
        assert alive(made) == 1


class Slots:
    """A kernel that cannot be referred to weakly."""

    __slots__ = ("__by", "op_id")

    def __init__(self, by: Any) -> None:
        self.op_id = "slots"
        self.__by = by

    def run(self, x: Any, *, cfg: int) -> Any:
        return x * cfg * (self.__by if isinstance(self.__by, int) else 1)

    def heuristic_cfg(self, inv: Any) -> int:
        return 1

    def candidate_cfgs(self, inv: Any) -> list[int]:
        return [1]


async def test_kernels_with_slots_are_identified_by_class_and_state() -> None:
    """Equal ones share a program; those that differ in a private slot do not."""
    execute: Executor[Any, Any] = Executor(chain())
    for by in (2, 3, 2):
        np.testing.assert_array_equal(execute.nowait(Slots(by), X + 1), (X + 1) * by)
    programs = [
        execute._runs._programs.get(execute.selector.resolve(Invocation("slots", (X,), {}), Slots(by)), 1)
        for by in (2, 2)
    ]
    assert programs[0] is programs[1] is not None


async def test_few_kernels_without_weak_references_are_kept_alive() -> None:
    """Such a kernel is identified by its id, so it is kept for as long as its id is in use."""

    class Watched:
        pass

    held: weakref.WeakSet[Any] = weakref.WeakSet()
    selector, inv = chain(), Invocation("slots", (X,), {})
    for _ in range(1000):
        state = Watched()
        held.add(state)
        assert selector.choose_nowait(inv, Slots(state)) == 1
        del state
    assert alive(held) <= 256


async def test_equal_kernels_take_the_warm_path(monkeypatch) -> None:
    """Once one has run, the others run without another look-up."""
    async with chain() as selector:
        execute: Executor[Any, Any] = Executor(selector)
        selector.cache.put(*selector.resolve(Invocation("made", (X,), {}), Made(1)).key, Blocks(3))
        await execute(Made(1), X)
        monkeypatch.setattr(selector, "select", None)
        for _ in range(3):
            await execute(Made(1), X)
        with pytest.raises(TypeError):
            await execute(Made(2), X)


MAKERS = {
    "a lock": lambda: Made(threading.Lock()),
    "an array": lambda: Made(np.zeros(3)),
    "a function": lambda: function_kernel(threading.Lock()),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)  # the loop does not matter here
async def test_executing_keeps_no_kernel_alive_that_is_identified_by_its_id(make: Any, jit: bool) -> None:
    """Its compiled programs are released as well."""
    made: weakref.WeakSet[Any] = weakref.WeakSet()
    async with chain() as selector:
        execute: Executor[Any, Any] = Executor(selector, jit=jit)
        selector.cache.put(*selector.resolve(Invocation("made", (X,), {}), Made(1)).key, Blocks(2))
        await execute(make(), X)
        for _ in range(20 if jit else 500):
            one = make()
            made.add(one)
            for _ in range(2):
                np.testing.assert_array_equal(execute.nowait(one, X), X)
            del one
        assert alive(made) == 0
        kept = execute._runs._programs._by_signature
        runnables = [one for each in (kept.young, kept._old) for held in each.values() for one in held]
        assert runnables
        assert not any(runnable.jitted for runnable in runnables)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_programs_of_a_tune_are_released_with_their_kernel(make: Any) -> None:
    """They are used while the kernel lives, even though the executor outlives it."""

    async def main() -> tuple[Executor[Any, Any], threading.Event]:
        async with chain(AutotunePolicy(), tuner=Tuner(warmup=1, iters=1)) as selector:
            execute: Executor[Any, Any] = Executor(selector)
            one, gone, x = make(), threading.Event(), jnp.ones(3)
            weakref.finalize(one, gone.set)
            for _ in range(3):
                assert float((await execute(one, x))[0]) in (2.0, 3.0)
            return execute, gone

    execute, gone = anyio.run(main)
    # A thread releases the tune's candidates after the tune has ended; cycles then wait for the garbage collector.
    assert any(gc.collect() is not None and gone.wait(0.1) for _ in range(100))
    assert len(execute._runs._programs._by_signature) == 1


def test_hits_of_kernels_made_per_call_have_constant_cost() -> None:
    """The last thousand calls cost as much as the first thousand."""
    selector = chain()
    inv: Invocation[Any, Any] = Invocation("made", (X,), {})
    selector.cache.put(*selector.resolve(inv, Made(1)).key, Blocks(3))

    def seconds(count: int) -> float:
        best = float("inf")
        for _ in range(5):
            start = time.thread_time()  # excludes the load of other processes
            for _ in range(count // 5):
                selector.choose_nowait(inv, Made(1))
            best = min(best, time.thread_time() - start)
        return best

    first = seconds(1000)
    for _ in range(3000):
        selector.choose_nowait(inv, Made(1))
    assert seconds(1000) < 3 * first
