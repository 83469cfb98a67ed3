"""A directory with one file a record: the default.

    root/ab/<address>.json      records, spread by the first two digits of their key's digest
    root/claims/<address>.lock  held while a key is tuned
    root/set-aside/             what could not be read

A put touches one file, however many there are. Other processes' records are found as soon as they are
linked into place, because nothing is read ahead.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from pathlib import Path

from asel.errors import StoreError
from asel.keys import CacheKey
from asel.stores.files import create, file_claim, in_thread, is_temporary, opened, overwrite, read, set_aside
from asel.stores.protocol import Claim
from asel.stores.records import Address, Record, RecordError, Rejected, key_digest, log_rejected

__all__ = ["DirectoryStore"]

# No write takes this long: what is older was left by a process that was killed.
_ABANDONED_AFTER_S = 3600.0
_BATCH = 256


class DirectoryStore:
    """Keeps each record in a file of its own. Safe for many threads and processes at once."""

    def __init__(self, root: str | os.PathLike[str], *, read_only: bool = False) -> None:
        self.root = Path(root).expanduser().absolute()
        self.read_only = read_only
        self.on_rejected: Callable[[Rejected], object] = log_rejected

    def __repr__(self) -> str:
        return f"DirectoryStore({str(self.root)!r})"

    @property
    def location(self) -> str:
        return str(self.root)

    async def get(self, address: Address) -> Record | None:
        found = await in_thread(self.location, "reading from", partial(self._read, address))
        if isinstance(found, Rejected):
            self.on_rejected(found)
            return None
        return found

    async def put(self, record: Record, *, replace: bool = False, claim: Claim | None = None) -> Record:
        if self.read_only:
            raise StoreError(f"{self.location} is only read", location=self.location)
        contents = record.to_json().encode()
        while True:
            write = partial(self._write, record.address, contents, replace)
            if await in_thread(self.location, "writing to", write):
                return record
            if (stored := await self.get(record.address)) is not None:
                return stored
            # What stood in the way was bad and is set aside, or has been deleted: try again.

    def claim(self, address: Address, *, wait_s: float = 0.0) -> AbstractAsyncContextManager[Claim]:
        path = self.root / "claims" / f"{address.digest}.lock"
        return file_claim(path, self.location, partial(self.get, address), wait_s)

    async def records(self, key: CacheKey | None = None) -> AsyncIterator[Record]:
        names = await in_thread(self.location, "listing", partial(self._names, key))
        for start in range(0, len(names), _BATCH):
            batch = names[start : start + _BATCH]
            for found in await in_thread(self.location, "reading from", partial(self._read_all, batch)):
                if isinstance(found, Rejected):
                    self.on_rejected(found)
                elif key is None or found.key == key:
                    yield found

    async def delete(self, address: Address, *, expected: Record | None = None) -> bool:
        return await in_thread(self.location, "deleting from", partial(self._delete, address, expected))

    # In a thread.

    def _write(self, address: Address, contents: bytes, replace: bool) -> bool:
        shard, name = _place(address)
        with opened(self.root, make=True) as root, opened(shard, inside=root, make=True) as directory:
            if not replace:
                return create(name, contents, directory)
            overwrite(name, contents, directory)
            return True

    def _read(self, address: Address) -> Record | Rejected | None:
        shard, name = _place(address)
        found = self._read_file(shard, name, address.key)
        if isinstance(found, Record) and found.address != address:
            return self._reject(shard, name, address.key, "it is the record of another address")
        return found

    def _read_all(self, places: list[tuple[str, str]]) -> list[Record | Rejected]:
        found = (self._read_file(shard, name) for shard, name in places)
        return [record for record in found if record is not None]

    def _read_file(self, shard: str, name: str, key: CacheKey | None = None) -> Record | Rejected | None:
        try:
            with opened(self.root) as root, opened(shard, inside=root) as directory:
                return Record.from_json(read(name, directory))
        except FileNotFoundError:
            return None
        except RecordError as error:
            return self._reject(shard, name, key, str(error))

    def _reject(self, shard: str, name: str, key: CacheKey | None, reason: str) -> Rejected | None:
        where = f"{shard}/{name}"
        if self.read_only:
            return Rejected(str(self.root / where), reason, key)
        try:
            with opened(self.root) as root, opened(shard, inside=root) as directory:
                where = set_aside(name, directory, root)
        except FileNotFoundError:
            return None  # another reader was first, and tells
        except OSError:
            pass  # where nothing can be moved, it is told each time it is met
        return Rejected(str(self.root / where), reason, key)

    def _names(self, key: CacheKey | None) -> list[tuple[str, str]]:
        if key is not None:
            digest = key_digest(key)
            return [(digest[:2], name) for name in self._listed(digest[:2]) if name.startswith(digest)]
        try:
            shards = sorted(entry.name for entry in os.scandir(self.root) if len(entry.name) == 2)
        except FileNotFoundError:
            return []
        return [(shard, name) for shard in shards for name in self._listed(shard)]

    def _listed(self, shard: str) -> Iterator[str]:
        try:
            with opened(self.root) as root, opened(shard, inside=root) as directory:
                for name in sorted(os.listdir(directory)):
                    if is_temporary(name):
                        if not self.read_only:
                            _sweep(name, directory)
                    elif name.endswith(".json"):
                        yield name
        except (FileNotFoundError, NotADirectoryError):
            return

    def _delete(self, address: Address, expected: Record | None) -> bool:
        """Compare and delete as one step: the file is moved away first, and put back if it is another."""
        shard, name = _place(address)
        try:
            with opened(self.root) as root, opened(shard, inside=root) as directory:
                if expected is not None and self._read(address) != expected:
                    return False
                aside = f".tmp-deleted-{os.getpid()}-{time.monotonic_ns()}"
                os.rename(name, aside, src_dir_fd=directory, dst_dir_fd=directory)
                contents = read(aside, directory)
                if expected is not None and contents != expected.to_json().encode():
                    create(name, contents, directory)  # replaced just now, by someone who knew better
                    os.unlink(aside, dir_fd=directory)
                    return False
                os.unlink(aside, dir_fd=directory)
                os.fsync(directory)
                return True
        except FileNotFoundError:
            return False


def _place(address: Address) -> tuple[str, str]:
    return address.key_digest[:2], f"{address.digest}.json"


def _sweep(name: str, directory: int) -> None:
    with suppress(FileNotFoundError):
        if time.time() - os.stat(name, dir_fd=directory, follow_symlinks=False).st_mtime > _ABANDONED_AFTER_S:
            os.unlink(name, dir_fd=directory)
