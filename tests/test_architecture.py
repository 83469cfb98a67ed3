"""The shape of the code: which room may import which, and what is public."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys

import pytest
from support.paths import ROOT, TESTS

import asel

# In the order of the arrow: a room imports only from the rooms before it, `errors` and `redaction` aside.
ROOMS = ["runtime", "kernels", "events", "tuning", "stores", "telemetry", "selection", "serving"]
ROOMS += ["integrations", "web", "testing", "cli", "__main__"]
FOR_EVERY_ROOM = {"errors", "redaction"}
MAY_IMPORT_JAX = {
    "tuning.arrays",
    "tuning.jax_measure",
    "tuning.program",
    "tuning.timing",
    "tuning.worker_messages",
    "cli.demo.kernels",
}


@functools.cache
def modules() -> dict[str, ast.Module]:
    found = {}
    for path in (ROOT / "asel").rglob("*.py"):
        parts = path.relative_to(ROOT / "asel").with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = ast.parse(path.read_text())
    found.pop("")  # `asel` itself gathers what is public
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


def test_rooms_import_only_from_rooms_before_them():
    """Imports follow the order of DESIGN.md's table."""
    for name, tree in modules().items():
        room = name.partition(".")[0]
        before = {room} if room in FOR_EVERY_ROOM else set(ROOMS[: ROOMS.index(room) + 1])
        imported = {target.split(".")[1] for target in imports(tree) if target.startswith("asel.")}
        assert imported <= before | FOR_EVERY_ROOM, name


def test_the_engine_does_not_import_jax_at_module_level():
    """Only modules that compile, time or pack arrays import JAX when they load."""
    for name, tree in modules().items():
        loaded = {imported.partition(".")[0] for imported in imports(tree, top_level_only=True)}
        assert name in MAY_IMPORT_JAX or not loaded & {"jax", "jaxlib"}, name


def test_all_is_sorted_and_complete():
    """`asel.__all__` is the promise: sorted, complete, importable."""
    assert asel.__all__ == sorted(asel.__all__)
    for name in asel.__all__:
        assert getattr(asel, name) is not None


def test_every_module_says_what_it_is():
    """A module starts with a one-sentence docstring."""
    assert [name for name, tree in modules().items() if not ast.get_docstring(tree)] == []


@pytest.mark.timeout(120)
def test_the_public_types_are_what_users_see():
    """tests/typing_api.py is checked by mypy, never run."""
    command = [sys.executable, "-m", "mypy", "--strict", str(TESTS / "typing_api.py")]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


def test_no_private_module_of_opentelemetry_is_imported():
    """They move without notice. Its API for logs has no public name yet, so `_logs` is not one of them."""
    for name, tree in modules().items():
        for imported in imports(tree):
            private = {part for part in imported.split(".") if part.startswith("_")} - {"_logs"}
            assert not (imported.startswith("opentelemetry.") and private), (name, imported)
