"""The shape of the code: which module may import which, and what is public."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

import asel

ROOT = Path(asel.__file__).parent
TESTS = Path(__file__).parent

# In the order of the arrow: a module imports only from those above it. `errors` and `events` are for everyone.
ARROW = [
    "redaction",
    "errors",
    "limiter",
    "loop",
    "events",
    "fanout",
    "scopes",
    "threads",
    "kernel",
    "canonical",
    "devices",
    "buckets",
    "memo",
    "signatures",
    "encoding",
    "keys",
    "policy",
    "outcomes",
    "pending",
    "cache",
    "stores.strict_json",
    "stores.records",
    "stores.protocol",
    "stores.files",
    "stores.leftovers",
    "stores.file_claims",
    "stores.directory",
    "stores.document_format",
    "stores.document",
    "stores.targets",
    "stores.scripts",
    "stores.refusals",
    "stores.wires",
    "stores.wakeups",
    "stores.queues",
    "stores.links",
    "stores.leases",
    "stores.redis",
    "stores",
    "codec",
    "persistence",
    "moving",
    "persistent",
    "measure",
    "lanes",
    "board",
    "strategies",
    "benchmark",
    "checks",
    "meter",
    "traffic",
    "jobs",
    "reporting",
    "parcels",
    "worker_startup",
    "processes",
    "_worker",
    "steps",
    "readying",
    "sampling",
    "tuner",
    "adapters",
    "health",
    "claims",
    "keeper",
    "tuning",
    "registry",
    "answers",
    "calls",
    "backlog",
    "reading",
    "explaining",
    "withdrawal",
    "telemetry.names",
    "telemetry.tally",
    "telemetry.environment",
    "telemetry.export_queue",
    "telemetry.pipeline",
    "telemetry.tap",
    "telemetry.aside",
    "telemetry.structlog",
    "telemetry.opentelemetry",
    "telemetry.metrics",
    "telemetry.connections",
    "telemetry.processors",
    "telemetry.providers",
    "telemetry.outputs",
    "telemetry.setup",
    "telemetry.capture",
    "telemetry",
    "misses",
    "tiers",
    "selection",
    "executor",
    "testing",
    "demo",
    "cli",
]
MAY_IMPORT_JAX = {"benchmark", "parcels", "demo.kernels"}


@functools.cache
def modules() -> dict[str, ast.Module]:
    found = {}
    for path in ROOT.rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__").replace("__init__", "")
        found[name] = ast.parse(path.read_text())
    found.pop("")  # asel itself gathers everything
    return found


def imports(tree: ast.AST, *, top_level_only: bool = False) -> set[str]:
    """Return the modules that are imported when the program runs, not those a type checker sees."""
    found = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if top_level_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return
        if isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(tree)
    return found


def position(name: str) -> int:
    while name not in ARROW:
        name = name.rpartition(".")[0]
        assert name, "a module that the arrow does not know"
    return ARROW.index(name)


@pytest.mark.parametrize("name", sorted(modules()))
def test_modules_import_only_from_those_above_them(name):
    """The arrow stays an arrow."""
    for imported in imports(modules()[name]):
        if imported.startswith("asel."):
            target = imported.removeprefix("asel.")
            same_package = name.split(".")[0] == target.split(".")[0]
            assert position(target) < position(name) or same_package, f"{name} imports {imported}"


@pytest.mark.parametrize("name", sorted(modules()))
def test_the_engine_does_not_import_jax_at_module_level(name):
    """Only what compiles and times, or packs arrays for those who do, needs JAX to load."""
    loaded = {imported.partition(".")[0] for imported in imports(modules()[name], top_level_only=True)}
    assert name in MAY_IMPORT_JAX or not loaded & {"jax", "jaxlib"}


def test_all_is_sorted_and_true():
    """`asel.__all__` is the promise: sorted, complete, importable."""
    assert asel.__all__ == sorted(asel.__all__)
    for name in asel.__all__:
        assert getattr(asel, name) is not None


@pytest.mark.parametrize("name", sorted(modules()))
def test_every_module_says_what_it_is(name):
    """A module starts with a sentence."""
    assert ast.get_docstring(modules()[name])


@pytest.mark.timeout(120)
def test_the_public_types_are_what_users_see():
    """tests/typing_api.py is checked by mypy, never run."""
    command = [sys.executable, "-m", "mypy", "--strict", str(TESTS / "typing_api.py")]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT.parent)
    assert result.returncode == 0, result.stdout + result.stderr
