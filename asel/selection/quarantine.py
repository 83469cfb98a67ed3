"""Configs that failed in a real call: for a while, they are neither tuned nor taken from a store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

from asel.kernels.candidates import same_config
from asel.kernels.kernel import Cfg
from asel.kernels.keys import CacheKey
from asel.runtime.bounded_memo import BoundedMemo
from asel.runtime.fork import renew_after_fork

__all__ = ["Quarantine"]

_MAX_KEYS = 65_536


@dataclass(frozen=True, slots=True)
class _Barred(Generic[Cfg]):
    cfg: Cfg
    for_s: float
    until: float


class Quarantine(Generic[Cfg]):
    """The barred configs of each key. Safe to use from any thread; `ConfigCache.clear` does not empty it."""

    def __init__(self) -> None:
        self.clock: Callable[[], float] = time.monotonic
        self._lock = threading.Lock()
        self._barred: BoundedMemo[tuple[_Barred[Cfg], ...]] = BoundedMemo(_MAX_KEYS)
        # Keys whose config may be tried again, until a tune of the key begins.
        self._due: set[CacheKey] = set()
        renew_after_fork(self)

    def renew(self) -> None:
        """In the child of a fork: a new lock."""
        self._lock = threading.Lock()

    def bar(self, key: CacheKey, cfg: Cfg, for_s: float = 300.0) -> bool:
        """Bar a config for `for_s` seconds; return False if it is barred already.

        The time doubles each time the config fails again.
        """
        with self._lock:
            if self.is_barred(key, cfg):
                return False
            barred = self._barred.get(key) or ()
            before = next((one for one in barred if same_config(one.cfg, cfg)), None)
            for_s = for_s if before is None else 2 * before.for_s
            others = (one for one in barred if one is not before)
            self._barred.put(key, (*others, _Barred(cfg, for_s, self.clock() + for_s)))
            return True

    def is_barred(self, key: CacheKey, cfg: Cfg) -> bool:
        return any(same_config(failed, cfg) for failed in self.configs(key))

    def configs(self, key: CacheKey) -> tuple[Cfg, ...]:
        """Return the configs of a key that are barred now."""
        barred = self._barred.get(key)
        return () if barred is None else tuple(one.cfg for one in barred if self.clock() < one.until)

    def seconds(self, key: CacheKey, cfg: Cfg) -> float:
        """Return how long a config was last barred for; zero if it never was."""
        return next((one.for_s for one in self._barred.get(key) or () if same_config(one.cfg, cfg)), 0.0)

    def mark_due(self, key: CacheKey) -> None:
        """Record that a key should be tuned again, since its config is no longer barred."""
        with self._lock:
            self._due.add(key)

    def is_due(self, key: CacheKey) -> bool:
        """Return whether a key should be tuned again, and no tune of it has begun."""
        return key in self._due

    def take_due(self, key: CacheKey) -> bool:
        """Do the same; only the first caller gets True, and has to begin the tune."""
        if key not in self._due:
            return False
        with self._lock:
            if key not in self._due:
                return False
            self._due.discard(key)
            return True
