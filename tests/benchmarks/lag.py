"""How late the event loop runs while 24 candidates tune on it: `python tests/benchmarks/lag.py`.

A heartbeat sleeps 5 ms at a time, and what it oversleeps is the lag. Beside it is the longest pause of the
interpreter's own garbage collector, which nobody's threads can do without. Exits with 1 if a budget is exceeded.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import quantiles
from time import perf_counter
from typing import Literal

import anyio
from families import FAMILIES, Blocks
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from asel import Tuner

BEAT_S = 0.005
P99_S, MOST_S = 0.010, 0.100
BACKENDS = ("asyncio", "trio")
FAMILY = next(family for family in FAMILIES if family.name == "recurrence")
ARGS = FAMILY.args  # made here: on the loop it would be this benchmark's own lag


async def asel_tune(isolation: Literal["thread", "process"]) -> None:
    await Tuner[Blocks](isolation=isolation).autotune(FAMILY.make, ARGS, {}, FAMILY.candidates)


async def blocking_tune() -> None:
    from ejkernel.ops import Tuner

    Tuner(1, 3).autotune(FAMILY.make, ARGS, {}, FAMILY.candidates)


async def lags_during(tune: Callable[[], Awaitable[None]]) -> list[float]:
    """Return how many seconds late each heartbeat was."""
    late: list[float] = []

    async def beat() -> None:
        while True:
            start = perf_counter()
            await anyio.sleep(BEAT_S)
            late.append(perf_counter() - start - BEAT_S)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(beat)
        await anyio.sleep(10 * BEAT_S)
        await tune()
        await anyio.sleep(0.2)  # the beat that a blocking tune held up is counted, and so is letting go of programs
        tasks.cancel_scope.cancel()
    return late


@contextmanager
def longest_collection() -> Iterator[Callable[[], float]]:
    """Give the seconds of the longest garbage collection so far."""
    longest = start = 0.0

    def note(phase: str, info: object) -> None:
        nonlocal longest, start
        if phase == "start":
            start = perf_counter()
        else:
            longest = max(longest, perf_counter() - start)

    gc.callbacks.append(note)
    try:
        yield lambda: longest
    finally:
        gc.callbacks.remove(note)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the event loop's lag during a tune.")
    parser.add_argument("--quick", action="store_true", help="on asyncio only")
    backends = BACKENDS[:1] if parser.parse_args().quick else BACKENDS
    tunes: dict[str, Callable[[], Awaitable[None]]] = {
        "nothing": partial(anyio.sleep, 3),
        "asel, thread": partial(asel_tune, "thread"),
        "asel, process": partial(asel_tune, "process"),
        "ejKernel, on the loop": blocking_tune,
    }
    anyio.run(asel_tune, "thread")  # what JAX does only once is nobody's lag
    table = Table(box=SIMPLE)
    for heading in ("loop", "what runs"):
        table.add_column(heading, no_wrap=True)
    for heading in ("beats", "p50", "p99", "max", "gc", "budget", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    kept = True
    for name, tune in tunes.items():  # the peer last: what it imports makes collections longer
        for backend in backends:
            try:
                with longest_collection() as collecting_s:
                    late = anyio.run(lags_during, tune, backend=backend)
            except ImportError:
                table.add_row(backend, name, "not installed")
                continue
            cuts = quantiles(late, n=100, method="inclusive")
            row = [
                f"{len(late):,}",
                *(f"{seconds * 1e3:,.2f} ms" for seconds in (cuts[49], cuts[98], max(late), collecting_s())),
            ]
            if name.startswith("asel"):
                ok = cuts[98] <= P99_S and max(late) <= MOST_S
                kept = kept and ok
                limits = f"p99 <= {P99_S * 1e3:g}, max <= {MOST_S * 1e3:g} ms"
                row += [limits, "[green]ok" if ok else "[bold red]OVER"]
            table.add_row(backend, name, *row)
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)
    console.print(f"{len(FAMILY.candidates)} candidates of {FAMILY.name}.", style="dim")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
