"""Detects ops whose keys differ in one constant only, as when a step count is passed as a Python number."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from asel.kernels.call_encoding import Encoder
from asel.runtime.bounded_memo import BoundedMemo

__all__ = ["MANY_KEYS", "Churn", "ChurnWatch"]

MANY_KEYS = 64
"""The number of values of one constant that counts as churn. A real model has fewer head dimensions or windows."""
_MAX_GROUPS = 4096
_MAX_CONSTANTS = 256
_PATH = re.compile(r"(?:args\[(\d+)\]|kwargs\['(\w+)'\])(.*)", re.DOTALL)


class Churn(NamedTuple):
    """An op has `keys` keys that differ only in the value of `argument`."""

    argument: str
    keys: int


class ChurnWatch:
    """Counts the values of each constant among calls that are otherwise equal.

    Called for new signatures only; each op is reported once. Memory is bounded: a few thousand groups of calls, each
    with at most `MANY_KEYS` hashes. The least recently used groups are forgotten.
    """

    def __init__(self) -> None:
        self._values: BoundedMemo[set[int]] = BoundedMemo(_MAX_GROUPS)
        self._reported: dict[str, object] = {}

    def note(self, op: str, device: str, encoder: Encoder, names: Sequence[str]) -> Churn | None:
        """Record a new signature. Return the churn, once for each op, when a constant reaches `MANY_KEYS` values."""
        if op in self._reported:
            return None
        for path, value in encoder.constants[:_MAX_CONSTANTS]:
            group = (op, device, path, encoder.parts - value)
            values = self._values.get(group)
            if values is None:
                self._values.put(group, values := set())
            values.add(value)
            if len(values) >= MANY_KEYS:
                mine = object()
                if self._reported.setdefault(op, mine) is not mine:
                    return None  # another thread got here first, and reports
                return Churn(_readable(path, names), len(values))
        return None


def _readable(path: str, names: Sequence[str]) -> str:
    """Return an argument's path in terms of the kernel's parameters: `step`, `options['window']`."""
    found = _PATH.fullmatch(path)
    if found is None:
        return path
    position, name, rest = found.groups()
    if name is None:
        name = names[int(position)] if int(position) < len(names) else f"args[{position}]"
    return f"{name}{rest}"
