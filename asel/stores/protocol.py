"""The protocol of stores: the promises of each method, and defaults that a store can inherit."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import anyio

from asel.kernels.keys import CacheKey
from asel.runtime.threads import run_in_thread
from asel.stores.records import Address, Record, RecordError, Rejected
from asel.stores.summaries import RecordLine

__all__ = [
    "READ_BATCH",
    "SCAN_BATCH",
    "Change",
    "Changed",
    "Claim",
    "Store",
    "StoreDefaults",
    "StoreStats",
    "apply_each",
    "apply_one",
    "claiming",
    "optional_method",
]

# Records that a thread reads at a time. Few, so that they are freed before the garbage collector counts them as
# long-lived: a pass over all long-lived objects stops every thread (70 ms with 100,000 objects). Listing 10,000 records
# caused three such passes with batches of 16, and causes at most one with 4, for 0.1 ms more a batch.
READ_BATCH = 4
# Lines that a thread reads and summarizes at a time, in about 2 ms. They are text, which the collector skips.
SCAN_BATCH = 64

# Concurrent changes of a store that takes them one by one. Each may occupy a thread, and the event loop competes with
# those threads for the GIL.
_MAX_CONCURRENT_CHANGES = 8


@dataclass(slots=True)
class Claim:
    """The result of a wait for the right to tune a key.

    If `held`, this process has the right until the block ends or a lease is lost. If neither held nor with a
    `record`, the wait timed out, and the holder may be stuck.
    """

    held: bool = False
    record: Record | None = None
    """The record that was stored for the address during the wait: there is nothing left to tune."""
    token: str = ""
    """Identifies the holder, in stores that need it."""
    is_agreed: bool = False
    """Whether all processes have this record or failure as their answer, even one that asked for a new tune."""
    failure: str = ""
    """Why the tune of the holder failed, in stores where it then counts as failed for all."""


@dataclass(frozen=True, slots=True)
class Change:
    """A record to put, or the deletion of the record at an address.

    Records are lines of JSON here: each is one string, which the garbage collector skips.
    """

    address: Address
    line: str = ""
    """The record to put; empty for a deletion."""
    replace: bool = False
    expected: str = ""
    """The record to delete; if empty, any record is deleted."""

    @classmethod
    def put(cls, record: Record, *, replace: bool = False) -> Change:
        return cls(record.address, record.to_json(), replace)

    @classmethod
    def delete(cls, address: Address, *, expected: Record | None = None) -> Change:
        return cls(address, expected="" if expected is None else expected.line())

    def expects(self, line: str) -> bool:
        """Return whether a deletion is meant for this record. The formatting of the JSON does not matter."""
        if not self.expected or line == self.expected:
            return True
        try:
            return Record.from_json(line) == Record.from_json(self.expected)
        except RecordError:
            return False


class Changed(NamedTuple):
    """The result of a change: the line that is stored now, and whether this change put or removed it."""

    line: str
    done: bool

    def record(self) -> Record:
        return Record.from_json(self.line)


@dataclass(frozen=True, slots=True)
class StoreStats:
    """The numbers of records, bad files, locks and leftovers in a store."""

    records: int
    bytes: int = 0
    """The size of the records; 0 if the store does not know it."""
    set_aside: int = 0
    """Bad files that are kept for people to examine: a bounded number, the newest."""
    set_aside_bytes: int = 0
    temporary: int = 0
    """Half-written files; those of dead writers are removed in time."""
    locks: int = 0
    """Lock files of claims: those of current holders, and a bounded number left by killed holders."""
    other_schemas: int = 0
    """Records that other versions of asel keep in the same place."""


class Store(Protocol):
    """A place that keeps records for many processes.

    Every method may raise `StoreError`. A method that finds an unreadable record calls `on_rejected`,
    sets the record aside, and goes on as if it were not there. A store may also be an async context manager that
    keeps its connections open for the block. `StoreDefaults` has the methods that a store need not write itself.
    """

    on_rejected: Callable[[Rejected], object]

    @property
    def location(self) -> str:
        """Its location for messages, without user name and password."""

    async def get(self, address: Address) -> Record | None:
        """Return the record at an address."""

    async def put(self, record: Record, *, replace: bool = False, claim: Claim | None = None) -> Record:
        """Store a record and return the stored record: another writer's, if that was first and `replace` is false.

        Once it returns, the record survives a crash. With a `claim` that was lost meanwhile, nothing is replaced.
        """

    def claim(self, address: Address, *, wait_s: float = 0.0, anew: bool = False) -> AbstractAsyncContextManager[Claim]:
        """Hold the right to tune, exclusively, while the block runs.

        Waits `wait_s` seconds at most, for the right or for a record; with `anew`, for the right alone, because the
        present record is going to be replaced. A holder that dies loses the right.
        """

    def records(self, key: CacheKey | None = None) -> AsyncIterator[Record]:
        """Give every record, or those of one key, in no order."""

    async def delete(self, address: Address, *, expected: Record | None = None) -> bool:
        """Remove a record, unless another than the expected one is stored; return whether it was removed."""


def optional_method(store: Store, name: Literal["apply", "scan", "stats"]) -> Callable[..., Any]:
    """Return a store's own method, or the default of a store that does not inherit from StoreDefaults."""
    own = getattr(store, name, None)
    return partial(getattr(StoreDefaults, name), store) if own is None else own


class StoreDefaults:
    """The methods of a store that can be derived from its other methods. A store may override them to be faster."""

    async def apply(self: Store, changes: Sequence[Change]) -> list[Changed]:
        """Make many changes; return their results, in order. A failure leaves some of them made."""
        return await apply_each(partial(apply_one, self), changes)

    async def scan(self: Store) -> AsyncIterator[list[RecordLine]]:
        """Give every record as its line and summary, a batch at a time, in no order."""
        batch: list[Record] = []
        async for record in self.records():
            batch.append(record)
            if len(batch) == READ_BATCH:
                yield await run_in_thread("reading records", partial(_lines, batch))
                batch = []
        if batch:
            yield await run_in_thread("reading records", partial(_lines, batch))

    async def stats(self: Store) -> StoreStats:
        """Return the number of records."""
        count = 0
        async for _ in self.records():
            count += 1
        return StoreStats(count)


def _lines(batch: list[Record]) -> list[RecordLine]:
    return [RecordLine.of(record) for record in batch]


async def apply_each(apply: Callable[[Change], Awaitable[Changed]], changes: Sequence[Change]) -> list[Changed]:
    """Make changes one by one, a few concurrently; return their results, in order."""
    results: dict[int, Changed] = {}
    failures: list[Exception] = []
    left = iter(enumerate(changes))

    async def worker() -> None:
        for number, change in left:
            try:
                results[number] = await apply(change)
            except Exception as error:
                failures.append(error)
                tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        for _ in range(min(_MAX_CONCURRENT_CHANGES, len(changes))):
            tasks.start_soon(worker)
    if failures:
        raise failures[0]
    return [results[number] for number in range(len(changes))]


async def apply_one(store: Store, change: Change) -> Changed:
    """Make a change with the other methods of a store."""
    if not change.line:
        expected = await run_in_thread("reading a record", partial(_record, change.expected))
        return Changed("", await store.delete(change.address, expected=expected))
    if not change.replace and (before := await store.get(change.address)) is not None:
        return Changed(await run_in_thread("writing a record", before.line), False)
    record = await run_in_thread("reading a record", partial(Record.from_json, change.line))
    stored = await store.put(record, replace=change.replace)
    return Changed(await run_in_thread("writing a record", stored.line), stored == record)


def _record(line: str) -> Record | None:
    return Record.from_json(line) if line else None


@asynccontextmanager
async def claiming(
    attempt: Callable[[], Awaitable[Callable[[], Awaitable[object]] | None]],
    look: Callable[[], Awaitable[Record | None]],
    pause: Callable[[], Awaitable[object]],
    wait_s: float,
    anew: bool = False,
) -> AsyncIterator[Claim]:
    """Hold a claim, which is acquired by repeated attempts.

    `attempt` returns the function that releases the claim, or None if another process holds it; when
    cancelled, it leaves nothing held. `look` returns a record that ends the wait, and
    `pause` returns when it is time for another attempt.
    """
    claim, release = Claim(), None
    try:
        with anyio.move_on_after(wait_s) if wait_s > 0 else nullcontext():
            while (release := await attempt()) is None and wait_s > 0:
                if not anew and (record := await look()) is not None:
                    claim.record = record
                    break
                await pause()
        claim.held = release is not None
        if claim.held and not anew:  # the previous holder may have just stored it
            claim.record = await look()
        yield claim
    finally:
        claim.held = False
        if release is not None:
            with anyio.CancelScope(shield=True):
                await release()
