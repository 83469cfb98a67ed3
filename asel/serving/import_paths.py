"""Import paths of objects, for use in other processes: `package.module:name`."""

from __future__ import annotations

import enum
import functools
import importlib
import sys
from typing import Any

from asel.errors import InvalidRequestError
from asel.kernels.kernel_numbers import kernel_number

__all__ = ["imported", "imported_kernel", "kernel_path", "path_of"]


def path_of(value: Any) -> str | None:
    """Return the path that leads to `value` itself; None if there is none."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if isinstance(value, enum.Enum):
        module, name = type(value).__module__, f"{type(value).__qualname__}.{value.name}"
    if isinstance(module, str) and isinstance(name, str) and _found(module, name) is value:
        return f"{_importable(module)}:{name}"
    return _path_of_variable(value)


def kernel_path(kernel: Any) -> str | None:
    """Return the path of a kernel, or of its class if the class makes an equal kernel without arguments."""
    fn = getattr(kernel, "fn", None)  # a kernel from the decorator takes the name of its function
    for named in (fn, type(kernel)):
        module, name = getattr(named, "__module__", None), getattr(named, "__qualname__", None)
        if not isinstance(module, str) or not isinstance(name, str):
            continue
        found = _found(module, name)
        if found is kernel or (found is type(kernel) and _makes_equal(found, kernel)):
            return f"{_importable(module)}:{name}"
    return _path_of_variable(kernel)


def imported(path: str) -> Any:
    """Return the object at an import path.

    Raises:
        InvalidRequestError: there is no such object.
    """
    module, colon, name = path.partition(":")
    if not colon or not module or not name:
        raise InvalidRequestError(f"{path!r} is not an import path; write package.module:name")
    try:
        return functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except SystemExit as error:
        raise InvalidRequestError(f"{path!r} cannot be imported: importing {module} ends the program") from error
    except (ImportError, AttributeError) as error:
        advice = ""
        if module == "__main__":
            advice = "; another program wrote it, so put the kernel into a module that both can import"
        raise InvalidRequestError(f"{path!r} cannot be imported: {error}{advice}") from error


def imported_kernel(path: str) -> Any:
    """Return the kernel at an import path, or an instance of the kernel class there.

    Raises:
        InvalidRequestError: there is no kernel.
    """
    found = imported(path)
    is_class = isinstance(found, type)
    if not all(hasattr(found, name) for name in (("run",) if is_class else ("run", "op_id"))):
        raise InvalidRequestError(
            f"{path!r} is of type {type(found).__name__} and not a kernel: it has no op_id and run"
        )
    if not is_class:
        return found
    try:
        return found()
    except Exception as error:
        raise InvalidRequestError(f"{path!r} cannot be made without arguments: {error}") from error


def _found(module: str, name: str) -> Any:
    """Return the object that a loaded module has under a name, without importing anything; None if there is none."""
    try:
        return functools.reduce(getattr, name.split("."), sys.modules[module])
    except (KeyError, AttributeError):
        return None


def _makes_equal(cls: Any, kernel: Any) -> bool:
    try:
        return kernel_number(cls()) == kernel_number(kernel)
    except Exception:  # it needs arguments
        return False


def _path_of_variable(value: Any) -> str | None:
    """Return the path of a variable that holds `value`, in the module of its class or else in any other."""
    home = type(value).__module__
    modules = sorted(sys.modules, key=lambda name: (name != home, name == "__main__", name))
    for module in modules:
        # Read `__dict__`, because reading an attribute of a lazy module would import its parts.
        variables = getattr(sys.modules.get(module), "__dict__", {})
        for name, found in list(variables.items()):
            if found is value:
                return f"{_importable(module)}:{name}"
    return None


def _importable(module: str) -> str:
    """Return the name by which other programs import a module, which `python -m` calls `__main__`."""
    spec = getattr(sys.modules.get(module), "__spec__", None)
    return module if spec is None or module != "__main__" else str(spec.name)
