"""The readable form of a config, `Blocks(m=64, n=128)`; and of a list, without the fields its configs share."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from asel.redaction import redact

__all__ = ["MAX_CONFIG_CHARS", "config_text", "config_texts", "one_line"]

MAX_CONFIG_CHARS = 120
"""Room for eight fields. With a call of 240 characters, a line stays under 500."""
_MAX_SHARED_CHARS = 160
_MAX_VALUE_CHARS = 40
_UNSET = object()


def one_line(text: str, limit: int) -> str:
    """Return text without line breaks, in at most `limit` characters."""
    text = " ".join(text.split())
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def config_text(cfg: Any, limit: int = MAX_CONFIG_CHARS) -> str:
    """Return a config of any class in at most `limit` characters."""
    try:
        return one_line(redact(str(cfg)), limit)
    except Exception:  # a user's `__str__`
        return type(cfg).__name__


def config_texts(cfgs: Sequence[Any], limit: int = MAX_CONFIG_CHARS) -> tuple[list[str], str]:
    """Return configs without the fields they share, `Blocks(m=64, ...)`, and the shared fields, `n=1`.

    Nothing is left out if configs have no fields, are of several classes, or share all fields or none.
    """
    fields = [_fields_of(cfg) for cfg in cfgs]
    names = fields[0].keys() if fields else ()
    kinds = {type(cfg) for cfg in cfgs}
    if len(kinds) != 1 or not names or any(each.keys() != names for each in fields):
        return [config_text(cfg, limit) for cfg in cfgs], ""
    texts = [{name: _value_text(value) for name, value in each.items()} for each in fields]
    shared = [name for name in names if len({each[name] for each in texts}) == 1]
    if not shared or len(shared) == len(names):
        return [config_text(cfg, limit) for cfg in cfgs], ""
    # One long value would leave no room for the fields after it.
    shown = [{name: one_line(text, _MAX_VALUE_CHARS) for name, text in each.items()} for each in texts]
    kind = kinds.pop()
    differing = [[(name, text) for name, text in each.items() if name not in shared] for each in shown]
    lines = [one_line(_abbreviated(kind, items), limit) for items in differing]
    return lines, one_line(", ".join(f"{name}={shown[0][name]}" for name in shared), _MAX_SHARED_CHARS)


def _abbreviated(kind: type, items: Iterable[tuple[str, str]]) -> str:
    if issubclass(kind, dict):
        return "{" + "".join(f"{name!r}: {text}, " for name, text in items) + "...}"
    return f"{kind.__name__}({''.join(f'{name}={text}, ' for name, text in items)}...)"


def _fields_of(cfg: Any) -> Mapping[str, Any]:
    if isinstance(cfg, dict):
        return {str(name): value for name, value in cfg.items()}
    if dataclasses.is_dataclass(cfg):
        named = [field.name for field in dataclasses.fields(cfg) if field.repr]
    else:  # named tuples and pydantic's models
        named = list(getattr(type(cfg), "_fields", None) or getattr(type(cfg), "model_fields", None) or ())
    return {name: getattr(cfg, name, _UNSET) for name in named}


def _value_text(value: Any) -> str:
    try:
        return redact(repr(value))
    except Exception:  # a user's `__repr__`
        return type(value).__name__
