"""Targets of `asel tune`: kernels by import path or file, recorded calls, job files."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asel.errors import AselError, InvalidRequestError
from asel.kernels.call_parsing import parse_call
from asel.kernels.kernel_methods import parameters_of
from asel.redaction import redact
from asel.serving.import_paths import imported_kernel

__all__ = ["Call", "Target", "kernel_at", "target_calls"]


@dataclass(frozen=True, slots=True)
class Call:
    """A call to tune. If `backward` is None, the command line decides."""

    kernel: Any
    inv: Any
    seen: int = 1
    backward: bool | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """The calls to tune, the lines that could not be read, and the options of a job file."""

    calls: tuple[Call, ...]
    skipped: tuple[str, ...] = ()
    options: dict[str, Any] | None = None


def target_calls(target: str, shapes: Sequence[str]) -> Target:
    """Return the calls of a target.

    Raises:
        InvalidRequestError: it is not a target, or has no calls. The message has the fix.
    """
    path = Path(target)
    if path.suffix == ".toml":
        from asel.cli.tune.job_file import read_job_file

        _refuse_shapes(shapes, "a job file has its own shapes")
        return read_job_file(path)
    if path.is_file() and path.suffix != ".py":
        _refuse_shapes(shapes, "recorded calls have their own shapes")
        return _recorded(path)
    if ":" not in target and path.suffix in (".json", ".jsonl"):
        raise InvalidRequestError(f"there is no file {target}: check the path")
    kernel = kernel_at(target)
    if not shapes:
        raise InvalidRequestError(
            f"name the calls of {target} to tune: --shapes '{_example_shapes(kernel)}', with your shapes"
        )
    return Target(tuple(Call(kernel, parse_call(text, kernel)) for text in shapes))


def kernel_at(target: str) -> Any:
    """Return the kernel at `package.module:name` or `path/to/file.py:name`; the name may be left out if there is one.

    Raises:
        InvalidRequestError: there is none.
    """
    place, _, name = target.rpartition(":") if ":" in target else (target, "", "")
    if place.endswith(".py"):
        module = _module_of_file(Path(place))
    elif "/" in place or not all(part.isidentifier() for part in place.split(".")):
        raise InvalidRequestError(
            f"{target!r} is neither a file nor an import path: write package.module:kernel or path/to/file.py:kernel"
        )
    else:
        _add_to_path(Path.cwd())
        module = place
    return _kernel_in(module, name, target)


def _module_of_file(path: Path) -> str:
    if not path.is_file():
        raise InvalidRequestError(f"there is no file {path}: check the path")
    path = path.resolve()
    _add_to_path(path.parent)
    _import(path.stem)
    found = getattr(sys.modules[path.stem], "__file__", None)
    if found is None or Path(found).resolve() != path:
        raise InvalidRequestError(f"{path} is shadowed by another module named {path.stem!r}, {found}: rename the file")
    return path.stem


def _add_to_path(folder: Path) -> None:
    """Make the modules in a folder importable, as `python -m` does. Worker processes get the same path."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and not f"{module}.".startswith(f"{error.name}."):
            raise InvalidRequestError(
                f"{module} cannot be imported: it needs {error.name}, which is not installed"
            ) from error
        raise InvalidRequestError(
            f"there is no module {module!r}: install it, go to the directory that has it, or name its file"
        ) from error
    except Exception as error:
        kind = type(error).__name__
        raise InvalidRequestError(
            f"{module} cannot be imported: {kind}: {redact(error)}; --debug shows the traceback"
        ) from error


def _kernel_in(module: str, name: str, target: str) -> Any:
    loaded = _import(module)
    found = {attribute: value for attribute, value in vars(loaded).items() if _is_kernel(value, module)}
    classes = {type(value) for value in found.values()}
    names = [attribute for attribute, value in found.items() if value not in classes]  # a class is not another kernel
    if not name:
        if len(names) != 1:
            listed = ", ".join(names) or "none"
            raise InvalidRequestError(
                f"name a kernel in {target}, as in {target}:{(names or ['name'])[0]}; it has {listed}"
            )
        name = names[0]
    try:
        return imported_kernel(f"{module}:{name}")
    except AselError as error:
        listed = f"; the kernels there are {', '.join(names)}" if names else ""
        raise InvalidRequestError(f"{redact(error)}{listed}") from error


def _is_kernel(value: Any, module: str) -> bool:
    if not all(hasattr(value, method) for method in ("run", "candidate_cfgs", "heuristic_cfg")):
        return False
    # An imported class is a base class here, or another module's kernel.
    return not isinstance(value, type) or value.__module__ == module


def _recorded(path: Path) -> Target:
    from asel.serving.recorded_calls import read_calls

    _add_to_path(Path.cwd())
    read = read_calls(path)
    if not read.calls:
        why = f": {read.skipped[0]}" if read.skipped else ", it is empty"
        raise InvalidRequestError(
            f"{path} has no call that can be tuned{why}. `asel.save_invocations` writes such files"
        )
    calls = tuple(Call(one.kernel, one.invocation, one.seen) for one in read.calls)
    return Target(calls, tuple(f"{path}, {line}" for line in read.skipped))


def _refuse_shapes(shapes: Sequence[str], why: str) -> None:
    if shapes:
        raise InvalidRequestError(f"--shapes is for a kernel: {why}")


def _example_shapes(kernel: Any) -> str:
    signature = parameters_of(kernel)
    if signature is None:
        return "f32[8,128]"
    names = [p.name for p in signature.parameters.values() if p.default is p.empty and p.name not in ("cfg", "self")]
    return ", ".join(f"{name}=f32[8,128]" for name in names)
