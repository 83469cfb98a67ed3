"""`asel cache why KEY`: the winner, explained."""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING

from asel.cli.cache.record_lookup import DeviceOption, JsonOption, KeyArgument, matching, read_entries
from asel.cli.locations import StoreOption

if TYPE_CHECKING:
    from asel.web.entries import Entry

__all__ = ["reasons", "why"]


def why(key: KeyArgument, store: StoreOption = None, device: DeviceOption = None, as_json: JsonOption = False) -> None:
    """Explain in sentences why a key has its config."""
    from asel.cli.output import console, print_item, print_json

    found = matching(read_entries(store, device=device)[0], key)
    if as_json:
        print_json(
            [{"key": one.record.key.call_key, "config": one.record.cfg, "reasons": reasons(one)} for one in found]
        )
        return
    out = console()
    for one in found:
        out.print(f"{one.name} runs with {one.config}.", style="bold")
        for line in reasons(one):
            print_item(out, "-", line)


def reasons(entry: Entry) -> list[str]:
    """Return the reasons for the winner, one sentence each."""
    from asel.tuning.outcomes import in_words
    from asel.web.entries import config_words

    report = entry.report
    if report is None:
        return ["A user put it, or the report of its tune was not kept: there are no measurements."]
    measured = entry.measured
    sentences = [_against_heuristic(entry)]
    rivals = [one for one in measured[1:] if one.alias_of is None]
    if rivals and measured:
        best, second = measured[0], rivals[0]
        apart = second.shown_s / best.shown_s - 1 if best.shown_s else 0.0
        tie = f", which is within the noise of {report.noise:.1%}" if abs(apart) <= report.noise else ""
        slower = f"{apart:.1%} slower" if apart >= 0 else f"{-apart:.1%} faster"
        sentences.append(
            f"The next best of {len(entry.outcomes)} candidates is {config_words(second.cfg)} with "
            f"{in_words(second.shown_s)}, {slower} than the winner's {in_words(best.shown_s)}{tie}."
        )
    early = sum(one.eliminated is not None for one in measured)
    if early:
        sentences.append(
            f"{early} of {len(measured)} measured candidates {'was' if early == 1 else 'were'} clearly slower "
            "and dropped out early."
        )
    sentences += [
        f"{config_words(one.cfg)} failed in {one.stage}: {one.error_type}: {one.message}" for one in entry.failed
    ]
    sentences += [f"{config_words(one.cfg)} was skipped: {one.reason}." for one in entry.skipped]
    sentences.append(f"The tune took {in_words(entry.record.seconds)} on {entry.device} with {entry.software}.")
    here = metadata.version("jax")
    if entry.record.environment.get("jax", here) != here:
        sentences.append(
            f"This machine has jax {here}: the record is used here unless the policy has match_environment='exact'."
        )
    return sentences


def _against_heuristic(entry: Entry) -> str:
    from asel.kernels.candidates import same_config
    from asel.web.entries import config_words

    report = entry.report
    assert report is not None
    if report.incumbent is None:
        return "The kernel has no heuristic to compare it with; it was the fastest measured."
    if same_config(report.winner, report.incumbent):
        return f"It is the heuristic's config: no candidate was faster by more than the noise of {report.noise:.1%}."
    if entry.speedup is None:
        return f"The heuristic's {config_words(report.incumbent)} was not measured."
    return (
        f"It takes {report.margin:.1%} less time than the heuristic's {config_words(report.incumbent)} "
        f"({entry.speedup:.2f}x as fast); the noise is {report.noise:.1%}."
    )
