"""What the chain asks of a store, and how plain `get`/`put` caches answer it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Generic, Protocol

import anyio.to_thread

from asel.errors import InvalidRequestError
from asel.kernel import Cfg
from asel.keys import CacheKey
from asel.outcomes import TuneReport

__all__ = ["Persistence", "Stored", "as_persistence"]


@dataclass(frozen=True, slots=True)
class Stored(Generic[Cfg]):
    """What the store holds for a key. `adopted`: another writer was there first."""

    cfg: Cfg
    report: TuneReport[Cfg] | None = None
    adopted: bool = False


class Persistence(Protocol[Cfg]):
    """A place where answers outlive the process."""

    async def load(self, key: CacheKey, checksum: str) -> Stored[Cfg] | None: ...

    async def save(self, report: TuneReport[Cfg], *, replace: bool) -> Stored[Cfg]: ...


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
    """Return `persistent` itself, or an adapter where it only has `get` and `put`.

    Raises:
        InvalidRequestError: it has neither pair of methods.
    """
    if persistent is None or (hasattr(persistent, "load") and hasattr(persistent, "save")):
        return persistent  # type: ignore[no-any-return]
    if hasattr(persistent, "get") and hasattr(persistent, "put"):
        return _GetPut(persistent)
    raise InvalidRequestError(f"persistent={persistent!r} has neither get and put nor load and save")
