"""`asel cache stats`: the numbers of records, unreadable files and locks of each cache."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from asel.cli.cache.record_lookup import JsonOption
from asel.cli.interrupts import run_loop
from asel.cli.locations import StoreOption, caches_at

if TYPE_CHECKING:
    from asel.stores.persistent_cache import PersistentCache
    from asel.stores.protocol import StoreStats
    from asel.stores.records import Rejected

__all__ = ["size_words", "stats"]


def stats(store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Count the records of a cache, its unreadable and half-written files, and its locks."""
    from asel.cli.output import console, print_json, print_table

    found = run_loop(_stats_of, caches_at(store))
    if as_json:
        print_json([{"cache": path, **dataclasses.asdict(counted), "unreadable": bad} for path, counted, bad in found])
        return
    names = ["cache", "records", "size", "unreadable", "set aside", "half-written", "locks", "other versions"]
    rows = [
        [path, f"{n.records:,}", size_words(n.bytes) if n.bytes else "-"]
        + [str(count) for count in (bad, n.set_aside, n.temporary, n.locks, n.other_schemas)]
        for path, n, bad in found
    ]
    print_table(console(), names, rows)


async def _stats_of(caches: list[PersistentCache[Any]]) -> list[tuple[str, StoreStats, int]]:
    found = []
    for cache in caches:
        rejected: list[Rejected] = []
        good = 0
        async with cache, cache.rejections_to(rejected.append):
            async for _ in cache.records():
                good += 1
            counted = dataclasses.replace(await cache.stats(), records=good)  # a directory counts files by their names
            found.append((cache.path, counted, len(rejected)))
    return found


def size_words(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
