"""Numbers that are exact, whichever threads count."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count

__all__ = ["Count", "Tally"]


class Count:
    """A number that any thread may add one to, without a lock and without losing any.

    `add` is one step in C and returns how many there were before, those looked at with `value` included.
    """

    __slots__ = ("_lock", "_looks", "add")

    def __init__(self) -> None:
        self.add: Callable[[], int] = count().__next__
        self._looks = 0
        self._lock = threading.Lock()

    @property
    def value(self) -> int:
        with self._lock:
            # The only way to read such a number is to take one.
            value = self.add() - self._looks
            self._looks += 1
            return value


class Tally:
    """How many answers each tier gave for each op.

    `hits[op]()` counts an answer from memory, in as few steps as there can be, and returns a number that
    grows with each.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], Count] = {}
        self.hits = _Hits(self)

    def clear(self) -> None:
        """Begin at zero, with locks that nobody holds: a forked child has selections of its own."""
        self._counts.clear()
        self.hits.clear()

    def add(self, op: str, tier: str) -> None:
        self._count(op, tier).add()

    def _count(self, op: str, tier: str) -> Count:
        # One of two threads that come at once sets the default, and both get that one.
        return self._counts.get((op, tier)) or self._counts.setdefault((op, tier), Count())

    def ops(self) -> set[str]:
        """Return the ops that were answered for."""
        return {op for op, _ in list(self._counts)}

    def read(self) -> dict[tuple[str, str], int]:
        """Return the answers so far, by op and tier."""
        return {address: counted.value for address, counted in list(self._counts.items())}


class _Hits(dict[str, Callable[[], int]]):
    def __init__(self, tally: Tally) -> None:
        self._tally = tally

    def __missing__(self, op: str) -> Callable[[], int]:
        return self.setdefault(op, self._tally._count(op, "memory").add)
