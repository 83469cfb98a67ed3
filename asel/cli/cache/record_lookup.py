"""Finds the records for an `asel cache` command, by operation, key and device."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asel.cli.interrupts import run_loop
from asel.errors import InvalidRequestError

if TYPE_CHECKING:
    from asel.stores.persistent_cache import PersistentCache
    from asel.stores.records import Record, Rejected
    from asel.web.entries import Entry

__all__ = [
    "DeviceOption",
    "JsonOption",
    "KeyArgument",
    "OpOption",
    "age",
    "all_entries",
    "entries_of",
    "matching",
    "read_entries",
]

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
OpOption = Annotated[str | None, typer.Option("--op", help="Only this operation: matmul, or matmul@v1.")]
DeviceOption = Annotated[str | None, typer.Option("--device", help="Only devices with this in their name.")]
KeyArgument = Annotated[
    str,
    typer.Argument(
        metavar="KEY", help="The first digits of a key, as `ls` and logs show it; an operation; or part of a call."
    ),
]


def read_entries(
    location: str | None, op: str | None = None, device: str | None = None
) -> tuple[list[Entry], list[Rejected]]:
    """Return the records of the caches at a location, sorted by operation and call, and the rejected ones."""
    from asel.cli.locations import caches_at

    return run_loop(all_entries, caches_at(location), wanted(op, device))


def wanted(op: str | None, device: str | None) -> Callable[[Record], bool]:
    def is_wanted(record: Record) -> bool:
        key = record.key
        return (op is None or op in (key.op_id, key.kernel_name)) and (device is None or device in key.device)

    return is_wanted


async def all_entries(
    caches: list[PersistentCache[Any]], is_wanted: Callable[[Record], bool]
) -> tuple[list[Entry], list[Rejected]]:
    found: list[Entry] = []
    rejected: list[Rejected] = []
    for cache in caches:
        entries, bad = await entries_of(cache, is_wanted)
        found += entries
        rejected += bad
    return sorted(found, key=_order), rejected


def _order(entry: Entry) -> tuple[Any, ...]:
    """Sort by operation, then by call with numbers in numerical order: `f32[512]` before `f32[1024]`."""
    parts = re.split(r"(\d+)", entry.record.call)
    numbers = tuple((int(part), "") if part.isdigit() else (-1, part) for part in parts)
    return entry.op, numbers, entry.record.key, entry.record.created


async def entries_of(
    cache: PersistentCache[Any], is_wanted: Callable[[Record], bool] = lambda record: True
) -> tuple[list[Entry], list[Rejected]]:
    from asel.web.entries import Entry

    rejected: list[Rejected] = []
    async with cache, cache.rejections_to(rejected.append):
        entries = [Entry.of(record, cache.path) async for record in cache.records() if is_wanted(record)]
    return entries, rejected


def matching(entries: list[Entry], key: str) -> list[Entry]:
    """Return the entries that KEY names.

    Raises:
        InvalidRequestError: there are none, or they have several keys.
    """
    found = [one for one in entries if key and one.record.key.call_key.startswith(key)]
    found = found or [one for one in entries if key in (one.op, one.op.partition("@")[0], one.name)]
    found = found or [one for one in entries if key in one.name]
    if not found:
        hint = (
            f"one of {', '.join(sorted({one.short_key for one in entries})[:5])}" if entries else "the cache is empty"
        )
        raise InvalidRequestError(f"no record matches {key!r}: `asel cache ls` lists the keys ({hint})")
    keys = {one.record.key: one for one in found}
    if len(keys) > 1:
        shown = "; ".join(f"{one.short_key} {one.name}" for one in list(keys.values())[:5])
        more = f"; and {len(keys) - 5} more" if len(keys) > 5 else ""
        raise InvalidRequestError(f"{key!r} matches {len(keys)} keys: {shown}{more}. {_how_to_choose(keys.values())}")
    return found


def _how_to_choose(entries: Collection[Entry]) -> str:
    """Return advice for naming one of several keys: operations with equal arguments have equal digits."""
    if len({one.short_key for one in entries}) == len(entries):
        return "Use the digits of one of them"
    if len({one.name for one in entries}) == len(entries):
        return "Use the whole call of one of them, in quotes"
    return "Add --device to choose one"


def age(created: float) -> str:
    """Return the time since `created`, in its largest unit: `3d`."""
    seconds = max(0.0, time.time() - created)
    for unit, size in (("y", 31_557_600), ("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"
