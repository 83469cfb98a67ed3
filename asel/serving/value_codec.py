"""The arguments of a call as JSON: arrays by shape and dtype, and everything else by value or import path.

None, booleans, numbers, text and lists stand for themselves. Everything else is an object with one tag:
`{"array": "f32[8,128]"}`, `{"tuple": [...]}`, `{"dict": {...}}`, `{"items": [[key, value], ...]}`, `{"dtype": "bf16"}`,
`{"float": "inf"}`, `{"complex": "1+2j"}`, `{"bytes": "00ff"}`, `{"import": "package.module:name"}` for functions,
classes and enum members, `{"partial": function, "args": [...], "kwargs": {...}}`, and
`{"make": "package.module:Class", "fields": {...}}` for dataclasses and named tuples.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np

from asel.errors import InvalidRequestError
from asel.kernels.arguments import is_numeric
from asel.kernels.call_parsing import parse_value
from asel.kernels.call_text import call_text
from asel.kernels.kernel import Invocation
from asel.redaction import redact
from asel.serving.import_paths import imported, path_of

__all__ = ["decoded", "encoded"]


def encoded(value: Any, path: str) -> Any:
    """Return `value` as JSON.

    Raises:
        InvalidRequestError: it cannot be written. The message begins with `path`.
    """
    import jax

    if value is None or type(value) in (bool, int):
        return value
    if type(value) is str:
        if redact(value) != value:
            raise InvalidRequestError(f"{path} is text that contains a secret")
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if type(value) is complex:
        return {"complex": repr(value)}
    if type(value) is bytes:
        return {"bytes": value.hex()}
    if isinstance(value, jax.Array | jax.ShapeDtypeStruct) or is_numeric(value):
        return _encoded_array(value, path)
    if isinstance(value, np.dtype):
        return {"dtype": _text(value)}
    if type(value) is list:
        return [encoded(item, f"{path}[{i}]") for i, item in enumerate(value)]
    if type(value) is tuple:
        return {"tuple": [encoded(item, f"{path}[{i}]") for i, item in enumerate(value)]}
    if type(value) is dict:
        if all(type(key) is str for key in value):
            return {"dict": {key: encoded(item, f"{path}[{key!r}]") for key, item in value.items()}}
        pairs = [[encoded(key, f"{path} key"), encoded(item, f"{path}[{key!r}]")] for key, item in value.items()]
        return {"items": pairs}
    if type(value) is functools.partial:
        args = [encoded(arg, f"{path}.args[{i}]") for i, arg in enumerate(value.args)]
        kwargs = {name: encoded(item, f"{path}.{name}") for name, item in value.keywords.items()}
        return {"partial": encoded(value.func, f"{path}.func"), "args": args, "kwargs": kwargs}
    if (names := _fields_of(type(value))) is not None and (cls := path_of(type(value))) is not None:
        return {"make": cls, "fields": {name: encoded(getattr(value, name), f"{path}.{name}") for name in names}}
    if (found := path_of(value)) is not None:
        return {"import": found}
    raise InvalidRequestError(f"{path} is a {type(value).__name__}, which has neither a value nor an import path")


def decoded(value: Any) -> Any:
    """Return the value that `encoded` wrote.

    Raises:
        InvalidRequestError: `value` is not in the form that `encoded` writes.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [decoded(item) for item in value]
    try:
        return _of_tag(value)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, InvalidRequestError):
            raise
        raise InvalidRequestError(f"{value!r} cannot be read: {type(error).__name__}: {error}") from error


def _of_tag(value: dict[str, Any]) -> Any:
    import jax

    match value:
        case {"array": str(text), **weak}:
            array = parse_value(text)
            if not isinstance(array, jax.ShapeDtypeStruct):
                raise InvalidRequestError(f"{text!r} is not an array; write dtype[shape], as in f32[8,128]")
            weak_type = weak.get("weak") is True
            return jax.ShapeDtypeStruct(array.shape, array.dtype, weak_type=weak_type)  # type: ignore[no-untyped-call]
        case {"tuple": list(items)}:
            return tuple(decoded(item) for item in items)
        case {"dict": dict(items)}:
            return {key: decoded(item) for key, item in items.items()}
        case {"items": list(pairs)}:
            return {decoded(key): decoded(item) for key, item in pairs}
        case {"dtype": str(text)}:
            return parse_value(text)
        case {"float": str(text)}:
            return float(text)
        case {"complex": str(text)}:
            return complex(text)
        case {"bytes": str(text)}:
            return bytes.fromhex(text)
        case {"import": str(path)}:
            return imported(path)
        case {"partial": function, "args": list(args), "kwargs": dict(kwargs)}:
            keywords = {name: decoded(item) for name, item in kwargs.items()}
            return functools.partial(decoded(function), *map(decoded, args), **keywords)
        case {"make": str(path), "fields": dict(fields)}:
            cls = imported(path)
            if _fields_of(cls) is None:
                raise InvalidRequestError(f"{path!r} is not a dataclass or a named tuple")
            return cls(**{name: decoded(field) for name, field in fields.items()})
    raise InvalidRequestError(f"{value!r} has none of the tags {', '.join(_TAGS)}")


_TAGS = ("array", "tuple", "dict", "items", "dtype", "float", "complex", "bytes", "import", "partial", "make")


def _encoded_array(value: Any, path: str) -> Any:
    if (mesh := getattr(getattr(value, "sharding", None), "mesh", None)) is not None and mesh.size > 1:
        raise InvalidRequestError(f"{path} is sharded over {mesh.size} devices")
    text = {"array": _text(value)}
    return {**text, "weak": True} if getattr(value, "weak_type", False) else text


def _text(value: Any) -> str:
    return call_text(Invocation("", (value,), {}))


def _fields_of(cls: Any) -> list[str] | None:
    """Return the field names of a dataclass or a named tuple; None for any other class."""
    if not isinstance(cls, type):
        return None
    if dataclasses.is_dataclass(cls):
        return [field.name for field in dataclasses.fields(cls) if field.init]
    return list(cls._fields) if issubclass(cls, tuple) and hasattr(cls, "_fields") else None
