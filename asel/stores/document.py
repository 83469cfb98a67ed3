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
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple, TypeVar

import anyio
import filelock
from anyio.lowlevel import RunVar

from asel.errors import StoreError
from asel.keys import CacheKey
from asel.pending import Shared
from asel.stores.document_format import Contents, compose, parse
from asel.stores.file_claims import file_claim, lock_files, remove_stale_locks
from asel.stores.files import FoundFile, NotAFileError, create, held_file, in_thread, opened, overwrite, sizes_in
from asel.stores.leftovers import trim
from asel.stores.protocol import READ_BATCH, Change, Changed, Claim, StoreStats
from asel.stores.records import Address, Record, RecordError, Rejected, log_rejected

__all__ = ["DocumentStore", "write_document"]

T = TypeVar("T")

_MOST_BYTES = 256 << 20
_LOCK_S = 10.0
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
    """Keeps all records in one JSON file. A put rewrites it: meant for hundreds of records, not for a fleet.

    One user's processes write it; others may read it. In a directory that anybody may write to, a document counts only
    if it belongs to us, to the directory's owner or to root.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).expanduser().absolute()
        self.on_rejected: Callable[[Rejected], object] = log_rejected
        self._seen = _NOTHING
        # Found by threads, and told on the event loop with the next result, whoever gets that.
        self._untold: deque[Rejected] = deque()
        # Of each event loop: the batch that is being gathered, and the turn to write.
        self._next: RunVar[_Batch | None] = RunVar("asel_document_batch")
        self._turn: RunVar[anyio.Lock] = RunVar("asel_document_turn")

    def __repr__(self) -> str:
        return f"DocumentStore({str(self.path)!r})"

    @property
    def location(self) -> str:
        return str(self.path)

    async def get(self, address: Address) -> Record | None:
        return await self._in_thread("reading", partial(self._get, address))

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
        contents = await self._in_thread("reading", self._read)
        lines = [line for address, line in contents.lines.items() if key is None or address.key == key]
        for start in range(0, len(lines), READ_BATCH):
            batch = lines[start : start + READ_BATCH]
            for record in await in_thread(self.location, "reading", lambda: [*map(Record.from_json, batch)]):  # noqa: B023
                yield record

    async def stats(self) -> StoreStats:
        """Return how full the document is. What dead processes left beside it is removed on the way."""
        return await self._in_thread("looking at", self._stats)

    async def _in_thread(self, what: str, work: Callable[[], T]) -> T:
        try:
            return await in_thread(self.location, what, work)
        finally:
            while self._untold:
                self.on_rejected(self._untold.popleft())

    async def _write_batch(self, batch: _Batch) -> None:
        turn = self._turn.get(None)
        if turn is None:
            self._turn.set(turn := anyio.Lock())
        async with turn:
            self._close(batch)
            try:
                await self._in_thread("writing", partial(self._write, batch.changes))
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
        line = self._read().lines.get(address)
        return None if line is None else Record.from_json(line)

    def _read(self) -> Contents:
        """Return what the document holds, read again if the file has changed."""
        try:
            with opened(self.path.parent) as directory:
                follow = _is_link_to_follow(self.path.name, directory)
                with held_file(self.path.name, directory, follow=follow) as file:
                    if file.version == self._seen.version:
                        return self._seen.contents
                    _refuse_strangers(file, directory)
                    return self._parse(file).contents
        except FileNotFoundError:
            return Contents()
        except NotAFileError as error:
            bad = Rejected(self.location, str(error))
            if self._seen.contents.rejected != [bad]:
                self._untold.append(bad)
            self._seen = _Seen(None, Contents(rejected=[bad]))
            return Contents()

    def _parse(self, file: FoundFile) -> _Seen:
        known = {line: address for address, line in self._seen.contents.lines.items()}
        self._seen = seen = _Seen(file.version, parse(file.read(_MOST_BYTES), self.location, known))
        self._untold.extend(seen.contents.rejected)
        return seen

    def _write(self, changes: list[_Change]) -> None:
        with opened(self.path.parent, make=True) as directory, document_lock(self.path):
            self._write_alone(changes, directory)

    def _write_alone(self, changes: list[_Change], directory: int) -> None:
        """Merge the changes into the file as it is now.

        The file is opened once, after the lock was got: a link that was planted meanwhile is not followed, and what
        is read, copied and replaced is one and the same file.
        """
        with ExitStack() as stack:
            file: FoundFile | None = None
            try:
                file = stack.enter_context(held_file(self.path.name, directory))
                _refuse_strangers(file, directory)
            except FileNotFoundError:
                pass
            except NotAFileError as error:
                raise StoreError(f"{self.path} is not written: {error}", location=self.location) from error
            self._merge(changes, directory, file)

    def _merge(self, changes: list[_Change], directory: int, file: FoundFile | None) -> None:
        seen = self._seen  # taken once: a reader in another thread may set it to an older state at any moment
        if file is None:
            seen = _NOTHING
        elif file.version != seen.version:
            seen = self._parse(file)
        contents = Contents(dict(seen.contents.lines), seen.contents.foreign)
        if not [change for change in changes if change.apply(contents.lines)]:
            return
        size = sum(len(line) + 2 for line in chain(contents.lines.values(), contents.foreign))
        if size > _MOST_BYTES and size > (0 if file is None else file.facts.st_size):
            why = (
                f"{self.path} would have {size:,} bytes, and at most {_MOST_BYTES:,} are read: use a directory instead"
            )
            raise StoreError(why, location=self.location)
        if file is not None and seen.contents.rejected:
            self._keep_a_copy(directory, file)
        overwrite(self.path.name, compose(contents), directory, temporary=temporary_name(self.path), like=file)
        with held_file(self.path.name, directory) as written:
            self._seen = _Seen(written.version, contents)

    def _keep_a_copy(self, directory: int, file: FoundFile) -> None:
        """Set the document aside as it is, before the next version leaves out what is bad in it."""
        contents, copies = file.read(_MOST_BYTES), self._copies(directory)
        newest = max(copies, default=-1)
        if newest >= 0 and self._is_copy(newest, contents, directory):
            return  # made for an earlier attempt to write, which failed
        write = partial(create, contents=contents, directory=directory, temporary=temporary_name(self.path), like=file)
        while not write(self._copy(newest + 1)):
            newest += 1
        trim([self._copy(number) for number in (*copies, newest + 1)], directory)

    def _copy(self, number: int) -> str:
        return f"{self.path.name}.bad-{number}"

    def _is_copy(self, number: int, contents: bytes, directory: int) -> bool:
        try:
            with held_file(self._copy(number), directory) as copy:
                return copy.facts.st_size == len(contents) and copy.read(_MOST_BYTES) == contents
        except (OSError, RecordError):
            return False

    def _copies(self, directory: int) -> list[int]:
        """Return the numbers of the copies that were set aside."""
        pattern = re.compile(re.escape(self.path.name) + r"\.bad-([0-9]{1,9})")
        found = map(pattern.fullmatch, os.listdir(directory))
        return [int(match[1]) for match in found if match is not None]

    def _stats(self) -> StoreStats:
        contents = self._read()
        remove_stale_locks(self._claims)
        try:
            with opened(self.path.parent) as directory:
                copies = map(self._copy, self._copies(directory))
                sizes = sizes_in(directory, [self.path.name, temporary_name(self.path), *copies])
        except FileNotFoundError:
            sizes = {}
        size, temporary = sizes.pop(self.path.name, 0), sizes.pop(temporary_name(self.path), None)
        return StoreStats(
            records=len(contents.lines),
            bytes=size,
            set_aside=len(sizes),
            set_aside_bytes=sum(sizes.values()),
            temporary=0 if temporary is None else 1,
            locks=len(lock_files(self._claims)),
            other_schemas=len(contents.foreign),
        )


def _is_link_to_follow(name: str, directory: int) -> bool:
    """Tell whether it is a link of somebody who may decide where it leads: us, the directory's owner, root."""
    facts = os.stat(name, dir_fd=directory, follow_symlinks=False)
    return stat.S_ISLNK(facts.st_mode) and facts.st_uid in (os.geteuid(), os.fstat(directory).st_uid, 0)


def _refuse_strangers(file: FoundFile, directory: int) -> None:
    """Refuse a file that somebody else may have planted: one in a directory that anybody may write to."""
    place = os.fstat(directory)
    if place.st_mode & stat.S_IWOTH and file.facts.st_uid not in (os.geteuid(), place.st_uid, 0):
        raise NotAFileError(
            f"it belongs to another user ({file.facts.st_uid}) in a directory that anybody may write to"
        )


@contextmanager
def document_lock(path: Path) -> Iterator[None]:
    """Be the only one to write a document.

    Raises:
        StoreError: another process has been at it for seconds.
    """
    beside = path.with_name(f".{path.name}.lock")
    lock = filelock.UnixFileLock(beside, thread_local=False, fallback_to_soft=False)
    try:
        with lock.acquire(timeout=_LOCK_S, poll_interval=0.002):
            yield
    except filelock.Timeout as error:
        raise StoreError(f"{beside} was held for over {_LOCK_S:g} s", location=str(path)) from error


def temporary_name(path: Path) -> str:
    """Return the name the next version is written under: with one writer at a time, a dead one leaves one file."""
    return f".{path.name}.tmp"


def write_document(path: Path, pieces: Iterable[bytes]) -> None:
    """Write a whole document in the place of what is there, and as private as that."""
    with opened(path.parent, make=True) as directory, document_lock(path), ExitStack() as stack:
        before: FoundFile | None = None
        with suppress(FileNotFoundError, NotAFileError):  # a link is replaced, not what it leads to
            before = stack.enter_context(held_file(path.name, directory))
        overwrite(path.name, pieces, directory, temporary=temporary_name(path), like=before)
