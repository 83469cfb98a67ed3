"""An exact counter that threads share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count

from asel.runtime.fork import renew_after_fork

__all__ = ["Count"]


class Count:
    """A counter that any thread may increment without a lock.

    `add` is one step in C, so no increment is lost. Its return value means nothing: reading `value` increments it, too.
    """

    __slots__ = ("__weakref__", "_lock", "_reads", "add")

    def __init__(self) -> None:
        self.add: Callable[[], int] = count().__next__
        self._reads = 0
        self.renew()
        renew_after_fork(self)

    def renew(self) -> None:
        """Replace the lock: in the child of a fork, a copied lock may stay held forever."""
        self._lock = threading.Lock()

    @property
    def value(self) -> int:
        with self._lock:
            # `count` can only be read by incrementing it.
            value = self.add() - self._reads
            self._reads += 1
            return value
