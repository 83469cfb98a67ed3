"""One process of a fleet: `python fleet.py LOCATION LOG`; tunes the key it is asked for and prints its answer.

It says `ready`, waits for a line on its input, and logs each candidate it measures, so that a test
can count the tunes of a whole fleet. `Fleet` is the test's side of it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path


@dataclass
class Answer:
    """What one process of the fleet says in the end."""

    cfg: dict
    tier: str
    events: list[str]


class Member:
    """The test's handle on one process."""

    def __init__(self, location: str, log: Path, *options: str, backend: str = "asyncio") -> None:
        command = [sys.executable, __file__, location, str(log), "--backend", backend, *options]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ready(self) -> None:
        assert self.process.stdout.readline() == "ready\n"

    def go(self) -> None:
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def says(self) -> str:
        """Return the next line: `measuring` when its tune begins."""
        return self.process.stdout.readline().strip()

    def answer(self) -> Answer:
        line = self.says()
        while line == "measuring":
            line = self.says()
        assert line, f"it ended with {self.process.wait()} and no answer"
        return Answer(**json.loads(line))

    def end(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


class Fleet:
    """Some processes over one store, every other one on trio."""

    def __init__(self, location: str, log: Path, size: int, *options: str) -> None:
        self._log = log
        with ExitStack() as stack:
            backends = islice(cycle(("asyncio", "trio")), size)
            self.members = [Member(location, log, *options, backend=backend) for backend in backends]
            for member in self.members:
                stack.callback(member.end)
            for member in self.members:
                member.ready()
            self._stack = stack.pop_all()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def answers(self) -> list[Answer]:
        """Let all of them go at once and return what they say."""
        for member in self.members:
            member.go()
        return [member.answer() for member in self.members]

    @property
    def tuners(self) -> set[str]:
        """The processes that measured something."""
        return set(self._log.read_text().split()) if self._log.exists() else set()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("location")
    parser.add_argument("log")
    parser.add_argument("--backend", default="asyncio")
    parser.add_argument("--sample-s", type=float, default=0.05)
    parser.add_argument("--hang", action="store_true", help="never finish the first sample")
    parser.add_argument("--favourite", type=int, default=3, help="the config that is fastest here")
    parser.add_argument("--wait-s", type=float)
    parser.add_argument("--lease-s", type=float, help="of a claim in Redis")
    given = parser.parse_args()

    import anyio
    import jax  # noqa: F401 - before anyone is told to go
    from kernels import Blocks, Toy, call

    from asel import AutotunePolicy, ConfigSelectorChain, PersistentCache, Tuner
    from asel.stores.redis import RedisStore
    from asel.testing import RecordingSink

    class Logging:
        async def compile(self, trial):
            async def sample():
                print("measuring", flush=True)
                with open(given.log, "a") as log:  # noqa: ASYNC230
                    log.write(f"{os.getpid()}\n")
                await anyio.sleep(1000 if given.hang else given.sample_s)
                return 0.1 if trial.cfg.m == given.favourite else 0.3

            return sample

    async def choose() -> Answer:
        sink = RecordingSink()
        store = given.location
        if given.lease_s is not None:
            store = RedisStore(given.location, lease_s=given.lease_s, renew_s=given.lease_s / 3)
        cache = PersistentCache("toy", store, cfg_type=Blocks)
        tuner = Tuner(0, 1, measure=Logging(), strategy="exhaustive")
        policy = AutotunePolicy(wait_s=given.wait_s)
        async with ConfigSelectorChain(None, policy, tuner, cache, sinks=[sink]) as chain:
            selection = await chain.select(call(), Toy())
            await chain.settled()
            cfg = await chain.choose(call(), Toy())
        return Answer(asdict(cfg), selection.tier, sink.names)

    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(asdict(anyio.run(choose, backend=given.backend))), flush=True)


if __name__ == "__main__":
    main()
