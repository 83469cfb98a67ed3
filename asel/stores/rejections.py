"""Reports records that cannot be used to the selectors that listen."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from asel.runtime.bounded_memo import BoundedMemo
from asel.stores.records import Address, Rejected, log_rejected

__all__ = ["Rejections"]


class Rejections:
    """Reports rejected records to the selectors that listen; to the log if none does."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[Rejected], object]] = []
        self._reported: BoundedMemo[bool] = BoundedMemo(1024)

    @asynccontextmanager
    async def to(self, listener: Callable[[Rejected], object]) -> AsyncIterator[None]:
        """Report to a listener while the block runs."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    def report(self, rejected: Rejected) -> None:
        for listener in list(self._listeners) or [log_rejected]:
            listener(rejected)

    def report_once(self, address: Address, created: float, rejected: Rejected) -> None:
        """Report a record that may be read repeatedly: once for each reason."""
        what = (address, created, rejected.reason)
        if self._reported.get(what) is None:
            self._reported.put(what, True)
            self.report(rejected)
