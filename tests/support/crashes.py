"""Writers that are killed: `cd tests; python -m support.crashes LOCATION --kills 5000` for a long run.

A process that has loaded everything forks a writer, which puts one record after another and acknowledges each. At some
moment it is killed with `kill -9`. Every acknowledged record must be in the store.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import anyio

from asel.kernels.keys import CacheKey
from asel.stores import open_store
from asel.stores.records import Record
from support.paths import TESTS


def record(number: int) -> Record:
    key = CacheKey("cpu", "op", str(number))
    return Record(key=key, cfg=number, environment={"jax": "1"}, created=1.0, report={"filler": "x" * 3000})


def write(location: str, first: int) -> None:
    """Put records forever, and print the number of each once it is stored."""

    async def puts() -> None:
        store = open_store(location)
        number = first
        while True:
            await store.put(record(number))
            os.write(1, f"{number}\n".encode())
            number += 1

    anyio.run(puts)


def fork_writers(location: str) -> None:
    """Fork a writer for each line of input, and print its process id."""
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            write(location, int(line))
        os.write(1, f"pid {pid}\n".encode())
        os.waitpid(pid, 0)
        os.write(1, b"dead\n")


def kill_writers(location: str, kills: int, seed: int = 0) -> tuple[set[int], list[Record]]:
    """Return the records that killed writers acknowledged, and the records in the store afterwards."""
    chance, acknowledged, first = random.Random(seed), set(), 0
    command = [sys.executable, "-m", "support.crashes", location]
    with subprocess.Popen(command, cwd=TESTS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as forker:
        for _ in range(kills):
            forker.stdin.write(f"{first}\n")
            forker.stdin.flush()
            pid, spared = None, chance.randrange(1, 6)
            for line in forker.stdout:
                word, _, rest = line.strip().partition(" ")
                if word == "dead":
                    break
                if word == "pid":
                    pid = int(rest)
                else:
                    acknowledged.add(int(word))
                    spared -= 1
                if pid is not None and spared <= 0:
                    for _ in range(chance.randrange(20_000)):  # somewhere within the next put
                        pass
                    os.kill(pid, signal.SIGKILL)
                    pid = None  # what it acknowledged before is still to be read
            first = max(acknowledged, default=0) + 10
        forker.stdin.close()

    async def everything() -> list[Record]:
        store = open_store(location)
        rejected: list[object] = []
        store.on_rejected = rejected.append
        found = [one async for one in store.records()]
        assert not rejected, rejected
        return found

    return acknowledged, anyio.run(everything)


def half_written(location: str) -> list[Path]:
    """Return the half-written files of killed writers."""
    path = Path(location)
    return [*path.rglob(".tmp-*"), *path.parent.glob(f".{path.name}.tmp*")]


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill writers and count what is lost.")
    parser.add_argument("location")
    parser.add_argument("--kills", type=int, help="without it: be the process that forks the writers")
    given = parser.parse_args()
    if given.kills is None:
        fork_writers(given.location)
        return 0
    acknowledged, found = kill_writers(given.location, given.kills, seed=random.randrange(2**32))
    lost = acknowledged - {one.cfg for one in found}
    print(f"{given.kills} kills, {len(acknowledged)} puts acknowledged, {len(found)} records, {len(lost)} lost")
    print(f"{len(half_written(given.location))} half-written files left")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
