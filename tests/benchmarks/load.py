"""The latency of warm requests while cold keys tune in the background: `python tests/benchmarks/load.py`.

Requests come at a fixed rate, and are timed from the time they are due until their result is there. Each row takes
turns of serving alone and of serving while other keys tune in the background, one after the other without a pause; 24
programs each. Beside it are the floor, the same requests while another program compiles those candidates, which is the
cost of sharing the cores, and ejKernel's selector, which tunes on the event loop. Exits with 1 if a budget is exceeded
while the floor's is not.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from itertools import count
from statistics import median, quantiles
from time import perf_counter
from typing import Any, Literal

import anyio
import jax
import jax.numpy as jnp
from lag import compiling_elsewhere
from load_kernels import Cold, Warm, cold_args
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from asel import AutotunePolicy, ConfigSelectorChain, Executor, Tuner

BACKENDS = ("asyncio", "trio")
SHORT_S, LONG_S = 2e-3, 25e-3
# Requests of 20 ms or more may take twice as long at the 99th percentile, and shorter ones this much longer.
LONG_FACTOR, SHORT_MORE_S = 2.0, 15e-3
USE = 0.2  # of the time, by requests alone
TURNS, SETTLE_S = 2, 0.3
# If a row exceeds its budget by this much more than the floor does, that is due to asel.
TOLERANCE = 0.25
numbers = count()

Request = Tuning = Callable[[], Awaitable[object]]


@dataclass(slots=True)
class Row:
    """Latencies of one size of requests, alone and beside tunes."""

    alone: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    keys: int = 0

    def p99(self, latencies: list[float]) -> float:
        return quantiles(latencies, n=100, method="inclusive")[98]

    @property
    def excess(self) -> float:
        """The 99th percentile as a share of its budget."""
        alone, beside = self.p99(self.alone), self.p99(self.beside)
        if median(self.alone) >= 20e-3:
            return beside / (LONG_FACTOR * alone)
        return (beside - alone) / SHORT_MORE_S

    def shown(self) -> list[str]:
        ms = [median(self.alone), self.p99(self.alone), median(self.beside), self.p99(self.beside), max(self.beside)]
        return [f"{len(self.beside):,}", str(self.keys or ""), *(f"{1e3 * each:,.1f} ms" for each in ms)]


async def serve(request: Request, every_s: float, latencies: list[float], tuning: Tuning, at_least: int) -> None:
    """Make requests at a fixed rate, `at_least` that many and until `tuning` has ended, and wait for all answers."""
    is_tuned = False

    async def tune() -> None:
        nonlocal is_tuned
        await tuning()
        is_tuned = True

    async def answer(due: float) -> None:
        await request()
        latencies.append(perf_counter() - due)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tune)
        due, made = perf_counter(), 0
        while made < at_least or not is_tuned:
            due, made = due + every_s, made + 1
            await anyio.sleep(max(0.0, due - perf_counter()))
            tasks.start_soon(answer, due)


async def measure(
    row: Row, size: int, seconds: float, requests: int, tunes: Callable[..., Awaitable[object]], isolation: Any
) -> None:
    """Serve requests alone, and then beside tunes."""
    every_s = seconds / USE
    x = jnp.ones((size, size))
    policy = AutotunePolicy(cache_miss_fallback="background")
    tuner = Tuner[Any](isolation=isolation)
    async with ConfigSelectorChain[Any, Any](policy=policy, tuner=tuner, sinks=()) as selector:
        execute, warm = Executor[Any, Any](selector), Warm()

        async def request() -> None:
            out = await execute(warm, x, x)
            await anyio.to_thread.run_sync(out.block_until_ready)

        await request()
        await selector.settled()
        for _ in range(20):
            await request()
        await anyio.sleep(SETTLE_S)
        gc.collect()
        await serve(request, every_s, row.alone, partial(anyio.sleep, 0), requests)

        async def tune() -> None:
            ends_at = anyio.current_time() + requests * every_s
            while anyio.current_time() < ends_at:
                await tunes(execute)
                row.keys += 1

        await serve(request, every_s, row.beside, tune, requests)


async def tune_cold(execute: Executor[Any, Any]) -> None:
    """Request a new key, and return once it is tuned."""
    # Made in a thread: JAX compiles `jnp.ones` for each new shape, which would stop the loop.
    await execute(cold, *await anyio.to_thread.run_sync(cold_args, next(numbers)))
    await execute.selector.settled()


async def compile_elsewhere(execute: Executor[Any, Any]) -> None:
    with ExitStack() as stack:
        # In a thread, because the other program takes long to start.
        compile_all = await anyio.to_thread.run_sync(stack.enter_context, compiling_elsewhere())
        await compile_all()


async def tune_on_the_loop(execute: Executor[Any, Any]) -> None:
    from ejkernel.ops import Tuner as Blocking

    kernel, args = cold, cold_args(next(numbers))
    candidates = list(kernel.candidate_cfgs(None))
    Blocking(1, 3).autotune(lambda cfg: partial(kernel.run, cfg=cfg), args, {}, candidates)


cold = Cold()
FLOOR, PEER = "another program compiles", "ejKernel, on the loop"
RUNS: dict[str, tuple[Callable[..., Awaitable[object]], Literal["thread", "process"]]] = {
    FLOOR: (compile_elsewhere, "thread"),
    "asel, thread": (tune_cold, "thread"),
    "asel, process": (tune_cold, "process"),
    PEER: (tune_on_the_loop, "thread"),
}


def calibrated(seconds: float) -> tuple[int, float]:
    """Return the size of matrices whose products take about the given time, and their actual time."""
    warm, size, taken = jax.jit(Warm().run, static_argnames="cfg"), 64, 0.0
    while taken < seconds:
        size = int(size * 1.25) // 8 * 8
        x = jnp.ones((size, size))
        warm(x, x, cfg=0).block_until_ready()
        taken = min(_timed(partial(warm, x, x, cfg=0)) for _ in range(30))
    return size, taken


def _timed(run: Callable[[], jax.Array]) -> float:
    start = perf_counter()
    run().block_until_ready()
    return perf_counter() - start


def contenders(backends: tuple[str, ...], only: str | None) -> Iterator[tuple[str, str]]:
    for name in RUNS:
        # Rows without asel are the same on both loops.
        for backend in backends if name.startswith("asel") else BACKENDS[:1]:
            if (only is None or only in name) and (name != PEER or find_spec("ejkernel") is not None):
                yield name, backend


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure warm requests while cold keys tune.")
    parser.add_argument("--quick", action="store_true", help="on asyncio only")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--only", help="the rows whose names have this")
    asked = parser.parse_args()
    table = Table(box=SIMPLE)
    for heading in ("loop", "what runs", "requests of"):
        table.add_column(heading, no_wrap=True)
    for heading in ("beside", "keys", "p50 alone", "p99 alone", "p50 beside", "p99 beside", "max", "of budget", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    kept, floors = True, dict[str, float]()
    for target_s, requests in ((SHORT_S, 200), (LONG_S, 60)):
        size, taken_s = calibrated(target_s)
        what = f"{1e3 * taken_s:.0f} ms"
        rows = {each: Row() for each in contenders(BACKENDS[:1] if asked.quick else BACKENDS, asked.only)}
        for _ in range(asked.turns):
            for (name, backend), row in rows.items():
                anyio.run(measure, row, size, taken_s, requests, *RUNS[name], backend=backend)
        for (name, backend), row in rows.items():
            excess, verdict = row.excess, ""
            if name == FLOOR:
                floors[what] = excess
            elif name != PEER:
                floor = floors.get(what, 0.0)
                ok = excess <= 1.0 or (floor > 1.0 and excess <= floor * (1 + TOLERANCE))
                verdict = "[bold red]OVER" if not ok else "[green]ok" if excess <= 1.0 else "as the floor"
                kept = kept and ok
            table.add_row(backend, name, what, *row.shown(), f"{excess:.0%}", verdict)
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(table)
    console.print(
        f"Budget: p99 {LONG_FACTOR:g}x that alone for requests of 20 ms or more, "
        f"{1e3 * SHORT_MORE_S:g} ms more for shorter ones. Requests alone use {USE:.0%} of the time.",
        style="dim",
    )
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
