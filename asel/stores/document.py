"""One readable file of records, to ship with a program or keep under version control.

Every write takes the lock beside the file, reads what others have written, adds its own and replaces the
file in one step; what this process puts at the same time is written together. Lines that cannot be read
are left out of the next version, and a copy of the document as it was is kept beside it. A document behind
a link is read through it, and not written.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import anyio
import filelock
from anyio.lowlevel import RunVar

from asel.errors import StoreError
from asel.keys import CacheKey
from asel.pending import Shared
from asel.stores.document_format import Contents, compose, parse
from asel.stores.file_claims import file_claim, lock_files, remove_stale_locks
from asel.stores.files import FoundFile, NotAFileError, create, held_file, in_thread, opened, overwrite, sizes_in, trim
from asel.stores.protocol import Change, Changed, Claim, StoreStats
from asel.stores.records import Address, Record, Rejected, log_rejected

__all__ = ["DocumentStore"]

_MOST_BYTES = 256 << 20
_LOCK_S = 10.0
# Records are read a few at a time: more of them at once would be moved on by the garbage collector, whose next
# look at everything stops all threads.
_READ_BATCH = 16
_UNCHANGED = Changed("", False)


@dataclass(slots=True)
class _Change:
    """A put or a deletion on its way into the file, and what came of it."""

    asked: Change
    result: Changed = _UNCHANGED

    def apply(self, lines: dict[Address, bytes]) -> bool:
        """Change the lines; return whether there was something to change.

        It may have been made before, by a task that was cancelled before it could say so.
        """
        asked, line = self.asked, self.asked.line.encode()
        stored = lines.get(asked.address)
        if not line:
            found = stored is not None and asked.expects(stored.decode())
            if found:
                del lines[asked.address]
            self.result = Changed("", found or self.result.done)
            return found
        if stored is not None and (not asked.replace or stored == line):
            self.result = Changed(stored.decode(), self.result.done and stored == line)
            return False
        lines[asked.address], self.result = line, Changed(asked.line, True)
        return True


@dataclass(slots=True)
class _Batch:
    """The changes that are written together."""

    written: Shared[None] = field(default_factory=Shared)
    changes: list[_Change] = field(default_factory=list)


class _Seen(NamedTuple):
    """What the file held when it was last read, and which file that was."""

    version: tuple[int, ...] | None
    contents: Contents


_NOTHING = _Seen(None, Contents())


class DocumentStore:
    """Keeps all records in one JSON file. A put rewrites it: meant for hundreds of records, not for a fleet."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).expanduser().absolute()
        self.on_rejected: Callable[[Rejected], object] = log_rejected
        self._seen = _NOTHING
        # Of each event loop: the batch that is being gathered, and the turn to write.
        self._next: RunVar[_Batch | None] = RunVar("asel_document_batch")
        self._turn: RunVar[anyio.Lock] = RunVar("asel_document_turn")

    def __repr__(self) -> str:
        return f"DocumentStore({str(self.path)!r})"

    @property
    def location(self) -> str:
        return str(self.path)

    async def get(self, address: Address) -> Record | None:
        record, rejected = await in_thread(self.location, "reading", partial(self._get, address))
        self._tell(rejected)
        return record

    async def put(self, record: Record, *, replace: bool = False, claim: Claim | None = None) -> Record:
        # What cannot be stored is the caller's error alone, not that of the whole batch.
        change = await in_thread(self.location, "writing", partial(Change.put, record, replace=replace))
        [changed] = await self.apply([change])
        return record if changed.done else await in_thread(self.location, "reading", changed.record)

    async def delete(self, address: Address, *, expected: Record | None = None) -> bool:
        change = await in_thread(self.location, "writing", partial(Change.delete, address, expected=expected))
        [changed] = await self.apply([change])
        return changed.done

    async def apply(self, changes: Sequence[Change]) -> list[Changed]:
        """Make many changes in one rewrite, together with those that come while another batch is being written."""
        batch = self._next.get(None)
        if batch is None:
            self._next.set(batch := _Batch())
        ours = [_Change(change) for change in changes]
        batch.changes += ours
        await batch.written.carry(partial(self._write_batch, batch), partial(self._close, batch))
        return [change.result for change in ours]

    def claim(self, address: Address, *, wait_s: float = 0.0, anew: bool = False) -> AbstractAsyncContextManager[Claim]:
        return file_claim(self._claims, address, self.location, partial(self.get, address), wait_s, anew)

    async def records(self, key: CacheKey | None = None) -> AsyncIterator[Record]:
        contents, rejected = await in_thread(self.location, "reading", self._read)
        self._tell(rejected)
        lines = [line for address, line in contents.lines.items() if key is None or address.key == key]
        for start in range(0, len(lines), _READ_BATCH):
            batch = lines[start : start + _READ_BATCH]
            for record in await in_thread(self.location, "reading", lambda: [*map(Record.from_json, batch)]):  # noqa: B023
                yield record

    async def stats(self) -> StoreStats:
        """Return how full the document is. What dead processes left beside it is removed on the way."""
        stats, rejected = await in_thread(self.location, "looking at", self._stats)
        self._tell(rejected)
        return stats

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
        self._tell(rejected)

    def _close(self, batch: _Batch) -> None:
        if self._next.get(None) is batch:
            self._next.set(None)

    def _tell(self, rejected: list[Rejected]) -> None:
        for bad in rejected:
            self.on_rejected(bad)

    # In a thread.

    @property
    def _claims(self) -> Path:
        return self.path.with_name(f".{self.path.name}.claims")

    @property
    def _temporary(self) -> str:
        """The name the next version is written under: with one writer at a time, a dead one leaves one file."""
        return f".{self.path.name}.tmp"

    def _get(self, address: Address) -> tuple[Record | None, list[Rejected]]:
        contents, rejected = self._read()
        line = contents.lines.get(address)
        return None if line is None else Record.from_json(line), rejected

    def _read(self) -> tuple[Contents, list[Rejected]]:
        """Return what the document holds, read again if the file has changed; and what was bad, once."""
        try:
            with opened(self.path.parent) as directory:
                follow = _is_link_to_follow(self.path.name, directory)
                with held_file(self.path.name, directory, follow=follow) as file:
                    seen = self._seen
                    if file.version == seen.version:
                        return seen.contents, []
                    self._seen = seen = self._parse(file)
                    return seen.contents, seen.contents.rejected
        except FileNotFoundError:
            return Contents(), []
        except NotAFileError as error:
            seen, self._seen = self._seen, _Seen(None, Contents(rejected=[Rejected(self.location, str(error))]))
            return Contents(), [] if seen == self._seen else self._seen.contents.rejected

    def _parse(self, file: FoundFile) -> _Seen:
        known = {line: address for address, line in self._seen.contents.lines.items()}
        return _Seen(file.version, parse(file.read(_MOST_BYTES), self.location, known))

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
        """Merge the changes into the file as it is now.

        The file is opened once, after the lock was got: a link that was planted meanwhile is not followed, and what
        is read, copied and replaced is one and the same file.
        """
        with ExitStack() as stack:
            try:
                file = stack.enter_context(held_file(self.path.name, directory))
            except FileNotFoundError:
                file = None
            except NotAFileError as error:
                why = f"{self.path} is only read: it is a link, or not a plain file"
                raise StoreError(why, location=self.location) from error
            return self._merge(changes, directory, file)

    def _merge(self, changes: list[_Change], directory: int, file: FoundFile | None) -> list[Rejected]:
        news: list[Rejected] = []
        seen = self._seen  # taken once: a reader in another thread may set it to an older state at any moment
        if file is None:
            seen = _NOTHING
        elif file.version != seen.version:
            self._seen = seen = self._parse(file)
            news = seen.contents.rejected
        contents = Contents(dict(seen.contents.lines), seen.contents.foreign)
        changed = [change for change in changes if change.apply(contents.lines)]
        if changed:
            if file is not None and seen.contents.rejected:
                self._keep_a_copy(directory, file)
            overwrite(self.path.name, compose(contents), directory, temporary=self._temporary, like=file)
            with held_file(self.path.name, directory) as written:
                self._seen = _Seen(written.version, contents)
        return news

    def _keep_a_copy(self, directory: int, file: FoundFile) -> None:
        """Set the document aside as it is, before the next version leaves out what is bad in it."""
        names = self._copies(directory)
        newest = max((int(name.rpartition("-")[2]) for name in names), default=-1)
        name = f"{self.path.name}.bad-{newest + 1}"
        create(name, file.read(_MOST_BYTES), directory, temporary=self._temporary, like=file)
        trim([*names, name], directory)

    def _copies(self, directory: int) -> list[str]:
        pattern = re.compile(re.escape(self.path.name) + r"\.bad-[0-9]{1,18}")
        return [name for name in os.listdir(directory) if pattern.fullmatch(name)]

    def _stats(self) -> tuple[StoreStats, list[Rejected]]:
        contents, rejected = self._read()
        remove_stale_locks(self._claims)
        try:
            with opened(self.path.parent) as directory:
                sizes = sizes_in(directory, [self.path.name, self._temporary, *self._copies(directory)])
        except FileNotFoundError:
            sizes = {}
        size, temporary = sizes.pop(self.path.name, 0), sizes.pop(self._temporary, None)
        stats = StoreStats(
            records=len(contents.lines),
            bytes=size,
            set_aside=len(sizes),
            set_aside_bytes=sum(sizes.values()),
            temporary=0 if temporary is None else 1,
            locks=len(lock_files(self._claims)),
            other_schemas=len(contents.foreign),
        )
        return stats, rejected


def _is_link_to_follow(name: str, directory: int) -> bool:
    """Tell whether it is a link of somebody who may decide where it leads: us, the directory's owner, root."""
    facts = os.stat(name, dir_fd=directory, follow_symlinks=False)
    return stat.S_ISLNK(facts.st_mode) and facts.st_uid in (os.geteuid(), os.fstat(directory).st_uid, 0)
