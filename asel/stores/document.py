"""One readable file of records, to ship with a program or keep under version control.

    {"asel": 1, "records": [
    {...},
    {...}
    ]}

Sorted, one record a line, so that two versions of it differ where their records do. Every write takes
the lock beside the file, reads what others have written, adds its own and replaces the file in one
step; what this process puts at the same time is written together.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import filelock
from anyio.lowlevel import RunVar

from asel.errors import StoreError
from asel.keys import CacheKey
from asel.pending import Shared
from asel.stores.files import create, file_claim, in_thread, opened, overwrite, read
from asel.stores.protocol import Claim
from asel.stores.records import SCHEMA, Address, Record, RecordError, Rejected, log_rejected

__all__ = ["DocumentStore", "document_of", "records_in"]

_MOST_BYTES = 256 << 20
_LOCK_S = 10.0

Table = dict[Address, Record]


def document_of(records: Iterable[Record]) -> str:
    """Return records as a document."""
    lines = ",\n".join(record.line() for record in sorted(records, key=lambda record: record.address))
    return f'{{"asel": {SCHEMA}, "records": [\n{lines}\n]}}\n'


def records_in(document: Any, where: str) -> tuple[Table, list[Rejected]]:
    """Return the records of a parsed document, and what in it is none.

    Raises:
        RecordError: it is no document at all, or of another version.
    """
    if not isinstance(document, dict) or not isinstance(document.get("records"), list):
        raise RecordError("it is not a document of records")
    if (version := document.get("asel")) != SCHEMA or isinstance(version, bool):
        raise RecordError(f"it has version {version!r}, and this asel reads version {SCHEMA}")
    table: Table = {}
    rejected = []
    for number, facts in enumerate(document["records"]):
        try:
            record = Record.from_facts(facts)
        except RecordError as error:
            rejected.append(Rejected(f"{where}, record {number}", str(error)))
        else:
            table[record.address] = record
    return table, rejected


@dataclass(slots=True)
class _Change:
    """A put or a deletion on its way into the file, and what came of it."""

    address: Address
    record: Record | None
    replace: bool = False
    expected: Record | None = None
    result: Record | bool | None = None

    def apply(self, table: Table) -> bool:
        """Change the table; return whether there was something to change."""
        stored = table.get(self.address)
        if self.record is None:
            found = stored is not None and self.expected in (None, stored)
            if found:
                del table[self.address]
            self.result = found or self.result is True  # written before, by a task that did not live to say so
            return found
        if stored is not None and (not self.replace or stored == self.record):
            self.result = stored
            return False
        table[self.address] = self.result = self.record
        return True


@dataclass(slots=True)
class _Batch:
    """The changes that are written together."""

    written: Shared[None] = field(default_factory=Shared)
    changes: list[_Change] = field(default_factory=list)


class _Seen(NamedTuple):
    """What the file held when it was last read, and which file that was."""

    version: tuple[int, ...] | None
    table: Table
    rejected: list[Rejected]


class DocumentStore:
    """Keeps all records in one JSON file. A put rewrites it: meant for hundreds of records, not for a fleet."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).expanduser().absolute()
        self.on_rejected: Callable[[Rejected], object] = log_rejected
        self._seen = _Seen(None, {}, [])
        # Of each event loop: the batch that is being gathered, and the turn to write.
        self._next: RunVar[_Batch | None] = RunVar("asel_document_batch")
        self._turn: RunVar[anyio.Lock] = RunVar("asel_document_turn")

    def __repr__(self) -> str:
        return f"DocumentStore({str(self.path)!r})"

    @property
    def location(self) -> str:
        return str(self.path)

    async def get(self, address: Address) -> Record | None:
        return (await self._load()).get(address)

    async def put(self, record: Record, *, replace: bool = False, claim: Claim | None = None) -> Record:
        record.to_json()  # what cannot be stored is the caller's error alone, not that of the whole batch
        change = _Change(record.address, record, replace)
        await self._change(change)
        assert isinstance(change.result, Record)
        return change.result

    def claim(self, address: Address, *, wait_s: float = 0.0) -> AbstractAsyncContextManager[Claim]:
        path = self.path.with_name(f".{self.path.name}.claims") / f"{address.digest}.lock"
        return file_claim(path, self.location, partial(self.get, address), wait_s)

    async def records(self, key: CacheKey | None = None) -> AsyncIterator[Record]:
        for address, record in list((await self._load()).items()):
            if key is None or address.key == key:
                yield record

    async def delete(self, address: Address, *, expected: Record | None = None) -> bool:
        change = _Change(address, None, expected=expected)
        await self._change(change)
        return change.result is True

    async def _load(self) -> Table:
        table, rejected = await in_thread(self.location, "reading", self._read)
        for bad in rejected:
            self.on_rejected(bad)
        return table

    async def _change(self, change: _Change) -> None:
        """Have a change written, together with those that come while another batch is being written."""
        batch = self._next.get(None)
        if batch is None:
            self._next.set(batch := _Batch())
        batch.changes.append(change)
        await batch.written.carry(partial(self._write_batch, batch), partial(self._close, batch))

    async def _write_batch(self, batch: _Batch) -> None:
        turn = self._turn.get(None)
        if turn is None:
            self._turn.set(turn := anyio.Lock())
        async with turn:
            self._close(batch)
            try:
                rejected = await in_thread(self.location, "writing", partial(self._write, batch.changes))
            except StoreError as error:
                batch.written.fail(error)
                return
            batch.written.succeed(None)
        for bad in rejected:
            self.on_rejected(bad)

    def _close(self, batch: _Batch) -> None:
        if self._next.get(None) is batch:
            self._next.set(None)

    # In a thread.

    def _read(self) -> tuple[Table, list[Rejected]]:
        """Return the records, read anew where the file is another than last time; and what was bad, once."""
        try:
            with opened(self.path.parent) as directory:
                seen = self._seen
                if _version(self.path.name, directory) == seen.version:
                    return seen.table, []
                self._seen = seen = self._parse(directory)
                return seen.table, seen.rejected
        except FileNotFoundError:
            return {}, []

    def _parse(self, directory: int) -> _Seen:
        version = _version(self.path.name, directory)
        try:
            document = json.loads(read(self.path.name, directory, _MOST_BYTES))
            return _Seen(version, *records_in(document, self.location))
        except RecordError as error:
            return _Seen(version, {}, [Rejected(self.location, str(error))])
        except (ValueError, RecursionError) as error:
            return _Seen(version, {}, [Rejected(self.location, f"it is not JSON: {error}")])

    def _write(self, changes: list[_Change]) -> list[Rejected]:
        with opened(self.path.parent, make=True) as directory:
            path = self.path.with_name(f".{self.path.name}.lock")
            lock = filelock.UnixFileLock(path, thread_local=False, fallback_to_soft=False)
            try:
                with lock.acquire(timeout=_LOCK_S, poll_interval=0.002):
                    return self._write_alone(changes, directory)
            except filelock.Timeout as error:
                raise StoreError(f"{path} was held for over {_LOCK_S:g} s", location=self.location) from error

    def _write_alone(self, changes: list[_Change], directory: int) -> list[Rejected]:
        news: list[Rejected] = []
        try:
            if _version(self.path.name, directory) != self._seen.version:
                self._seen = self._parse(directory)
                news = self._seen.rejected
            seen = self._seen
        except FileNotFoundError:
            seen = _Seen(None, {}, [])
        table = dict(seen.table)
        changed = [change for change in changes if change.apply(table)]
        if changed:
            if seen.rejected:
                self._keep_a_copy(directory)
            overwrite(self.path.name, document_of(table.values()).encode(), directory)
            self._seen = _Seen(_version(self.path.name, directory), table, [])
        return news

    def _keep_a_copy(self, directory: int) -> None:
        """Set the document aside as it is, before what is bad in it is left out."""
        contents = read(self.path.name, directory, _MOST_BYTES)
        numbers = itertools.count()
        while not create(f"{self.path.name}.bad-{next(numbers)}", contents, directory):
            pass


def _version(name: str, directory: int) -> tuple[int, ...]:
    facts = os.stat(name, dir_fd=directory, follow_symlinks=False)
    return facts.st_ino, facts.st_mtime_ns, facts.st_size
