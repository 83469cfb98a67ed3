"""The report's main plots as PNG files, for a document or a chat."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asel.errors import InvalidRequestError
from asel.web.entries import Entry, differing_fields

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["save_plots"]

MAX_KEYS = 50
"""The number of keys with a picture of their samples."""
MAX_CANDIDATES = 40
"""Candidates in one picture, fastest first."""
_WINNER, _HEURISTIC, _OTHER = "#1a7f4b", "#b35900", "#57708a"


def save_plots(entries: Sequence[Entry], folder: Path) -> list[Path]:
    """Write `overview.png`, and a picture of the samples of each of the first keys; return their paths.

    Raises:
        InvalidRequestError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InvalidRequestError("--png needs matplotlib: pip install 'asel[plots]'") from error
    folder.mkdir(parents=True, exist_ok=True)
    written = [_saved(_overview(Figure, entries), folder / "overview.png")]
    tuned = [entry for entry in entries if entry.measured]
    for number, entry in enumerate(tuned[:MAX_KEYS]):
        name = re.sub(r"[^\w.-]+", "_", f"{number:02d}-{entry.op}-{entry.short_key}")
        written.append(_saved(_samples(Figure, entry), folder / f"{name}.png"))
    return written


def _saved(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=150, bbox_inches="tight")
    return path


def _overview(figure_class: type[Figure], entries: Sequence[Entry]) -> Figure:
    figure = figure_class(figsize=(10, 4))
    speedups, costs = figure.subplots(1, 2)
    found = [entry.speedup for entry in entries if entry.speedup is not None]
    speedups.hist(found, bins=min(20, max(4, len(found))), color=_WINNER)
    speedups.yaxis.get_major_locator().set_params(integer=True)
    speedups.axvline(1, color=_HEURISTIC, linestyle="--")
    speedups.set(xlabel="times as fast as the heuristic", ylabel="keys", title="Speed-up by key")
    seconds: dict[str, float] = {}
    for entry in entries:
        seconds[entry.op] = seconds.get(entry.op, 0.0) + entry.record.seconds
    ranked = sorted(seconds.items(), key=lambda pair: pair[1])[-MAX_CANDIDATES:]
    costs.barh(range(len(ranked)), [spent for _, spent in ranked], color=_OTHER)
    costs.set_yticks(range(len(ranked)), [op for op, _ in ranked], parse_math=False)
    costs.set(xlabel="seconds of tuning", title="Tuning by operation")
    figure.subplots_adjust(wspace=0.5)
    return figure


def _samples(figure_class: type[Figure], entry: Entry) -> Figure:
    shown = entry.measured[:MAX_CANDIDATES]
    figure = figure_class(figsize=(8, 1.2 + 0.3 * len(shown)))
    axes = figure.subplots()
    for row, one in enumerate(shown):
        colour = _colour(entry, one.cfg)
        samples = one.samples_s or (one.shown_s,)
        axes.plot([1e3 * s for s in samples], [row] * len(samples), "o", color=colour, alpha=0.35, markersize=4)
        axes.plot([1e3 * one.shown_s], [row], "|", color=colour, markersize=14, markeredgewidth=2.5)
    axes.set_yticks(range(len(shown)), differing_fields([one.cfg for one in shown]), parse_math=False)
    axes.set_ylim(len(shown) - 0.4, -0.6)  # the fastest on top
    times = [s for one in shown for s in (*one.samples_s, one.shown_s)]
    if min(times) > 0 and max(times) > 10 * min(times):
        axes.set_xscale("log")
        for ticks in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
            ticks("{x:g}")
    axes.set_xlabel("time, ms")
    axes.set_title(entry.name if len(entry.name) <= 80 else f"{entry.name[:77]}...", parse_math=False)
    axes.grid(axis="x", alpha=0.3)
    return figure


def _colour(entry: Entry, cfg: Any) -> str:
    return _WINNER if entry.is_winner(cfg) else _HEURISTIC if entry.is_heuristic(cfg) else _OTHER
