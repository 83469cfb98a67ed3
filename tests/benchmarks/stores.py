"""The cost of storing records, beside ejKernel's PersistentCache: `python tests/benchmarks/stores.py`.

Puts and gets with few and with many records, a start with 10,000 of them, moving thousands of them, and a
fleet's cold start. Exits with 1 if a budget is exceeded. `--moving` times the moves alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple
from unittest.mock import patch

import anyio
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent.parent))

from heartbeat import Lateness, beat, second_heart
from support.fleet import Fleet, Order, answers
from support.redis_server import RedisServer

from asel import PersistentCache
from asel.kernels.keys import CacheKey
from asel.stores import DocumentStore, open_store
from asel.stores.records import Record

SIZES = (10, 1_000, 10_000, 100_000)
FLEETS = (1, 2, 4, 8)
BEAT_S = 0.001
# A put costs the same with few records and with many.
MOST_GROWTH = 1.5
# As large as the record of a tune of 24 candidates.
OUTCOMES = [{"cfg": {"m": n, "n": n}, "median_s": 1e-3, "samples_s": [1e-3] * 10} for n in range(24)]


def record(number: int) -> Record:
    return Record(
        key=CacheKey("cpu", "matmul@v1", f"{number:064x}"),
        cfg={"m": number, "n": 128},
        checksum="c" * 64,
        environment={"jax": "0.10.2", "jaxlib": "0.10.2"},
        report={"outcomes": OUTCOMES},
        created=1.7e9,
        seconds=2.5,
    )


async def fill(store: Any, size: int, make: Callable[[int], Record] = record) -> None:
    """Put records without waiting for the disk; these puts are not timed."""
    numbers = iter(range(size))

    async def some() -> None:
        for number in numbers:
            await store.put(make(number))

    with patch.object(os, "fsync", lambda file: None):
        async with anyio.create_task_group() as tasks:
            # A document writes concurrent puts together.
            for _ in range(500 if isinstance(store, DocumentStore) else 8):
                tasks.start_soon(some)


@asynccontextmanager
async def opened(location: str) -> AsyncIterator[Any]:
    """Open a store as a selector does, with its connections."""
    store: Any = open_store(location)
    async with store if hasattr(store, "__aenter__") else nullcontext():
        yield store


async def each(step: Callable[[int], Any], numbers: range) -> float:
    """Return the median seconds of an awaited step."""
    taken = []
    for number in numbers:
        start = perf_counter()
        await step(number)
        taken.append(perf_counter() - start)
    return median(taken)


async def put_and_get(location: str, size: int, count: int) -> tuple[float, float]:
    async with opened(location) as store:
        await fill(store, size)
        await store.get(record(0).address)
        puts = await each(lambda number: store.put(record(number)), range(size, size + count))
        return puts, await each(lambda number: store.get(record(number).address), range(size, size + count))


def ejkernel_put_and_get(path: str, size: int, count: int) -> tuple[float, float]:
    from ejkernel.ops import PersistentCache

    cache = PersistentCache("matmul", path)
    cache._data = {f"cpu|matmul@v1|{number:064x}": {"m": number, "n": 128} for number in range(size)}

    async def put(number: int) -> None:
        cache.put("cpu", "matmul@v1", f"{number:064x}", {"m": number, "n": 128})

    async def get(number: int) -> None:
        cache.get("cpu", "matmul@v1", f"{number:064x}")

    async def both() -> tuple[float, float]:
        return await each(put, range(size, size + count)), await each(get, range(size, size + count))

    return anyio.run(both)


def compare_costs(sizes: tuple[int, ...]) -> tuple[Table, bool]:
    table = Table("store", "operation", title="A record of 24 outcomes; ejKernel stores the config alone", box=SIMPLE)
    for size in sizes:
        table.add_column(f"{size:,}", justify="right")
    table.add_column("budget", justify="right")
    table.add_column("")
    rows: dict[str, list[tuple[float, float]]] = {"directory": [], "document": [], "redis": [], "ejKernel": []}
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder, RedisServer() as redis:
            rows["directory"].append(anyio.run(put_and_get, f"{folder}/cache", size, 300))
            rows["redis"].append(anyio.run(put_and_get, redis.url(), size, 300))
            if size <= 10_000:  # each put rewrites the whole file
                rows["document"].append(anyio.run(put_and_get, f"{folder}/c.json", size, 20))
            rows["ejKernel"].append(ejkernel_put_and_get(f"{folder}/e.json", size, 5 if size > 10_000 else 20))
    kept = True
    for name, costs in rows.items():
        for index, operation in enumerate(("put", "get")):
            cells = [f"{cost[index] * 1e3:,.3f} ms" for cost in costs] + [""] * (len(sizes) - len(costs))
            budget, mark = "", ""
            if name == "directory" and operation == "put":
                growth = costs[-1][0] / costs[0][0]
                ok = growth <= MOST_GROWTH
                kept, budget = kept and ok, f"{growth:.2f}x <= {MOST_GROWTH:g}x"
                mark = "[green]ok" if ok else "[bold red]OVER"
            table.add_row(name, operation, *cells, budget, mark)
    return table, kept


def floor_s(folder: str) -> float:
    """Return the seconds of the file system itself: a file written, synced and linked, and its directory synced."""
    directory = os.open(folder, os.O_RDONLY)
    taken = []
    for number in range(300):
        start = perf_counter()
        path = f"{folder}/{number}"
        file = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.write(file, b"x" * 5000)
        os.fsync(file)
        os.close(file)
        os.link(path, f"{path}.json")
        os.fsync(directory)
        os.unlink(path)
        taken.append(perf_counter() - start)
    os.close(directory)
    return median(taken)


async def fill_there(location: str, size: int) -> None:
    async with opened(location) as store:
        await fill(store, size)


def time_starts(size: int) -> Table:
    """Return the seconds of a process's first answer, by the number of records."""
    table = Table("store", f"first get of {size:,} records", box=SIMPLE)

    async def first(location: str) -> float:
        start = perf_counter()
        assert await open_store(location).get(record(size // 2).address) is not None
        return perf_counter() - start

    with tempfile.TemporaryDirectory() as folder, RedisServer() as redis:
        for name, location in {
            "directory": f"{folder}/c",
            "document": f"{folder}/c.json",
            "redis": redis.url(),
        }.items():
            anyio.run(fill_there, location, size)
            table.add_row(name, f"{anyio.run(first, location) * 1e3:,.2f} ms")
    return table


class Times(NamedTuple):
    """The duration of some work, and the longest stalls meanwhile."""

    taken_s: float
    stall_s: float
    """Of the event loop."""
    own_s: float
    """Of the event loop, without pauses in which the machine stopped all threads."""
    idle_s: float
    """Of a heartbeat in another program."""

    def __str__(self) -> str:
        return format(self, ".1f")

    def __format__(self, digits: str) -> str:
        return f"{self.taken_s:{digits}} s {self.stall_s * 1e3:.0f}/{self.own_s * 1e3:.0f}/{self.idle_s * 1e3:.0f} ms"


async def watched(work: Callable[[], Any]) -> tuple[Any, Times]:
    """Return the result of some work, and its times."""
    gc.collect()
    late: list[Lateness] = []
    with second_heart(BEAT_S) as stopped:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(beat, late, BEAT_S)
            await anyio.sleep(0.1)  # the other program has to start
            late.clear()
            start = perf_counter()
            result = await work()
            taken = perf_counter() - start
            tasks.cancel_scope.cancel()
        others = [other for other in stopped() if other.came > start]
    stall = max((each.seconds for each in late), default=0.0)
    own = max((each.own_s for each in late), default=0.0)
    return result, Times(taken, stall, own, max((each.seconds for each in others), default=0.0))


async def move(location: str, folder: str, size: int) -> dict[str, Times]:
    """Return the times of each way to move records."""
    document = json.loads(json.dumps({"records": [record(number).to_facts() for number in range(size)]}))
    large = replace(record(size), report={"outcomes": OUTCOMES * 750})  # two megabytes
    results: dict[str, Times] = {}

    async def step(name: str, work: Callable[[], Any]) -> Any:
        result, results[name] = await watched(work)
        return result

    async with opened(location) as store:
        cache = PersistentCache("matmul", store)
        assert (await step("import", lambda: cache.import_(document))).imported == size
        document.clear()  # slow, too, but not part of asel
        text = await step("export", cache.export)
        assert (await step("import again", lambda: cache.import_(text))).imported == 0
        assert await step("export_to", lambda: cache.export_to(f"{folder}/export.json")) == size
        await step("prune half", lambda: cache.prune(lambda one: one.cfg["m"] % 2 == 0))
        await step("import a file", lambda: cache.import_(f"{folder}/export.json"))
        await step("put 2 MB", lambda: store.put(large))
        await step("get 2 MB", lambda: store.get(large.address))
    return results


def time_moves(sizes: tuple[int, ...]) -> Table:
    """Return the time to move records, and the longest stall of the event loop meanwhile."""
    title = (
        "Seconds, and the longest stalls: of the event loop / of the event loop without what the machine stopped all "
        "threads for / of an idle program at the same time"
    )
    table = Table("store", "records", title=title, box=SIMPLE)
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder, RedisServer() as redis:
            for name, location in {
                "directory": f"{folder}/c",
                "document": f"{folder}/c.json",
                "redis": redis.url(),
            }.items():
                results = anyio.run(move, location, folder, size)
                if len(table.columns) == 2:
                    for step in results:
                        table.add_column(step, justify="right")
                table.add_row(name, f"{size:,}", *map(str, results.values()))
    return table


async def peak(size: int) -> tuple[float, float]:
    """Return the megabytes that exporting a directory of `size` records to a file adds, and the peak."""
    with tempfile.TemporaryDirectory() as folder:
        cache = PersistentCache("matmul", f"{folder}/c")
        await fill(cache.store, size)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert await cache.export_to(f"{folder}/export.json") == size
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return (after - before) / 1024, after / 1024


def time_fleets() -> tuple[Table, bool]:
    table = Table("store", "processes", "tunes", "seconds until all have an answer", "", box=SIMPLE)
    kept = True
    for size in FLEETS:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            redis = stack.enter_context(RedisServer())
            for name, location in {"directory": f"{folder}/c", "redis": redis.url()}.items():
                order = Order(location, f"{folder}/{name}.log", sample_s=0.3)
                with Fleet(size) as fleet:
                    start = perf_counter()
                    said = answers(fleet.members, order)
                    taken = perf_counter() - start
                tunes = len(order.tuners)
                ok = tunes == 1 and len({str(answer.cfg) for answer in said}) == 1
                kept = kept and ok
                table.add_row(name, str(size), str(tunes), f"{taken:.2f}", "[green]ok" if ok else "[bold red]OVER")
    return table, kept


def main() -> int:
    parser = argparse.ArgumentParser(description="Time stores beside ejKernel's.")
    parser.add_argument("--quick", action="store_true", help="at most 10,000 records")
    parser.add_argument("--moving", action="store_true", help="exports, imports and prunes alone")
    given = parser.parse_args()
    sizes = SIZES[:-1] if given.quick else SIZES
    console = Console(width=None if sys.stdout.isatty() else 150)
    added, whole = anyio.run(peak, 10_000 if given.quick else 100_000)  # first: a process's peak never falls
    console.print(
        f"export_to of {10_000 if given.quick else 100_000:,} records: {added:.0f} MB more than {whole - added:.0f} MB"
    )
    console.print(time_moves((1_000, 10_000) if given.quick else (10_000, 20_000)))
    if given.moving:
        return 0
    with tempfile.TemporaryDirectory() as folder:
        console.print(f"The file system's floor for a durable file: {floor_s(folder) * 1e3:.3f} ms")
    costs, cheap = compare_costs(sizes)
    console.print(costs)
    console.print(time_starts(10_000))
    fleets, one_tune = time_fleets()
    console.print(fleets)
    return 0 if cheap and one_tune else 1


if __name__ == "__main__":
    sys.exit(main())
