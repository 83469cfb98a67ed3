"""What the README shows is what runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text()


def example(marker: str) -> str:
    """Return the one Python block that contains `marker`."""
    (block,) = [b for b in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if marker in b]
    return block


@pytest.mark.timeout(90)
def test_the_quick_start_runs_as_it_stands(tmp_path):
    """Copied into a file, it tunes a real kernel on this machine."""
    script = tmp_path / "quick_start.py"
    script.write_text(example("anyio.run(main)"))
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("memory Blocks(rows=")


@pytest.mark.timeout(90)
def test_the_example_test_passes_on_both_backends(tmp_path):
    """A user's test of tune latency: both backends, no sleeping."""
    (tmp_path / "test_example.py").write_text(example("test_no_request_waits_longer_than_its_budget"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert "2 passed" in result.stdout, result.stdout + result.stderr


def test_every_event_is_in_the_table():
    """The README's table of events is complete."""
    from asel import events

    for kind in vars(events).values():
        if isinstance(kind, type) and issubclass(kind, events.Event) and kind not in (events.Event, events.Answer):
            assert f"`{kind.name}`" in README


@pytest.mark.timeout(120)
def test_the_demo_tells_its_story():
    """`asel demo` is the main job on the real device: cold, warm, crowded, traced, restarted. On trio: test_otlp.py."""
    command = [sys.executable, "-c", "from asel.cli import main; main()", "demo"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    for line in (
        "from tier autotune",
        "from tier memory",
        "1,000 callers, 1 tune, 1 answer",
        "traced with",
        "from tier persistent",
    ):
        assert line in result.stdout
