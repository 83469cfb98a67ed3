"""Reads and changes any number of records, a bounded number at a time.

Thousands of records are kept as text only: Python's garbage collector skips text, while a pass over that many dicts
and lists stops every thread for a tenth of a second and more.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field

from asel.stores.protocol import READ_BATCH, Change, Changed, Store, optional_method
from asel.stores.records import Address, Record

__all__ = ["Page", "apply_page", "record_batches"]

# The changes of one page: a document is rewritten once for each page, and freeing a page takes 3 ms.
_MAX_CHANGES = 2048
_MAX_BYTES = 64 << 20


async def record_batches(store: Store, filter: Callable[[Record], bool] | None) -> AsyncGenerator[list[Record]]:
    """Give the records of a store that pass a filter, `READ_BATCH` at a time."""
    batch: list[Record] = []
    async with aclosing(store.records()) as listing:  # type: ignore[type-var]
        async for record in listing:
            if filter is None or filter(record):
                batch.append(record)
            if len(batch) == READ_BATCH:
                yield batch
                batch = []
    yield batch


@dataclass(slots=True)
class Page:
    """Changes that are made together."""

    changes: dict[Address, Change] = field(default_factory=dict)
    size: int = 0

    def add(self, change: Change) -> bool:
        """Add a change; return False if the page already has one for its address."""
        if self.changes.setdefault(change.address, change) is not change:
            return False
        self.size += len(change.line) + len(change.expected)
        return True

    @property
    def is_full(self) -> bool:
        return len(self.changes) >= _MAX_CHANGES or self.size > _MAX_BYTES


async def apply_page(store: Store, page: Page) -> list[Changed]:
    """Make the changes of a page; return their results, in order."""
    if not page.changes:
        return []
    return await optional_method(store, "apply")(list(page.changes.values()))  # type: ignore[no-any-return]
