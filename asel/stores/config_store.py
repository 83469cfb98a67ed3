"""The protocol between a chain and its persistent cache, and adapters for simpler caches."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Literal, Protocol

from asel.errors import InvalidRequestError
from asel.kernels.kernel import Cfg
from asel.kernels.keys import CacheKey
from asel.runtime.threads import run_in_thread
from asel.stores.protocol import Claim
from asel.stores.records import Record, Rejected
from asel.stores.summaries import RecordSummary
from asel.tuning.outcomes import TuneReport

__all__ = ["ConfigStore", "ConfigStoreDefaults", "StoreQuery", "Stored", "as_config_store"]

Conflict = Literal["duplicated_key", "key_out_of_sync"]


@dataclass(frozen=True, slots=True)
class StoreQuery(Generic[Cfg]):
    """A chain's query for a config: everything that can change the answer.

    With `exact`, only records measured in this environment count. `among` has the kernel's candidates, so that a
    config stored as plain JSON can be matched to one of them.
    """

    key: CacheKey
    checksum: str
    environment: Mapping[str, str]
    exact: bool = False
    among: tuple[Cfg, ...] = ()


@dataclass(frozen=True, slots=True)
class Stored(Generic[Cfg]):
    """A stored config. `adopted` is set if another writer was first.

    That writer may be this process (`duplicated_key`) or another (`key_out_of_sync`).
    """

    cfg: Cfg
    report: TuneReport[Cfg] | None = None
    adopted: bool = False
    conflict: Conflict | None = None
    record: Record | None = None
    foreign: bool = False
    """True if it was measured with other software than this process runs."""


class ConfigStore(Protocol[Cfg]):
    """Keeps configs beyond the process. `ConfigStoreDefaults` implements all methods but `find` and `keep`."""

    has_claims: bool
    """Whether the processes that share it can agree which of them tunes."""
    can_withdraw: bool
    """Whether it can remove a record; if not, a withdrawn record is replaced by another."""
    changes_together: bool
    """Whether all processes that share it change configs at the same points of one program: the ranks of a cluster."""

    async def find(self, query: StoreQuery[Cfg]) -> Stored[Cfg] | None:
        """Return the best record for a query."""

    async def keep(self, report: TuneReport[Cfg], *, replace: bool, claim: Claim | None = None) -> Stored[Cfg]:
        """Store a tune's result and return the stored config: another process's, if that was first."""

    def claim(self, query: StoreQuery[Cfg], wait_s: float, anew: bool) -> AbstractAsyncContextManager[Claim]:
        """Hold the right to tune among all processes that share the store; with `anew`, even if there is a record."""

    def read(self, record: Record, query: StoreQuery[Cfg]) -> Stored[Cfg] | None:
        """Return the config of a record that came with a claim; None if it cannot be used."""

    async def reports(self, query: StoreQuery[Cfg]) -> list[TuneReport[Cfg]]:
        """Return the reports of all tunes of a key, with any candidates."""

    async def withdraw(self, stored: Stored[Cfg]) -> bool:
        """Remove a record that was found, unless another has replaced it; return whether it was removed."""

    def rejections_to(self, listener: Callable[[Rejected], object]) -> AbstractAsyncContextManager[object]:
        """Call `listener` with each record that has to be rejected, while the block runs."""

    def summaries(self, device: str) -> AsyncGenerator[list[RecordSummary]]:
        """Give the summary of every record of a device, a batch at a time, in no order."""

    def read_summary(self, summary: RecordSummary, query: StoreQuery[Cfg]) -> Stored[Cfg] | None:
        """Return the config of a summarized record; None if it cannot be used."""

    async def earlier_tunes(self, query: StoreQuery[Cfg], limit: int) -> list[TuneReport[Cfg]]:
        """Return the reports of the same kernel and device for other calls, newest first."""


class ConfigStoreDefaults(Generic[Cfg]):
    """Defaults for a store that only finds and keeps: every process tunes by itself, and the first to store wins."""

    has_claims = False
    can_withdraw = False
    changes_together = False

    def claim(self, query: StoreQuery[Cfg], wait_s: float, anew: bool) -> AbstractAsyncContextManager[Claim]:
        return nullcontext(Claim(held=True))

    def read(self, record: Record, query: StoreQuery[Cfg]) -> Stored[Cfg] | None:
        return None

    async def reports(self, query: StoreQuery[Cfg]) -> list[TuneReport[Cfg]]:
        return []

    async def withdraw(self, stored: Stored[Cfg]) -> bool:
        return False

    def rejections_to(self, listener: Callable[[Rejected], object]) -> AbstractAsyncContextManager[object]:
        return nullcontext()

    async def summaries(self, device: str) -> AsyncGenerator[list[RecordSummary]]:
        nothing: list[list[RecordSummary]] = []
        for batch in nothing:
            yield batch

    def read_summary(self, summary: RecordSummary, query: StoreQuery[Cfg]) -> Stored[Cfg] | None:
        return None

    async def earlier_tunes(self, query: StoreQuery[Cfg], limit: int) -> list[TuneReport[Cfg]]:
        return []


class _LoadSaveStore(ConfigStoreDefaults[Cfg]):
    """A user's own store with `load(key, checksum)` and `save(report, replace=...)`."""

    def __init__(self, user_store: Any) -> None:
        self._user_store = user_store

    async def find(self, query: StoreQuery[Cfg]) -> Stored[Cfg] | None:
        stored = await self._user_store.load(query.key, query.checksum)
        return None if stored is None else _checked(stored)

    async def keep(self, report: TuneReport[Cfg], *, replace: bool, claim: Claim | None = None) -> Stored[Cfg]:
        return _checked(await self._user_store.save(report, replace=replace))


def _checked(stored: Any) -> Stored[Any]:
    if not isinstance(stored, Stored):
        raise TypeError(f"the store returned {stored!r}, which is not a Stored")
    return stored


class _GetPutStore(ConfigStoreDefaults[Cfg]):
    """A cache with `get` and `put`, awaitable or not, such as ejKernel's own PersistentCache.

    It has no checksums, so its config for a key is used unchecked. Blocking methods run in a thread.
    """

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    async def find(self, query: StoreQuery[Cfg]) -> Stored[Cfg] | None:
        cfg = await _call(self._cache.get, *query.key)
        return None if cfg is None else Stored(cfg)

    async def keep(self, report: TuneReport[Cfg], *, replace: bool, claim: Claim | None = None) -> Stored[Cfg]:
        await _call(self._cache.put, *report.key, report.winner)
        return Stored(report.winner, report)


async def _call(method: Any, *args: Any) -> Any:
    if inspect.iscoroutinefunction(method):
        return await method(*args)
    # Our own threads, because a call that takes too long can be abandoned in one.
    result = await run_in_thread(f"asking {type(getattr(method, '__self__', method)).__name__}", partial(method, *args))
    return await result if inspect.isawaitable(result) else result


def as_config_store(persistent: Any) -> ConfigStore[Any] | None:
    """Return `persistent` itself, or an adapter for an object with `load` and `save`, or `get` and `put`.

    Raises:
        InvalidRequestError: it has no such pair of methods.
    """
    if persistent is None or isinstance(persistent, ConfigStoreDefaults):
        return persistent  # type: ignore[return-value]
    if hasattr(persistent, "load") and hasattr(persistent, "save"):
        return _LoadSaveStore(persistent)
    if hasattr(persistent, "get") and hasattr(persistent, "put"):
        return _GetPutStore(persistent)
    kind = type(persistent).__name__  # not the text, which may be a URL with a password
    raise InvalidRequestError(f"persistent: a {kind} has neither get and put nor load and save; use a PersistentCache")
