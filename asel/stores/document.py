"""One readable file of records, to ship with a program or keep under version control.

Every write takes the lock beside the file, reads the current records, adds its own and replaces the
file in one step; concurrent puts of this process are written together. Lines that cannot be read
are left out of the next version, and a copy of the old version is kept beside it. A document behind
a link can be read but not written.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import anyio
from anyio.lowlevel import RunVar

from asel.errors import StoreError
from asel.kernels.keys import CacheKey
from asel.redaction import redact
from asel.runtime.shared_work import Shared
from asel.stores.document_file import DocumentFile, PendingChange
from asel.stores.file_claims import file_claim, lock_files, remove_stale_locks
from asel.stores.file_ops import in_thread, require_posix
from asel.stores.protocol import READ_BATCH, SCAN_BATCH, Change, Changed, Claim, StoreDefaults, StoreStats
from asel.stores.records import Address, Record, Rejected, log_rejected
from asel.stores.summaries import RecordLine

__all__ = ["DocumentStore"]

T = TypeVar("T")


@dataclass(slots=True)
class _Batch:
    """The changes that are written together."""

    written: Shared[None] = field(default_factory=Shared)
    changes: list[PendingChange] = field(default_factory=list)


class DocumentStore(StoreDefaults):
    """Keeps all records in one JSON file. Each put rewrites it: meant for hundreds of records, not for a fleet.

    The processes of one user write it; others may read it. In a world-writable directory, a document is used only
    if it belongs to this user, to the directory's owner or to root.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        require_posix(f"a store in the document {os.fspath(path)!r}")
        self.path = Path(path).expanduser().absolute()
        self.on_rejected: Callable[[Rejected], object] = log_rejected
        self._file = DocumentFile(self.path)
        # For each event loop: the batch that collects changes, and a lock for the writer.
        self._next: RunVar[_Batch | None] = RunVar("asel_document_batch")
        self._turn: RunVar[anyio.Lock] = RunVar("asel_document_turn")

    def __repr__(self) -> str:
        return f"DocumentStore({redact(self.path)!r})"

    @property
    def location(self) -> str:
        return str(self.path)

    async def get(self, address: Address) -> Record | None:
        return await self._in_thread("reading", partial(self._get, address))

    async def put(self, record: Record, *, replace: bool = False, claim: Claim | None = None) -> Record:
        # A record that cannot be stored fails its own caller, not the whole batch.
        change = await in_thread(self.location, "writing", partial(Change.put, record, replace=replace))
        [changed] = await self.apply([change])
        return record if changed.done else await in_thread(self.location, "reading", changed.record)

    async def delete(self, address: Address, *, expected: Record | None = None) -> bool:
        change = await in_thread(self.location, "writing", partial(Change.delete, address, expected=expected))
        [changed] = await self.apply([change])
        return changed.done

    async def apply(self, changes: Sequence[Change]) -> list[Changed]:
        """Make many changes in one rewrite, together with others that arrive while another batch is being written."""
        batch = self._next.get(None)
        if batch is None:
            self._next.set(batch := _Batch())
        ours = [PendingChange(change) for change in changes]
        batch.changes += ours
        await batch.written.carry(partial(self._write_batch, batch), partial(self._close, batch))
        return [change.result for change in ours]

    def claim(self, address: Address, *, wait_s: float = 0.0, anew: bool = False) -> AbstractAsyncContextManager[Claim]:
        return file_claim(self._claims, address, self.location, partial(self.get, address), wait_s, anew)

    async def records(self, key: CacheKey | None = None) -> AsyncIterator[Record]:
        contents = await self._in_thread("reading", self._file.read)
        lines = [line for address, line in contents.lines.items() if key is None or address.key == key]
        for start in range(0, len(lines), READ_BATCH):
            batch = lines[start : start + READ_BATCH]
            for record in await in_thread(self.location, "reading", lambda: [*map(Record.from_json, batch)]):  # noqa: B023
                yield record

    async def scan(self) -> AsyncIterator[list[RecordLine]]:
        lines = list((await self._in_thread("reading", self._file.read)).lines.values())
        for start in range(0, len(lines), SCAN_BATCH):
            batch = lines[start : start + SCAN_BATCH]
            yield await in_thread(self.location, "reading", lambda: [*map(RecordLine.parse, batch)])  # noqa: B023

    async def stats(self) -> StoreStats:
        """Return the numbers of records, copies and locks, and remove stale lock files."""
        return await self._in_thread("looking at", self._stats)

    async def _in_thread(self, what: str, work: Callable[[], T]) -> T:
        try:
            return await in_thread(self.location, what, work)
        finally:
            while self._file.unreported:
                self.on_rejected(self._file.unreported.popleft())

    async def _write_batch(self, batch: _Batch) -> None:
        turn = self._turn.get(None)
        if turn is None:
            self._turn.set(turn := anyio.Lock())
        async with turn:
            self._close(batch)
            try:
                await self._in_thread("writing", partial(self._file.write, batch.changes))
            except StoreError as error:
                batch.written.fail(error)
                return
            batch.written.succeed(None)

    def _close(self, batch: _Batch) -> None:
        if self._next.get(None) is batch:
            self._next.set(None)

    # In a thread.

    @property
    def _claims(self) -> Path:
        return self.path.with_name(f".{self.path.name}.claims")

    def _get(self, address: Address) -> Record | None:
        line = self._file.read().lines.get(address)
        return None if line is None else Record.from_json(line)

    def _stats(self) -> StoreStats:
        remove_stale_locks(self._claims)
        return replace(self._file.stats(), locks=len(lock_files(self._claims)))
