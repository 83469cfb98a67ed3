"""The event loop's lag while 24 candidates tune on it: `python tests/benchmarks/lag.py`.

A heartbeat sleeps 5 ms at a time; its lateness is the lag. Beside it is the longest pause of the interpreter's garbage
collector. The floor is the same heartbeat while another program compiles the same candidates: it is late only because
the machine is busy. A p99 over its budget counts as the machine's if the floor's is over it too, and asel's is at most
a quarter above that. A single late beat counts as the machine's for as long as a second heartbeat, in a program that
does nothing else, was late too: asel's threads can take its core for a few milliseconds, but not its interpreter. All
take turns. Shown are the median of their p99 and p50, the worst of their maxima, and the worst that was theirs alone.
Exits with 1 if a budget is exceeded.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from statistics import median, quantiles
from time import perf_counter
from typing import Literal

import anyio
from families import FAMILIES, Blocks
from heartbeat import Lateness, beat, second_heart
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from tuning import compile_alone

from asel import Tuner

BEAT_S = 0.005
P99_S, MOST_S = 0.010, 0.100
# An excess over the floor by this factor still counts as the floor's, which is measured at other times.
TOLERANCE = 0.25
TURNS = 5
BACKENDS = ("asyncio", "trio")
FAMILY = next(family for family in FAMILIES if family.name == "recurrence")
ARGS = FAMILY.args  # made here, since on the loop it would cause lag itself


async def asel_tune(isolation: Literal["thread", "process"]) -> None:
    await Tuner[Blocks](isolation=isolation).autotune(FAMILY.make, ARGS, {}, FAMILY.candidates)


async def blocking_tune() -> None:
    from ejkernel.ops import Tuner

    Tuner(1, 3).autotune(FAMILY.make, ARGS, {}, FAMILY.candidates)


async def lags_during(tune: Callable[[], Awaitable[None]]) -> list[Lateness]:
    """Return the lateness of each heartbeat."""
    late: list[Lateness] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(beat, late, BEAT_S)
        await anyio.sleep(10 * BEAT_S)
        await tune()
        await anyio.sleep(0.2)  # count the beat that a blocking tune delayed, and the release of programs
        tasks.cancel_scope.cancel()
    return late


@contextmanager
def longest_collection() -> Iterator[Callable[[], float]]:
    """Yield a function that returns the seconds of the longest garbage collection so far."""
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


@contextmanager
def compiling_elsewhere() -> Iterator[Callable[[], Awaitable[None]]]:
    """Yield a function that has another, running program compile all candidates once, and waits for it."""
    command = [sys.executable, __file__, "--compile"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        other.stdout.readline()

        async def compile_all() -> None:
            other.stdin.close()
            await anyio.to_thread.run_sync(other.wait)

        yield compile_all


def compile_when_told() -> None:
    compile_alone(FAMILY)  # one-off work of JAX is not measured
    gc.collect()
    print("ready", flush=True)
    sys.stdin.read()
    compile_alone(FAMILY)


@contextmanager
def given(tune: Callable[[], Awaitable[None]]) -> Iterator[Callable[[], Awaitable[None]]]:
    yield tune


NOTHING, FLOOR, PEER = "nothing", "compiling elsewhere", "ejKernel, on the loop"
TUNES = {
    NOTHING: partial(given, partial(anyio.sleep, 3)),
    FLOOR: compiling_elsewhere,
    "asel, thread": partial(given, partial(asel_tune, "thread")),
    "asel, process": partial(given, partial(asel_tune, "process")),
    PEER: partial(given, blocking_tune),
}


@dataclass(slots=True)
class Row:
    """The figures of the turns of one tune on one loop, in seconds."""

    beats: int = 0
    p50: list[float] = field(default_factory=list)
    p99: list[float] = field(default_factory=list)
    most: float = 0.0
    alone: float = 0.0
    """The longest lateness that the second heartbeat did not share."""
    collecting: float = 0.0

    def take_turn(self, name: str, backend: str) -> None:
        gc.collect()  # collect garbage of imports and compiles before
        with TUNES[name]() as tune, second_heart(BEAT_S) as stopped, longest_collection() as collecting_s:
            beats = anyio.run(lags_during, tune, backend=backend)
            others = stopped()
        late = [beat.seconds for beat in beats]
        cuts = quantiles(late, n=100, method="inclusive")
        self.beats += len(late)
        self.p50.append(cuts[49])
        self.p99.append(cuts[98])
        self.most = max(self.most, *late)
        self.alone = max(self.alone, *(beat.beside(others) for beat in beats))
        self.collecting = max(self.collecting, collecting_s())

    def shown(self) -> list[str]:
        seconds = median(self.p50), median(self.p99), self.most, self.alone, self.collecting
        return [f"{self.beats:,}", *(f"{each * 1e3:,.2f} ms" for each in seconds)]

    def verdict(self, floors: Sequence[Row]) -> str:
        p99, floor = median(self.p99), median(each for row in floors for each in row.p99)
        if self.alone > MOST_S:
            return "OVER"
        if p99 <= P99_S:
            return "ok"
        return "as the floor" if floor > P99_S and p99 <= floor * (1 + TOLERANCE) else "OVER"


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the event loop's lag during a tune.")
    parser.add_argument("--quick", action="store_true", help="on asyncio only, one turn")
    parser.add_argument("--compile", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.compile:
        compile_when_told()
        return 0
    backends, turns = (BACKENDS[:1], 1) if asked.quick else (BACKENDS, TURNS)
    anyio.run(asel_tune, "thread")  # one-off work of JAX is not measured
    rows = {(name, backend): Row() for name in TUNES for backend in backends}
    for turn in range(turns):
        for (name, backend), row in rows.items():
            # The peer comes last and once, because its imports make collections longer.
            if name != PEER or (turn == turns - 1 and find_spec("ejkernel") is not None):
                row.take_turn(name, backend)
    table = Table(box=SIMPLE)
    for heading in ("loop", "what runs"):
        table.add_column(heading, no_wrap=True)
    for heading in ("beats", "p50", "p99", "max", "alone", "gc", "budget", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    kept, floors = True, [rows[FLOOR, backend] for backend in backends]
    limits = f"p99 <= {P99_S * 1e3:g}, max <= {MOST_S * 1e3:g} ms"
    for (name, backend), row in rows.items():
        verdict = row.verdict(floors) if name.startswith("asel") else ""
        kept = kept and verdict != "OVER"
        mark = {"ok": "[green]ok", "OVER": "[bold red]OVER"}.get(verdict, verdict)
        table.add_row(
            backend, name, *(row.shown() if row.beats else ["not installed"]), limits if verdict else "", mark
        )
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(table)
    console.print(f"{len(FAMILY.candidates)} candidates of {FAMILY.name}, {turns} turns.", style="dim")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
