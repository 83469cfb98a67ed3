"""The cost of a cold key when many are requested at once: `python tests/benchmarks/cold_keys.py`.

The floor is the same tune without a queue: keys requested one after the other. The measure is scripted and takes no
time, so only asel and the event loop are timed; the last rows compile and run with JAX. Processor time counts, since
thousands of keys take seconds, in which other programs run as well.
The cost of a key must not grow with the number of keys. Exits with 1 if a budget is exceeded.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from time import process_time
from typing import Any

import anyio
import jax.numpy as jnp
from rich.console import Console
from side_by_side import Budget, compare, without_gc

from asel import ConfigSelectorChain, Invocation, Kernel, Tuner, device_fingerprint
from asel.testing import ScriptedMeasure

BACKENDS = ("asyncio", "trio")
SIZES = (100, 500, 2_000)
JAX_SIZES = (10, 40)
MAX_GROWTH = 1.5


class Scaled(Kernel[int, Any]):
    op_id = "scaled"
    candidates = (1, 2, 3)

    def run(self, x, *, seed, cfg):
        return x * cfg + seed

    def heuristic_cfg(self, inv):
        return self.candidates[0]

    def candidate_cfgs(self, inv):
        return self.candidates


def calls(keys: int) -> list[Invocation[int, Any]]:
    x = jnp.zeros(8)
    return [Invocation("scaled", (x,), {"seed": seed}) for seed in range(keys)]


async def one_after_the_other(keys: int, make_tuner: Callable[[], Tuner[int]]) -> float:
    """Return the processor seconds per key, requested one by one."""
    kernel = Scaled()
    async with ConfigSelectorChain(tuner=make_tuner(), sinks=()) as selector:
        start = process_time()
        for inv in calls(keys):
            await selector.choose(inv, kernel)
        return (process_time() - start) / keys


async def at_once(keys: int, make_tuner: Callable[[], Tuner[int]]) -> float:
    """Return the processor seconds per key, requested all at once."""
    kernel = Scaled()
    async with ConfigSelectorChain(tuner=make_tuner(), sinks=()) as selector:
        start = process_time()
        async with anyio.create_task_group() as tasks:
            for inv in calls(keys):
                tasks.start_soon(selector.choose, inv, kernel)
        return (process_time() - start) / keys


def scripted_tuner() -> Tuner[int]:
    return Tuner(measure=ScriptedMeasure(0.0))


def contenders() -> dict[str, tuple[str, Callable[[], Awaitable[float]]]]:
    """Return the backend and the timed function of each row."""
    rows: dict[str, tuple[str, Callable[[], Awaitable[float]]]] = {}
    for backend in BACKENDS:
        rows[f"{backend}, one by one"] = (backend, partial(one_after_the_other, SIZES[0], scripted_tuner))
        for keys in SIZES:
            rows[f"{backend}, {keys:,} at once"] = (backend, partial(at_once, keys, scripted_tuner))
    for keys in JAX_SIZES:
        rows[f"JAX, {keys} at once"] = ("asyncio", partial(at_once, keys, Tuner))
    return rows


def budgets() -> dict[str, Budget]:
    by_backend = {f"{b}, {SIZES[-1]:,} at once": Budget(MAX_GROWTH, f"{b}, {SIZES[0]} at once") for b in BACKENDS}
    return {**by_backend, f"JAX, {JAX_SIZES[-1]} at once": Budget(MAX_GROWTH, f"JAX, {JAX_SIZES[0]} at once")}


def main() -> int:
    parser = argparse.ArgumentParser(description="Time many cold keys at once.")
    parser.add_argument("--rounds", type=int, default=3, help="the best of this many interleaved rounds counts")
    rounds: int = parser.parse_args().rounds
    device_fingerprint()  # asel inspects the machine once, which is not part of a key's cost
    rows = contenders()
    best = dict.fromkeys(rows, float("inf"))
    for _ in range(rounds):
        for name, (backend, work) in rows.items():
            gc.collect()
            with without_gc():
                best[name] = min(best[name], anyio.run(work, backend=backend))
    table, kept = compare(best, budgets(), floor=f"{BACKENDS[0]}, one by one")
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(table)
    console.print("Processor time per key: three candidates, a race each.", style="dim")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
