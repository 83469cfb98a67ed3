"""Records in the coordination service of `jax.distributed`: one answer for every rank of a multi-host program.

A program that runs on many hosts hangs or fails if its ranks compile different configs. So the records that a rank
sees must not depend on timing. Each address has a log in the service, and each rank has a position in that log.
A rank advances when it writes or claims, which every rank does at the same point of the program. The n-th entry is
the same for all ranks: the one that was written first. Reading returns the entry at the rank's own position.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from typing import Any, TypeVar

import anyio

from asel.errors import InvalidRequestError, StoreError
from asel.kernels.keys import CacheKey
from asel.redaction import redact
from asel.runtime.fork import renew_after_fork
from asel.runtime.threads import run_in_thread
from asel.stores.protocol import Claim, StoreDefaults
from asel.stores.records import Address, Record, RecordError, Rejected, log_rejected, schema_name

__all__ = ["JaxClusterStore"]

T = TypeVar("T")

_LOCATION = re.compile(r"jax://([A-Za-z0-9_.-]{0,128})")
# Prefixes of entries: a record, its removal, or the message of a failed tune.
_RECORD, _REMOVED, _FAILED = "=", "-", "!"
# Time limit of a request. The service answers in a fifth of a millisecond, so only a hung one takes longer.
_PROMPT_S = 5.0


@dataclass(slots=True)
class _Place:
    """A rank's position in the log of one address, and the entry there."""

    position: int = 0
    entry: str = _REMOVED

    @property
    def line(self) -> str:
        return self.entry[1:] if self.entry.startswith(_RECORD) else ""

    @property
    def failure(self) -> str:
        return self.entry[1:] if self.entry.startswith(_FAILED) else ""


class _Rank:
    """This process's positions in the logs: shared by all stores of one location."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self._places: dict[Address, _Place] = {}
        self.renew()
        renew_after_fork(self)

    def renew(self) -> None:
        self._lock = threading.Lock()

    def place(self, address: Address) -> _Place:
        with self._lock:
            place = self._places.get(address, _Place())
            return _Place(place.position, place.entry)

    def move(self, address: Address, position: int, entry: str) -> None:
        """Advance to an entry, unless another task of this rank has already done so."""
        with self._lock:
            if self._places.get(address, _Place()).position < position:
                self._places[address] = _Place(position, entry)

    def lines(self, key: CacheKey | None) -> list[str]:
        with self._lock:
            return [place.line for address, place in self._places.items() if key is None or address.key == key]


_ranks: dict[tuple[int, str], _Rank] = {}


class JaxClusterStore(StoreDefaults):
    """Records and claims that all ranks of a `jax.distributed` program share, for as long as it runs.

    Every rank must select, put and retune the same keys in the same order; each then has the same answer.

    Raises:
        InvalidRequestError: `jax.distributed.initialize()` has not been called yet.
    """

    changes_together = True

    def __init__(self, location: str = "jax://", *, client: Any = None) -> None:
        found = _LOCATION.fullmatch(location)
        if found is None:
            raise InvalidRequestError(
                "a jax:// URL is jax:// or jax://NAME, with letters, digits and _ . - in the name"
            )
        client = _client() if client is None else client
        self._location = location
        self._root = f"asel/{found[1] or 'default'}/{schema_name()}"
        name = (id(client), self._root)  # the rank keeps its client, so the id is not reused
        self._rank = _ranks[name] = _ranks.get(name) or _Rank(client)
        self.on_rejected: Callable[[Rejected], object] = log_rejected

    def __repr__(self) -> str:
        return f"JaxClusterStore({self._location!r})"

    @property
    def location(self) -> str:
        return self._location

    async def get(self, address: Address) -> Record | None:
        line = self._rank.place(address).line
        return await self._call("reading", partial(Record.from_json, line)) if line else None

    async def records(self, key: CacheKey | None = None) -> AsyncIterator[Record]:
        for line in self._rank.lines(key):
            if line:
                yield await self._call("reading", partial(Record.from_json, line))

    async def put(self, record: Record, *, replace: bool = False, claim: Claim | None = None) -> Record:
        line = await self._call("writing", record.to_json)
        place = self._rank.place(record.address)
        if place.line and not replace:
            return await self._call("reading", partial(Record.from_json, place.line))
        entry = await self._call("writing", partial(self._append, record.address, place.position + 1, _RECORD + line))
        if entry == _RECORD + line:
            return record
        if not entry.startswith(_RECORD):
            raise StoreError(f"{self.location}: another rank has removed this key", location=self.location)
        return await self._call("reading", partial(Record.from_json, entry[1:]))

    async def delete(self, address: Address, *, expected: Record | None = None) -> bool:
        place, there = self._rank.place(address), await self.get(address)
        if there is None or (expected is not None and there != expected):
            return False
        return await self._call("writing", partial(self._append, address, place.position + 1, _REMOVED)) == _REMOVED

    @asynccontextmanager
    async def claim(self, address: Address, *, wait_s: float = 0.0, anew: bool = False) -> AsyncIterator[Claim]:
        place = self._rank.place(address)
        if not anew and (place.line or place.failure):
            yield await self._agreed_claim(place)
            return
        position, claim = place.position + 1, Claim()
        delays = chain((0.01, 0.015, 0.02, 0.03, 0.05), repeat(0.1))
        try:
            with anyio.move_on_after(wait_s) if wait_s > 0 else nullcontext():
                while not await self._take(address, position, claim) and wait_s > 0:
                    if await self._look(address, position, claim):
                        break
                    await anyio.sleep(next(delays))
            if claim.held:
                await self._look(address, position, claim)
            yield claim
        except Exception as error:
            if claim.held and not claim.failure and not isinstance(error, StoreError):
                failed = f"{_FAILED}{type(error).__name__}: {redact(error)}"
                await self._finish(partial(self._append, address, position, failed))
            raise
        finally:
            if claim.held:
                claim.held = False
                await self._finish(partial(self._rank.client.key_value_delete, self._claim_key(address, position)))

    async def _agreed_claim(self, place: _Place) -> Claim:
        """Return a claim with the answer at this rank's position, so that no rank tunes."""
        record = await self._call("reading", partial(Record.from_json, place.line)) if place.line else None
        return Claim(held=True, record=record, is_agreed=True, failure=place.failure)

    async def _take(self, address: Address, position: int, claim: Claim) -> bool:
        """Take the claim if it is free. Shielded, so that a claim that the thread takes is always released."""
        with anyio.move_on_after(_PROMPT_S, shield=True):
            claim.held = await self._call("claiming", partial(self._set, self._claim_key(address, position), "held"))
            return claim.held
        raise StoreError(f"claiming in {self.location} took longer than {_PROMPT_S:g} s", location=self.location)

    async def _look(self, address: Address, position: int, claim: Claim) -> bool:
        """Return whether this rank's next entry exists; if so, put it into the claim."""
        entry = await self._call("reading", partial(self._entry, address, position))
        if entry is None:
            return False
        self._rank.move(address, position, entry)
        place = _Place(position, entry)
        claim.is_agreed, claim.failure = True, place.failure
        if place.line:
            claim.record = await self._call("reading", partial(Record.from_json, place.line))
        return True

    async def _finish(self, work: Callable[[], object]) -> None:
        with anyio.move_on_after(_PROMPT_S, shield=True):
            await self._call("releasing a claim in", work)

    async def _call(self, what: str, work: Callable[[], T]) -> T:
        try:
            return await run_in_thread(f"{what} {self.location}", work)
        except (RuntimeError, RecordError) as error:  # JAX's own errors are RuntimeErrors
            raise StoreError(f"{what} {self.location} failed: {redact(error)}", location=self.location) from error

    # In a thread.

    def _append(self, address: Address, position: int, entry: str) -> str:
        """Write an entry unless another rank was first; advance to the stored entry, and return it."""
        if not self._set(self._log_key(address, position), entry):
            there = self._entry(address, position)
            assert there is not None  # entries are never removed
            entry = there
        self._rank.move(address, position, entry)
        return entry

    def _entry(self, address: Address, position: int) -> str | None:
        try:
            return str(self._rank.client.key_value_try_get(self._log_key(address, position)))
        except RuntimeError as error:
            if not str(error).startswith("NOT_FOUND"):
                raise
            return None

    def _set(self, key: str, value: str) -> bool:
        """Write a value; return False if there is one already."""
        try:
            self._rank.client.key_value_set(key, value)
        except RuntimeError as error:
            if not str(error).startswith("ALREADY_EXISTS"):
                raise
            return False
        return True

    def _log_key(self, address: Address, position: int) -> str:
        return f"{self._root}/log/{address.digest}/{position}"

    def _claim_key(self, address: Address, position: int) -> str:
        return f"{self._root}/claim/{address.digest}/{position}"


def _client() -> Any:
    """Return this process's client of the coordination service.

    JAX has no public name for it; Orbax and others use the same one.
    """
    state = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
    if (client := getattr(state, "client", None)) is None:
        raise InvalidRequestError(
            "a jax:// store needs the coordination service: call jax.distributed.initialize() first"
        )
    return client
