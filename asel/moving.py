"""Caches on the move: out of one store as a document, into another, and away with what is old.

Records pass in bounded pages, and whatever takes long is done in a thread: however large a cache is, the event loop
goes on. Only `export` has all records in memory, since it returns them.
"""

from __future__ import annotations

import datetime
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any

from asel.errors import InvalidRequestError, StoreError
from asel.redaction import redact
from asel.stores import records
from asel.stores.document import write_document
from asel.stores.document_format import (
    FOOTER,
    Found,
    Line,
    bare_lines,
    header,
    in_order,
    is_header,
    read_facts,
    read_lines,
    read_whole,
    records_in,
)
from asel.stores.protocol import READ_BATCH, Change, Changed, Store, StoreDefaults
from asel.stores.records import MOST_BYTES, Address, Record, RecordError
from asel.threads import run_in_thread

__all__ = ["Imported", "export", "export_to", "import_", "prune"]

# Records that exist at a time as more than a line of text: few, for the reason of `READ_BATCH`.
_STEP = READ_BATCH
# Records that a thread reads in one go.
_READ = 256
# Records that are changed in one go: a document is rewritten once for each page.
_PAGE = 4096
_PAGE_BYTES = 64 << 20
# A document that was formatted by somebody else has to be read as a whole.
_MAX_WHOLE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Imported:
    """What became of the records of a document."""

    imported: int
    skipped: tuple[tuple[Address, str], ...] = ()
    """What was there already."""
    mismatched: tuple[tuple[str, str], ...] = ()
    """What could not be taken in, and why."""


# Out of a store.


async def export(store: Store, filter: Callable[[Record], bool] | None) -> dict[str, Any]:
    """Return a store's records as a document."""
    exported: dict[Address, dict[str, Any]] = {}

    def add(step: list[Record]) -> None:
        exported.update((record.address, record.to_facts()) for record in step)

    async for step in _steps(store, filter):
        await run_in_thread("exporting", partial(add, step))
    in_turn = await run_in_thread("exporting", lambda: [exported[address] for address in in_order(exported)])
    return {"asel": records.SCHEMA, "records": in_turn}


async def export_to(store: Store, path: str | os.PathLike[str], filter: Callable[[Record], bool] | None) -> int:
    """Write a store's records to a file as a document, in one step; return how many there are."""
    target = _absolute(path)
    if await run_in_thread("exporting", lambda: os.path.realpath(target) == os.path.realpath(store.location)):
        raise InvalidRequestError(f"{target} is where the records are; export them to another file")
    with tempfile.TemporaryFile() as spool:
        places: dict[Address, tuple[int, int]] = {}

        def add(step: list[Record]) -> None:
            for record in step:
                line = record.line().encode()
                places[record.address] = spool.tell(), len(line)
                spool.write(line)

        try:
            async for step in _steps(store, filter):
                await run_in_thread("exporting", partial(add, step))
            await run_in_thread("exporting", lambda: write_document(target, _document(spool, places)))
        except StoreError:
            raise
        except OSError as error:
            raise StoreError(f"exporting to {target} failed: {error}", location=str(target)) from error
        return len(places)


def _document(spool: IO[bytes], places: dict[Address, tuple[int, int]]) -> Iterator[bytes]:
    yield header()
    separator = b""
    for address in in_order(places):
        offset, size = places[address]
        spool.seek(offset)
        yield separator + spool.read(size)
        separator = b",\n"
    yield FOOTER


async def _steps(store: Store, filter: Callable[[Record], bool] | None) -> AsyncIterator[list[Record]]:
    step: list[Record] = []
    async with aclosing(store.records()) as listing:  # type: ignore[type-var]
        async for record in listing:
            if filter is None or filter(record):
                step.append(record)
            if len(step) == _STEP:
                yield step
                step = []
    yield step


# Into a store.


async def import_(
    store: Store, document: Mapping[str, Any] | str | os.PathLike[str], load: Callable[[Any], object]
) -> Imported:
    """Put a document's records into a store, those that `load` can read."""
    taken = _Import(store, load)
    try:
        if isinstance(document, Mapping):
            await taken.take(_found_in_facts(records_in(document)))
        else:
            with await run_in_thread("importing", partial(_opened, document)) as file:
                await taken.take(_found_in_file(file, file.name))
    except RecordError as error:
        raise InvalidRequestError(f"this cannot be imported: {error}") from error
    except StoreError:
        raise
    except OSError as error:
        raise InvalidRequestError(f"this cannot be imported: {error}") from error
    return Imported(taken.imported, tuple(taken.skipped), tuple(taken.mismatched))


@dataclass(slots=True)
class _Import:
    """An import under way."""

    store: Store
    load: Callable[[Any], object]
    imported: int = 0
    skipped: list[tuple[Address, str]] = field(default_factory=list)
    mismatched: list[tuple[str, str]] = field(default_factory=list)

    async def take(self, found: Iterator[Found]) -> None:
        page: dict[Address, Change] = {}
        while (changes := await run_in_thread("importing", partial(self._next, found))) is not None:
            for change in changes:
                if page.setdefault(change.address, change) is not change:
                    self.skipped.append((change.address, "it is in the document twice"))
            if _is_full(page.values()):
                await self._put(list(page.values()))
                page = {}
        await self._put(list(page.values()))

    def _next(self, found: Iterator[Found]) -> list[Change] | None:
        """Return what to do with the next records that fit, None at the end."""
        changes: list[Change] = []
        for step in found:
            self.mismatched += ((bad.where, bad.reason) for bad in step.rejected)
            other = f"it is of another version, and this asel reads version {records.SCHEMA}"
            self.mismatched += ((f"a record of {len(text)} bytes", other) for text in step.foreign)
            changes += (Change(line.address, line.text) for line in step.lines if self._fits(line))
            if len(changes) >= _READ or _is_full(changes):
                return changes
        return changes or None

    def _fits(self, line: Line) -> bool:
        try:
            self.load(line.cfg)
        except RecordError as error:
            self.mismatched.append((f"the record of {line.address.key}", redact(error)))
            return False
        return True

    async def _put(self, changes: list[Change]) -> None:
        results = await _apply(self.store, changes)
        await run_in_thread("importing", partial(self._note, changes, results))

    def _note(self, changes: list[Change], results: list[Changed]) -> None:
        for change, changed in zip(changes, results, strict=True):
            if changed.done:
                self.imported += 1
                continue
            same = change.line == changed.line or Record.from_json(change.line).cfg == changed.record().cfg
            self.skipped.append((change.address, "there already" + ("" if same else ", with another config")))


def _absolute(path: str | os.PathLike[str]) -> Path:
    return Path(path).expanduser().absolute()


def _opened(path: str | os.PathLike[str]) -> IO[bytes]:
    return _absolute(path).open("rb")


def _found_in_facts(many: list[Any]) -> Iterator[Found]:
    for first in range(0, len(many), _STEP):
        yield read_facts(many[first : first + _STEP], "the document", first)


def _found_in_file(file: IO[bytes], where: str) -> Iterator[Found]:
    first = file.readline(MOST_BYTES)
    if not is_header(first):
        whole = first + file.read(_MAX_WHOLE_BYTES)
        if len(whole) > _MAX_WHOLE_BYTES:
            raise RecordError(f"{where} has over {_MAX_WHOLE_BYTES:,} bytes, and not a record a line")
        found = read_whole(whole, where)
        if not found.lines and not found.foreign and found.rejected:
            raise RecordError(found.rejected[0].reason)
        yield found
        return
    lines = bare_lines(iter(partial(file.readline, MOST_BYTES + 2), b""), 2)
    while step := list(islice(lines, _STEP)):
        yield read_lines(step, where)


# Away.


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

    page: list[Change] = []
    deleted = 0
    async for step in _steps(store, is_condemned):
        page += await run_in_thread("pruning", partial(_deletions, step))
        if _is_full(page):
            deleted += _count(await _apply(store, page))
            page = []
    return deleted + _count(await _apply(store, page))


def _deletions(step: list[Record]) -> list[Change]:
    return [Change.delete(record.address, expected=record) for record in step]


def _is_full(changes: Collection[Change]) -> bool:
    """Tell whether enough changes for one go have come together."""
    if len(changes) >= _PAGE:
        return True
    return sum(len(change.line) + len(change.expected) for change in changes) > _PAGE_BYTES


def _count(changes: list[Changed]) -> int:
    return sum(changed.done for changed in changes)


async def _apply(store: Store, changes: list[Change]) -> list[Changed]:
    """Make changes in one go if the store can, else one by one."""
    if not changes:
        return []
    apply: Callable[[list[Change]], Any] = getattr(store, "apply", None) or partial(StoreDefaults.apply, store)
    return await apply(changes)  # type: ignore[no-any-return]
