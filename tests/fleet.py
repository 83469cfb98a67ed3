"""One process of a fleet: `python fleet.py BACKEND` tunes the key it is asked for, again and again.

It says `ready`, and answers each line of its input, which is an `Order`: it prints `measuring` for each sample it
takes and its answer in the end, and logs who measured, so that a test can count the tunes of a whole fleet.
`Fleet` is the test's side of it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path


@dataclass
class Order:
    """What a process of the fleet is to do."""

    location: str
    log: str
    sample_s: float = 0.05
    hang: bool = False
    """Whether it never finishes its first sample."""
    gate: str = ""
    """A file without which no sample is finished."""
    favourite: int = 3
    """The config that is fastest there."""
    wait_s: float | None = None
    lease_s: float | None = None
    """Of a claim in Redis."""

    @property
    def tuners(self) -> set[str]:
        """The processes that measured something."""
        log = Path(self.log)
        return set(log.read_text().split()) if log.exists() else set()


@dataclass
class Answer:
    """What one process of the fleet says in the end."""

    cfg: dict
    tier: str
    events: list[str]


class Member:
    """The test's handle on one process."""

    def __init__(self, backend: str = "asyncio") -> None:
        command = [sys.executable, __file__, backend]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ready(self) -> None:
        assert self.says() == "ready"

    def go(self, order: Order) -> None:
        self.process.stdin.write(json.dumps(asdict(order)) + "\n")
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
    """Some processes, every other one on trio."""

    def __init__(self, size: int) -> None:
        with ExitStack() as stack:
            self.members = [Member(backend) for backend in islice(cycle(("asyncio", "trio")), size)]
            for member in self.members:
                stack.callback(member.end)
            for member in self.members:
                member.ready()
            self._stack = stack.pop_all()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()


def answers(members: Iterable[Member], order: Order) -> list[Answer]:
    """Let all of them go at once and return what they say."""
    members = list(members)
    for member in members:
        member.go(order)
    return [member.answer() for member in members]


def main(backend: str) -> None:
    import anyio
    import jax  # noqa: F401 - before anyone is told to go
    from kernels import Blocks, Toy, call

    from asel import AutotunePolicy, ConfigSelectorChain, PersistentCache, Tuner
    from asel.stores.redis import RedisStore
    from asel.testing import RecordingSink

    class Logging:
        def __init__(self, order: Order) -> None:
            self.order = order

        async def compile(self, trial):
            async def sample():
                print("measuring", flush=True)
                with open(self.order.log, "a") as log:  # noqa: ASYNC230
                    log.write(f"{os.getpid()}\n")
                while self.order.gate and not os.path.exists(self.order.gate):  # noqa: ASYNC110, ASYNC240
                    await anyio.sleep(0.01)
                await anyio.sleep(1000 if self.order.hang else self.order.sample_s)
                return 0.1 if trial.cfg.m == self.order.favourite else 0.3

            return sample

    async def choose(order: Order) -> Answer:
        sink, store = RecordingSink(), order.location
        if order.lease_s is not None:
            store = RedisStore(order.location, lease_s=order.lease_s, renew_s=order.lease_s / 3)
        cache = PersistentCache("toy", store, cfg_type=Blocks)
        tuner = Tuner(0, 1, measure=Logging(order), strategy="exhaustive")
        policy = AutotunePolicy(wait_s=order.wait_s)
        async with ConfigSelectorChain(None, policy, tuner, cache, sinks=[sink]) as chain:
            selection = await chain.select(call(), Toy())
            await chain.settled()
            cfg = await chain.choose(call(), Toy())
        return Answer(asdict(cfg), selection.tier, sink.names)

    print("ready", flush=True)
    for line in sys.stdin:
        answer = anyio.run(choose, Order(**json.loads(line)), backend=backend)
        print(json.dumps(asdict(answer)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
