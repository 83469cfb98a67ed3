"""A count that is exact, whichever threads add to it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count

from asel.runtime.fork import renew_after_fork

__all__ = ["Count"]


class Count:
    """A number that any thread may add one to, without a lock and without losing any.

    `add` is one step in C. It returns a number that grows with each call; reading `value` makes it grow, too.
    """

    __slots__ = ("__weakref__", "_lock", "_looks", "add")

    def __init__(self) -> None:
        self.add: Callable[[], int] = count().__next__
        self._looks = 0
        self.renew()
        renew_after_fork(self)

    def renew(self) -> None:
        """In the child of a fork: a lock that nobody holds."""
        self._lock = threading.Lock()

    @property
    def value(self) -> int:
        with self._lock:
            # The only way to read such a number is to take one.
            value = self.add() - self._looks
            self._looks += 1
            return value
