"""What a chain asks of the place where answers outlive it, and how simpler caches answer that."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol

import anyio.to_thread

from asel.errors import InvalidRequestError
from asel.kernel import Cfg
from asel.keys import CacheKey
from asel.outcomes import TuneReport
from asel.stores.protocol import Claim
from asel.stores.records import Record, Rejected

__all__ = ["Persistence", "Sought", "Stored", "as_persistence"]

Conflict = Literal["duplicated_key", "key_out_of_sync"]


@dataclass(frozen=True, slots=True)
class Sought(Generic[Cfg]):
    """What a chain looks for: everything that can change the answer.

    `exact`: only what was measured in this environment counts. `among`: the configs it may be, so that
    one that comes back as plain JSON is known again.
    """

    key: CacheKey
    checksum: str
    environment: Mapping[str, str]
    exact: bool = False
    among: tuple[Cfg, ...] = ()


@dataclass(frozen=True, slots=True)
class Stored(Generic[Cfg]):
    """What the store holds for a key. `adopted`: another writer was there first.

    It may have been this very process (`duplicated_key`), or another (`key_out_of_sync`).
    """

    cfg: Cfg
    report: TuneReport[Cfg] | None = None
    adopted: bool = False
    conflict: Conflict | None = None
    record: Record | None = None
    foreign: bool = False
    """It was measured with other software than there is here."""


class Persistence(Protocol[Cfg]):
    """A place where answers outlive the process."""

    has_claims: bool
    """Whether processes that share it can agree who tunes."""

    async def find(self, sought: Sought[Cfg]) -> Stored[Cfg] | None:
        """Return the best that is kept for what is sought."""

    async def keep(self, report: TuneReport[Cfg], *, replace: bool, claim: Claim | None = None) -> Stored[Cfg]:
        """Keep a tune's result and return what is kept: another's, where that was first."""

    def claim(self, sought: Sought[Cfg], wait_s: float, anew: bool) -> AbstractAsyncContextManager[Claim]:
        """Hold the right to tune, among all processes that share the place; `anew`, whatever is kept there."""

    def read(self, record: Record, sought: Sought[Cfg]) -> Stored[Cfg] | None:
        """Return what a record that came with a claim says; None where it cannot be used."""

    async def reports(self, sought: Sought[Cfg]) -> list[TuneReport[Cfg]]:
        """Return the reports of all tunes of a key, whatever they chose among."""

    def told(self, listener: Callable[[Rejected], object]) -> AbstractAsyncContextManager[None]:
        """Tell `listener` of records that had to be rejected, while the block runs."""

    # May also have `async withdraw(stored) -> bool`: remove what was found, if it still is what is kept.


class _LoadSave(Generic[Cfg]):
    """A place of somebody else's making, with `load(key, checksum)` and `save(report, replace=...)`.

    It knows no claims: every process tunes for itself, and the first to save is adopted by the others.
    """

    has_claims = False

    def __init__(self, place: Any) -> None:
        self._place = place

    async def find(self, sought: Sought[Cfg]) -> Stored[Cfg] | None:
        stored = await self._place.load(sought.key, sought.checksum)
        return None if stored is None else _checked(stored)

    async def keep(self, report: TuneReport[Cfg], *, replace: bool, claim: Claim | None = None) -> Stored[Cfg]:
        return _checked(await self._place.save(report, replace=replace))

    def claim(self, sought: Sought[Cfg], wait_s: float, anew: bool) -> AbstractAsyncContextManager[Claim]:
        return nullcontext(Claim(held=True))

    def read(self, record: Record, sought: Sought[Cfg]) -> Stored[Cfg] | None:
        return None

    async def reports(self, sought: Sought[Cfg]) -> list[TuneReport[Cfg]]:
        return []

    def told(self, listener: Callable[[Rejected], object]) -> AbstractAsyncContextManager[None]:
        return nullcontext()


def _checked(stored: Any) -> Stored[Any]:
    if not isinstance(stored, Stored):
        raise TypeError(f"the store answered {stored!r}, which is no Stored")
    return stored


class _GetPut(Generic[Cfg]):
    """A cache with `get` and `put`, awaitable or not, such as ejKernel's own PersistentCache.

    It knows no checksums: what it has for a key is taken as it is. Blocking methods run in a thread.
    """

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    async def load(self, key: CacheKey, checksum: str) -> Stored[Cfg] | None:
        cfg = await _call(self._cache.get, *key)
        return None if cfg is None else Stored(cfg)

    async def save(self, report: TuneReport[Cfg], *, replace: bool) -> Stored[Cfg]:
        await _call(self._cache.put, *report.key, report.winner)
        return Stored(report.winner, report)


async def _call(method: Any, *args: Any) -> Any:
    if inspect.iscoroutinefunction(method):
        return await method(*args)
    result = await anyio.to_thread.run_sync(method, *args)
    return await result if inspect.isawaitable(result) else result


def as_persistence(persistent: Any) -> Persistence[Any] | None:
    """Return `persistent` itself, or an adapter where it has less than the whole protocol.

    Raises:
        InvalidRequestError: it has no pair of methods we know.
    """
    if persistent is None or (hasattr(persistent, "find") and hasattr(persistent, "keep")):
        return persistent  # type: ignore[no-any-return]
    if hasattr(persistent, "load") and hasattr(persistent, "save"):
        return _LoadSave(persistent)
    if hasattr(persistent, "get") and hasattr(persistent, "put"):
        return _LoadSave(_GetPut(persistent))
    kind = type(persistent).__name__  # and not its text, which may be a URL with a password
    raise InvalidRequestError(f"persistent: a {kind} has neither get and put nor load and save; use a PersistentCache")
