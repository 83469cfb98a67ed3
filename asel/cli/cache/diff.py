"""`asel cache diff A B`: the configs of two machines, or of two versions, for the same calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from asel.cli.cache.record_lookup import JsonOption, OpOption, read_entries

if TYPE_CHECKING:
    from asel.web.entries import Entry

__all__ = ["diff"]

_Store = Annotated[str, typer.Argument(help="A directory, a *.json document, a redis:// URL, or an operation's name.")]


def diff(
    a: _Store,
    b: _Store,
    op: OpOption = None,
    jax_a: Annotated[
        str | None, typer.Option("--jax-a", help="Of A, only records measured with this version of JAX.")
    ] = None,
    jax_b: Annotated[
        str | None, typer.Option("--jax-b", help="Of B, only records measured with this version of JAX.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare the configs of two caches for the same calls; exit with 1 if they differ.

    The devices may differ. A and B may be the same cache, with --jax-a and --jax-b for two versions.
    """
    from asel.cli.errors import FOUND_A_PROBLEM
    from asel.cli.output import console, print_json, print_table

    ours, theirs = _newest(a, op, jax_a), _newest(b, op, jax_b)
    rows = [_compared(name, ours.get(name), theirs.get(name)) for name in sorted({*ours, *theirs})]
    if as_json:
        print_json(rows)
    else:
        out = console()
        changed = [row for row in rows if row["change"] != "same"]
        if changed:
            shown = [[row["change"], row["call"], *_cells(row, "a"), *_cells(row, "b")] for row in changed]
            print_table(out, ["change", "call", "A", "time", "B", "time"], shown)
        out.print(f"{len(rows) - len(changed)} of {len(rows)} calls have the same config in both")
    if any(row["change"] != "same" for row in rows):
        raise typer.Exit(FOUND_A_PROBLEM)


def _newest(store: str, op: str | None, jax: str | None) -> dict[str, Entry]:
    entries = [one for one in read_entries(store, op)[0] if jax in (None, one.record.environment.get("jax"))]
    return {one.name: one for one in sorted(entries, key=lambda one: one.record.created)}


def _compared(name: str, a: Entry | None, b: Entry | None) -> dict[str, Any]:
    if a is None or b is None:
        change = "only in A" if b is None else "only in B"
    else:
        change = "same" if a.record.cfg == b.record.cfg else "other config"
    return {"call": name, "change": change, "a": _facts(a), "b": _facts(b)}


def _facts(entry: Entry | None) -> dict[str, Any] | None:
    if entry is None:
        return None
    best = None if entry.report is None else entry.report.best
    seconds = None if best is None else best.shown_s
    environment = entry.record.environment
    return {"config": entry.config, "seconds": seconds, "device": entry.record.key.device, "environment": environment}


def _cells(row: dict[str, Any], side: str) -> list[str]:
    from asel.tuning.outcomes import in_words

    facts = row[side]
    if facts is None:
        return ["-", "-"]
    return [facts["config"], "-" if facts["seconds"] is None else in_words(facts["seconds"])]
