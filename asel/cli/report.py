"""`asel report`: one page about a cache, to hand to a colleague."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from asel.cli.cache.record_lookup import DeviceOption, JsonOption, OpOption, read_entries

__all__ = ["report"]


def report(
    store: Annotated[
        str | None,
        typer.Argument(
            metavar="[STORE]",
            envvar="ASEL_STORE",
            help="A directory, a *.json document, a redis:// URL, or the name of an operation in the cache directory.",
            show_default="all operations in the cache directory",
        ),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")] = Path("asel-report.html"),
    op: OpOption = None,
    device: DeviceOption = None,
    png: Annotated[
        Path | None,
        typer.Option("--png", help="Also save the main plots in this directory. Needs the extra asel\\[plots]."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a page with every key, its candidates and the cost of tuning; exit with 1 if a record cannot be read.

    The page needs no network.
    """
    from asel.cli.errors import FOUND_A_PROBLEM, problem
    from asel.cli.output import console, print_json
    from asel.errors import InvalidRequestError
    from asel.redaction import redact
    from asel.web.plots import save_plots
    from asel.web.report import report_page

    entries, unreadable = read_entries(store, op, device)
    if not entries:
        raise InvalidRequestError("no records to report on: `asel cache ls` lists the existing records")
    title = store or "the caches of this machine"
    page = report_page(entries, unreadable, title=title, created=time.time())
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(page, encoding="utf-8")
    pictures = [] if png is None else save_plots(entries, png)
    if as_json:
        print_json({"page": output, "keys": len(entries), "unreadable": len(unreadable), "pictures": pictures})
    else:
        out = console()
        keys = f"{len(entries)} {'key' if len(entries) == 1 else 'keys'}"
        out.print(f"{output}: {keys}, {len(page) / 1e6:.1f} MB, opens in any browser")
        if pictures:
            out.print(f"{png}: {len(pictures)} {'picture' if len(pictures) == 1 else 'pictures'}")
    for bad in unreadable:
        problem(f"{redact(bad.where)}: {redact(bad.reason)}")
    if unreadable:
        raise typer.Exit(FOUND_A_PROBLEM)
