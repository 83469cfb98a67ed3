"""A service as a user would write it: `cd tests; uvicorn --workers 2 support.web_service:app`.

`POST /scale/{rows}` runs a kernel on `rows` rows, and returns the tier of its config. `POST /search/{rows}` runs one
with a long tune. Tunes happen in the background, over a store that its workers share. Each tune that
begins or ends is a line of `ASEL_SERVICE_LOG`. `WebService` is the test's side of it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from asel import AutotunePolicy, ConfigSelectorChain, Invocation, PersistentCache, Tuner, kernel
from asel.integrations.starlette import SelectorLifespan
from support.paths import TESTS

STORE, LOG = "ASEL_SERVICE_STORE", "ASEL_SERVICE_LOG"
WARM_ROWS = 8
NAMED = {"autotune_start": "began", "autotune_finish": "ended"}


def _scaled(x: jax.Array, cfg: int) -> jax.Array:
    blocks = x.reshape(-1, cfg, x.shape[1])
    return jax.lax.map(lambda block: block * 2, blocks).reshape(x.shape)


@kernel(op_id="scale", configs=[1, 2, 4], heuristic=1)
def scale(x: jax.Array, *, cfg: int) -> jax.Array:
    return _scaled(x, cfg)


@kernel(op_id="search", configs=list(range(1, 400)), heuristic=1)
def search(x: jax.Array, *, cfg: int) -> jax.Array:
    return _scaled(x, 1) + cfg  # another program for each config


def note(event: Any) -> None:
    if event.name in NAMED:
        line = f"{NAMED[event.name]} {os.getpid()} {event.key.op_id.partition('@')[0]} {event.key.call}\n"
        file = os.open(os.environ[LOG], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(file, line.encode())
        os.close(file)


async def run(request: Request) -> JSONResponse:
    op = {"scale": scale, "search": search}[request.path_params["op"]]
    x = jnp.ones((request.path_params["rows"], 4))
    selection = await request.state.selector.select(Invocation(op.op_id, (x,), {}), op)
    out = await request.state.execute(op, x)
    return JSONResponse({"tier": selection.tier, "sum": float(out.sum()), "worker": os.getpid()})


def make_app() -> Starlette:
    selector = ConfigSelectorChain[Any, Any](
        policy=AutotunePolicy(cache_miss_fallback="background"),
        tuner=Tuner(0, 1),
        persistent=PersistentCache("service", os.environ[STORE]),
        on_event=note,
        close_grace_s=5.0,
    )
    tuned = SelectorLifespan(selector, lambda: [(scale, (jnp.ones((WARM_ROWS, 4)),))])
    return Starlette(routes=[*tuned.routes(), Route("/{op}/{rows:int}", run, methods=["POST"])], lifespan=tuned)


class WebService:
    """The test's handle on a server and its workers, which listen on a socket in a folder."""

    def __init__(self, folder: Path, workers: int) -> None:
        self.socket, self.log = folder / "socket", folder / "log"
        self.socket.unlink(missing_ok=True)
        command = [sys.executable, "-m", "uvicorn", "--factory", "support.web_service:make_app"]
        command += ["--uds", str(self.socket), "--workers", str(workers), "--timeout-graceful-shutdown", "5"]
        # On a busy machine a worker that compiles may be late with its pong, and would be replaced. uvicorn waits as
        # long for a worker that is killed between ping and pong, and handles no signal meanwhile.
        command += ["--no-access-log", "--timeout-worker-healthcheck", "15"]
        environment = {**os.environ, STORE: str(folder / "store"), LOG: str(self.log), "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            command, cwd=TESTS, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        self.workers: list[int] = []
        for _ in range(workers):
            self.started()

    def started(self) -> None:
        """Wait until one more worker serves, and record its process id; workers start in any order."""
        for line in self.process.stderr:
            if "Started server process" in line:
                self.workers.append(int(line.partition("[")[2].partition("]")[0]))
            if "Application startup complete" in line:
                return
        raise AssertionError(f"the service ended with {self.process.wait()}")

    def tunes(self, what: str) -> Counter[str]:
        """Return how many tunes of each call `began` or `ended`, over all workers."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return Counter(line.split(maxsplit=2)[2] for line in lines if line.startswith(what))

    def tuners(self, call: str) -> list[int]:
        """Return the workers that began a tune of a call."""
        lines = [line.split(maxsplit=2) for line in self.log.read_text().splitlines()]
        return [int(worker) for what, worker, tuned in lines if what == "began" and tuned == call]

    def terminate(self) -> tuple[int, str]:
        """Terminate it as an orchestrator does; return its exit code and its output."""
        self.process.send_signal(signal.SIGTERM)
        _, said = self.process.communicate(timeout=60)
        return self.process.returncode, said

    def __enter__(self) -> WebService:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.communicate()
        self.process.stderr.close()
