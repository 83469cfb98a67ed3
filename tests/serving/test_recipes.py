"""The recipes in RECIPES.md run unchanged."""

from __future__ import annotations

import ast
import importlib
import re
import sys

import anyio
import httpx
import jax.numpy as jnp
import pytest
from support.paths import TESTS

import asel
from asel.testing import ScriptedMeasure

PAGE = (TESTS.parent / "asel" / "serving" / "RECIPES.md").read_text()
BLOCKS = {
    block.partition("\n")[0].removeprefix("# "): block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
}


class Recipes:
    """Runs blocks by the name in their first line, and records the events of their selectors."""

    def __init__(self) -> None:
        self.events = []
        self.tunes_for_real = False

    def watched(self, make):
        """Return a selector class that records its events, with a scripted measure unless it should really tune."""

        def made(**options):
            if not self.tunes_for_real:
                options["tuner"] = asel.Tuner(measure=ScriptedMeasure({8: 0.002, 64: 0.001}))
            return make(on_event=self.events.append, **options)

        return made

    def run(self, *names: str) -> dict:
        """Run blocks one after the other and return what they define."""
        namespace = {"__name__": "recipe"}
        for name in names:
            exec(compile(BLOCKS[name], name, "exec"), namespace)
        return namespace

    def run_cells(self, *names: str) -> dict:
        """Run cells as a notebook does: `await` is allowed, each is a task of its own, and one loop runs them all."""
        namespace = {"__name__": "notebook"}

        async def run(name):
            cell = eval(compile(BLOCKS[name], name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), namespace)
            if cell is not None:
                await cell

        async def notebook():
            for name in names:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(run, name)

        # On trio: on asyncio, the last cell would rightly be found to block the loop.
        anyio.run(notebook, backend="trio")
        return namespace

    @property
    def tuned(self) -> list[str]:
        """The calls that were tuned since the last time."""
        found = [event.key.call for event in self.events if event.name == "autotune_finish"]
        self.events.clear()
        return found


@pytest.fixture
def recipes(tmp_path, monkeypatch):
    """A directory with the recipes' kernel and a store of its own."""
    made = Recipes()
    (tmp_path / "my_kernels.py").write_text(BLOCKS["my_kernels.py"])
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "__init__.py").write_text(BLOCKS["my_package/__init__.py"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("ASEL_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("BlockingSelector", "ConfigSelectorChain"):
        monkeypatch.setattr(asel, name, made.watched(getattr(asel, name)))
    yield made
    for name in ("my_kernels", "my_package"):
        sys.modules.pop(name, None)


@pytest.mark.timeout(60)
def test_a_training_script_traces_with_tuned_configs(recipes, tmp_path, capsys):
    """The first trace tunes both passes, and a second start tunes nothing; the batch variant works too."""
    recipes.tunes_for_real = True
    first = recipes.run("train.py")
    recipes.tunes_for_real = False
    assert recipes.tuned == ["x=f32[128,64], w=f32[64,64]"]
    again = recipes.run("train.py")
    assert recipes.tuned == []
    assert (first["w"] == again["w"]).all()

    recipes.run("train_later.py")
    assert recipes.tuned == ["x=f32[256,64], w=f32[64,64]"]
    written = (tmp_path / "calls.jsonl").read_text().splitlines()
    assert '{"kernel": "my_kernels:Dense", "call": "x=f32[256,64], w=f32[64,64]", "seen": 1}' in written
    assert "2 calls: 1 tuned, 1 known" in capsys.readouterr().out


def test_a_notebook_keeps_its_selector_from_cell_to_cell(recipes):
    """Until a cell closes it; a blocking selector works too, inside the notebook's own loop."""
    cells = recipes.run_cells("cell 1", "cell 2", "cell 3", "cell 4")
    assert recipes.tuned == ["x=f32[64,64], w=f32[64,64]", "x=f32[128,64], w=f32[64,64]"]
    assert (cells["y"].shape, cells["z"].shape) == ((64, 64), (128, 64))


@pytest.mark.timeout(60)
def test_a_service_answers_over_http(recipes):
    """The service is warm before its first request."""
    app = recipes.run("service.py")["app"]

    async def ask():
        transport = httpx.ASGITransport(app)
        async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport) as client:
            assert recipes.tuned == ["x=f32[64,64], w=f32[64,64]"]
            return (await client.post("http://service/sum", json=[1.0] * 64)).json()

    assert anyio.run(ask) == {"sum": 64.0 * 64}
    assert recipes.tuned == []


@pytest.mark.timeout(60)
def test_configs_ship_with_a_package(recipes, tmp_path, monkeypatch):
    """They answer on a machine where nothing was ever tuned."""
    recipes.run("ship.py")
    assert len(recipes.tuned) == 1
    monkeypatch.setenv("ASEL_CACHE_DIR", str(tmp_path / "another machine"))
    package = importlib.import_module("my_package")
    kernels = importlib.import_module("my_kernels")
    with asel.BlockingSelector(persistent=package.persistent) as selector:
        call = asel.Invocation("dense", (jnp.ones((64, 64)), jnp.eye(64)), {})
        assert selector.select(call, kernels.dense).tier in ("memory", "persistent")
    assert recipes.tuned == []
