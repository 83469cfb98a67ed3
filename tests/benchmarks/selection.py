"""The cost of an answer from memory, beside its floor and its peers: `python tests/benchmarks/selection.py`.

The floor is a bare coroutine that looks two avals up in a dict. Exits with 1 if a budget is exceeded.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import tracemalloc
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import inf
from time import perf_counter
from typing import Any

import anyio
import anyio.lowlevel
import jax
import jax.numpy as jnp
import numpy as np
import structlog
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from rich.console import Console
from side_by_side import Budget, Contender, compare, once_each, race, without_gc

import asel.serving.executor
import asel.serving.preparation
import asel.serving.runs
from asel import (
    AutotunePolicy,
    BlockingExecutor,
    BlockingSelector,
    ConfigSelectorChain,
    Executor,
    Invocation,
    Kernel,
    Sink,
    Tuner,
)
from asel.testing import ScriptedMeasure
from asel.tuning.measure import Sampler, Trial

UNSAMPLED = TracerProvider(sampler=ALWAYS_OFF).get_tracer("benchmark")
CALLERS = 10_000
KEYS = (10, 4_000, 10_000, 100_000)
CANDIDATES = (4, 25, 100)
NEW_SHAPES = 200
BACKENDS = ("asyncio", "trio")
BUDGETS = {
    "hit": Budget(5, "floor"),
    "hit, fresh arrays": Budget(5, "floor"),
    "hit, default sinks": Budget(10, "floor"),
    "hit, default sinks, structlog at INFO": Budget(10, "floor"),
    "hit, default sinks, nothing configured": Budget(10, "floor"),
    "hit, 100 arrays": Budget(200, "floor"),  # 60 us if the floor is 0.30 us
    "ejKernel": Budget(25, "hit", at_least=True),
    "hit, 4,000 keys": Budget(1.5, "hit, 10 keys"),
    "hit, 10,000 keys": Budget(1.5, "hit, 10 keys"),
    "hit, 100,000 keys": Budget(1.5, "hit, 10 keys"),
    "ejKernel, 100,000 keys": Budget(10, "hit, 100,000 keys", at_least=True),
    "new shape, 4 candidates": Budget(3, "ejKernel, new shape, 4 candidates"),
    "new shape, 25 candidates": Budget(3, "ejKernel, new shape, 25 candidates"),
    "new shape, 100 candidates": Budget(3, "ejKernel, new shape, 100 candidates"),
    "execute, warm": Budget(1, "the jitted call and 5 us"),
    "execute, warm, with prepare": Budget(1, "the jitted call and 5 us"),
    "execute.nowait, warm": Budget(1, "the jitted call and 1.5 us"),
    "BlockingExecutor, warm": Budget(1, "the jitted call and 5 us"),
    "ejKernel's executor": Budget(1, "execute, warm, with prepare", at_least=True),
    "asyncio, a cold key": Budget(3, "asyncio, an Event"),
    "trio, a cold key": Budget(3, "trio, an Event"),
}


@dataclass(frozen=True)
class Blocks:
    m: int


class MatMul(Kernel[Blocks, Any]):
    op_id = "matmul"
    candidates = (Blocks(64), Blocks(128), Blocks(256))

    def run(self, *args, cfg, **kwargs):
        return args

    def heuristic_cfg(self, inv):
        return self.candidates[0]

    def candidate_cfgs(self, inv):
        return self.candidates


def two_arrays() -> tuple[jax.Array, jax.Array]:
    return jnp.zeros((64, 128)), jnp.zeros((128, 32))


def hundred_arrays() -> dict[str, dict[str, jax.Array]]:
    return {f"layer{i}": {"w": jnp.zeros((8, i + 1)), "b": jnp.zeros(i + 1)} for i in range(50)}


# ---------------------------------------------------------------------------------------------
# Hits.


async def time_hits(rounds: int, slice_s: float) -> dict[str, float | None]:
    """Return the seconds of each kind of hit, ours and the peers'; None for a peer that is not installed."""
    tuner = Tuner(measure=ScriptedMeasure(0.0))
    async with ConfigSelectorChain(tuner=tuner, sinks=()) as quiet, ConfigSelectorChain(tuner=tuner) as telling:
        ours = asel_hits(quiet, telling)
        for inv, kernel in {id(inv): (inv, kernel) for row in ours for inv, kernel in row.calls}.values():
            for selector in (quiet, telling):
                await selector.choose(inv, kernel)  # later calls are hits
        contenders, missing = [floor(), *ours], {}
        for name, peer_hits in PEERS.items():
            try:
                contenders += peer_hits()
            except ImportError:
                missing[name] = None
        return {**race(contenders, rounds=rounds, slice_s=slice_s), **missing}


def floor() -> Contender:
    a, b = two_arrays()
    known = {(a.aval, b.aval): Blocks(64)}

    async def look_up(a: Any, b: Any) -> Blocks:
        return known[(a.aval, b.aval)]

    return Contender("floor", look_up, [(a, b)])


def asel_hits(quiet: ConfigSelectorChain[Blocks, Any], telling: ConfigSelectorChain[Blocks, Any]) -> list[Contender]:
    kernel = MatMul()

    def call(*args: Any, **kwargs: Any) -> tuple[Invocation[Blocks, Any], MatMul]:
        return Invocation("matmul", args, kwargs), kernel

    once = [call(*two_arrays())]
    # Each compiled function gives its results its own sharding objects, which are equal to the others'.
    fresh = [call(*map(make, two_arrays())) for make in (jnp.abs, jnp.cos, jnp.sin, jnp.tan) for _ in range(128)]
    # `device_put` makes one for each array; more of them than asel remembers.
    put = [call(*map(jax.device_put, host)) for host in [tuple(map(np.asarray, two_arrays()))] for _ in range(3000)]
    statics = [call(*two_arrays(), causal=True, window=128, layout="bthd", mask=None)]
    return [
        Contender("hit", quiet.choose, once),
        Contender("hit, fresh arrays", quiet.choose, fresh),
        Contender("hit, arrays of device_put", quiet.choose, put),
        Contender("hit, four static kwargs", quiet.choose, statics),
        Contender("hit, a float kwarg", quiet.choose, [call(*two_arrays(), scale=0.125)]),
        Contender("hit, choose_nowait", quiet.choose_nowait, once),
        Contender("hit, default sinks", telling.choose, once, unsampled),
        Contender("hit, default sinks, structlog at INFO", telling.choose, once, unsampled_at_info),
        Contender("hit, default sinks, nothing configured", telling.choose, once),
        Contender("hit, 100 arrays", quiet.choose, [call(hundred_arrays())]),
    ]


@contextmanager
def unsampled() -> Iterator[None]:
    """Run the block inside a request whose trace is not sampled."""
    with UNSAMPLED.start_as_current_span("request"):
        yield


@contextmanager
def unsampled_at_info() -> Iterator[None]:
    """Do the same in an application that has configured structlog."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.INFO))
    try:
        with unsampled():
            yield
    finally:
        structlog.reset_defaults()


# ---------------------------------------------------------------------------------------------
# Hits among many keys, each asked for in turn.


def keyword_calls(make: Callable[..., Any], keys: int) -> list[Any]:
    a, b = two_arrays()
    return [make("matmul", (a, b), {"step": step}) for step in range(keys)]


async def time_many_keys(rounds: int, slice_s: float) -> tuple[dict[str, float | None], float]:
    """Return the seconds of a hit by the number of keys in memory, and the bytes per key."""
    contenders, selectors, missing, bytes_per_key = [], [], dict[str, float | None](), 0.0
    for keys in KEYS:
        selector: ConfigSelectorChain[Blocks, Any] = ConfigSelectorChain(sinks=())
        kernel, calls = MatMul(), keyword_calls(Invocation, keys)
        tracemalloc.start()
        for inv in calls:
            selector.cache.put(*selector.resolve(inv, kernel).key, Blocks(64))
            await selector.choose(inv, kernel)
        bytes_per_key = tracemalloc.get_traced_memory()[0] / keys
        tracemalloc.stop()
        selectors.append(selector)
        # A put closes the fast lane of every key.
        for inv in calls:
            await selector.choose(inv, kernel)
        contenders.append(Contender(f"hit, {keys:,} keys", selector.choose, [(inv, kernel) for inv in calls]))
        try:
            contenders.append(ejkernel_keys(keys))
        except ImportError:
            missing[f"ejKernel, {keys:,} keys"] = None
    return {**race(contenders, rounds=rounds, slice_s=slice_s), **missing}, bytes_per_key


def ejkernel_keys(keys: int) -> Contender:
    from ejkernel.ops import Invocation

    selector, kernel = ejkernel_selector()
    return Contender(
        f"ejKernel, {keys:,} keys", selector.choose, [(inv, kernel) for inv in keyword_calls(Invocation, keys)]
    )


# ---------------------------------------------------------------------------------------------
# Shapes that were never seen, answered by the heuristic.


async def time_new_shapes(rounds: int) -> dict[str, float | None]:
    """Return the seconds of a new shape that the heuristic answers, by the number of candidates."""
    best: dict[str, float | None] = {}
    b = jnp.zeros((128, 32))
    sizes = count(1)

    def shapes() -> list[Any]:
        return [jax.ShapeDtypeStruct((next(sizes), 128), jnp.float32) for _ in range(NEW_SHAPES)]

    policy = AutotunePolicy(cache_miss_fallback="heuristics")
    for _ in range(rounds):
        for candidates in CANDIDATES:
            blocks = tuple(Blocks(m) for m in range(candidates))
            kernel = MatMul()
            kernel.candidates = blocks
            selector: ConfigSelectorChain[Blocks, Any] = ConfigSelectorChain(policy=policy, sinks=())
            taken = {f"new shape, {candidates} candidates": (selector, kernel, Invocation)}
            try:
                from ejkernel.ops import Invocation as PeersInvocation

                taken[f"ejKernel, new shape, {candidates} candidates"] = (*ejkernel_selector(blocks), PeersInvocation)
            except ImportError:
                best[f"ejKernel, new shape, {candidates} candidates"] = None
            for name, (chooser, op, make) in taken.items():
                calls = [(make("matmul", (a, b), {}), op) for a in shapes()]
                contender = Contender(name, chooser.choose, calls)
                best[name] = min(best.get(name) or inf, once_each(contender) / NEW_SHAPES)
    return best


# ---------------------------------------------------------------------------------------------
# Peers, each with the smallest kernel it allows.


def ejkernel_selector(blocks: tuple[Blocks, ...] = ()) -> tuple[Any, Any]:
    from ejkernel.ops import AutotunePolicy, ConfigCache, ConfigSelectorChain, Kernel

    class MatMul(Kernel[Blocks, Any]):
        def run(self, *args, cfg, **kwargs):
            return args

        def heuristic_cfg(self, inv):
            return Blocks(64)

        def candidate_cfgs(self, inv):
            return blocks

    # The first call leaves the heuristic in memory; later calls are hits.
    return ConfigSelectorChain(ConfigCache(), AutotunePolicy(allow_autotune=False)), MatMul("matmul")


def ejkernel_hits() -> list[Contender]:
    from ejkernel.ops import Invocation

    selector, kernel = ejkernel_selector()
    return [
        Contender("ejKernel", selector.choose, [(Invocation("matmul", two_arrays(), {}), kernel)]),
        Contender("ejKernel, 100 arrays", selector.choose, [(Invocation("matmul", (hundred_arrays(),), {}), kernel)]),
    ]


def tokamax_hits() -> list[Contender]:
    from tokamax._src.autotuning.autotuner import AutotuningData
    from tokamax._src.benchmarking import BenchmarkData
    from tokamax._src.ops.op import Op

    class MatMul(Op[Any, jax.Array, None, Blocks, Any]):
        config_cls = Blocks

        def _fwd(self, a: jax.Array, b: jax.Array, *, return_residuals: bool, config: Blocks):
            return a @ b, None

        def _get_heuristics_config(self, ba):
            return Blocks(64)

    op, arrays = MatMul(), two_arrays()
    measured = BenchmarkData(compile_time_ms=1.0, lower_time_ms=1.0, evaluation_times_ms=(1.0,), metadata={})
    op.get_autotuning_cache()[op.bind(*arrays).autotuning_cache_key] = AutotuningData({Blocks(128): measured})

    def bind_and_hit(a: jax.Array, b: jax.Array) -> Blocks:
        return op.bind(a, b).get_config()

    return [Contender("tokamax, bind and hit", bind_and_hit, [arrays])]


PEERS: dict[str, Callable[[], list[Contender]]] = {"ejkernel": ejkernel_hits, "tokamax": tokamax_hits}


# ---------------------------------------------------------------------------------------------
# Choosing and running.


class Added(Kernel[Blocks, Any]):
    op_id = "added"

    def run(self, a, b, *, cfg):
        return a + b

    def heuristic_cfg(self, inv):
        return Blocks(64)

    def candidate_cfgs(self, inv):
        return (Blocks(64), Blocks(128))


class PreparedAdded(Added):
    op_id = "prepared_added"

    def prepare(self, *args, **kwargs):
        return args, kwargs


async def time_executors(rounds: int, slice_s: float) -> dict[str, float | None]:
    """Return the seconds of a warm call: jitted by hand, by our executor, by ejKernel's."""
    # On a busy machine a run may take a millisecond, and then the next one is in a thread, which is not timed here.
    for module in (asel.serving.executor, asel.serving.preparation, asel.serving.runs):
        module.QUICK_S = 1.0  # type: ignore[attr-defined]
    a, b = jnp.ones(4), jnp.ones(4)
    call = jax.jit(lambda a, b: a + b)
    plain, prepared = Added(), PreparedAdded()
    block = BlockingExecutor(BlockingSelector(tuner=Tuner(), sinks=()))
    async with ConfigSelectorChain(tuner=Tuner(), sinks=()) as selector:
        execute = Executor(selector)
        for _ in range(20):  # until the runs are known to be quick
            await execute(plain, a, b)
            await execute(prepared, a, b)
            block(plain, a, b)

        calls = [(a, b)]
        contenders = [
            Contender("the jitted call", call, calls),
            Contender("execute, warm", partial(execute.__call__, plain), calls),
            Contender("execute, warm, with prepare", partial(execute.__call__, prepared), calls),
            Contender("execute.nowait, warm", partial(execute.nowait, plain), calls),
            Contender("BlockingExecutor, warm", partial(block.__call__, plain), calls),
        ]
        missing: dict[str, float | None] = {}
        try:
            contenders += ejkernel_executor(calls)
        except ImportError:
            missing["ejKernel's executor"] = None
        seconds = race(contenders, rounds=rounds, slice_s=slice_s)
    block.selector.close()
    jitted_s = seconds["the jitted call"]
    limits = {"the jitted call and 5 us": jitted_s + 5e-6, "the jitted call and 1.5 us": jitted_s + 1.5e-6}
    return {**seconds, **limits, **missing}


def ejkernel_executor(calls: list[tuple[Any, Any]]) -> list[Contender]:
    from ejkernel.ops import AutotunePolicy, ConfigCache, ConfigSelectorChain, Executor, Kernel

    class Added(Kernel[Blocks, Any]):
        def run(self, a, b, *, cfg):
            return jitted(a, b)

        def heuristic_cfg(self, inv):
            return Blocks(64)

    jitted = jax.jit(lambda a, b: a + b)
    execute = Executor(ConfigSelectorChain(ConfigCache(), AutotunePolicy(allow_autotune=False)))
    return [Contender("ejKernel's executor", partial(execute, Added("added"), stamp=False), calls)]


# ---------------------------------------------------------------------------------------------
# Many callers of one cold key.


def time_crowds(rounds: int) -> dict[str, float]:
    """Return the seconds per caller of many, on both backends in real time."""
    waits: dict[str, Callable[[], Awaitable[float]]] = {
        "an Event": crowd_at_an_event,
        "a cold key": partial(crowd_at_a_cold_key, ()),
        "a cold key, default sinks": partial(crowd_at_a_cold_key, None),
    }
    best = {f"{backend}, {what}": float("inf") for backend in BACKENDS for what in waits}
    for _ in range(rounds):
        for backend in BACKENDS:
            for what, wait in waits.items():
                name = f"{backend}, {what}"
                best[name] = min(best[name], anyio.run(wait, backend=backend) / CALLERS)
    return best


async def crowd_at_an_event() -> float:
    event = anyio.Event()
    return await _crowd(event.wait, event.set)


async def crowd_at_a_cold_key(sinks: tuple[Sink, ...] | None) -> float:
    measure, kernel, inv = GatedMeasure(), MatMul(), Invocation("matmul", two_arrays(), {})
    async with ConfigSelectorChain(tuner=Tuner(measure=measure), sinks=sinks) as selector:
        seconds = await _crowd(partial(selector.choose, inv, kernel), measure.gate.set)
    if sorted(cfg.m for cfg in measure.compiled) != [cfg.m for cfg in kernel.candidates]:
        raise RuntimeError(f"{CALLERS:,} callers of one key did not share one tune: {measure.compiled} were compiled")
    return seconds


class GatedMeasure(ScriptedMeasure):
    """Holds the tune until the gate opens, so that every caller finds it pending."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.gate = anyio.Event()

    async def compile(self, trial: Trial[Any]) -> Sampler:
        await self.gate.wait()
        return await super().compile(trial)


async def _crowd(wait: Callable[[], Awaitable[Any]], release: Callable[[], object]) -> float:
    """Return the seconds in which all callers begin to wait, are woken, and end."""
    waiting = 0

    async def caller() -> None:
        nonlocal waiting
        waiting += 1
        await wait()

    gc.collect()
    with without_gc():
        start = perf_counter()
        async with anyio.create_task_group() as tasks:
            for _ in range(CALLERS):
                tasks.start_soon(caller)
            while waiting < CALLERS:
                await anyio.lowlevel.checkpoint()
            release()
        return perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description="Time answers from memory beside their floor and their peers.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: sooner, and noisier")
    parser.add_argument("--executors", action="store_true", help="the rows of the executors alone")
    arguments = parser.parse_args()
    quick: bool = arguments.quick
    if arguments.executors:
        seconds = anyio.run(time_executors, 40 if quick else 300, 0.002)
        table, kept = compare(
            seconds, {name: of for name, of in BUDGETS.items() if name in seconds}, floor="the jitted call"
        )
        Console(width=None if sys.stdout.isatty() else 110).print(table)
        return 0 if kept else 1
    hits = anyio.run(time_hits, 40 if quick else 300, 0.002)
    many, bytes_per_key = anyio.run(time_many_keys, 40 if quick else 300, 0.002)
    new = anyio.run(time_new_shapes, 3 if quick else 15)
    executors = anyio.run(time_executors, 40 if quick else 300, 0.002)
    crowds = time_crowds(2 if quick else 7)
    table, kept = compare({**hits, **many, **new, **executors, **crowds}, BUDGETS, floor="floor")
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(table)
    console.print(f"Of {KEYS[-1]:,} keys, each takes {bytes_per_key:,.0f} bytes of memory.", style="dim")
    console.print(f"Each of {CALLERS:,} callers, for the last rows. The best of interleaved rounds.", style="dim")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
