"""Exact counts of the answers by op and tier, from any thread."""

from __future__ import annotations

from collections.abc import Callable

from asel.runtime.counter import Count

__all__ = ["AnswerCounters"]


class AnswerCounters:
    """Counts the answers of each tier for each op.

    `hits[op]()` counts an answer from memory in a single call, and returns a number that grows with every call.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], Count] = {}
        self.hits = _Hits(self)

    def clear(self) -> None:
        """Start from zero with new locks, as in a forked child, which counts its own selections."""
        self._counts.clear()
        self.hits.clear()

    def add(self, op: str, tier: str) -> None:
        self._count(op, tier).add()

    def _count(self, op: str, tier: str) -> Count:
        # If two threads get here at once, one sets the default and both use it.
        return self._counts.get((op, tier)) or self._counts.setdefault((op, tier), Count())

    def ops(self) -> set[str]:
        """Return the ops that have had an answer."""
        return {op for op, _ in list(self._counts)}

    def read(self) -> dict[tuple[str, str], int]:
        """Return the answers so far, by op and tier."""
        return {address: counted.value for address, counted in list(self._counts.items())}


class _Hits(dict[str, Callable[[], int]]):
    def __init__(self, counters: AnswerCounters) -> None:
        self._counters = counters

    def __missing__(self, op: str) -> Callable[[], int]:
        return self.setdefault(op, self._counters._count(op, "memory").add)
