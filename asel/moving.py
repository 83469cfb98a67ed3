"""Caches on the move: out of one store as a document, into another, and away with what is old."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from asel.errors import InvalidRequestError
from asel.stores.document import records_in
from asel.stores.protocol import Store
from asel.stores.records import SCHEMA, Address, Record, RecordError

__all__ = ["Imported", "export", "import_", "prune"]


@dataclass(frozen=True, slots=True)
class Imported:
    """What became of the records of a document."""

    imported: int
    skipped: tuple[tuple[Address, str], ...] = ()
    """What was there already."""
    mismatched: tuple[tuple[str, str], ...] = ()
    """What could not be taken in, and why."""


async def export(store: Store, filter: Callable[[Record], bool] | None) -> dict[str, Any]:
    """Return a store's records as a document."""
    records = [record async for record in store.records() if filter is None or filter(record)]
    lines = [record.line() for record in sorted(records, key=lambda record: record.address)]
    return {"asel": SCHEMA, "records": list(map(json.loads, lines))}


async def import_(store: Store, document: Mapping[str, Any], load: Callable[[Any], object]) -> Imported:
    """Put a document's records into a store, those that `load` can read."""
    try:
        table, bad = records_in(document, "the document")
    except RecordError as error:
        raise InvalidRequestError(f"this cannot be imported: {error}") from error
    mismatched = [(rejected.where, rejected.reason) for rejected in bad]
    imported, skipped = 0, []
    for address, record in table.items():
        try:
            load(record.cfg)
        except RecordError as error:
            mismatched.append((f"the record of {address.key}", str(error)))
            continue
        before = await store.get(address)
        stored = before or await store.put(record)
        if before is None and stored == record:
            imported += 1
        else:
            skipped.append((address, "there already" + ("" if stored.cfg == record.cfg else ", with another config")))
    return Imported(imported, tuple(skipped), tuple(mismatched))


async def prune(
    store: Store,
    predicate: Callable[[Record], bool] | None,
    older_than: float | datetime.timedelta | None,
    not_environment: Mapping[str, str] | None,
) -> int:
    """Delete the records that any of the conditions names."""
    if predicate is None and older_than is None and not_environment is None:
        raise InvalidRequestError("prune: say what to delete: a predicate, older_than= or not_environment=")
    age_s = older_than.total_seconds() if isinstance(older_than, datetime.timedelta) else older_than
    now = time.time()

    def is_condemned(record: Record) -> bool:
        return (
            (predicate is not None and predicate(record))
            or (age_s is not None and now - record.created > age_s)
            or (not_environment is not None and record.environment not in ({}, dict(not_environment)))
        )

    condemned = [record async for record in store.records() if is_condemned(record)]
    return sum([await store.delete(record.address, expected=record) for record in condemned])
