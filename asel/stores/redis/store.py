"""Records in Redis: the fleet's shared store."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from anyio.lowlevel import current_token

from asel.errors import InvalidRequestError, StoreError
from asel.kernels.keys import CacheKey
from asel.runtime.threads import run_in_thread
from asel.stores.protocol import (
    READ_BATCH,
    Change,
    Changed,
    Claim,
    StoreDefaults,
    StoreStats,
    apply_each,
    apply_one,
    claiming,
)
from asel.stores.records import Address, OtherSchemaError, Record, RecordError, Rejected, key_digest, log_rejected
from asel.stores.redis.scripts import DELETE, FORGET, MEMBERS, PUT, READ, SET_ASIDE, SIZES, UNPUBLISHED, Names, tag
from asel.stores.redis.url import Target
from asel.stores.summaries import Addressed, RecordLine

if TYPE_CHECKING:
    from asel.stores.redis.client import Link, SharedLink, Turn

__all__ = ["RedisStore"]

R = TypeVar("R", bound=Addressed)

# Lines that are read and summarized at a time: few, because Redis answers no other client while it reads them.
_SCAN_BATCH = 16


class RedisStore(StoreDefaults):
    """Records and claims in a Redis of version 6 or later.

    `url` is `redis://user:password@host:port/db`, or `rediss://` for TLS, with any of `prefix=`, `expire_s=`
    (how long a record lasts), `timeout_s=` (an operation, 2 by default) and, for TLS, `ssl_ca_certs=`,
    `ssl_certfile=`, `ssl_keyfile=`, `ssl_check_hostname=`, `ssl_cert_reqs=` in its query.

    `timeout_s` limits a whole operation: connecting, requests and retries. It applies to each page of a listing, and
    to each attempt of a claim within `wait_s`. Concurrent operations queue, and time in the queue does not count.

    Within `async with store:` one connection serves all tasks of that event loop; without it, concurrent operations
    share one. Waiting for a claim opens a second connection, for wake-ups; a user without the right to subscribe
    polls instead. Entering succeeds while Redis is down.

    How durable an acknowledged put is depends on the configuration of Redis.

    Raises:
        InvalidRequestError: the URL cannot be understood, or `coredis` is not installed.
    """

    def __init__(self, url: str, *, lease_s: float = 15.0, renew_s: float = 5.0) -> None:
        if not 0 < renew_s < lease_s:
            raise InvalidRequestError(f"renew_s={renew_s} must be above 0 and below lease_s={lease_s}")
        self._target = Target.from_url(url)
        try:
            from asel.stores.redis import client, leases, wakeups
        except ModuleNotFoundError as error:
            raise InvalidRequestError("a Redis store needs coredis: pip install 'asel[redis]'") from error
        self._rights = wakeups.ChannelRights(self._target)
        self._make_link = partial(client.SharedLink, self._target, self._rights)
        self._lease = partial(leases.Lease, lease_s=lease_s, renew_s=renew_s)
        self._names = Names(self._target.prefix)
        self._links: dict[object, SharedLink] = {}
        self._reported: set[tuple[bytes, bytes]] = set()
        self.on_rejected: Callable[[Rejected], object] = log_rejected

    @property
    def location(self) -> str:
        return self._target.location

    def __repr__(self) -> str:
        return f"RedisStore({self.location!r})"

    async def __aenter__(self) -> RedisStore:
        shared = self._links.get(_loop())
        if shared is None:
            shared = self._links[_loop()] = self._make_link()
        shared.users += 1
        try:
            await shared.ready()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        shared = self._links[_loop()]
        shared.users -= 1
        if shared.users == 0:
            del self._links[_loop()]
            await shared.end()

    @asynccontextmanager
    async def _link(self) -> AsyncIterator[Link]:
        async with self:
            yield self._links[_loop()].link

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[Turn]:
        """Give a turn for one operation, within its time limit."""
        async with self._link() as link, link.turn() as turn:
            yield turn

    async def get(self, address: Address) -> Record | None:
        async with self._turn() as turn:
            return await self._get(turn, address)

    async def _get(self, turn: Turn, address: Address) -> Record | None:
        _, record = await self._look(turn, address)
        return record

    async def _look(self, turn: Turn, address: Address) -> tuple[Any, Record | None]:
        [found] = await turn.run(READ, [self._names.record(address)])
        if found is None:
            return None, None
        digest = address.digest.encode()
        [read] = await _read([(digest, found)], Record.from_json)
        if isinstance(read, Record):
            return found, read
        await self._reject(turn, digest, found, read, address.key)
        return found, None

    async def put(self, record: Record, *, replace: bool = False, claim: Claim | None = None) -> Record:
        text = await run_in_thread("writing a record", record.to_json)
        changed = await self._put(record.address, text, replace=replace, claim=claim)
        return record if changed.line == text else await run_in_thread("reading a record", changed.record)

    async def _put(self, address: Address, text: str, *, replace: bool, claim: Claim | None = None) -> Changed:
        names = self._names
        digest, bad = address.digest.encode(), b""
        index = names.index(address.key_digest)
        expire_ms = round((self._target.expire_s or 0) * 1000)
        async with self._turn() as turn:
            for _ in range(8):  # repeats only while another client keeps writing bad values
                keys = [names.record(address), index, names.lease(address), names.set_aside(digest)]
                keys.append(names.set_aside(address.key_digest.encode()))
                token = claim.token if claim is not None else ""
                found = await turn.run(
                    PUT, keys, text, digest, int(replace), token, expire_ms, bad, names.wake(address)
                )
                if found == UNPUBLISHED:
                    self._rights.refuse()
                if found in (None, UNPUBLISHED):
                    return Changed(text, True)
                if found == text.encode():
                    return Changed(text, False)
                [stored] = await _read([(digest, found)], RecordLine.parse)
                if isinstance(stored, RecordLine):
                    return Changed(found.decode(), False)
                self._report(digest, str(stored), address.key)
                bad = tag(found)
        raise StoreError(f"another program keeps writing unreadable records to {self.location}", location=self.location)

    async def delete(self, address: Address, *, expected: Record | None = None) -> bool:
        async with self._turn() as turn:
            found, record = await self._look(turn, address)
            if record is None or record != (expected or record):
                return False
            return await self._delete(turn, address, tag(found) if expected is not None else b"")

    async def _delete(self, turn: Turn, address: Address, tagged: bytes) -> bool:
        keys = [self._names.record(address), self._names.index(address.key_digest)]
        # Sent once: a second attempt would find nothing and return that nothing was deleted.
        return bool(await turn.run(DELETE, keys, tagged, address.digest, once=True))

    async def apply(self, changes: Sequence[Change]) -> list[Changed]:
        """Make many changes; return their results, in order. A failure leaves some of them made."""
        return await apply_each(self._apply, changes)

    async def _apply(self, change: Change) -> Changed:
        """Make a change. Its line of JSON is not parsed, except if Redis has a different record."""
        if change.line:
            return await self._put(change.address, change.line, replace=change.replace)
        async with self._turn() as turn:
            if change.expected and await self._delete(turn, change.address, tag(change.expected.encode())):
                return Changed("", True)
        return await apply_one(self, change)  # the expected record may be formatted in another way

    @asynccontextmanager
    async def claim(self, address: Address, *, wait_s: float = 0.0, anew: bool = False) -> AsyncIterator[Claim]:
        async with self._link() as link:
            lease = self._lease(link, self._names, address, waits=wait_s > 0, anew=anew)

            async def read() -> Record | None:
                async with link.turn() as turn:
                    return await self._get(turn, address)

            try:
                async with claiming(lease.attempt, partial(lease.look, read), lease.pause, wait_s, anew) as claim:
                    lease.stop_waiting()
                    if not claim.held:
                        yield claim
                        return
                    claim.token = lease.token
                    async with lease.renewed(claim):
                        yield claim
            finally:
                lease.stop_waiting()

    async def records(self, key: CacheKey | None = None) -> AsyncIterator[Record]:
        async with aclosing(self._batches(Record.from_json, READ_BATCH, key)) as batches:
            async for batch in batches:
                for record in batch:
                    yield record

    async def scan(self) -> AsyncIterator[list[RecordLine]]:
        async with aclosing(self._batches(RecordLine.parse, _SCAN_BATCH)) as batches:
            async for batch in batches:
                yield batch

    async def _batches(
        self, parse: Callable[[bytes], R], size: int, key: CacheKey | None = None
    ) -> AsyncGenerator[list[R]]:
        # No turn is held while the caller handles a record: it may never ask for the next.
        seen: set[bytes] = set()
        cursor: bytes | None = b"0"
        while cursor is not None:
            cursor, digests = await self._digests(key, cursor)
            fresh = [digest for digest in dict.fromkeys(digests) if digest not in seen]
            seen.update(fresh)
            for start in range(0, len(fresh), size):
                if batch := await self._read_batch(fresh[start : start + size], key, parse):
                    yield batch

    async def stats(self) -> StoreStats:
        """Return the numbers of records, claims and bad values under this prefix."""
        counts: Counter[str] = Counter()
        size, cursor = 0, b"0"
        while True:
            async with self._turn() as turn:
                cursor, names = await turn.call(b"SCAN", cursor, b"MATCH", self._names.everything, b"COUNT", 512)
                kinds = {name: self._names.kind(name) for name in names}
                records = [name for name, kind in kinds.items() if kind == "record"]
                size += await turn.run(SIZES, records) if records else 0
            counts.update(kinds.values())
            if cursor == b"0":
                return StoreStats(
                    records=counts["record"],
                    bytes=size,
                    set_aside=counts["set-aside"],
                    locks=counts["lease"],
                    other_schemas=counts["another version's record"],
                )

    async def _digests(self, key: CacheKey | None, cursor: bytes) -> tuple[bytes | None, list[bytes]]:
        """Return some digests, and the cursor for the next ones, if any."""
        start = self._names.records
        async with self._turn() as turn:
            if key is not None:
                return None, await turn.run(MEMBERS, [self._names.index(key_digest(key))])
            cursor, names = await turn.call(b"SCAN", cursor, b"MATCH", start + b"*", b"COUNT", 512)
        return None if cursor == b"0" else cursor, [name.removeprefix(start) for name in names]

    async def _read_batch(self, digests: list[bytes], key: CacheKey | None, parse: Callable[[bytes], R]) -> list[R]:
        names = self._names
        keys = [names.records + digest for digest in digests]
        records: list[R] = []
        async with self._turn() as turn:
            found = dict(zip(digests, await turn.run(READ, keys), strict=True))
            gone = [digest for digest in digests if found[digest] is None]
            if gone and key is not None:  # expired, most likely
                index = names.index(key_digest(key))
                await _if_possible(turn.run(FORGET, [index, *(names.records + digest for digest in gone)], *gone))
            there = [(digest, found[digest]) for digest in digests if found[digest] is not None]
            for (digest, value), read in zip(there, await _read(there, parse), strict=True):
                if isinstance(read, RecordError):
                    await self._reject(turn, digest, value, read, key)
                else:
                    records.append(read)
        return records

    async def _reject(self, turn: Turn, digest: bytes, found: Any, error: RecordError, key: CacheKey | None) -> None:
        """Set aside and report a value that is not a record; leave another version's record alone."""
        if isinstance(error, OtherSchemaError):
            return
        names, tagged = self._names, tag(found)
        keys = [names.records + digest, names.index_of(digest), names.set_aside(digest)]
        did = await _if_possible(turn.run(SET_ASIDE, keys, tagged, digest))
        if did is None and (digest, tagged) not in self._reported:  # a read-only Redis: each read finds it again
            self._reported.add((digest, tagged))
            did = 1
        if did:  # otherwise another client did it, and reports it
            self._report(digest, str(error), key)

    def _report(self, digest: bytes, reason: str, key: CacheKey | None) -> None:
        where = f"{(self._names.records + digest).decode(errors='replace')} in {self.location}"
        self.on_rejected(Rejected(where, reason, key))


def _loop() -> object:
    return current_token().native_token


async def _read(values: list[tuple[bytes, Any]], parse: Callable[[bytes], R]) -> list[R | RecordError]:
    """Return each value parsed with `parse`, or the error if it is not a record."""
    return await run_in_thread("reading records", lambda: [_parsed(digest, value, parse) for digest, value in values])


def _parsed(digest: bytes, value: Any, parse: Callable[[bytes], R]) -> R | RecordError:
    if not isinstance(value, bytes):
        kind, size = value
        return RecordError(f"it is a {kind.decode()}" + (f" of {size:,} bytes" if size else "") + ", not a record")
    try:
        record = parse(value)
    except RecordError as error:
        return error
    return record if record.address.digest.encode() == digest else RecordError("it is the record of another address")


async def _if_possible(request: Awaitable[Any]) -> Any:
    try:
        return await request
    except StoreError:
        return None
