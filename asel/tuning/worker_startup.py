"""How a worker process is started, so that it imports code from the same places as this interpreter, and no others.

By default, Python puts the working directory, which may contain anyone's `pickle.py`, at the head of the path. So the
worker is started by the path of its file, with `-P`, with this interpreter's flags and without PYTHONPATH. It then
gets this interpreter's `sys.path` and the files of all modules imported here, so that a module added to the path later
cannot replace one that this program runs.
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
    """Return the environment of a worker: this program's, with the user site that this interpreter uses.

    Without PYTHONPATH: the worker would import the standard library through it before it knows this program's modules.
    `import_state` has its value.
    """
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}  # for the worker's own Python child processes
    environment.pop("PYTHONPATH", None)
    if base := _user_base():
        environment["PYTHONUSERBASE"] = base
    return environment


def _python_path() -> str:
    """Return PYTHONPATH for the worker's own child processes.

    Without relative locations, since this program may have changed its working directory.
    """
    locations = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(
        one for one in locations if os.path.isabs(one) and {one, os.path.normpath(one)} & set(sys.path)
    )


def _user_base() -> str | None:
    """Return the base directory of the user site, if this interpreter uses that site."""
    site = sys.modules.get("site")
    if site is None or not site.ENABLE_USER_SITE or site.USER_SITE not in sys.path:
        return None
    base: str = site.USER_BASE
    return base


def import_state() -> bytes:
    """Return the import state of this interpreter for `asel.tuning.worker`, in JSON."""
    import asel.tuning.worker_messages  # noqa: F401 - and everything that a worker imports itself, so that their files are sent

    customized = [name for name in ("sitecustomize", "usercustomize") if name in sys.modules]
    return json.dumps([_absolute_path(), _module_files(), customized, _python_path()]).encode()


def _absolute_path() -> list[str]:
    """Return `sys.path`, with relative entries as this interpreter resolves them."""
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
    """Return the file of each imported top-level module, and the folders of packages."""
    found: dict[str, tuple[str | None, list[str] | None]] = {}
    for name, module in list(sys.modules.items()):
        spec = vars(module).get("__spec__") if isinstance(module, ModuleType) else None
        if spec is None or "." in name or spec.name != name:
            continue
        folders = None if spec.submodule_search_locations is None else [*map(str, module.__path__)]
        if spec.has_location and os.path.isfile(spec.origin or ""):  # not inside a zip file
            found[name] = spec.origin, folders
        elif spec.origin is None and folders:  # a namespace package
            found[name] = None, folders
    return found
