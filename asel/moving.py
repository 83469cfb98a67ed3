"""Caches on the move: out of one store as a document, into another, and away with what is old."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio

from asel.errors import InvalidRequestError
from asel.redaction import redact
from asel.stores.document import records_in
from asel.stores.protocol import Store
from asel.stores.records import SCHEMA, Address, Record, RecordError
from asel.threads import run_in_thread

__all__ = ["Imported", "export", "import_", "prune"]

_AT_ONCE = 64


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
        # Ten thousand records take seconds, which are the loop's to use.
        table, bad = await run_in_thread("reading a document", partial(records_in, document, "the document"))
    except RecordError as error:
        raise InvalidRequestError(f"this cannot be imported: {error}") from error
    mismatched = [(rejected.where, rejected.reason) for rejected in bad]
    fitting = []
    for address, record in table.items():
        try:
            load(record.cfg)
        except RecordError as error:
            mismatched.append((f"the record of {address.key}", redact(error)))
        else:
            fitting.append(record)
    there: dict[Address, Record] = {}

    async def take_in(record: Record) -> None:
        before = await store.get(record.address)
        stored = before or await store.put(record)
        if before is not None or stored != record:
            there[record.address] = stored

    await _for_each(fitting, take_in)
    skipped = [
        (address, "there already" + ("" if there[address].cfg == table[address].cfg else ", with another config"))
        for address in table
        if address in there
    ]
    return Imported(len(fitting) - len(skipped), tuple(skipped), tuple(mismatched))


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
    if age_s is not None and not age_s >= 0:
        raise InvalidRequestError(f"prune: older_than={older_than!r} must be an age, zero or more")
    now = time.time()

    def is_condemned(record: Record) -> bool:
        return (
            (predicate is not None and predicate(record))
            or (age_s is not None and now - record.created > age_s)
            or (not_environment is not None and record.environment not in ({}, dict(not_environment)))
        )

    condemned = [record async for record in store.records() if is_condemned(record)]
    deleted = []

    async def delete(record: Record) -> None:
        if await store.delete(record.address, expected=record):
            deleted.append(record)

    await _for_each(condemned, delete)
    return len(deleted)


async def _for_each(records: Iterable[Record], work: Callable[[Record], Awaitable[None]]) -> None:
    """Do some work for every record, many at a time: a document writes what comes together at once."""
    left, failures = iter(records), list[Exception]()

    async def some() -> None:
        for record in left:
            try:
                await work(record)
            except Exception as error:
                failures.append(error)
                tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        for _ in range(_AT_ONCE):
            tasks.start_soon(some)
    if failures:
        raise failures[0]
