"""Claims as locks on files: tried and never waited for, and over with their process, however that ends."""

from __future__ import annotations

import errno
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import chain, count, repeat
from pathlib import Path

import anyio
import filelock

from asel.errors import StoreError
from asel.stores.files import in_thread
from asel.stores.protocol import Claim, claiming
from asel.stores.records import Address, Record, schema_name

__all__ = ["file_claim", "lock_files", "remove_stale_locks"]

# What one try at a lock may take. It never waits for the holder, so only a hung file system takes longer.
_PROMPT_S = 5.0
# Holders that were killed leave their lock files behind. Above this number the stale ones are removed, oldest first:
# with a process's first attempt, and then with one of as many.
MAX_LOCK_FILES = 256
_attempts = count()


class FileClaim:
    """A lock on a file. It ends with its process, however that ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # Not per thread: taken in one and given back in another.
        self._lock = filelock.UnixFileLock(path, thread_local=False, fallback_to_soft=False)
        self._mutex = threading.Lock()
        self._abandoned = False

    def take(self) -> bool:
        """Return whether the lock is ours now."""
        self._path.parent.mkdir(parents=True, exist_ok=True)  # a lock need not outlive a power cut
        if self._path.parent.is_symlink():  # planted: the lock would be made, and removed, somewhere else
            raise OSError(errno.ELOOP, "the directory of the claims is a link", str(self._path.parent))
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
        """Remove the file and release it: whoever has it open finds a name that is gone, and tries again."""
        with suppress(OSError):
            self._path.unlink()
        self._lock.release(force=True)


@asynccontextmanager
async def file_claim(
    folder: Path,
    address: Address,
    location: str,
    look: Callable[[], Awaitable[Record | None]],
    wait_s: float,
    anew: bool,
) -> AsyncIterator[Claim]:
    """Hold a claim by a lock on a file; those who wait for it poll, and occupy no thread meanwhile."""
    path = folder / f"{address.digest}.{schema_name()}.lock"
    delays = chain((0.01, 0.015, 0.02, 0.03, 0.05), repeat(0.1))

    async def attempt() -> Callable[[], Awaitable[None]] | None:
        lock = FileClaim(path)

        def take() -> bool:
            if next(_attempts) % MAX_LOCK_FILES == 0:
                remove_stale_locks(folder)
            return lock.take()

        # Shielded, so that a lock that was got is known to be; bounded, because a file system may hang.
        with anyio.move_on_after(_PROMPT_S, shield=True):
            return partial(give_back, lock) if await in_thread(location, "claiming in", take) else None
        lock.abandon()
        raise StoreError(f"claiming in {location} took longer than {_PROMPT_S:g} s", location=location)

    async def give_back(lock: FileClaim) -> None:
        with anyio.move_on_after(_PROMPT_S):
            await in_thread(location, "giving back a claim in", lock.give_back)

    async with claiming(attempt, look, lambda: anyio.sleep(next(delays)), wait_s, anew) as claim:
        yield claim


def lock_files(folder: Path) -> list[Path]:
    """Return the lock files of claims, held or stale."""
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def remove_stale_locks(folder: Path, max_files: int = MAX_LOCK_FILES) -> None:
    """Remove the oldest lock files that nobody holds, until few enough are left."""
    files = lock_files(folder)
    for path in sorted(files, key=_made_at)[: max(0, len(files) - max_files)]:
        lock = FileClaim(path)
        with suppress(OSError, NotImplementedError):
            if lock.take():
                lock.give_back()


def _made_at(path: Path) -> int:
    try:
        return path.stat(follow_symlinks=False).st_mtime_ns
    except OSError:  # just given back
        return 0
