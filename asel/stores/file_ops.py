"""File operations that survive crashes: files are written whole or not at all, read within bounds, moved unchanged.

The plain functions here block, and run in a thread. Directories are held open and names resolved
inside them, without following links: even if another user plants a link in a cache directory, a write stays in it.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import filelock

from asel.errors import InvalidRequestError, StoreError
from asel.runtime.threads import run_in_thread
from asel.stores.records import MAX_BYTES, RecordError

__all__ = [
    "TEMPORARY_PREFIX",
    "HeldFile",
    "NotAFileError",
    "create",
    "directory_lock",
    "facts_of",
    "held_file",
    "in_thread",
    "make_temporary",
    "opened",
    "overwrite",
    "require_posix",
    "sizes_in",
]

T = TypeVar("T")

_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})
TEMPORARY_PREFIX = ".tmp-"
IS_POSIX = os.name == "posix"
# How long to wait for a directory's lock. Holders need milliseconds; a process that was stopped may hold it longer.
_LOCK_S = 5.0


class NotAFileError(RecordError):
    """A link, a directory or a device is in the place of a record's file."""


def require_posix(what: str) -> None:
    """Refuse a platform that lacks the file operations that the stores rely on.

    Raises:
        InvalidRequestError: this is not a POSIX platform.
    """
    if not IS_POSIX:
        raise InvalidRequestError(
            f"{what} needs a POSIX platform, and this is {sys.platform}: directories and documents rely on its locks "
            "and links. Use a Redis store (path='redis://host'), or your own with the Store protocol"
        )


@contextmanager
def opened(path: str | Path, *, inside: int | None = None, make: bool = False, follow: bool = False) -> Iterator[int]:
    """Hold a directory open. A directory `inside` another may not be a link, unless `follow`.

    With `make`, a missing directory is made, and synced to disk.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | (0 if inside is None or follow else os.O_NOFOLLOW)
    try:
        directory = os.open(path, flags, dir_fd=inside)
    except FileNotFoundError:
        if not make:
            raise
        if inside is None:
            _make_all(Path(path))
        else:
            with suppress(FileExistsError):
                os.mkdir(path, dir_fd=inside)
            os.fsync(inside)
        directory = os.open(path, flags, dir_fd=inside)
    try:
        yield directory
    finally:
        os.close(directory)


def _make_all(path: Path) -> None:
    """Make a directory and its parents, and sync each to disk."""
    missing = [parent for parent in (path, *path.parents) if not parent.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for made in missing:
        with opened(made.parent) as directory:
            os.fsync(directory)


# Reading.


@dataclass(frozen=True, slots=True)
class HeldFile:
    """A plain file, held open, so that its inode number is not reused."""

    descriptor: int
    facts: os.stat_result

    def read(self, max_bytes: int = MAX_BYTES) -> bytes:
        """Return the contents.

        Raises:
            RecordError: they are more than `max_bytes` bytes.
        """
        if self.facts.st_size > max_bytes:
            raise RecordError(f"it has {self.facts.st_size:,} bytes, and at most {max_bytes:,} are read")
        offset, pieces = 0, []
        while piece := os.pread(self.descriptor, min(max(self.facts.st_size, 1 << 16), max_bytes + 1 - offset), offset):
            offset += len(piece)
            pieces.append(piece)
        return b"".join(pieces)

    @property
    def version(self) -> tuple[int, ...]:
        """Changes when the contents change, with the precision of the file system's clock."""
        return self.facts.st_ino, self.facts.st_mtime_ns, self.facts.st_size

    def is_still(self, name: str, directory: int) -> bool:
        """Return whether the file is unchanged and still has that name. Reliable only under the `directory_lock`."""
        now = os.stat(name, dir_fd=directory, follow_symlinks=False)
        return now.st_dev == self.facts.st_dev and HeldFile(self.descriptor, now).version == self.version


@contextmanager
def held_file(name: str, directory: int, *, follow: bool = False) -> Iterator[HeldFile]:
    """Hold a file open; with `follow`, also the target of a link.

    Raises:
        FileNotFoundError: it does not exist.
        NotAFileError: it is a link, a device, or another kind of thing.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(name, flags, dir_fd=directory)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise NotAFileError("it is a link or a device, not a file") from error
        raise
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise NotAFileError("it is not a plain file")
        yield HeldFile(descriptor, facts)
    finally:
        os.close(descriptor)


# Writing.


def create(
    name: str,
    contents: bytes | Iterable[bytes],
    directory: int,
    *,
    temporary: str | None = None,
    like: HeldFile | None = None,
    sync: bool = True,
) -> bool:
    """Write a new file; return False, touching nothing, if it exists already.

    Creating the link decides between two writers, and the file appears with all its contents. With `like`, the new
    file gets that file's permissions. Without `sync` the name is not on disk yet: a caller that
    writes many files syncs their directory once.
    """
    with _written(contents, directory, temporary, like) as written:
        try:
            os.link(written, name, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=False)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            if not _rename_into_place(written, name, directory):
                return False
        if sync:
            os.fsync(directory)
        return True


def _rename_into_place(temporary: str, name: str, directory: int) -> bool:
    """Check that the name is free and rename, as one step: for file systems without links."""
    with directory_lock(directory):
        with suppress(FileNotFoundError):
            os.stat(name, dir_fd=directory, follow_symlinks=False)
            return False
        os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
        return True


def overwrite(
    name: str,
    contents: bytes | Iterable[bytes],
    directory: int,
    *,
    temporary: str | None = None,
    like: HeldFile | None = None,
    sync: bool = True,
) -> None:
    """Replace a file in one step: a reader finds the old contents or the new."""
    with _written(contents, directory, temporary, like) as written, directory_lock(directory):
        os.rename(written, name, src_dir_fd=directory, dst_dir_fd=directory)
    if sync:
        os.fsync(directory)


@contextmanager
def directory_lock(directory: int) -> Iterator[None]:
    """Hold a directory's lock, for operations that examine a file before they replace, move or delete it.

    On a file system without locks, a file may be replaced between the examination and the operation.

    Raises:
        TimeoutError: another process has held the lock for seconds.
    """
    deadline = time.monotonic() + _LOCK_S
    while not _is_locked(directory):
        if time.monotonic() > deadline:
            raise TimeoutError(f"another process has held the directory's lock for over {_LOCK_S:g} s")
        time.sleep(0.001)
    try:
        yield
    finally:
        with suppress(OSError):
            filelock.unlock_descriptor(directory)


def _is_locked(directory: int) -> bool:
    """Lock a directory; return False if another process holds the lock. Succeeds if the file system has no locks."""
    try:
        return filelock.lock_descriptor(directory, blocking=False)
    except OSError:
        return True


@contextmanager
def _written(
    contents: bytes | Iterable[bytes], directory: int, name: str | None, like: HeldFile | None
) -> Iterator[str]:
    """Write these contents to a temporary file on disk, which exists during the block, and give its name.

    The file is locked, so that no sweep takes it for a dead writer's. Only one
    process at a time may use a given `name`, and an earlier file of that name is removed.
    """
    file, name = make_temporary(name, directory)
    try:
        if like is not None:
            _protect(file, like)
        for piece in (contents,) if isinstance(contents, bytes) else contents:
            left = memoryview(piece)
            while left:
                left = left[os.write(file, left) :]
        os.fsync(file)
        yield name
    finally:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=directory)
        os.close(file)


def make_temporary(given: str | None, directory: int) -> tuple[int, str]:
    """Return the descriptor and the name of a new file that is locked."""
    while True:
        name = given or f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
        if given is not None:
            with suppress(FileNotFoundError):
                os.unlink(given, dir_fd=directory)
        file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666, dir_fd=directory)
        with suppress(OSError):  # without a lock, its age protects it
            filelock.lock_descriptor(file, blocking=False)
        if os.fstat(file).st_nlink:
            return file, name
        os.close(file)  # a sweep removed it before it was locked


def _protect(file: int, like: HeldFile) -> None:
    """Give a file the permissions of another, and the other's owner if that is allowed."""
    mode = stat.S_IMODE(like.facts.st_mode) & 0o777
    try:
        os.fchown(file, like.facts.st_uid, like.facts.st_gid)
    except OSError:
        try:
            os.fchown(file, -1, like.facts.st_gid)
        except OSError:
            mode &= ~0o070  # the file has another group, which must not get these permissions
    os.fchmod(file, mode)


def sizes_in(directory: int, names: Iterable[str]) -> dict[str, int]:
    """Return the sizes of the files, leaving out names that do not exist."""
    return {name: facts.st_size for name, facts in facts_of(names, directory)}


def facts_of(names: Iterable[str], directory: int) -> Iterator[tuple[str, os.stat_result]]:
    """Give each file that exists, with its `stat` result."""
    for name in names:
        with suppress(FileNotFoundError):
            yield name, os.stat(name, dir_fd=directory, follow_symlinks=False)


async def in_thread(location: str, what: str, work: Callable[[], T]) -> T:
    """Return the result of blocking file work.

    Raises:
        StoreError: the file system failed.
    """
    try:
        return await run_in_thread(f"{what} {location}", work)
    except StoreError:
        raise
    except (OSError, NotImplementedError, RecordError) as error:
        raise StoreError(f"{what} {location} failed: {error}", location=location) from error
