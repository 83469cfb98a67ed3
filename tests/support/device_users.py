"""Two processes that tune on one device: `python -m support.device_users BACKEND ISOLATION LOG` is one of them.

It prints `ready`; on `tune` it tunes and prints `tuned`; on `hold` it takes the device, keeps it and prints `held`.
Each run of a candidate is a line of the log, with its beginning, its end and its process.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from support.paths import TESTS


@dataclass(frozen=True, order=True)
class Run:
    """The time in which a candidate ran, on a clock that all processes share, and the process."""

    start_ns: int
    end_ns: int
    user: str


class DeviceUser:
    """The test's handle on one process."""

    def __init__(self, backend: str, isolation: str, log: Path) -> None:
        command = [sys.executable, "-m", "support.device_users", backend, isolation, str(log)]
        self.process = subprocess.Popen(command, cwd=TESTS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def says(self) -> str:
        return self.process.stdout.readline().strip()

    def do(self, what: str) -> None:
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


def runs(log: Path) -> list[Run]:
    """Return the log, in order."""
    lines = [line.split() for line in log.read_text().splitlines()]
    return sorted(Run(int(start), int(end), user) for start, end, user in lines)


def run_as_it_is(x: object, *, log: str, user: str, sleep_s: float) -> object:
    """Run for a while. JAX cannot trace this, so each sample is one run."""
    np.asarray(x)
    start = time.monotonic_ns()
    time.sleep(sleep_s)
    with open(log, "a") as file:
        file.write(f"{start} {time.monotonic_ns()} {user}\n")
    return x


def candidate(log: str, user: str, sleep_s: float) -> object:
    return partial(run_as_it_is, log=log, user=user, sleep_s=sleep_s)


def main(backend: str, isolation: str, log: str) -> None:
    import anyio
    import jax
    import jax.numpy as jnp

    from asel import Tuner
    from asel.tuning.device_lock import alone_on
    from support.device_users import candidate  # which a worker process can import, as it cannot __main__

    async def serve() -> None:
        async with Tuner(1, 20, isolation=isolation, strategy="exhaustive") as tuner:
            unlogged = partial(candidate, "/dev/null", isolation)
            await tuner.autotune(unlogged, (jnp.ones(4),), {}, [1e-6])  # so that a worker is up
            print("ready", flush=True)
            await anyio.to_thread.run_sync(sys.stdin.readline)
            await tuner.autotune(partial(candidate, log, isolation), (jnp.ones(4),), {}, [2e-3, 3e-3, 4e-3])
            print("tuned", flush=True)
            await anyio.to_thread.run_sync(sys.stdin.readline)
            async with alone_on(jax.local_devices()[:1], [], across_processes=True):
                print("held", flush=True)
                await anyio.sleep_forever()

    anyio.run(serve, backend=backend)


if __name__ == "__main__":
    main(*sys.argv[1:])
