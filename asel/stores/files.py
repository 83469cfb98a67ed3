"""Files that survive: written whole or not at all, read within bounds, locked without waiting.

The plain functions here block, and run in a thread. Directories are held open and names resolved
inside them, without following links: whatever is planted in a cache directory, a write stays in it.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import TypeVar

import anyio
import filelock

from asel.errors import StoreError
from asel.stores.protocol import Claim, claiming
from asel.stores.records import MOST_BYTES, Record, RecordError
from asel.threads import run_in_thread

__all__ = ["create", "file_claim", "in_thread", "is_temporary", "opened", "overwrite", "read", "set_aside"]

T = TypeVar("T")

_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})
_TEMPORARY = ".tmp-"
# What one try at a lock may take. It never waits for the holder, so only a hung file system takes longer.
_PROMPT_S = 5.0


@contextmanager
def opened(path: str | Path, *, inside: int | None = None, make: bool = False) -> Iterator[int]:
    """Hold a directory open. One inside another may not be a link; with `make` it is made if missing, for good."""
    flags = os.O_RDONLY | os.O_DIRECTORY | (0 if inside is None else os.O_NOFOLLOW)
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
    """Make a directory and its parents, each of them on disk before this returns."""
    missing = [parent for parent in (path, *path.parents) if not parent.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for made in missing:
        with opened(made.parent) as directory:
            os.fsync(directory)


def read(name: str, directory: int, most: int = MOST_BYTES) -> bytes:
    """Return a file's contents.

    Raises:
        FileNotFoundError: there is none.
        RecordError: it is a link, a device, or larger than `most` bytes.
    """
    try:
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise RecordError("it is a link or a device, not a file") from error
        raise
    try:
        facts = os.fstat(file)
        if not stat.S_ISREG(facts.st_mode):
            raise RecordError("it is not a plain file")
        if facts.st_size > most:
            raise RecordError(f"it has {facts.st_size:,} bytes, and at most {most:,} are read")
        with os.fdopen(file, "rb", closefd=False) as stream:
            return stream.read(most + 1)
    finally:
        os.close(file)


def create(name: str, contents: bytes, directory: int) -> bool:
    """Write a file that was not there; False if it is there already, untouched.

    The link is what decides between two writers, and it appears with its contents or not at all.
    """
    temporary = _written(contents, directory)
    try:
        try:
            os.link(temporary, name, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=False)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            if not _rename_into_place(temporary, name, directory):
                return False
        os.fsync(directory)
        return True
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=directory)


def _rename_into_place(temporary: str, name: str, directory: int) -> bool:
    """Where there are no links: look and rename, alone by a lock on the directory itself."""
    import fcntl

    fcntl.flock(directory, fcntl.LOCK_EX)  # held for a look and a rename
    try:
        with suppress(FileNotFoundError):
            os.stat(name, dir_fd=directory, follow_symlinks=False)
            return False
        os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
        return True
    finally:
        fcntl.flock(directory, fcntl.LOCK_UN)


def overwrite(name: str, contents: bytes, directory: int) -> None:
    """Replace a file in one step: a reader finds the old contents or the new."""
    temporary = _written(contents, directory)
    try:
        os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        os.unlink(temporary, dir_fd=directory)
        raise
    os.fsync(directory)


def _written(contents: bytes, directory: int) -> str:
    name = f"{_TEMPORARY}{secrets.token_hex(8)}"
    file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666, dir_fd=directory)
    try:
        try:
            left = memoryview(contents)
            while left:
                left = left[os.write(file, left) :]
            os.fsync(file)
        finally:
            os.close(file)
    except BaseException:
        os.unlink(name, dir_fd=directory)
        raise
    return name


def is_temporary(name: str) -> bool:
    """Tell a half-written file, perhaps of a process that was killed, from all others."""
    return name.startswith(_TEMPORARY)


def set_aside(name: str, directory: int, root: int) -> str:
    """Move a bad file out of the way, to where a person can look at it; return its new name."""
    aside = f"{name}.{secrets.token_hex(4)}"
    with opened("set-aside", inside=root, make=True) as keep:
        os.rename(name, aside, src_dir_fd=directory, dst_dir_fd=keep)
    return f"set-aside/{aside}"


class FileClaim:
    """A lock on a file, tried and never waited for. It ends with its process, however that ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # Not per thread: taken in one and given back in another.
        self._lock = filelock.UnixFileLock(path, thread_local=False, fallback_to_soft=False)
        self._mutex = threading.Lock()
        self._abandoned = False

    def take(self) -> bool:
        """Return whether the lock is ours now."""
        self._path.parent.mkdir(parents=True, exist_ok=True)  # a lock need not outlive a power cut
        try:
            self._lock.acquire(blocking=False)
        except filelock.Timeout:
            return False
        with self._mutex:
            if self._abandoned:
                self.give_back()
            return not self._abandoned

    def abandon(self) -> None:
        """Have a thread that is still at `take` give back what it gets."""
        with self._mutex:
            self._abandoned = True

    def give_back(self) -> None:
        """Remove the file and let go of it: whoever held it open finds a name that is gone, and tries anew."""
        with suppress(OSError):
            self._path.unlink()
        self._lock.release(force=True)


@asynccontextmanager
async def file_claim(
    path: Path, location: str, look: Callable[[], Awaitable[Record | None]], wait_s: float
) -> AsyncIterator[Claim]:
    """Hold a claim by a lock on a file; those who wait for it poll, and occupy no thread meanwhile."""
    delays = chain((0.01, 0.015, 0.02, 0.03, 0.05), repeat(0.1))

    async def attempt() -> Callable[[], Awaitable[None]] | None:
        lock = FileClaim(path)
        # Shielded, so that a lock that was got is known to be; bounded, because a file system may hang.
        with anyio.move_on_after(_PROMPT_S, shield=True):
            return partial(give_back, lock) if await in_thread(location, "claiming in", lock.take) else None
        lock.abandon()
        raise StoreError(f"claiming in {location} took longer than {_PROMPT_S:g} s", location=location)

    async def give_back(lock: FileClaim) -> None:
        with anyio.move_on_after(_PROMPT_S):
            await in_thread(location, "giving back a claim in", lock.give_back)

    async with claiming(attempt, look, lambda: anyio.sleep(next(delays)), wait_s) as claim:
        yield claim


async def in_thread(location: str, what: str, work: Callable[[], T]) -> T:
    """Return what some file work returns.

    Raises:
        StoreError: the file system failed.
    """
    try:
        return await run_in_thread(f"{what} {location}", work)
    except StoreError:
        raise
    except (OSError, NotImplementedError) as error:
        raise StoreError(f"{what} {location} failed: {error}", location=location) from error
