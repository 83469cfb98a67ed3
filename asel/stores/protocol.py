"""What a store promises, whatever it is made of."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import anyio

from asel.keys import CacheKey
from asel.stores.records import Address, Record, RecordError, Rejected
from asel.threads import run_in_thread

__all__ = ["READ_BATCH", "Change", "Changed", "Claim", "Store", "StoreDefaults", "StoreStats", "claiming"]

# Records that a thread reads in one go. Few, so that they are gone before the garbage collector counts them as
# long-lived: its next pass over everything stops all threads (70 ms with 100,000 objects). Listing 10,000 records had
# three such passes with batches of 16, and has one at most with 4, for 0.1 ms more a batch.
READ_BATCH = 4

# How many changes are under way at once in a store that takes them one by one. Each has a thread at times, and the
# event loop has to wait for its turn among them.
_AT_ONCE = 8


@dataclass(slots=True)
class Claim:
    """How a wait for the right to tune a key ended.

    `held`: the right is this process's, until the block ends or a lease is lost. Not held and no
    `record`: the wait was over first, and the holder is stuck for all one knows.
    """

    held: bool = False
    record: Record | None = None
    """What was stored for the address while one waited: there is nothing left to tune."""
    token: str = ""
    """What a store knows the holder by, where it needs to."""


@dataclass(frozen=True, slots=True)
class Change:
    """A record to put, or the deletion of what is at an address.

    Records are lines of JSON here: thousands of them are one string each, and no work for the garbage collector.
    """

    address: Address
    line: str = ""
    """The record to put; empty for a deletion."""
    replace: bool = False
    expected: str = ""
    """The record to delete; whatever there is, if empty."""

    @classmethod
    def put(cls, record: Record, *, replace: bool = False) -> Change:
        return cls(record.address, record.to_json(), replace)

    @classmethod
    def delete(cls, address: Address, *, expected: Record | None = None) -> Change:
        return cls(address, expected="" if expected is None else expected.line())

    def expects(self, line: str) -> bool:
        """Tell whether a deletion is meant for this record, whichever way it is spelt."""
        if not self.expected or line == self.expected:
            return True
        try:
            return Record.from_json(line) == Record.from_json(self.expected)
        except RecordError:
            return False


class Changed(NamedTuple):
    """What became of a change: the line that is stored now, and whether this change made the difference."""

    line: str
    done: bool

    def record(self) -> Record:
        return Record.from_json(self.line)


@dataclass(frozen=True, slots=True)
class StoreStats:
    """How full a store is, and what lies in it besides its records."""

    records: int
    bytes: int = 0
    """The size of the records; 0 if the store does not know it."""
    set_aside: int = 0
    """Bad files that are kept for people to look at: a bounded number, the newest."""
    set_aside_bytes: int = 0
    temporary: int = 0
    """Half-written files, of writers at work or killed; those of the dead are removed in time."""
    locks: int = 0
    """Lock files of claims: of those that hold one, and a bounded number left by killed holders."""
    other_schemas: int = 0
    """Records that other versions of asel keep in the same place."""


class Store(Protocol):
    """A place that keeps records for many processes.

    Every method may raise `StoreError`. One that cannot make sense of what it finds tells `on_rejected`,
    sets it aside, and goes on as if it were not there. May also be an async context manager, which
    then keeps its connections open meanwhile. `StoreDefaults` has the methods that a store need not write itself.
    """

    on_rejected: Callable[[Rejected], object]

    @property
    def location(self) -> str:
        """Where it is, for people to read: never with a secret in it."""

    async def get(self, address: Address) -> Record | None:
        """Return the record at an address."""

    async def put(self, record: Record, *, replace: bool = False, claim: Claim | None = None) -> Record:
        """Store a record and return what is stored: another's, where it was first and `replace` is not asked for.

        Once it returns, the record survives a crash. With a `claim` that was lost meanwhile, nothing is replaced.
        """

    def claim(self, address: Address, *, wait_s: float = 0.0, anew: bool = False) -> AbstractAsyncContextManager[Claim]:
        """Hold the right to tune, exclusively, while the block runs.

        Waits `wait_s` seconds at most, for the right or for a record; for the right alone with `anew`,
        where the record that is there is going to be replaced. A holder that dies loses it.
        """

    def records(self, key: CacheKey | None = None) -> AsyncIterator[Record]:
        """Give every record, or those of one key, in no order."""

    async def delete(self, address: Address, *, expected: Record | None = None) -> bool:
        """Remove a record, if it still is the expected one; return whether it did."""


class StoreDefaults:
    """The methods of a store that can be made of the others. One that can do better has its own."""

    async def apply(self: Store, changes: Sequence[Change]) -> list[Changed]:
        """Make many changes; return what became of each, in their order. A failure leaves some of them made."""
        results: dict[int, Changed] = {}
        failures: list[Exception] = []
        left = iter(enumerate(changes))

        async def some() -> None:
            for number, change in left:
                try:
                    results[number] = await _apply(self, change)
                except Exception as error:
                    failures.append(error)
                    tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            for _ in range(min(_AT_ONCE, len(changes))):
                tasks.start_soon(some)
        if failures:
            raise failures[0]
        return [results[number] for number in range(len(changes))]

    async def stats(self: Store) -> StoreStats:
        """Return how full the store is."""
        count = 0
        async for _ in self.records():
            count += 1
        return StoreStats(count)


async def _apply(store: Store, change: Change) -> Changed:
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
    """Hold a claim that is won by attempts.

    `attempt` returns the function that gives the claim back, or None where another holds it; when
    cancelled, it leaves nothing held. `look` returns the record that makes a claim pointless, and
    `pause` returns when it may be worth trying again.
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
        if claim.held and not anew:  # the holder before may have stored it just now
            claim.record = await look()
        yield claim
    finally:
        claim.held = False
        if release is not None:
            with anyio.CancelScope(shield=True):
                await release()
