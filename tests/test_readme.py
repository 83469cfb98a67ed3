"""The code in the READMEs runs."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.paths import ROOT

README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "asel").rglob("*.md"))]


def blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)


def example(marker: str) -> str:
    """Return the one Python block that contains `marker`."""
    (block,) = [block for page in PAGES for block in blocks(page) if marker in block]
    return block


QUICK_START = "anyio.run(main)"
EXAMPLE_TEST = "test_no_request_waits_longer_than_its_budget"


def test_the_readme_is_a_page_that_people_read():
    """It has at most 200 lines; details are in the rooms' READMEs."""
    assert len(README.splitlines()) <= 200


@pytest.mark.timeout(90)
def test_the_quick_start_runs_as_it_stands(tmp_path):
    """Copied into a file, it tunes a real kernel on this machine."""
    script = tmp_path / "quick_start.py"
    script.write_text(example(QUICK_START))
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("memory Blocks(rows=")


AROUND_FRAGMENTS = """
import jax.numpy as np_
from asel import *
from asel.testing import ScriptedMeasure

a = b = np_.ones((512, 512))
matmul, inv = MatMul(), Invocation("matmul", (a, a), {})
fast = Tuner(measure=ScriptedMeasure(0.0))

def serve(): ...

async def run(fragment):
    async with ConfigSelectorChain(tuner=fast) as selector:
        await selector.choose(inv, matmul)
        await fragment(selector)
"""


@pytest.mark.timeout(90)
def test_every_fragment_runs_after_the_quick_start(tmp_path, monkeypatch):
    """Code on any page may use the quick start's kernel and an open selector; it is run, not only shown."""
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")  # there is no collector here
    monkeypatch.setenv("ASEL_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "my_kernels.py").write_text(example("# my_kernels.py"))
    script = [example(QUICK_START).replace(QUICK_START, ""), AROUND_FRAGMENTS]
    for page in PAGES:
        if page.name == "RECIPES.md":  # its blocks are files: serving/test_recipes.py
            continue
        for number, block in enumerate(blocks(page)):
            if QUICK_START in block or EXAMPLE_TEST in block or "tokamax" in block:  # integrations/test_tokamax.py
                continue
            name = f"{re.sub(r'[^a-z]', '_', str(page.relative_to(ROOT).parent))}_{number}"
            script.append(f"async def {name}(selector):\n{textwrap.indent(block, '    ')}\nanyio.run(run, {name})\n")
    (tmp_path / "fragments.py").write_text("\n".join(script))
    command = [sys.executable, "-W", "ignore", tmp_path / "fragments.py"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.timeout(90)
def test_the_example_test_passes_on_both_backends(tmp_path):
    """A user's test of tune latency: both backends, no sleeping."""
    (tmp_path / "test_example.py").write_text(example(EXAMPLE_TEST))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert "2 passed" in result.stdout, result.stdout + result.stderr


def test_every_event_is_in_the_table():
    """The table of events is complete."""
    from asel import events

    table = (ROOT / "asel" / "events" / "README.md").read_text()
    for kind in vars(events).values():
        if isinstance(kind, type) and issubclass(kind, events.Event) and kind not in (events.Event, events.Answer):
            assert f"`{kind.name}`" in table


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    """Pages, pictures and folders that a page links to exist."""
    for target in re.findall(r"\]\((?!http|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target
