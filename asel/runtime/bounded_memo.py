"""A bounded mapping for values that can be computed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

__all__ = ["BoundedMemo"]

T = TypeVar("T")


class BoundedMemo(Generic[T]):
    """A bounded mapping that costs one dict look-up on a hit.

    It has two generations: when the young one is full, it replaces the old one. An old entry that is read moves to the
    young generation, so entries that are not read for a whole generation are forgotten. No lock: each step is one
    dict operation, and a race costs one recomputation at most.

    `min_capacity` returns a number of entries to have room for, even if it exceeds `max_entries`.
    """

    def __init__(self, max_entries: int, min_capacity: Callable[[], int] = lambda: 0) -> None:
        self._half = max(1, max_entries // 2)
        self._min_capacity = min_capacity
        self.young: dict[Any, T] = {}
        self._old: dict[Any, T] = {}

    def get(self, key: Any) -> T | None:
        found = self.young.get(key)
        if found is None and (found := self._old.get(key)) is not None:
            self.put(key, found)
        return found

    def put(self, key: Any, value: T) -> None:
        if len(self.young) >= self._half and len(self.young) >= self._min_capacity():
            self._old, self.young = self.young, {}
        self.young[key] = value

    def forget(self, key: Any) -> None:
        self.young.pop(key, None)
        self._old.pop(key, None)

    def replace_all(self, change: Callable[[T], T]) -> None:
        """Replace every value by `change(value)`."""
        for generation in (self.young, self._old):
            for key in list(generation):
                generation[key] = change(generation[key])

    def __len__(self) -> int:
        return len(self.young.keys() | self._old.keys())
