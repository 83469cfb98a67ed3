"""A directory with one file for each record: the default.

    root/schema-2/ab/<address>.json      records, spread by the first two digits of their key's digest
    root/claims/<address>.schema-2.lock  held while a key is tuned
    root/set-aside/                      the newest of the files that could not be read

A put writes one file, in a directory of any size. Other processes' records are found as soon as they are
linked into place, because nothing is read ahead. Versions of asel with another record format have their own records
and claims beside these, and no version touches another's.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from asel.errors import StoreError
from asel.kernels.keys import CacheKey
from asel.redaction import redact
from asel.stores.file_claims import file_claim, lock_files, remove_stale_locks
from asel.stores.file_ops import (
    HeldFile,
    NotAFileError,
    create,
    directory_lock,
    held_file,
    in_thread,
    opened,
    overwrite,
    require_posix,
    sizes_in,
)
from asel.stores.leftovers import is_temporary, set_aside, sweep
from asel.stores.protocol import READ_BATCH, SCAN_BATCH, Change, Changed, Claim, StoreDefaults, StoreStats
from asel.stores.records import (
    Address,
    OtherSchemaError,
    Record,
    RecordError,
    Rejected,
    key_digest,
    log_rejected,
    schema_name,
)
from asel.stores.summaries import Addressed, RecordLine

__all__ = ["DirectoryStore"]

R = TypeVar("R", bound=Addressed)

# Changes that a thread makes at a time; more would keep the event loop waiting for the GIL.
_WRITE_BATCH = 16
_TRIES = 8


class DirectoryStore(StoreDefaults):
    """Keeps each record in a file of its own. Safe for many threads and processes at once."""

    def __init__(self, root: str | os.PathLike[str], *, read_only: bool = False) -> None:
        require_posix(f"a store in the directory {os.fspath(root)!r}")
        self.root = Path(root).expanduser().absolute()
        self.read_only = read_only
        self.on_rejected: Callable[[Rejected], object] = log_rejected

    def __repr__(self) -> str:
        return f"DirectoryStore({redact(self.root)!r})"

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
        [changed] = await self._make(lambda: [Change.put(record, replace=replace)])
        return record if changed.done else await in_thread(self.location, "reading from", changed.record)

    async def delete(self, address: Address, *, expected: Record | None = None) -> bool:
        [changed] = await self._make(lambda: [Change.delete(address, expected=expected)])
        return changed.done

    async def apply(self, changes: Sequence[Change]) -> list[Changed]:
        """Make many changes; their directories are synced once for each batch, not once for each record."""
        results: dict[int, Changed] = {}
        order = await in_thread(self.location, "writing to", partial(_by_shard, changes))
        for start in range(0, len(order), _WRITE_BATCH):
            numbers = order[start : start + _WRITE_BATCH]
            batch = [changes[number] for number in numbers]
            results.update(zip(numbers, await self._make(partial(list, batch)), strict=True))
        return [results[number] for number in range(len(changes))]

    async def _make(self, changes: Callable[[], Sequence[Change]]) -> list[Changed]:
        if self.read_only:
            raise StoreError(f"{self.location} is read-only", location=self.location)
        rejected: list[Rejected] = []
        try:
            return await in_thread(self.location, "writing to", lambda: self._apply(changes(), rejected))
        finally:
            for bad in rejected:
                self.on_rejected(bad)

    def claim(self, address: Address, *, wait_s: float = 0.0, anew: bool = False) -> AbstractAsyncContextManager[Claim]:
        return file_claim(self.root / "claims", address, self.location, partial(self.get, address), wait_s, anew)

    async def records(self, key: CacheKey | None = None) -> AsyncIterator[Record]:
        async with aclosing(self._batches(Record.from_json, READ_BATCH, key)) as batches:
            async for batch in batches:
                for record in batch:
                    if key is None or record.key == key:
                        yield record

    async def scan(self) -> AsyncIterator[list[RecordLine]]:
        async with aclosing(self._batches(RecordLine.parse, SCAN_BATCH)) as batches:
            async for batch in batches:
                yield batch

    async def _batches(
        self, parse: Callable[[bytes], R], size: int, key: CacheKey | None = None
    ) -> AsyncGenerator[list[R]]:
        shards = await in_thread(self.location, "listing", partial(self._shards, key))
        for shard in shards:
            names = await in_thread(self.location, "listing", partial(self._names, shard, key))
            if isinstance(names, Rejected):
                self.on_rejected(names)
                continue
            for start in range(0, len(names), size):
                read = partial(self._read_all, shard, names[start : start + size], parse)
                batch: list[R] = []
                for found in await in_thread(self.location, "reading from", read):
                    if isinstance(found, Rejected):
                        self.on_rejected(found)
                    else:
                        batch.append(found)
                if batch:
                    yield batch

    async def stats(self) -> StoreStats:
        """Return the numbers of files by kind, and remove temporary files of dead writers and stale lock files."""
        return await in_thread(self.location, "looking through", self._stats)

    # In a thread. Reading:

    def _read(self, address: Address) -> Record | Rejected | None:
        shard, name = _shard_and_name(address)
        try:
            with self._shard(shard) as directory:
                return self._read_in(directory, shard, name, Record.from_json, address)
        except FileNotFoundError:
            return None

    def _read_all(self, shard: str, names: list[str], parse: Callable[[bytes], R]) -> list[R | Rejected]:
        try:
            with self._shard(shard) as directory:
                found = [self._read_in(directory, shard, name, parse) for name in names]
        except FileNotFoundError:
            return []
        return [record for record in found if record is not None]

    @contextmanager
    def _shard(self, shard: str, *, make: bool = False) -> Iterator[int]:
        inner = partial(opened, make=make, follow=self.read_only)  # shipped files may lie behind links
        with (
            opened(self.root, make=make) as root,
            inner(schema_name(), inside=root) as base,
            inner(shard, inside=base) as directory,
        ):
            yield directory

    def _read_in(
        self,
        directory: int,
        shard: str,
        name: str,
        parse: Callable[[bytes], R],
        address: Address | None = None,
        *,
        in_the_way: bool = False,
    ) -> R | Rejected | None:
        """Return the record in a file, parsed with `parse`; a bad file is set aside.

        A record of another version stays, unless it is `in_the_way` of a put: no version writes to another's names.
        """
        reject = partial(self._reject, directory, shard, name, None if address is None else address.key)
        try:
            with held_file(name, directory, follow=self.read_only) as file:
                try:
                    record = parse(file.read())
                except RecordError as error:
                    stays = isinstance(error, OtherSchemaError) and not in_the_way
                    return None if stays else reject(file, str(error))
                if f"{record.address.digest}.json" != name:
                    return reject(file, "it is the record of another address")
                return record
        except FileNotFoundError:
            return None
        except NotAFileError as error:
            return reject(None, str(error))
        except PermissionError as error:  # another user's private file in a shared cache: it stays in place
            return Rejected(self._where(shard, name), str(error), None if address is None else address.key)

    def _reject(
        self, directory: int, shard: str, name: str, key: CacheKey | None, judged: HeldFile | None, reason: str
    ) -> Rejected | None:
        where = self._where(shard, name)
        if not self.read_only:
            try:
                with opened(self.root) as root:
                    aside = set_aside(name, directory, judged, root)
            except FileNotFoundError:
                return None  # another reader was first and reports it
            except OSError:
                pass  # it cannot be moved, so each read reports it
            else:
                if aside is None:  # a good record has taken its place
                    return None
                where = str(self.root / aside)
        return Rejected(where, reason, key)

    def _where(self, shard: str, name: str) -> str:
        return str(self.root / schema_name() / shard / name)

    def _shards(self, key: CacheKey | None) -> list[str]:
        if key is not None:
            return [key_digest(key)[:2]]
        try:
            return sorted(name for name in os.listdir(self.root / schema_name()) if len(name) == 2)
        except FileNotFoundError:
            return []

    def _names(self, shard: str, key: CacheKey | None = None) -> list[str] | Rejected:
        """Return the names of a shard's records, and remove the temporary files of dead writers."""
        start = "" if key is None else key_digest(key)
        try:
            with self._shard(shard) as directory:
                names = sorted(os.listdir(directory))
                if not self.read_only:
                    sweep(filter(is_temporary, names), directory)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except PermissionError as error:  # another user's private directory; other directories are still listed
            return Rejected(self._where(shard, ""), str(error), key)
        return [name for name in names if name.endswith(".json") and name.startswith(start) and not is_temporary(name)]

    def _stats(self) -> StoreStats:
        claims = self.root / "claims"
        if not self.read_only:
            remove_stale_locks(claims)
        shards = {shard: self._names(shard) for shard in self._shards(None)}
        readable = {shard: names for shard, names in shards.items() if not isinstance(names, Rejected)}
        files = {shard: _sizes(self.root / schema_name() / shard) for shard in readable}
        aside = _sizes(self.root / "set-aside")
        others = [*self.root.glob("??/*.json"), *self.root.glob("schema-*/??/*.json")]  # version 1 had no such folder
        return StoreStats(
            records=sum(map(len, readable.values())),
            bytes=sum(files[shard].get(name, 0) for shard, names in readable.items() for name in names),
            set_aside=len(aside),
            set_aside_bytes=sum(aside.values()),
            temporary=sum(is_temporary(name) for sizes in files.values() for name in sizes),
            locks=len(lock_files(claims)),
            other_schemas=sum(path.parts[-3] != schema_name() for path in others),
        )

    # Writing:

    def _apply(self, changes: Sequence[Change], rejected: list[Rejected]) -> list[Changed]:
        results: list[Changed] = []
        for shard, group in itertools.groupby(changes, key=lambda change: _shard_and_name(change.address)[0]):
            together = list(group)
            puts = any(change.line for change in together)
            try:
                with self._shard(shard, make=puts) as directory:
                    done = [self._apply_in(directory, change, rejected) for change in together]
                    if puts or any(changed.done for changed in done):
                        os.fsync(directory)  # also if another writer was first: it may not have synced yet
            except FileNotFoundError:
                if puts:
                    raise
                done = [Changed("", False)] * len(together)  # nothing to delete
            results += done
        return results

    def _apply_in(self, directory: int, change: Change, rejected: list[Rejected]) -> Changed:
        if not change.line:
            return Changed("", _delete(directory, change))
        shard, name = _shard_and_name(change.address)
        contents = change.line.encode()
        if change.replace:
            overwrite(name, contents, directory, sync=False)
            return Changed(change.line, True)
        for _ in range(_TRIES):
            # Read before writing: a file that is created in vain costs a sync of the disk.
            found = self._read_in(directory, shard, name, Record.from_json, change.address, in_the_way=True)
            if isinstance(found, Record):
                return Changed(found.line(), False)
            if found is not None:
                rejected.append(found)
                if found.where == self._where(shard, name):  # it could not be moved, so trying again is useless
                    break
            if create(name, contents, directory, sync=False):
                return Changed(change.line, True)
        raise StoreError(
            f"{self._where(shard, name)} holds an unreadable file, and it could not be moved aside",
            location=self.location,
        )


def _by_shard(changes: Sequence[Change]) -> list[int]:
    """Return the indexes of the changes, grouped by directory."""
    shards = [_shard_and_name(change.address)[0] for change in changes]
    return sorted(range(len(changes)), key=shards.__getitem__)


def _shard_and_name(address: Address) -> tuple[str, str]:
    return address.key_digest[:2], f"{address.digest}.json"


def _delete(directory: int, change: Change) -> bool:
    """Compare and delete in one step, so that the record cannot be replaced in between."""
    _, name = _shard_and_name(change.address)
    try:
        with directory_lock(directory):
            if change.expected:
                with held_file(name, directory) as file:
                    if not change.expects(file.read().decode(errors="replace")):
                        return False
            os.unlink(name, dir_fd=directory)
            return True
    except (FileNotFoundError, RecordError):  # a directory or link in its place is not the expected record
        return False


def _sizes(folder: Path) -> dict[str, int]:
    try:
        with opened(folder) as directory:
            return sizes_in(directory, os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return {}
