"""Processes of a fleet: `python -m support.fleet SOCKET` forks one for each connection. Each tunes the key it is
asked for, again and again.

It prints `ready`. Each line of its input is an `Order`: it prints `measuring` for each sample and then its answer, and
logs the process of each tune, so that a test can count the tunes of a whole fleet. `Fleet` is the test's side.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path

from support.paths import TESTS


@dataclass
class Order:
    """A command for one process of the fleet."""

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
    batch: int = 0
    """How many keys to warm up, in place of the one."""

    @property
    def tuners(self) -> set[str]:
        """The processes that measured something."""
        log = Path(self.log)
        return set(log.read_text().split()) if log.exists() else set()


@dataclass
class Answer:
    """The answer of one process of the fleet."""

    cfg: dict
    tier: str
    events: list[str]


class _Forker:
    """A process that has loaded JAX and forks the members of fleets, so that they start quickly."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.address = f"{self._folder.name}/forker"
        command = [sys.executable, "-W", "ignore", "-m", "support.fleet", self.address]
        self._process = subprocess.Popen(command, cwd=TESTS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout.readline() == "listening\n"
        atexit.register(self.end)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


_forker = functools.cache(_Forker)


class Member:
    """The test's handle on one process."""

    def __init__(self, backend: str = "asyncio") -> None:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(_forker().address)
            self._lines = connection.makefile("rw")
        self._write(backend)
        self.pid = int(self.says())

    def ready(self) -> None:
        assert self.says() == "ready"

    def go(self, order: Order) -> None:
        self._write(json.dumps(asdict(order)))

    def _write(self, line: str) -> None:
        self._lines.write(line + "\n")
        self._lines.flush()

    def says(self) -> str:
        """Return the next line: `measuring` when its tune begins."""
        return self._lines.readline().strip()

    def answer(self) -> Answer:
        line = self.says()
        while line == "measuring":
            line = self.says()
        assert line, "it ended without an answer"
        return Answer(**json.loads(line))

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def end(self) -> None:
        with suppress(ProcessLookupError):
            self.send_signal(signal.SIGCONT)
            self.send_signal(signal.SIGKILL)
        with suppress(ConnectionError):
            self._lines.read()  # ends with the process
        self._lines.close()


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
    """Give all members their orders at the same moment, and return their answers."""
    members = list(members)
    for member in members:
        member.go(order)
    return [member.answer() for member in members]


def fork_members(address: str) -> None:
    """Fork a member for each connection, which becomes its standard input and output."""
    import coredis  # noqa: F401 - what members need, once for all of them
    import jax  # noqa: F401
    import trio  # noqa: F401

    import support.kernels  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        print("listening", flush=True)
        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                break
            connection.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for descriptor in (0, 1):
        os.dup2(connection.fileno(), descriptor)
    connection.close()
    backend = sys.stdin.readline().strip()
    print(os.getpid(), flush=True)
    serve(backend)


def serve(backend: str) -> None:
    """Answer one order after the other."""
    import anyio

    from asel import AutotunePolicy, ConfigSelectorChain, PersistentCache, Tuner, warm_up
    from asel.stores.redis.store import RedisStore
    from asel.testing import RecordingSink
    from support.kernels import Blocks, Toy, call

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
            if order.batch:
                summary = await warm_up(chain, [(Toy(), call(8 * size)) for size in range(1, order.batch + 1)])
                outcomes = " ".join(item.outcome for item in summary.items)
                return Answer({item.call: asdict(item.cfg) for item in summary.items}, outcomes, sink.names)
            selection = await chain.select(call(), Toy())
            await chain.settled()
            cfg = await chain.choose(call(), Toy())
        return Answer(asdict(cfg), selection.tier, sink.names)

    print("ready", flush=True)
    for line in sys.stdin:
        answer = anyio.run(choose, Order(**json.loads(line)), backend=backend)
        print(json.dumps(asdict(answer)), flush=True)


if __name__ == "__main__":
    fork_members(sys.argv[1])
