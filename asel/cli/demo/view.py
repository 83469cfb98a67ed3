"""The demo's display: live on a terminal, lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from asel.cli.demo.service import Scene
from asel.cli.demo.story import Demo
from asel.cli.output import NARROW, bar
from asel.cli.progress import Tune, tune_lines
from asel.events import (
    AutotuneFailed,
    AutotuneFinish,
    AutotuneStart,
    CandidateEliminated,
    CandidateFailed,
    CandidateMeasured,
    Event,
)
from asel.kernels.config_text import config_text
from asel.tuning.outcomes import in_words

__all__ = ["LineSink", "frame", "live", "percentile", "plain"]

_FRAMES_PER_S = 8
_TIER_BAR = 24
_PLAIN_WIDTH = 100
_TIERS = ("memory", "persistent", "autotune", "heuristics")


@contextmanager
def live(demo: Demo, to: Console) -> Iterator[None]:
    """Show the scene as frames drawn in a thread; titles and finished tunes stay above it."""
    watch = demo.scene.progress
    kept: set[str] = set()

    def draw() -> Group:
        if demo.selector is not None:
            watch.look(demo.selector)
        return frame(demo.scene, to, [tune for tune_id, tune in list(watch.tunes.items()) if tune_id not in kept])

    def keep_finished() -> None:
        for tune_id, tune in watch.tunes.items():
            if tune.ended is not None and tune_id not in kept:
                kept.add(tune_id)
                to.print(Group(*tune_lines(tune, to, to.width), Text()))

    def begin_step(title: str) -> None:
        keep_finished()
        to.print(Text(title, "bold cyan"))

    demo.on_step = begin_step
    with Live(get_renderable=draw, console=to, refresh_per_second=_FRAMES_PER_S, redirect_stderr=False):
        yield
        keep_finished()


@contextmanager
def plain(demo: Demo, to: Console) -> Iterator[None]:
    """Print a line for each event of a tune, and after each step the served requests."""
    steps = 0

    def end_step() -> None:
        if steps:
            for line in _traffic(demo.scene, to, _PLAIN_WIDTH):
                to.print(f"  {line.plain}", soft_wrap=True)

    def begin_step(title: str) -> None:
        nonlocal steps
        end_step()
        steps += 1
        to.print(f"\n{title}", soft_wrap=True)

    demo.on_step = begin_step
    demo.sinks = (*demo.sinks, LineSink(to))
    yield
    end_step()


def frame(scene: Scene, to: Console, tunes: Sequence[Tune]) -> Group:
    """Return one frame: the scene with these tunes, as wide as the console."""
    lines = _traffic(scene, to, to.width)
    for tune in tunes:
        lines += [Text(), *tune_lines(tune, to, to.width)]
    for line in lines:
        line.truncate(to.width, overflow="ellipsis")
    return Group(*lines)


def _traffic(scene: Scene, to: Console, width: int) -> list[Text]:
    """Return lines with the number of requests, the tiers that answered them, and latencies."""
    lines = [Text(f"requests  {scene.served:,} served, {scene.waiting} in flight")]
    total = scene.tiers.total()
    for tier in _TIERS:
        count = scene.tiers[tier]
        if count:
            drawn = bar(count / total, min(_TIER_BAR, width - 32), to)
            lines.append(Text.assemble("  from ", (f"{tier:<11}", "bold"), f"{count:>7,}  ", (drawn, "cyan")))
    for during, what in (("calm", "nothing tunes"), ("tuning", "while it tunes")):
        taken = scene.latencies_s.get(during)
        if taken:
            words = f"p50 {in_words(percentile(taken, 0.5))}, p99 {in_words(percentile(taken, 0.99))}"
            parts = [f"  warm requests, {what}:", words]
            lines += [Text(" ".join(parts))] if width >= NARROW else [Text(parts[0]), Text(f"    {parts[1]}")]
    return lines


class LineSink:
    """Prints a line for each event of a tune."""

    on_loop = True  # so that its lines and the demo's are in order

    def __init__(self, to: Console) -> None:
        self._to = to

    def wants(self, kind: type[Event]) -> bool:
        return kind in _LINES

    def emit(self, event: Event) -> None:
        self._to.print(f"  {_line(event)}", soft_wrap=True)


_LINES = (AutotuneStart, AutotuneFinish, AutotuneFailed, CandidateEliminated, CandidateFailed, CandidateMeasured)


def _line(event: Event) -> str:
    match event:
        case AutotuneStart():
            place = "in the background" if event.background else "while its callers wait"
            return f"{event.op}({event.call}): a tune of {event.candidates} candidates begins, {place}"
        case AutotuneFinish():
            faster = (
                f", {event.margin:.1%} less time than the default" if event.margin else ": nothing beats the default"
            )
            waiters = f"; {event.waiters} callers get it" if event.waiters else ""
            return f"{event.op}: {config_text(event.cfg)} wins{faster}{waiters}"
        case AutotuneFailed():
            return f"{event.op}: the tune failed: {event.error_type}: {event.message}"
        case CandidateEliminated():
            return f"{event.op}: {config_text(event.cfg)} drops out in round {event.round}"
        case CandidateFailed():
            return f"{event.op}: {config_text(event.cfg)} fails in {event.stage}: {event.error_type}"
        case CandidateMeasured():
            timed = in_words(event.median_s if event.ranked_s is None else event.ranked_s)
            return f"{event.op}: {config_text(event.cfg)} takes {timed} ({event.samples} samples)"
    return event.name


def percentile(values: Sequence[float], share: float) -> float:
    """Return the percentile of some values, as a share: 0.5 is the median."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))]
