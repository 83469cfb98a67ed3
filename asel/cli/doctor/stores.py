"""Checks of caches: location, write access, free space, bad records; for Redis, whether it answers."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asel.cli.cache.stats import size_words
from asel.cli.doctor.findings import Finding, note, ok, problem
from asel.cli.interrupts import run_loop
from asel.cli.output import counted
from asel.errors import AselError
from asel.redaction import redact

if TYPE_CHECKING:
    from asel.stores.persistent_cache import PersistentCache
    from asel.stores.protocol import StoreStats
    from asel.stores.records import Rejected

__all__ = ["stores"]

# A few thousand records with all their samples: with less space, a put may fail soon.
_MIN_FREE_BYTES = 100 << 20
_MAX_NAMED = 3


def stores(location: str | None) -> Iterator[Finding]:
    """Check the caches at a location, by default in this machine's cache directory.

    Raises:
        InvalidRequestError: there is no cache at the location.
    """
    from asel.cli.locations import caches_at
    from asel.stores.persistent_cache import default_root

    if location is not None:
        found = caches_at(location)
    elif _is_empty(default_root()):
        found = []
    else:
        found = caches_at(None)
    is_remote = location is not None and "://" in location
    if not is_remote:
        yield from _place(Path(found[0].path) if location is not None else default_root())
        if not found:
            yield note("cache", "nothing is stored there yet", "`asel tune`, or a program that uses asel, fills it")
        yield note("redis", "not checked", "name one with --store redis://... to check whether it answers")
    for cache in found:
        yield from _contents(cache, "redis" if is_remote else "cache")


def _is_empty(root: Path) -> bool:
    return not root.is_dir() or not any(root.glob("*/schema-*"))


def _place(path: Path) -> Iterator[Finding]:
    """Check that a path can be written, and how much space is free."""
    from asel.cli.locations import existing_folder, why_not_writable

    folder = existing_folder(path)
    if reason := why_not_writable(folder):
        fix = "give this user the right to write there, or set ASEL_CACHE_DIR to another directory"
        yield problem("cache", reason, fix)
    else:
        made = "" if path.exists() else ", which will be made"
        yield ok("cache", f"{path}{made}: writable")
    free = shutil.disk_usage(folder).free
    if free < _MIN_FREE_BYTES:
        fix = "make room, or set ASEL_CACHE_DIR to a directory on another disk"
        yield problem("cache", f"only {size_words(free)} free at {folder}", fix)
    else:
        yield ok("cache", f"{size_words(free)} free")


def _contents(cache: PersistentCache[Any], topic: str) -> Iterator[Finding]:
    began = time.perf_counter()
    try:
        stats, records, rejected = run_loop(_read, cache)
    except (AselError, OSError) as error:
        fix = "start the server, or correct the URL" if topic == "redis" else "repair the file system, or use another"
        yield problem(topic, redact(error), fix)
        return
    taken = f", read in {time.perf_counter() - began:.2g} s" if topic == "redis" else ""
    yield ok(topic, f"{cache.path}: {counted(records, 'good record')}{taken}")
    for bad in rejected[:_MAX_NAMED]:
        fix = "delete it, or leave it: asel sets it aside when it next reads it, and tunes again"
        yield problem(topic, f"a bad record: {redact(bad.where)}: {redact(bad.reason)}", fix)
    if len(rejected) > _MAX_NAMED:
        yield problem(topic, f"and {len(rejected) - _MAX_NAMED:,} more bad records", "`asel cache ls` names them all")
    if stats.set_aside:
        folder = Path(cache.path, "set-aside")
        advice = f"look at {folder}; they can be deleted" if folder.is_dir() else "they can be deleted"
        yield note(topic, f"set aside earlier: {counted(stats.set_aside, 'bad file')}", advice)
    if stats.other_schemas:
        yield note(topic, f"left alone: {counted(stats.other_schemas, 'record')} of other versions of asel")


async def _read(cache: PersistentCache[Any]) -> tuple[StoreStats, int, list[Rejected]]:
    rejected: list[Rejected] = []
    records = 0
    async with cache, cache.rejections_to(rejected.append):
        async for _ in cache.records():
            records += 1
        return await cache.stats(), records, rejected
