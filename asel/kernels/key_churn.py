"""Notices an op whose keys differ in one constant only, as when a step count is passed as a Python number."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from asel.kernels.call_encoding import Encoder
from asel.runtime.bounded_memo import BoundedMemo

__all__ = ["MANY_KEYS", "Churn", "ChurnWatch"]

MANY_KEYS = 64
"""Values of one constant that count as churn: more than the head dimensions, windows and flags of a real model."""
_MAX_GROUPS = 4096
_MAX_CONSTANTS = 256
_PATH = re.compile(r"(?:args\[(\d+)\]|kwargs\['(\w+)'\])(.*)", re.DOTALL)


class Churn(NamedTuple):
    """One op has `keys` keys that differ in the value of `argument` only."""

    argument: str
    keys: int


class ChurnWatch:
    """Counts, for each constant of an op's calls, the values it had in calls that were equal but for it.

    Called for new signatures only; each op is reported once. Memory is bounded: some thousands of groups of calls,
    each with at most `MANY_KEYS` hashes. The least recently met groups are forgotten.
    """

    def __init__(self) -> None:
        self._values: BoundedMemo[set[int]] = BoundedMemo(_MAX_GROUPS)
        self._told: dict[str, object] = {}

    def note(self, op: str, device: str, encoder: Encoder, names: Sequence[str]) -> Churn | None:
        """Take note of a new signature; return the churn that it completes, once for each op."""
        if op in self._told:
            return None
        for path, value in encoder.constants[:_MAX_CONSTANTS]:
            group = (op, device, path, encoder.parts - value)
            values = self._values.get(group)
            if values is None:
                self._values.put(group, values := set())
            values.add(value)
            if len(values) >= MANY_KEYS:
                mine = object()
                # One of several threads that come this far at once is the first.
                return Churn(_readable(path, names), len(values)) if self._told.setdefault(op, mine) is mine else None
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
