"""How long something was under way, however many of its steps overlapped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import anyio

__all__ = ["Meter"]


class Meter:
    """Runs while at least one step does."""

    def __init__(self) -> None:
        self._before_s = 0.0
        self._since = 0.0
        self._steps = 0

    @property
    def seconds(self) -> float:
        return self._before_s + (anyio.current_time() - self._since if self._steps else 0.0)

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
