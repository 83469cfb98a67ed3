"""The time that a tune may spend, and the time that it has spent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import anyio

__all__ = ["Budget"]


class Budget:
    """Counts the time in which at least one step of the tune runs: overlapping steps count once, waiting is free."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._before_s = 0.0
        self._since = 0.0
        self._steps = 0

    @property
    def spent_s(self) -> float:
        return self._before_s + (anyio.current_time() - self._since if self._steps else 0.0)

    @property
    def is_spent(self) -> bool:
        return self.spent_s >= self.limit_s

    @contextmanager
    def running(self) -> Iterator[None]:
        if self._steps == 0:
            self._since = anyio.current_time()
        self._steps += 1
        try:
            yield
        finally:
            self._steps -= 1
            if self._steps == 0:
                self._before_s += anyio.current_time() - self._since
