"""The canonical forms of functions and classes: their names, their code, and what they captured.

A function counts by its bytecode, which ties the key to a version of Python. File and line number do not count: the
same function at another path is the same function.
"""

from __future__ import annotations

import collections
import functools
import inspect
import sys
import types
from typing import TYPE_CHECKING, Any

from asel.kernels.canonical_arrays import dtype_form
from asel.runtime.lazy_module import LazyModule

if TYPE_CHECKING:
    import numpy as np

    from asel.kernels.canonical import Canon, Canonicaliser
else:
    np = LazyModule("numpy", globals(), "np")

__all__ = ["FUNCTION_FORMS", "class_form", "library_function", "name_of", "wrapper_form"]


def name_of(value: Any) -> str:
    return f"{getattr(value, '__module__', None) or ''}:{getattr(value, '__qualname__', None) or value.__name__}"


def _function(self: Canonicaliser, fn: types.FunctionType, path: str) -> Canon:
    cells = []
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            captured = cell.cell_contents
        except ValueError:  # not bound yet
            cells.append((name, ("unbound",)))
        else:
            # JAX's own wrappers, such as vmap's, capture a bare object that means "not given".
            is_default = type(captured) is object and fn.__globals__.get("__name__", "").startswith("jax.")
            form = ("default",) if is_default else self.form(captured, f"{path} closing over {name!r}")
            cells.append((name, form))
    defaults = self.form((fn.__defaults__, fn.__kwdefaults__), f"{path} defaults")
    return ("function", name_of(fn), _code(self, fn.__code__, path), defaults, tuple(cells))


def _code(self: Canonicaliser, code: types.CodeType, path: str) -> Canon:
    return (
        "code",
        code.co_code,
        (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags),
        (code.co_names, code.co_varnames, code.co_freevars),
        self.each(code.co_consts, path),
    )


def _method(self: Canonicaliser, method: types.MethodType, path: str) -> Canon:
    return ("method", self.form(method.__func__, path), self.form(method.__self__, path))


def _partial(self: Canonicaliser, partial: functools.partial[Any], path: str) -> Canon:
    args = self.each(partial.args, f"{path}.args")
    return ("partial", self.form(partial.func, f"{path}.func"), args, self.form(partial.keywords, f"{path}.keywords"))


def _cached_function(self: Canonicaliser, fn: Any, path: str) -> Canon:
    return ("cached", self.form(fn.__wrapped__, path))


def _builtin(self: Canonicaliser, fn: Any, path: str) -> Canon:
    owner = getattr(fn, "__self__", None)
    if owner is None or isinstance(owner, types.ModuleType):
        return ("builtin", name_of(fn))
    return ("bound builtin", fn.__name__, self.form(owner, f"{path}.__self__"))


def _signature(self: Canonicaliser, signature: inspect.Signature, path: str) -> Canon:
    # Annotations do not count: they change no call.
    parameters = signature.parameters.values()
    return ("signature", tuple((p.name, p.kind.name, self.form(p.default, f"{path}.{p.name}")) for p in parameters))


def _generic_alias(self: Canonicaliser, alias: types.GenericAlias, path: str) -> Canon:
    return ("alias", self.form(alias.__origin__, path), self.each(alias.__args__, path))


FUNCTION_FORMS: list[tuple[Any, Any]] = [
    (types.FunctionType, _function),
    (types.MethodType, _method),
    (types.CodeType, _code),
    (functools.partial, _partial),
    (functools._lru_cache_wrapper, _cached_function),
    (types.BuiltinFunctionType, _builtin),
    (inspect.Signature, _signature),
    (types.GenericAlias, _generic_alias),
]


def library_function(value: Any) -> Canon | None:
    """Return the form of a NumPy or JAX callable that can be imported by its name, as pickle requires; or None.

    A wrapper around another function has None: its name says nothing about the user's code inside.
    """
    root = type(value).__module__.partition(".")[0]
    if not callable(value) or root not in ("numpy", "jax", "jaxlib") or (root != "numpy" and _wraps(value)):
        return None
    name = getattr(value, "__name__", None)
    homes = [getattr(value, "__module__", None) or ""]
    if isinstance(value, np.ufunc):  # ufuncs do not know their module
        homes = ["numpy", "scipy.special", "ml_dtypes"]
    if any(getattr(sys.modules.get(home), str(name), None) is value for home in homes):
        return ("importable", homes[0], name)
    return None


def _wraps(value: Any) -> bool:
    return callable(getattr(value, "__dict__", {}).get("__wrapped__"))


def wrapper_form(self: Canonicaliser, value: Any, path: str) -> Canon | None:
    """Return the form of a callable object that wraps a function, as by `functools.update_wrapper`; or None."""
    if not callable(value) or not _wraps(value):
        return None
    return ("wrapper", self.type_of(value, path), self.state(value, path, without=_COPIED))


_COPIED = {*functools.WRAPPER_ASSIGNMENTS, "__type_params__"}


# ---------------------------------------------------------------------------------------------
# Classes.


@functools.cache
def _abstract_scalars() -> set[type]:
    return {base for code in np.typecodes["All"] for base in np.dtype(code).type.__mro__[1:]}


def class_form(self: Canonicaliser, cls: type, path: str) -> Canon:
    if (dtype := _named_dtype(cls)) is not None:
        return dtype_form(dtype)
    if "<locals>" not in cls.__qualname__:
        return ("type", name_of(cls))
    # A function may create several classes of one name, so local classes count by their contents.
    held = {name: _unwrapped(value) for name, value in vars(cls).items() if _is_written(name, value)}
    bases = tuple(self.form(base, path) for base in cls.__bases__)
    return (
        "local type",
        name_of(cls),
        bases,
        tuple((name, self.form(held[name], f"{path}.{name}")) for name in sorted(held)),
    )


def _named_dtype(cls: Any) -> np.dtype[Any] | None:
    """Return the dtype that a class such as `jnp.bfloat16` or `np.float32` stands for; None if it stands for none."""
    if issubclass(cls, np.generic):
        is_concrete = cls not in _abstract_scalars() and np.dtype(cls).type is cls
        return np.dtype(cls) if is_concrete else None
    if type(cls).__name__ == "_ScalarMeta" and isinstance(getattr(cls, "dtype", None), np.dtype):
        return cls.dtype  # type: ignore[no-any-return]
    return None


def _is_written(name: str, value: Any) -> bool:
    """Return whether an attribute was written in the class body, rather than generated by Python or a decorator."""
    if name == "_abc_impl":
        return False
    if not (name.startswith("__") and name.endswith("__")):
        return True
    code = getattr(getattr(value, "__func__", value), "__code__", None)
    # The methods that dataclasses, attrs and namedtuples generate follow from the fields.
    return code is not None and not code.co_filename.startswith("<") and name != "__repr__"


_TupleField: Any = type(vars(collections.namedtuple("_Named", ["x"]))["x"])
_SLOTS = (types.MemberDescriptorType, types.GetSetDescriptorType, _TupleField)


def _unwrapped(value: Any) -> Any:
    """Return the functions inside a descriptor; any other value is returned unchanged."""
    if isinstance(value, staticmethod | classmethod):
        return value.__func__
    if isinstance(value, property):
        return (value.fget, value.fset, value.fdel)
    if isinstance(value, functools.cached_property):
        return value.func
    return "slot" if isinstance(value, _SLOTS) else value
