"""The readable form of a call: `q=bf16[8,1024,128], k=bf16[8,1024,128], causal=True`.

Computed once for each new signature. Values are shortened, so it does not identify the call: the key does.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from asel.kernels.arguments import children_of, has_attribute
from asel.kernels.buckets import Bucketing
from asel.kernels.kernel_methods import positional_names
from asel.redaction import redact
from asel.runtime.lazy_module import LazyModule

if TYPE_CHECKING:
    import numpy as np
else:
    np = LazyModule("numpy", globals(), "np")

__all__ = ["MAX_CALL_CHARS", "call_text", "short_dtype_name"]

MAX_CALL_CHARS = 240
"""Room for a dozen arrays. A log line with a call and a config stays under 500 characters."""
_MAX_VALUE_CHARS = 40
_MAX_ITEMS = 4
"""The number of items of a container that are shown; the rest are counted."""
_MAX_DEPTH = 3

_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


def call_text(inv: Any, kernel: Any = None, bucketing: Bucketing | None = None) -> str:
    """Return the call in at most `MAX_CALL_CHARS` characters, with arguments by the kernel's parameter names.

    A bucketed dimension is shown by its bound (`<=1024`), since calls of one bucket share a key.
    """
    parts: list[str] = []
    left = MAX_CALL_CHARS
    named = list(_named(inv, kernel))
    for shown, (name, path, value) in enumerate(named):
        text = _describe(value, path, bucketing, _MAX_DEPTH)
        part = f"{name}={text}" if name else text
        left -= len(part) + 2
        if left < len(", ... 999 more"):
            parts.append(_shortened(part, MAX_CALL_CHARS // 2) if not parts else f"... {len(named) - shown} more")
            break
        parts.append(part)
    return ", ".join(parts)[:MAX_CALL_CHARS]


def _named(inv: Any, kernel: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield the name, path and value of each argument, in the order of the parameters."""
    names = [name for name, _ in positional_names(kernel)]
    for i, value in enumerate(inv.args):
        yield (names[i] if i < len(names) else ""), f"args[{i}]", value
    rank = {name: i for i, name in enumerate(names)}
    for name in sorted(inv.kwargs, key=lambda name: (rank.get(name, len(rank)), name)):
        yield name, f"kwargs[{name!r}]", inv.kwargs[name]


def _describe(value: Any, path: str, bucketing: Bucketing | None, depth: int) -> str:
    if value is None or isinstance(value, bool | int | float | complex):
        return _shortened(f"{value.name}" if isinstance(value, enum.Enum) else repr(value))
    if isinstance(value, str | bytes):
        return _shortened(repr(redact(value) if isinstance(value, str) else value[: _MAX_VALUE_CHARS + 1]))
    if (array := _array(value, path, bucketing)) is not None:
        return array
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, np.dtype):
        return _short_dtype(value)
    if isinstance(value, functools.partial):
        return f"partial({_describe(value.func, path, bucketing, depth)})"
    if (name := _name_of_code(value)) is not None:
        return _shortened(name)
    kind = type(value).__name__
    if depth == 0:
        return f"{kind}(...)"
    if type(value) is dict:
        items = ((str(key), f"{path}[{key!r}]", item) for key, item in value.items())
        return "{" + _items(items, len(value), ": ", bucketing, depth) + "}"
    if type(value) in (tuple, list):
        opening, closing = "()" if type(value) is tuple else "[]"
        indexed = (("", f"{path}[{i}]", item) for i, item in enumerate(value))
        return opening + _items(indexed, len(value), "", bucketing, depth) + closing
    if (node := children_of(value)) is not None:
        steps = ((step.strip(".[]'"), path + step, child) for step, child in node[0])
        return f"{kind}({_items(steps, len(node[0]), '=', bucketing, depth)})"
    return kind


def _items(
    items: Iterable[tuple[str, str, Any]], count: int, separator: str, bucketing: Bucketing | None, depth: int
) -> str:
    shown = [
        (name + separator if name and separator else "") + _describe(value, path, bucketing, depth - 1)
        for name, path, value in islice(items, _MAX_ITEMS)
    ]
    if count > _MAX_ITEMS:
        shown.append(f"... {count - _MAX_ITEMS} more")
    return ", ".join(shown)


def _array(value: Any, path: str, bucketing: Bucketing | None) -> str | None:
    shape, dtype = _attribute(value, "shape"), _attribute(value, "dtype")
    if dtype is None or not isinstance(shape, tuple):
        return None
    dims: tuple[Any, ...] = shape if bucketing is None else bucketing.apply(path, shape)[0]
    return f"{_short_dtype(dtype)}[{','.join(f'<={d[1]}' if type(d) is tuple else str(d) for d in dims)}]"


def _attribute(value: Any, name: str) -> Any:
    """Return an attribute of an array-like object; None for a class, whose properties describe its instances."""
    return None if isinstance(value, type) or not has_attribute(value, name) else getattr(value, name, None)


def short_dtype_name(name: str) -> str:
    kind = name.rstrip("0123456789")
    return _SHORT[kind] + name[len(kind) :] if kind in _SHORT and kind != name else name


@functools.lru_cache(maxsize=256)
def _short_dtype(dtype: Any) -> str:
    return short_dtype_name(str(getattr(dtype, "name", dtype)))


def _name_of_code(value: Any) -> str | None:
    if isinstance(value, type) or callable(value):
        name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
        return name if isinstance(name, str) else None
    return None


def _shortened(text: str, limit: int = _MAX_VALUE_CHARS) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
