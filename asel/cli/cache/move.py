"""`asel cache export` and `asel cache import`: write a cache to one document, and read it back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asel.cli.cache.record_lookup import DeviceOption, JsonOption, OpOption, wanted
from asel.cli.errors import FOUND_A_PROBLEM, problem
from asel.cli.interrupts import run_loop
from asel.cli.locations import StoreOption, cache_at, new_cache_at
from asel.redaction import redact

if TYPE_CHECKING:
    from collections.abc import Callable

    from asel.stores.persistent_cache import PersistentCache
    from asel.stores.records import Record
    from asel.stores.transfer import Imported

__all__ = ["export", "import_"]


def export(
    document: Annotated[Path, typer.Argument(help="The file to write. An existing one is replaced.")],
    store: StoreOption = None,
    op: OpOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a cache to one JSON document, to ship with a program or to import elsewhere."""
    from asel.cli.output import console, counted, print_json

    count = run_loop(_export, cache_at(store), document, wanted(op, device))
    if as_json:
        print_json({"document": document, "records": count})
    else:
        console().print(f"{counted(count, 'record')} in {document}")


async def _export(cache: PersistentCache[Any], document: Path, is_wanted: Callable[[Record], bool]) -> int:
    async with cache:
        return await cache.export_to(document, is_wanted)


def import_(
    document: Annotated[
        Path, typer.Argument(help="A document that `asel cache export` wrote.", exists=True, dir_okay=False)
    ],
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Add the records of a document to a cache; existing records do not change."""
    from asel.cli.output import console, counted, print_json

    done = run_loop(_import, new_cache_at(store), document)
    if as_json:
        print_json({"imported": done.imported, "skipped": len(done.skipped), "mismatched": list(done.mismatched)})
    else:
        console().print(f"{counted(done.imported, 'record')} imported, {len(done.skipped):,} already there")
        for where, reason in done.mismatched:
            problem(f"{redact(where)}: {redact(reason)}")
    if done.mismatched:
        raise typer.Exit(FOUND_A_PROBLEM)


async def _import(cache: PersistentCache[Any], document: Path) -> Imported:
    async with cache:
        return await cache.import_(document)
