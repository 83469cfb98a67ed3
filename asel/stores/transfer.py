"""Exports the records of a store as a document, and imports documents.

Records pass a few at a time, and slow steps run in threads, so a large cache does not block the event loop.
"""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any

from asel.errors import InvalidRequestError, StoreError
from asel.redaction import redact
from asel.runtime.threads import leave_to_thread, run_in_thread
from asel.stores import records
from asel.stores.document_file import write_document
from asel.stores.document_format import (
    Found,
    Line,
    bare_lines,
    in_order,
    in_pieces,
    is_header,
    read_facts,
    read_lines,
    read_reformatted,
    records_in,
)
from asel.stores.pages import Page, apply_page, record_batches
from asel.stores.protocol import READ_BATCH, Change, Changed, Store
from asel.stores.records import MAX_BYTES, Address, Record, RecordError

__all__ = ["Imported", "export", "export_to", "import_"]


@dataclass(frozen=True, slots=True)
class Imported:
    """The result of an import: the number of records stored, and the records that were not."""

    imported: int
    skipped: tuple[tuple[Address, str], ...] = ()
    """The records that existed already, or were twice in the document, with the reason."""
    mismatched: tuple[tuple[str, str], ...] = ()
    """The records that could not be imported, with the reasons."""


# Exports.


async def export(store: Store, filter: Callable[[Record], bool] | None) -> bytes:
    """Return a store's records as a document."""
    lines: dict[tuple[str, ...], bytes] = {}

    def add(batch: list[Record]) -> None:
        lines.update((_sort_key(record.address), record.line().encode()) for record in batch)

    def document() -> bytes:
        whole = io.BytesIO()
        whole.writelines(in_pieces(lines.pop(key) for key in in_order(lines)))
        return whole.getvalue()

    async for batch in record_batches(store, filter):
        await run_in_thread("exporting", partial(add, batch))
    return await run_in_thread("exporting", document)


async def export_to(store: Store, path: str | os.PathLike[str], filter: Callable[[Record], bool] | None) -> int:
    """Write a store's records to a file as a document, in one step; return their number."""
    target = await run_in_thread("exporting", partial(_absolute, path))
    if await run_in_thread("exporting", lambda: os.path.realpath(target) == os.path.realpath(store.location)):
        raise InvalidRequestError(f"{target} is the store itself; export the records to another file")
    try:
        spool = await run_in_thread("exporting", tempfile.TemporaryFile)
        try:
            return await _export_through(spool, store, target, filter)
        finally:
            # Closing it frees its blocks, which takes 20 ms for 50 MB.
            leave_to_thread("closing a temporary file", spool.close)
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(f"exporting to {target} failed: {error}", location=str(target)) from error


async def _export_through(spool: IO[bytes], store: Store, target: Path, filter: Callable[[Record], bool] | None) -> int:
    """Copy a store's records into a temporary file as they are listed, and then into the target in order."""
    places: dict[tuple[str, ...], tuple[int, int]] = {}

    def add(batch: list[Record]) -> None:
        for record in batch:
            line = record.line().encode()
            places[_sort_key(record.address)] = spool.tell(), len(line)
            spool.write(line)

    def lines() -> Iterator[bytes]:
        for key in in_order(places):
            offset, size = places.pop(key)  # frees it here: freeing thousands at once would block the event loop
            spool.seek(offset)
            yield spool.read(size)

    async for batch in record_batches(store, filter):
        await run_in_thread("exporting", partial(add, batch))
    count = len(places)
    await run_in_thread("exporting", lambda: write_document(target, in_pieces(lines())))
    return count


def _sort_key(address: Address) -> tuple[str, ...]:
    """Return an address as a plain tuple, which the garbage collector stops tracking, unlike a NamedTuple."""
    return (*address.key, address.checksum, address.environment)


# Imports.


async def import_(
    store: Store, document: Mapping[str, Any] | bytes | str | os.PathLike[str], load: Callable[[Any], object]
) -> Imported:
    """Import the records of a document whose configs `load` can read."""
    running = _Import(store, load)
    try:
        if isinstance(document, Mapping):
            await running.add(_found_in_facts(records_in(document)))
        elif isinstance(document, bytes):
            await running.add(_found_in_file(io.BytesIO(document), "the document"))
        else:
            with await run_in_thread("importing", partial(_opened, document)) as file:
                await running.add(_found_in_file(file, file.name))
    except RecordError as error:
        raise InvalidRequestError(f"this cannot be imported: {error}") from error
    except StoreError:
        raise
    except OSError as error:
        raise InvalidRequestError(f"this cannot be imported: {error}") from error
    return Imported(running.imported, tuple(running.skipped), tuple(running.mismatched))


@dataclass(slots=True)
class _Import:
    """A running import."""

    store: Store
    load: Callable[[Any], object]
    imported: int = 0
    skipped: list[tuple[Address, str]] = field(default_factory=list)
    mismatched: list[tuple[str, str]] = field(default_factory=list)

    async def add(self, found: Iterator[Found]) -> None:
        page = Page()
        while (changes := await run_in_thread("importing", partial(self._next, found))) is not None:
            for change in changes:
                if not page.add(change):
                    self.skipped.append((change.address, "it is in the document twice"))
            if page.is_full:
                await self._put(page)
                page = Page()
        await self._put(page)

    def _next(self, found: Iterator[Found]) -> list[Change] | None:
        """Return the changes for the next records; None at the end."""
        batch = next(found, None)
        if batch is None:
            return None
        self.mismatched += ((bad.where, bad.reason) for bad in batch.rejected)
        other = f"it is of another version, and this asel reads version {records.SCHEMA}"
        self.mismatched += ((f"a record of {len(text)} bytes", other) for text in batch.foreign)
        return [Change(line.address, line.text) for line in batch.lines if self._fits(line)]

    def _fits(self, line: Line) -> bool:
        try:
            self.load(line.cfg)
        except RecordError as error:
            self.mismatched.append((f"the record of {line.address.key}", redact(error)))
            return False
        return True

    async def _put(self, page: Page) -> None:
        for change, changed in zip(page.changes.values(), await apply_page(self.store, page), strict=True):
            if changed.done:
                self.imported += 1
                continue
            same = partial(_same_config, change, changed)
            is_same = change.line == changed.line or await run_in_thread("importing", same)
            self.skipped.append((change.address, "there already" + ("" if is_same else ", with another config")))


def _same_config(change: Change, changed: Changed) -> bool:
    return Record.from_json(change.line).cfg == changed.record().cfg


def _absolute(path: str | os.PathLike[str]) -> Path:
    return Path(path).expanduser().absolute()


def _opened(path: str | os.PathLike[str]) -> IO[bytes]:
    return _absolute(path).open("rb")


def _found_in_facts(many: list[Any]) -> Iterator[Found]:
    for first in range(0, len(many), READ_BATCH):
        yield read_facts(many[first : first + READ_BATCH], "the document", first)


def _found_in_file(file: IO[bytes], where: str) -> Iterator[Found]:
    first = file.readline(MAX_BYTES)
    if not is_header(first):
        is_document, rejected = False, []
        for found in read_reformatted(first, file, where):
            is_document = is_document or bool(found.lines or found.foreign)
            rejected += found.rejected[:1]
            yield found
        if rejected and not is_document:
            raise RecordError(rejected[0].reason)
        return
    lines = bare_lines(iter(partial(file.readline, MAX_BYTES + 2), b""), 2)
    while batch := list(islice(lines, READ_BATCH)):
        yield read_lines(batch, where)
