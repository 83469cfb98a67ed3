"""Results that could not be stored, and wait until the store works again."""

from __future__ import annotations

from typing import Generic, NamedTuple

from asel.kernels.kernel import Cfg
from asel.kernels.keys import CacheKey
from asel.tuning.outcomes import TuneReport

__all__ = ["UnsavedResult", "UnsavedResults"]

_MAX_RESULTS = 10_000


class UnsavedResult(NamedTuple):
    report: TuneReport  # type: ignore[type-arg]
    replace: bool
    """Whether it replaces an existing record."""


class UnsavedResults(Generic[Cfg]):
    """The latest unsaved result of each key and checksum; beyond a limit, the oldest is dropped.

    A result may be put while an older one of its address is being stored. So a caller notes the waiting result before
    it begins to store, and passes it as `before`: a newer result is neither replaced nor removed.
    """

    def __init__(self) -> None:
        self._results: dict[tuple[CacheKey, str], UnsavedResult] = {}

    def __len__(self) -> int:
        return len(self._results)

    def of(self, key: CacheKey, checksum: str) -> UnsavedResult | None:
        return self._results.get((key, checksum))

    def all(self) -> list[UnsavedResult]:
        return list(self._results.values())

    def put(self, result: UnsavedResult, before: UnsavedResult | None) -> None:
        if self.remove(result.report, before):
            self._results[result.report.key, result.report.checksum] = result
        while len(self._results) > _MAX_RESULTS:
            del self._results[next(iter(self._results))]

    def remove(self, report: TuneReport[Cfg], before: UnsavedResult | None) -> bool:
        """Remove the result that waits at a report's address; False if a newer one took its place."""
        address = (report.key, report.checksum)
        if self._results.get(address) is not before:
            return False
        self._results.pop(address, None)
        return True
