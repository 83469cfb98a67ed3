"""Importing asel: what it loads, and that it works without POSIX."""

from __future__ import annotations

import subprocess
import sys

import pytest

from asel import PersistentCache
from asel.errors import InvalidRequestError
from asel.stores import DirectoryStore, DocumentStore, file_ops, open_store


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_asel_loads_nothing_that_only_stores_need():
    """`import asel` is quick: the code that reads and writes records is imported with the first PersistentCache."""
    modules = ("pydantic", "filelock", "coredis", "asel.stores.directory", "asel.stores.persistent_cache")
    found = run(f"import asel, asel.stores, sys; print([name for name in {modules!r} if name in sys.modules])")
    assert found.strip() == "[]"


def test_asel_and_its_stores_can_be_imported_without_posix_modules():
    """On Windows there is no fcntl, grp, pwd or resource, and `import asel` works all the same."""
    run(
        "import asyncio, subprocess, sys\n"  # they import what their platform has
        "for name in ('fcntl', 'grp', 'pwd', 'resource', 'termios'): sys.modules[name] = None\n"
        "import asel, asel.cli, asel.stores, asel.testing\n"
        "for name in asel.__all__: getattr(asel, name)\n"
        "asel.stores.DirectoryStore, asel.stores.DocumentStore, asel.telemetry.configure"
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda path: DirectoryStore(path),
        lambda path: DocumentStore(path / "cache.json"),
        lambda path: open_store(str(path)),
        lambda path: PersistentCache("toy", path),
    ],
    ids=["directory", "document", "location", "cache"],
)
def test_a_file_store_is_refused_without_posix(monkeypatch, tmp_path, make):
    """File stores need POSIX locks and links; the message has the alternatives."""
    monkeypatch.setattr(file_ops, "IS_POSIX", False)
    with pytest.raises(InvalidRequestError, match=r"needs a POSIX platform.*Redis"):
        make(tmp_path)


def test_file_stores_are_imported_on_first_use():
    """Lazy names are listed like any others, and a misspelt name is an AttributeError."""
    found = run(
        "import asel.stores as stores; assert 'DirectoryStore' not in vars(stores)\n"
        "from asel.stores import DirectoryStore; print(DirectoryStore.__name__, hasattr(stores, 'NoStore'))"
    )
    assert found.split() == ["DirectoryStore", "False"]
