"""Warnings about keys that could be tuned and are not: each once, with a remedy.

Otherwise nothing would show it, and a heuristic may be many times slower than the best candidate.
"""

from __future__ import annotations

import logging
import sys
import warnings

from asel.errors import UntunedWarning
from asel.kernels.keys import CacheKey

__all__ = ["UntunedWarnings"]

logger = logging.getLogger("asel")
_MAX_REMEMBERED = 65_536


class UntunedWarnings:
    """Warns once for each key and remedy, for one selector."""

    def __init__(self) -> None:
        self._given: dict[tuple[CacheKey, str], object] = {}

    def warn(self, key: CacheKey, why: str, remedy: str) -> None:
        """Warn that a key is not tuned; may be called from any thread."""
        first = object()
        if len(self._given) >= _MAX_REMEMBERED:
            self._given.clear()
        if self._given.setdefault((key, remedy), first) is not first:
            return
        call = f"({key.call})" if key.call else ""
        text = f"{key.op_id}{call} on {key.device.partition('|')[0]} is not tuned: {why}. {remedy}"
        try:
            warnings.warn(text, UntunedWarning, stacklevel=_caller_level())
        except UntunedWarning:
            # The program turns warnings into errors. This one must not cost a call its answer, or break a tune.
            logger.warning("%s", text)


def _caller_level() -> int:
    """Return the `stacklevel` for the caller of this function that points at the nearest code outside of asel."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "asel":
        level, frame = level + 1, frame.f_back
    return level
