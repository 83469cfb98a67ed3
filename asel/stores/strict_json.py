"""JSON for stores: finite numbers only, parsed and written without blocking the event loop for long.

The C code of `json` holds the GIL until it is done, in a worker thread too: a record of two megabytes would stop the
event loop for a tenth of a second. So a large text is parsed with hooks written in Python, and a value is written
piece by piece: between two hooks or pieces, other threads can run.
"""

from __future__ import annotations

import json
import math
from typing import Any

__all__ = ["discard", "dumps", "first", "loads", "value_at"]

# The largest text parsed by C code alone, which takes under two milliseconds.
_LARGE = 1 << 16
# The depth to which values are written one by one: a report's outcomes are at this depth.
_PIECES_DEPTH = 3


def loads(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is not JSON, or has a number that is not finite.
        RecursionError: it is nested too deeply for the parser.
    """
    if isinstance(text, bytes):
        text = text.decode()
    return (_LARGE_TEXTS if len(text) > _LARGE else _SMALL_TEXTS).decode(text)


def first(text: str) -> str:
    """Return the first JSON value of a text, as text, without anything that follows it.

    Raises:
        ValueError: it does not begin with one.
        RecursionError: it is nested too deeply for the parser.
    """
    return text[: value_at(text, 0)[1]]


def value_at(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON value that begins at `start`, and the index of its end.

    Raises:
        ValueError: no value begins there.
        RecursionError: it is nested too deeply for the parser.
    """
    return (_LARGE_TEXTS if len(text) > _LARGE else _SMALL_TEXTS).raw_decode(text, start)


def dumps(value: Any, depth: int = 0) -> str:
    """Return a value as JSON on one line: ASCII, keys sorted, so that equal values have equal texts.

    Raises:
        TypeError: it has no JSON form.
        ValueError: it has a number that is not finite.
    """
    if depth < _PIECES_DEPTH and type(value) is dict:
        pieces = (f"{_ENCODER.encode(_key(key))}:{dumps(value[key], depth + 1)}" for key in sorted(value))
        return f"{{{','.join(pieces)}}}"
    if depth < _PIECES_DEPTH and type(value) in (list, tuple):
        return f"[{','.join([dumps(inner, depth + 1) for inner in value])}]"
    return _ENCODER.encode(value)


def discard(value: Any, depth: int = 0) -> None:
    """Empty a parsed value that is no longer used, piece by piece: freeing two megabytes at once takes 12 ms."""
    if depth < _PIECES_DEPTH and type(value) in (dict, list):
        while value:
            discard(value.popitem()[1] if type(value) is dict else value.pop(), depth + 1)


def _key(key: Any) -> str:
    if not isinstance(key, str):
        raise TypeError(f"{key!r} is the key of a JSON object, and must be a string")
    return key


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant[:40]} is not a JSON number")


def _finite(digits: str) -> float:
    number = float(digits)
    return number if math.isfinite(number) else _refuse(digits)


def _whole(digits: str) -> int:
    return int(digits)


def _unchanged(value: dict[str, Any]) -> dict[str, Any]:
    return value


_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)
_SMALL_TEXTS = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)
# Returns the same values. At each call of a hook, which is Python code, another thread may take the GIL.
_LARGE_TEXTS = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite, parse_int=_whole, object_hook=_unchanged)
