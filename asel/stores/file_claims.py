"""Claims as locks on files: attempts never wait, and a claim ends with its process, even if that is killed.

The folder of the lock files is opened once, without following a link, and names are resolved inside it: another
user of a shared cache cannot have a lock made, or removed, anywhere else. `FileLock` works by path, so
only filelock's lock on a descriptor is used here.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import chain, count, repeat
from pathlib import Path

import anyio
import filelock

from asel.errors import StoreError
from asel.stores.file_ops import facts_of, in_thread, opened
from asel.stores.protocol import Claim, claiming
from asel.stores.records import Address, Record, schema_name

__all__ = ["file_claim", "lock_files", "remove_stale_locks"]

# Time limit of one attempt. It never waits for the holder, so only a hung file system takes longer.
_PROMPT_S = 5.0
# Holders that were killed leave their lock files behind. Above this number the stale ones are removed, oldest first:
# at a process's first attempt to claim, and then once in this many attempts.
MAX_LOCK_FILES = 256
_LOCK_NAME = re.compile(r"[0-9a-f]{32}\.[0-9a-f]{16}\.[0-9a-f]{16}\.schema-[0-9]+\.lock")
_attempts = count()
# The descriptors of this process's locks. A forked child closes its copies, or it would hold its parent's claims.
_descriptors: set[int] = set()


def _close_inherited() -> None:
    while _descriptors:
        with suppress(OSError):
            os.close(_descriptors.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_inherited)


class FileLock:
    """A lock on a file in a folder that is held open."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._file = self._folder = -1
        self._process = os.getpid()
        self._mutex = threading.Lock()
        self._abandoned = False

    def take(self, folder: int) -> bool:
        """Take the lock if it is free; return whether it is ours now."""
        while (file := _locked(self._name, folder)) is not None:
            if _is_named(file, self._name, folder):
                break
            _close(file)  # its holder has just removed it
        else:
            return False
        self._file, self._folder = file, os.dup(folder)
        _descriptors.add(self._folder)
        with self._mutex:
            if self._abandoned:
                self.give_back()
            return not self._abandoned

    def abandon(self) -> None:
        """Make a thread that is still in `take` release the lock as soon as it has taken it."""
        with self._mutex:
            self._abandoned = True

    def give_back(self) -> None:
        """Remove the file and release it: a process that has it open finds the name gone, and tries again."""
        if self._process != os.getpid():
            return  # a forked child's copy, whose descriptors are closed
        with suppress(OSError):
            os.unlink(self._name, dir_fd=self._folder)
        _close(self._folder)
        _close(self._file)


def _locked(name: str, folder: int) -> int | None:
    """Lock a file and return its descriptor; None if another process holds the lock."""
    file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666, dir_fd=folder)
    _descriptors.add(file)
    is_ours = False
    try:
        is_ours = filelock.lock_descriptor(file, blocking=False)
    finally:
        if not is_ours:
            _close(file)
    return file if is_ours else None


def _is_named(file: int, name: str, folder: int) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(name, dir_fd=folder, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _close(descriptor: int) -> None:
    _descriptors.discard(descriptor)
    os.close(descriptor)


@asynccontextmanager
async def file_claim(
    folder: Path,
    address: Address,
    location: str,
    look: Callable[[], Awaitable[Record | None]],
    wait_s: float,
    anew: bool,
) -> AsyncIterator[Claim]:
    """Hold a claim by a lock on a file; waiters poll, and occupy no thread between polls."""
    name = f"{address.digest}.{schema_name()}.lock"
    delays = chain((0.01, 0.015, 0.02, 0.03, 0.05), repeat(0.1))

    async def attempt() -> Callable[[], Awaitable[None]] | None:
        lock = FileLock(name)

        def take() -> bool:
            if next(_attempts) % MAX_LOCK_FILES == 0:
                remove_stale_locks(folder)
            folder.mkdir(parents=True, exist_ok=True)  # without a sync: a lock need not outlive a power cut
            with opened(folder.parent) as parent, opened(folder.name, inside=parent) as inside:
                return lock.take(inside)

        # Shielded, so that a lock that the thread takes is always released; bounded, because a file system may hang.
        with anyio.move_on_after(_PROMPT_S, shield=True):
            return partial(give_back, lock) if await in_thread(location, "claiming in", take) else None
        lock.abandon()
        raise StoreError(f"claiming in {location} took longer than {_PROMPT_S:g} s", location=location)

    async def give_back(lock: FileLock) -> None:
        with anyio.move_on_after(_PROMPT_S):
            await in_thread(location, "giving back a claim in", lock.give_back)

    async with claiming(attempt, look, lambda: anyio.sleep(next(delays)), wait_s, anew) as claim:
        yield claim


def lock_files(folder: Path) -> list[str]:
    """Return the names of the lock files of claims, held or stale."""
    try:
        return [name for name in os.listdir(folder) if _LOCK_NAME.fullmatch(name)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def remove_stale_locks(folder: Path, max_files: int = MAX_LOCK_FILES) -> None:
    """Remove the oldest lock files that are not held, until at most `max_files` are left."""
    names = lock_files(folder)
    if len(names) <= max_files:
        return
    with suppress(OSError), opened(folder.parent) as parent, opened(folder.name, inside=parent) as inside:
        made_at = {name: facts.st_mtime_ns for name, facts in facts_of(names, inside)}
        for name in sorted(made_at, key=lambda name: made_at[name])[: len(names) - max_files]:
            lock = FileLock(name)
            with suppress(OSError):
                if lock.take(inside):
                    lock.give_back()
