"""How the interpreter of a worker process is started: it imports code from where this one does, and from nowhere else.

Python would put the working directory, where anybody may have left a `pickle.py`, at the head of the worker's path.
So the worker is started by the path of its file, with `-P`, with this interpreter's own flags and without PYTHONPATH.
It then gets this interpreter's `sys.path`, and the files of the modules that are imported here: a module that has come
to lie on the path since must not take the place of one that this program runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from importlib.machinery import FileFinder
from pathlib import Path
from types import ModuleType

__all__ = ["import_state", "worker_command", "worker_environment"]


def worker_command() -> list[str]:
    """Return the command that starts a worker."""
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    site = [] if _user_base() else ["-s"]
    return [sys.executable, *flags, "-P", *site, str(Path(__file__).with_name("worker.py"))]


def worker_environment() -> dict[str, str]:
    """Return this program's environment, with its import locations as this interpreter uses them.

    PYTHONPATH is missing: the worker would import the standard library through it before it knows this program's
    modules. It gets the value with `import_state`.
    """
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}  # for whatever Python the worker starts in its turn
    environment.pop("PYTHONPATH", None)
    if base := _user_base():
        environment["PYTHONUSERBASE"] = base
    return environment


def _python_path() -> str:
    """Return PYTHONPATH for the worker's own child processes.

    A relative location would mean another directory once this program has changed its own.
    """
    locations = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(
        one for one in locations if os.path.isabs(one) and {one, os.path.normpath(one)} & set(sys.path)
    )


def _user_base() -> str | None:
    """Return where the user site is, if this interpreter uses it."""
    site = sys.modules.get("site")
    if site is None or not site.ENABLE_USER_SITE or site.USER_SITE not in sys.path:
        return None
    base: str = site.USER_BASE
    return base


def import_state() -> bytes:
    """Return what `asel.tuning.worker` needs to import as this interpreter does, in JSON."""
    import asel.tuning.worker_messages  # noqa: F401 - with all that a worker imports for itself, so that its files are known

    customized = [name for name in ("sitecustomize", "usercustomize") if name in sys.modules]
    return json.dumps([_absolute_path(), _module_files(), customized, _python_path()]).encode()


def _absolute_path() -> list[str]:
    """Return `sys.path` in its order; relative entries as this interpreter resolves them."""
    path = []
    for entry in sys.path:
        if isinstance(entry, str):  # others are ignored by imports
            with suppress(FileNotFoundError):  # the working directory was removed
                path.append(_absolute(entry))
    return path


def _absolute(entry: str) -> str:
    finder = sys.path_importer_cache.get(entry)
    if isinstance(finder, FileFinder):
        return finder.path  # a relative entry is resolved when it is first used
    if finder is not None:
        return entry  # the name of an import hook, as editable installs have
    return os.path.abspath(entry)  # the empty entry is resolved at each import


def _module_files() -> dict[str, tuple[str | None, list[str] | None]]:
    """Return the file of each top-level module that is imported, and a package's folders."""
    found: dict[str, tuple[str | None, list[str] | None]] = {}
    for name, module in list(sys.modules.items()):
        spec = vars(module).get("__spec__") if isinstance(module, ModuleType) else None
        if spec is None or "." in name or spec.name != name:
            continue
        folders = None if spec.submodule_search_locations is None else [*map(str, module.__path__)]
        if spec.has_location and os.path.isfile(spec.origin or ""):  # not in a zip file, say
            found[name] = spec.origin, folders
        elif spec.origin is None and folders:  # a namespace package
            found[name] = None, folders
    return found
