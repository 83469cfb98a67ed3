"""No acknowledged record is lost: real processes that are killed."""

from __future__ import annotations

import subprocess
import sys

import anyio
import pytest
from support.crashes import half_written, kill_writers, record
from support.paths import TESTS

from asel.stores import open_store

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize(("name", "kills"), [("cache", 40), ("cache.json", 15)])
def test_no_acknowledged_put_is_lost_to_kill_9(name, kills, tmp_path):
    """Dozens of writers are killed during a put; all acknowledged records are there and readable."""
    acknowledged, found = kill_writers(str(tmp_path / name), kills)
    assert len(acknowledged) >= kills
    assert acknowledged <= {one.cfg for one in found}
    assert all(one == record(one.cfg) for one in found)
    if name == "cache.json":
        assert len(half_written(str(tmp_path / name))) <= 1


PUTS = """
import sys, anyio
sys.path.insert(0, {tests!r})
from support.crashes import record
from asel.stores import open_store

async def main():
    store, numbers = open_store({location!r}), iter(range({first}, {first} + {count}))

    async def some():
        for number in numbers:
            await store.put(record(number))

    async with anyio.create_task_group() as tasks:
        for _ in range(10):
            tasks.start_soon(some)

sys.stdin.readline()
anyio.run(main)
"""


@pytest.mark.parametrize(("name", "processes", "count"), [("cache.json", 2, 250), ("cache", 4, 100)])
def test_concurrent_processes_lose_no_record(name, processes, count, tmp_path, request):
    """Two processes and five hundred puts into one document: five hundred records (ejKernel: half of them)."""
    location, tests = str(tmp_path / name), str(TESTS)
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", PUTS.format(tests=tests, location=location, first=i * count, count=count)],
            stdin=subprocess.PIPE,
        )
        for i in range(processes)
    ]
    for writer in writers:
        writer.stdin.write(b"go\n")
        writer.stdin.close()
    assert [writer.wait() for writer in writers] == [0] * processes

    async def numbers():
        return sorted([one.cfg async for one in open_store(location).records()])

    assert anyio.run(numbers) == list(range(processes * count))


def test_threads_that_share_one_store_lose_no_record(tmp_path):
    """Each has its own event loop (ejKernel: dictionary changed size during iteration)."""
    import threading

    for name in ("cache", "cache.json"):
        store = open_store(tmp_path / name)

        def write(first, store=store):
            async def puts():
                for number in range(first, first + 25):
                    await store.put(record(number))
                    assert await store.get(record(number).address) == record(number)

            anyio.run(puts)

        threads = [threading.Thread(target=write, args=(25 * i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        async def numbers(store=store):
            return sorted([one.cfg async for one in store.records()])

        assert anyio.run(numbers) == list(range(100))
