"""`asel cache ls`: every key with its config."""

from __future__ import annotations

import typer

from asel.cli.cache.record_lookup import DeviceOption, JsonOption, OpOption, age, read_entries
from asel.cli.locations import StoreOption
from asel.redaction import redact

__all__ = ["ls", "speedup_words"]


def ls(
    store: StoreOption = None, op: OpOption = None, device: DeviceOption = None, as_json: JsonOption = False
) -> None:
    """List the keys of a cache with their configs; exit with 1 if a record cannot be read."""
    from asel.cli.errors import FOUND_A_PROBLEM, problem
    from asel.cli.output import console, print_json, print_table

    entries, rejected = read_entries(store, op, device)
    if as_json:
        print_json([{name: value for name, value in one.facts().items() if name != "outcomes"} for one in entries])
    elif entries:
        out = console()
        several = len({one.device for one in entries}) > 1
        rows = [
            [one.short_key, one.op, one.record.call, one.config, speedup_words(one), age(one.record.created)]
            + ([one.device] if several else [])
            for one in entries
        ]
        names = ["key", "op", "call", "config", "speed-up", "age"] + (["device"] if several else [])
        print_table(out, names, rows)
    else:
        problem("no records")
    for bad in rejected:
        problem(f"{redact(bad.where)}: {redact(bad.reason)}")
    if rejected:
        raise typer.Exit(FOUND_A_PROBLEM)


def speedup_words(entry: object) -> str:
    """Return the speed-up over the heuristic with its noise: `1.14x ±2%`."""
    speedup, noise = getattr(entry, "speedup", None), getattr(entry, "noise", None)
    if speedup is None:
        return "-"
    return f"{speedup:.2f}x" + ("" if noise is None else f" \u00b1{noise:.0%}")
