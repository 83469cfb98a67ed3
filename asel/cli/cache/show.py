"""`asel cache show KEY`: a record with its candidates' timings."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from asel.cli.cache.ls import speedup_words
from asel.cli.cache.record_lookup import DeviceOption, JsonOption, KeyArgument, age, matching, read_entries
from asel.cli.locations import StoreOption

if TYPE_CHECKING:
    from rich.console import Console

    from asel.tuning.outcomes import Measured
    from asel.web.entries import Entry

__all__ = ["print_entry", "show"]

_MAX_BAR = 40


def show(key: KeyArgument, store: StoreOption = None, device: DeviceOption = None, as_json: JsonOption = False) -> None:
    """Show a record: the timings of its candidates as bars, the failures, and the device."""
    from asel.cli.output import console, print_json

    found = matching(read_entries(store, device=device)[0], key)
    if as_json:
        print_json([one.facts() for one in found])
        return
    out = console()
    for number, one in enumerate(found):
        if number:
            out.print()
        print_entry(out, one)


def print_entry(out: Console, entry: Entry) -> None:
    """Print all facts about a record."""
    from asel.cli.output import print_item
    from asel.tuning.outcomes import in_words

    record = entry.record
    out.print(entry.name, style="bold")
    facts = [
        (
            "config",
            f"{entry.config}, {speedup_words(entry)} as fast as the heuristic" if entry.speedup else entry.config,
        )
    ]
    facts += [("device", record.key.device), ("measured with", entry.software or "nothing: a user put it")]
    facts += [
        ("key", record.key.call_key),
        ("stored", f"{_date(record.created)}, {age(record.created)} ago, in {entry.cache}"),
    ]
    if entry.report is not None:
        facts.append(("tuned", f"{entry.report.objective}, in {in_words(record.seconds)}"))
    for name, value in facts:
        print_item(out, f"  {name:<14}", value)
    if entry.report is None:
        out.print("  it has no report of a tune")
        return
    _print_candidates(out, entry)


def _print_candidates(out: Console, entry: Entry) -> None:
    from asel.cli.output import spread_bar
    from asel.tuning.outcomes import in_words
    from asel.web.entries import differing_fields

    measured = entry.measured
    names = differing_fields([one.cfg for one in entry.outcomes])
    texts = {id(one): text for one, text in zip(entry.outcomes, names, strict=True)}
    width = min(max(map(len, names), default=0), 40)
    if measured:
        out.print("\n  candidates: solid to the fastest sample, shaded to the slowest tenth, a mark at the ranked time")
    longest = max((_spread(one)[2] for one in measured), default=0.0)
    room = min(_MAX_BAR, max(10, (out.width if out.is_terminal else 100) - width - 34))
    for one in measured:
        low, middle, high = _spread(one)
        bar = spread_bar(low, middle, high, longest, room, out)
        line = f"  {texts[id(one)]:<{width}}  {in_words(middle):>8}  {bar:<{room}}  {', '.join(entry.marks(one))}"
        out.print(line.rstrip())
    for failed in entry.failed:
        out.print(f"  {texts[id(failed)]:<{width}}  failed in {failed.stage}: {failed.error_type}: {failed.message}")
    for skipped in entry.skipped:
        out.print(f"  {texts[id(skipped)]:<{width}}  skipped: {skipped.reason}")


def _spread(one: Measured[object]) -> tuple[float, float, float]:
    """Return the fastest sample, the time that it is ranked by, and the 90th percentile of the samples."""
    samples = sorted(one.samples_s) or [one.shown_s]
    return samples[0], one.shown_s, max(one.shown_s, samples[int(0.9 * (len(samples) - 1))])


def _date(created: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(created))
