"""`asel cache prune`: delete old records."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asel.cli.cache.record_lookup import DeviceOption, JsonOption, OpOption, age, entries_of, wanted
from asel.cli.interrupts import run_loop
from asel.cli.locations import StoreOption, cache_at
from asel.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from asel.stores.persistent_cache import PersistentCache
    from asel.stores.records import Record
    from asel.web.entries import Entry

__all__ = ["prune", "seconds_in"]

_MAX_SHOWN = 20
_UNITS = {"s": 1, "min": 60, "h": 3_600, "d": 86_400, "w": 604_800, "y": 31_557_600}


def prune(
    store: StoreOption = None,
    older_than: Annotated[str | None, typer.Option(help="Only records older than this: 90d, 12h, 1y.")] = None,
    not_jax: Annotated[
        str | None, typer.Option(help="Only records measured with other versions of JAX than this.")
    ] = None,
    op: OpOption = None,
    device: DeviceOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be deleted, and delete nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Delete the records that meet all conditions, after showing them and asking."""
    from asel.cli.output import console, counted, print_json

    if not any((older_than, not_jax, op, device)):
        raise InvalidRequestError("give a condition: --older-than, --not-jax, --op, --device, or several of them")
    if as_json and not (yes or dry_run):
        raise InvalidRequestError("--json cannot ask: add --yes to delete, or --dry-run to list the records")
    cache = cache_at(store)
    should_delete = _condition(None if older_than is None else seconds_in(older_than), not_jax, wanted(op, device))
    entries, _ = run_loop(entries_of, cache, should_delete)
    # Delete only the records that are shown: meanwhile others may begin to meet the conditions.
    agreed = {one.record.address for one in entries}

    def delete() -> int:
        return run_loop(_delete, cache, lambda record: record.address in agreed and should_delete(record))

    if as_json:
        keys = [{"key": one.record.key.call_key, "op": one.op, "created": one.record.created} for one in entries]
        print_json({"deleted": 0 if dry_run else delete(), "matching": keys})
        return
    out = console()
    if not entries:
        out.print(f"nothing to delete in {cache.path}")
        return
    _show(out, entries)
    records = counted(len(entries), "record")
    if dry_run:
        out.print(f"{records} would be deleted from {cache.path}")
    elif yes or typer.confirm(f"Delete {records} from {cache.path}?"):
        out.print(f"{delete():,} deleted")
    else:
        out.print("nothing was deleted")


def _show(out: Console, entries: list[Entry]) -> None:
    from asel.cli.output import print_table

    shown = [[one.short_key, one.name, one.config, one.software or "-", age(one.record.created)] for one in entries]
    print_table(out, ["key", "call", "config", "measured with", "age"], shown[:_MAX_SHOWN])
    if len(entries) > _MAX_SHOWN:
        out.print(f"and {len(entries) - _MAX_SHOWN:,} more")


async def _delete(cache: PersistentCache[Any], should_delete: Callable[[Record], bool]) -> int:
    async with cache:
        return await cache.prune(should_delete)


def _condition(
    older_than_s: float | None, not_jax: str | None, is_wanted: Callable[[Record], bool]
) -> Callable[[Record], bool]:
    import time

    latest = None if older_than_s is None else time.time() - older_than_s

    def should_delete(record: Record) -> bool:
        if latest is not None and record.created > latest:
            return False
        jax = record.environment.get("jax")
        return (not_jax is None or jax not in (None, not_jax)) and is_wanted(record)

    return should_delete


def seconds_in(text: str) -> float:
    """Return the seconds in `90d` or `1.5h`.

    Raises:
        InvalidRequestError: it is not a duration.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|min|h|d|w|y)", text.strip())
    if found is None:
        raise InvalidRequestError(
            f"{text!r} is not a duration: write a number and a unit ({', '.join(_UNITS)}), as in 90d"
        )
    return float(found[1]) * _UNITS[found[2]]
