"""A selector in a web application: probes during the warm-up, and reports of failures."""

from __future__ import annotations

import importlib
import re
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import ModuleType

import anyio
import anyio.lowlevel
import httpx
import jax
import jax.numpy as jnp
import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from support.paths import TESTS

from asel import AutotunePolicy, ConfigSelectorChain, Invocation, PersistentCache, Tuner, kernel
from asel.integrations.starlette import SelectorLifespan
from asel.testing import RecordingSink

PATIENCE_S = 10.0  # how long a gate holds before the test is called broken; never reached by a passing one


@kernel(op_id="scale", configs=[1, 2, 3], heuristic=1)
def scale(x, *, cfg):
    return x * 2


@kernel(op_id="hopeless", configs=[1, 2], heuristic=1)
def hopeless(x, *, cfg):
    raise FloatingPointError("not this one")


def examples(*rows: int) -> list:
    return [(scale, (jnp.ones((n, 4)),)) for n in rows]


class GatedMeasure:
    """Compiles once its gate is open; or fails."""

    def __init__(self, *, is_open: bool = True, fails: bool = False) -> None:
        self.gate, self.reached = anyio.Event(), anyio.Event()
        self._is_open, self._fails = is_open, fails

    async def compile(self, trial):
        self.reached.set()
        if not self._is_open:
            await self.gate.wait()
        if self._fails:
            raise FloatingPointError("not here")

        async def sample() -> float:
            return 1e-3 * trial.cfg

        return sample


def selector(measure: GatedMeasure | None = None, **options) -> ConfigSelectorChain:
    return ConfigSelectorChain(**{"tuner": Tuner(0, 1, measure=measure or GatedMeasure()), "sinks": (), **options})


async def scaled(request: Request) -> JSONResponse:
    out = await request.state.execute(scale, jnp.ones((2, 4)))
    return JSONResponse(float(out.sum()))


@asynccontextmanager
async def serving(tuned: SelectorLifespan, kind: type = Starlette) -> AsyncIterator[httpx.AsyncClient]:
    """Serve an application as a server does: its lifespan around it, and the lifespan's state in each request."""
    app = kind(lifespan=tuned, routes=tuned.routes())
    app.add_route("/scaled", scaled)
    async with in_lifespan(app) as client:
        yield client


@asynccontextmanager
async def in_lifespan(app: Starlette) -> AsyncIterator[httpx.AsyncClient]:
    async with app.router.lifespan_context(app) as state:

        async def with_state(scope, receive, send):
            await app({**scope, "state": dict(state)}, receive, send)

        async with httpx.AsyncClient(transport=httpx.ASGITransport(with_state), base_url="http://service") as client:
            yield client


async def readiness(client: httpx.AsyncClient) -> dict:
    """Return the answer of `/readyz` once the warm-up is over; each probe is a turn of the loop."""
    with anyio.fail_after(PATIENCE_S):
        while (answer := await client.get("/readyz")).status_code == 503:
            await anyio.lowlevel.checkpoint()
    return answer.json()


@pytest.mark.parametrize("kind", [FastAPI, Starlette])
def test_probes_are_answered_during_the_warm_up(kind, real_backend):
    """Meanwhile the service is alive, not ready, and names the missing examples; afterwards requests find it warm."""

    async def main():
        measure, sink = GatedMeasure(is_open=False), RecordingSink()
        tuned = SelectorLifespan(selector(measure, sinks=[sink]), lambda: examples(2, 3))
        async with serving(tuned, kind) as client:
            with anyio.fail_after(PATIENCE_S):
                await measure.reached.wait()
            assert (await client.get("/livez")).status_code == 200
            answer = await client.get("/readyz")
            assert answer.status_code == 503
            calls = ["scale(x=f32[2,4])", "scale(x=f32[3,4])"]
            assert answer.json() == {"status": "warming up", "total": 2, "settled": 0, "missing": calls}
            measure.gate.set()
            assert await readiness(client) == {"status": "ready", "total": 2, "settled": 2}
            assert (await client.get("/scaled")).json() == 16.0
            assert len(sink.named("autotune_start")) == 2
        assert tuned.readiness().status == "closed"

    anyio.run(main, backend=real_backend)


def test_a_failed_warm_up_is_reported_and_the_service_is_ready(real_backend):
    """Bad kernels, and calls that the budget did not reach, are named with a reason."""

    async def main():
        shapes_only = (scale, (jax.ShapeDtypeStruct((5, 4), jnp.float32),))
        bad = SelectorLifespan(selector(GatedMeasure(fails=True)), [(hopeless, (jnp.ones(2),)), shapes_only])
        async with serving(bad) as client:
            answer = await readiness(client)
            assert (answer["status"], answer["total"], answer["settled"]) == ("degraded", 2, 2)
            assert answer["failed"]["hopeless(x=f32[2])"] == "FloatingPointError: not this one"
            assert answer["failed"]["scale(x=f32[5,4])"].startswith("runs on its heuristic: ")
            assert (await client.get("/scaled")).json() == 16.0
        async with serving(SelectorLifespan(selector(), examples(6), budget_s=0)) as client:
            assert (await readiness(client))["failed"] == {"scale(x=f32[6,4])": "the budget of 0 s was already spent"}

    anyio.run(main, backend=real_backend)


def test_an_example_that_hangs_does_not_block_readiness():
    """After a candidate's timeout its run is left to its thread, and the service is ready."""
    back = threading.Event()

    @kernel(op_id="hangs", configs=[1], heuristic=1)
    def hangs(x, *, cfg):
        assert back.wait(PATIENCE_S)
        return x

    async def main():
        policy = AutotunePolicy(allow_autotune=False, candidate_timeout_s=0.05)
        async with serving(SelectorLifespan(selector(policy=policy), [(hangs, (jnp.ones(2),))])) as client:
            answer = await readiness(client)
            assert answer["failed"] == {"hangs(x=f32[2])": "its run takes longer than 0.05 s"}
            back.set()

    anyio.run(main)


def test_the_service_of_the_readme_runs(tmp_path, monkeypatch):
    """The service of the room's README runs unchanged, with the kernel of serving's recipes."""
    blocks = {}
    for page in ("integrations/README.md", "serving/RECIPES.md"):
        text = (TESTS.parent / "asel" / page).read_text()
        for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
            blocks.setdefault(block.partition("\n")[0], block)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernels, service = ModuleType("my_kernels"), {"__name__": "service"}
    exec(blocks["# my_kernels.py"], kernels.__dict__)
    monkeypatch.setitem(sys.modules, "my_kernels", kernels)
    exec(blocks["# service.py"], service)

    async def main():
        async with in_lifespan(service["app"]) as client:
            assert await readiness(client) == {"status": "ready", "total": 1, "settled": 1}
            assert (await client.post("/sum", json=[1.0] * 64)).json() == {"sum": 64.0 * 64.0}

    anyio.run(main)


def test_examples_that_cannot_be_made_are_an_error_of_the_warm_up(caplog):
    """An error in the function of examples ends the warm-up but not the service; its secrets are redacted."""

    def make():
        raise LookupError("no model at redis://user:secret@host")

    async def main():
        async with serving(SelectorLifespan(selector(), make)) as client:
            answer = await readiness(client)
        assert answer["status"] == "degraded"
        assert answer["error"].startswith("LookupError: no model at redis://")
        assert "secret" not in answer["error"]
        async with serving(SelectorLifespan(selector(), [(scale, 5)])) as client:
            assert "pass the arguments as a tuple" in (await readiness(client))["error"]

    anyio.run(main)
    assert "the warm-up failed" in caplog.text


def test_a_service_with_tuning_off_is_ready_with_its_heuristics(monkeypatch):
    """If the policy or the environment forbids tuning, a heuristic is not a failure."""

    async def main():
        no_tuning = selector(policy=AutotunePolicy(allow_autotune=False))
        invocation = Invocation("scale", (), {"x": jnp.ones((2, 4))})
        ready = {"status": "ready", "total": 1, "settled": 1}
        async with serving(SelectorLifespan(no_tuning, [(scale, invocation)])) as client:
            assert await readiness(client) == ready
        monkeypatch.setenv("ASEL_AUTOTUNE", "off")
        async with serving(SelectorLifespan(selector(), examples(2))) as client:
            assert await readiness(client) == ready

    anyio.run(main)


def test_closing_ends_the_warm_up_and_the_next_start_continues_it(tmp_path, real_backend):
    """A service that is stopped during a tune keeps its stored configs, and tunes only the rest later."""

    async def main():
        sink = RecordingSink()

        def started(measure: GatedMeasure, *rows: int) -> SelectorLifespan:
            chain = selector(measure, persistent=PersistentCache("service", tmp_path), sinks=[sink])
            return SelectorLifespan(chain, examples(*rows))

        async with serving(started(GatedMeasure(), 2)) as client:
            await readiness(client)
        measure = GatedMeasure(is_open=False)
        tuned = started(measure, 2, 7)
        with anyio.fail_after(PATIENCE_S):
            async with serving(tuned) as client:
                await measure.reached.wait()
                assert (await client.get("/readyz")).json()["status"] == "warming up"
        assert tuned.readiness().status == "closed"
        async with serving(started(GatedMeasure(), 2, 7)) as client:
            await readiness(client)
        tuned_calls = [event.key.call for event in sink.named("autotune_finish")]
        assert tuned_calls == ["x=f32[2,4]", "x=f32[7,4]"]

    anyio.run(main, backend=real_backend)


class BrokenStore:
    """A store in which every operation fails."""

    async def load(self, key, checksum):
        raise OSError("the disk is gone")

    async def save(self, report, *, replace=False):
        raise OSError("the disk is gone")


def test_a_store_that_fails_leaves_the_service_ready():
    """Without its store, the service tunes for itself."""

    async def main():
        async with serving(SelectorLifespan(selector(persistent=BrokenStore()), examples(2))) as client:
            assert await readiness(client) == {"status": "ready", "total": 1, "settled": 1}

    anyio.run(main)


@pytest.mark.parametrize(("module", "needs"), [("starlette", "starlette.routing"), ("tokamax", "tokamax")])
def test_importing_a_module_without_its_extra_names_the_extra(module, needs, monkeypatch):
    """In one sentence, with the command that installs it."""
    monkeypatch.setitem(sys.modules, needs, None)
    monkeypatch.delitem(sys.modules, f"asel.integrations.{module}", raising=False)
    with pytest.raises(ImportError, match=rf'needs {module}: pip install "asel\[{module}\]"'):
        importlib.import_module(f"asel.integrations.{module}")
