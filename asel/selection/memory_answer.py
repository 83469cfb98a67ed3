"""The memory tier's last answer to a signature, for repeated calls to reuse without a walk."""

from __future__ import annotations

from typing import Generic

from asel.kernels.kernel import Cfg
from asel.selection.cache import ConfigCache
from asel.selection.policy import AutotunePolicy

__all__ = ["MemoryAnswer"]


class MemoryAnswer(Generic[Cfg]):
    """An answer, with the policy and the cache generation it was given under. Immutable, since threads share it."""

    __slots__ = ("_cache", "_generation", "_policy", "cfg", "checksum")

    def __init__(
        self, cfg: Cfg, checksum: str, policy: AutotunePolicy, cache: ConfigCache[Cfg], generation: int
    ) -> None:
        self.cfg = cfg
        self.checksum = checksum
        self._policy = policy
        self._cache = cache
        self._generation = generation

    def is_current(self, policy: AutotunePolicy) -> bool:
        """Return whether cache and policy are unchanged, so that the memory tier would give the same answer."""
        return self._generation == self._cache.generation and self._policy is policy
