"""The file behind a document store: read, merged with changes, and replaced in one step. Everything here blocks.

A document behind a link can be read but not written.
"""

from __future__ import annotations

import os
import re
import stat
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import filelock

from asel.errors import StoreError
from asel.redaction import redact
from asel.stores.document_format import Contents, compose, parse
from asel.stores.file_ops import HeldFile, NotAFileError, create, held_file, opened, overwrite, require_posix, sizes_in
from asel.stores.leftovers import trim
from asel.stores.protocol import Change, Changed, StoreStats
from asel.stores.records import Address, RecordError, Rejected

__all__ = ["DocumentFile", "PendingChange", "document_lock", "write_document"]

_MAX_BYTES = 256 << 20
_LOCK_S = 10.0
_UNCHANGED = Changed("", False)


@dataclass(slots=True)
class PendingChange:
    """A put or a deletion that is not yet in the file, and its result."""

    asked: Change
    result: Changed = _UNCHANGED

    def apply(self, lines: dict[Address, bytes]) -> bool:
        """Change the lines; return whether that changed anything.

        A task that was cancelled before it could report its result may have made the change already.
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


class _Seen(NamedTuple):
    """The version and the contents of the file when it was last read."""

    version: tuple[int, ...] | None
    contents: Contents


_NOTHING = _Seen(None, Contents())


class DocumentFile:
    """One document on disk, and its contents when last read. Safe for many threads and processes at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.unreported: deque[Rejected] = deque()
        """Records rejected while reading, to be reported with the next result."""
        self._seen = _NOTHING

    def __repr__(self) -> str:
        return f"DocumentFile({redact(self.path)!r})"

    def read(self) -> Contents:
        """Return the contents of the document, read again if the file has changed."""
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
            bad = Rejected(str(self.path), str(error))
            if self._seen.contents.rejected != [bad]:
                self.unreported.append(bad)
            self._seen = _Seen(None, Contents(rejected=[bad]))
            return Contents()

    def _parse(self, file: HeldFile) -> _Seen:
        checked = {line: address for address, line in self._seen.contents.lines.items()}
        self._seen = seen = _Seen(file.version, parse(file.read(_MAX_BYTES), str(self.path), checked))
        self.unreported.extend(seen.contents.rejected)
        return seen

    def write(self, changes: Sequence[PendingChange]) -> None:
        with opened(self.path.parent, make=True) as directory, document_lock(self.path):
            self._write_alone(changes, directory)

    def _write_alone(self, changes: Sequence[PendingChange], directory: int) -> None:
        """Merge the changes into the current file.

        The file is opened once, after the lock was taken: a link planted meanwhile is not followed, and the same file
        is read, copied and replaced.
        """
        with ExitStack() as stack:
            file: HeldFile | None = None
            try:
                file = stack.enter_context(held_file(self.path.name, directory))
                _refuse_strangers(file, directory)
            except FileNotFoundError:
                pass
            except NotAFileError as error:
                raise StoreError(f"{self.path} is not written: {error}", location=str(self.path)) from error
            self._merge(changes, directory, file)

    def _merge(self, changes: Sequence[PendingChange], directory: int, file: HeldFile | None) -> None:
        seen = self._seen  # read once: a reader in another thread may set it to an older state at any moment
        if file is None:
            seen = _NOTHING
        elif file.version != seen.version:
            seen = self._parse(file)
        contents = Contents(dict(seen.contents.lines), seen.contents.foreign)
        if not [change for change in changes if change.apply(contents.lines)]:
            return
        size = sum(len(line) + 2 for line in chain(contents.lines.values(), contents.foreign))
        if size > _MAX_BYTES and size > (0 if file is None else file.facts.st_size):
            why = f"{self.path} would have {size:,} bytes, and at most {_MAX_BYTES:,} are read: use a directory instead"
            raise StoreError(why, location=str(self.path))
        if file is not None and seen.contents.rejected:
            self._keep_a_copy(directory, file)
        overwrite(self.path.name, compose(contents), directory, temporary=temporary_name(self.path), like=file)
        with held_file(self.path.name, directory) as written:
            self._seen = _Seen(written.version, contents)

    def _keep_a_copy(self, directory: int, file: HeldFile) -> None:
        """Keep a copy of the document before the next version leaves out its bad lines."""
        contents, copies = file.read(_MAX_BYTES), self._copies(directory)
        newest = max(copies, default=-1)
        if newest >= 0 and self._is_copy(newest, contents, directory):
            return  # made by an earlier attempt to write, which failed
        write = partial(create, contents=contents, directory=directory, temporary=temporary_name(self.path), like=file)
        while not write(self._copy(newest + 1)):
            newest += 1
        trim([self._copy(number) for number in (*copies, newest + 1)], directory)

    def _copy(self, number: int) -> str:
        return f"{self.path.name}.bad-{number}"

    def _is_copy(self, number: int, contents: bytes, directory: int) -> bool:
        try:
            with held_file(self._copy(number), directory) as copy:
                return copy.facts.st_size == len(contents) and copy.read(_MAX_BYTES) == contents
        except (OSError, RecordError):
            return False

    def _copies(self, directory: int) -> list[int]:
        """Return the numbers of the copies that were set aside."""
        pattern = re.compile(re.escape(self.path.name) + r"\.bad-([0-9]{1,9})")
        found = map(pattern.fullmatch, os.listdir(directory))
        return [int(match[1]) for match in found if match is not None]

    def stats(self) -> StoreStats:
        """Return the numbers of records and copies, without the locks of claims."""
        contents = self.read()
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
            other_schemas=len(contents.foreign),
        )


def _is_link_to_follow(name: str, directory: int) -> bool:
    """Return whether it is a link made by a trusted user: this user, the directory's owner or root."""
    facts = os.stat(name, dir_fd=directory, follow_symlinks=False)
    return stat.S_ISLNK(facts.st_mode) and facts.st_uid in (os.geteuid(), os.fstat(directory).st_uid, 0)


def _refuse_strangers(file: HeldFile, directory: int) -> None:
    """Refuse a file that another user may have planted in a world-writable directory."""
    place = os.fstat(directory)
    if place.st_mode & stat.S_IWOTH and file.facts.st_uid not in (os.geteuid(), place.st_uid, 0):
        raise NotAFileError(f"it belongs to another user ({file.facts.st_uid}), and the directory is world-writable")


@contextmanager
def document_lock(path: Path) -> Iterator[None]:
    """Hold the exclusive right to write a document.

    Raises:
        StoreError: another process has held it for seconds.
    """
    beside = path.with_name(f".{path.name}.lock")
    lock = filelock.UnixFileLock(beside, thread_local=False, fallback_to_soft=False)
    try:
        with lock.acquire(timeout=_LOCK_S, poll_interval=0.002):
            yield
    except filelock.Timeout as error:
        raise StoreError(f"{beside} was held for over {_LOCK_S:g} s", location=str(path)) from error


def temporary_name(path: Path) -> str:
    """Return the name of the file for the next version. It is always the same, so dead writers leave at most one."""
    return f".{path.name}.tmp"


def write_document(path: Path, pieces: Iterable[bytes]) -> None:
    """Replace a whole document, with the permissions of the file that it replaces."""
    require_posix(f"exporting to {path}")
    with opened(path.parent, make=True) as directory, document_lock(path), ExitStack() as stack:
        before: HeldFile | None = None
        with suppress(FileNotFoundError, NotAFileError):  # a link itself is replaced, not its target
            before = stack.enter_context(held_file(path.name, directory))
        overwrite(path.name, pieces, directory, temporary=temporary_name(path), like=before)
