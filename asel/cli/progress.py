"""The progress of tunes: compiling candidates, samples, the leader."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from asel.events import (
    AutotuneFailed,
    AutotuneFinish,
    AutotuneStart,
    CandidateEliminated,
    CandidateFailed,
    CandidateMeasured,
    CandidateSkipped,
    CandidateStart,
    Event,
)
from asel.kernels.config_text import config_texts
from asel.tuning.estimates import trimmed_mean

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from asel.selection.selector import ConfigSelectorChain

__all__ = ["Candidate", "Tune", "TuneWatch", "tune_lines"]

Stage = Literal["waiting", "compiling", "racing", "out", "measured", "winner", "failed", "skipped"]
_MAX_CONFIG = 32
_MIN_BAR, _MAX_BAR = 5, 30
_STYLES: dict[Stage, str] = {
    "waiting": "dim",
    "compiling": "yellow",
    "racing": "cyan",
    "out": "dim",
    "measured": "cyan",
    "winner": "bold green",
    "failed": "red",
    "skipped": "dim",
}


@dataclass(slots=True)
class Candidate:
    """The state of one candidate."""

    cfg: Any
    stage: Stage = "waiting"
    compile_s: float | None = None
    samples: int = 0
    time_s: float | None = None
    note: str = ""


@dataclass(slots=True)
class Tune:
    """One tune, from its start to its end."""

    op: str
    call: str
    size: int
    began: float
    budget_s: float | None = None
    ended: float | None = None
    waiters: int = 0
    candidates: dict[int, Candidate] = field(default_factory=dict)
    margin: float | None = None
    error: str = ""

    @property
    def name(self) -> str:
        return f"{self.op}({self.call})"

    @property
    def seconds(self) -> float:
        return (time.monotonic() if self.ended is None else self.ended) - self.began

    @property
    def leader(self) -> Candidate | None:
        """The winner, or the fastest so far."""
        timed = [one for one in self.candidates.values() if one.time_s is not None and one.stage != "failed"]
        return min(timed, key=lambda one: (one.stage != "winner", one.time_s), default=None)


class TuneWatch:
    """A sink that keeps the state of every tune. `look` adds the samples so far, for which there are no events."""

    on_loop = True

    def __init__(self) -> None:
        self.tunes: dict[str, Tune] = {}

    def wants(self, kind: type[Event]) -> bool:
        return kind.__module__ == AutotuneStart.__module__

    def emit(self, event: Event) -> None:
        if isinstance(event, AutotuneStart):
            assert event.key is not None
            call = event.call or event.key.call_key[:8]
            self.tunes[event.tune_id] = Tune(event.key.op_id, call, event.candidates, time.monotonic())
            return
        tune = self.tunes.get(getattr(event, "tune_id", ""))
        if tune is not None:
            _advance(tune, event)

    def look(self, selector: ConfigSelectorChain[Any, Any]) -> None:
        """Add the samples so far of a selector's running tunes. Safe in another thread, because it only reads them."""
        for shared in selector._tunes.shared.in_flight:
            request, state, tune = shared.request, shared.state, self.tunes.get(shared.request.id)
            if tune is None:
                continue
            tune.waiters, tune.budget_s = shared.waiters, request.tune_budget_s
            for index, runner in list(state.runners.items()):
                one = tune.candidates.setdefault(index, Candidate(request.candidates[index]))
                one.compile_s = runner.compile_s
                one.samples = runner.sampled
                if one.stage in ("waiting", "compiling"):
                    one.stage = "racing"
                if state.board is not None and (samples := list(state.board.samples.get(index, ()))):
                    one.time_s = trimmed_mean(samples)
            for index in list(state.uncompilable):
                one = tune.candidates.setdefault(index, Candidate(request.candidates[index]))
                one.stage, one.note = "waiting", "cannot be compiled, so it is tried last"

    @property
    def running(self) -> list[Tune]:
        return [tune for tune in list(self.tunes.values()) if tune.ended is None]


def _advance(tune: Tune, event: Event) -> None:
    match event:
        case AutotuneFinish():
            tune.ended, tune.margin = time.monotonic(), event.margin
        case AutotuneFailed():
            tune.ended, tune.error = time.monotonic(), f"{event.error_type}: {event.message}"
        case CandidateStart() | CandidateMeasured() | CandidateEliminated() | CandidateFailed() | CandidateSkipped():
            one = tune.candidates.setdefault(event.index, Candidate(event.cfg))
            _advance_candidate(one, event)


def _advance_candidate(one: Candidate, event: Event) -> None:
    match event:
        case CandidateStart():
            one.stage = "compiling"
        case CandidateEliminated():
            one.stage = "out"
            one.note = f"out in round {event.round}" if event.round else "out at its warm-up"
        case CandidateMeasured():
            one.compile_s, one.samples = event.compile_s, event.samples
            one.time_s = event.median_s if event.ranked_s is None else event.ranked_s
            if event.winner:
                one.stage, one.note = "winner", "winner"
            elif one.stage != "out":
                one.stage = "measured"
        case CandidateFailed():
            one.stage, one.note = "failed", f"failed in {event.stage}: {event.error_type}: {event.message}"
        case CandidateSkipped():
            one.stage, one.note = "skipped", f"skipped: {event.reason}"


def tune_lines(tune: Tune, to: Console, width: int) -> Iterator[Text]:
    """Give a line for the tune and one for each candidate, none longer than `width`."""
    from rich.text import Text

    from asel.tuning.outcomes import in_words

    state = "running" if tune.ended is None else "failed after" if tune.error else "took"
    waiting = f", {tune.waiters} wait" if tune.waiters > 1 and tune.ended is None else ""
    yield _cut(Text(tune.name, "bold"), width)
    yield _cut(Text(f"  {state} {in_words(tune.seconds)}, {tune.size} candidates{waiting}"), width)
    candidates = [one for _, one in sorted(tune.candidates.items())]
    texts, _ = config_texts([one.cfg for one in candidates], _MAX_CONFIG)
    longest = max((one.time_s or 0.0 for one in candidates), default=0.0)
    room = min(_MAX_BAR, width - max(map(len, texts), default=0) - 45)
    for one, text in zip(candidates, texts, strict=True):
        line = Text.assemble("  ", (f"{text:<{max(map(len, texts))}}", _STYLES[one.stage]), "  ")
        line.append_text(_progress(one, longest, room, to))
        yield _cut(line, width)


def _progress(one: Candidate, longest: float, room: int, to: Console) -> Text:
    from rich.text import Text

    from asel.cli.output import bar
    from asel.tuning.outcomes import in_words

    if one.stage in ("waiting", "compiling", "failed", "skipped"):
        return Text(one.note or one.stage)
    if one.time_s is None:
        return Text(f"compiled in {in_words(one.compile_s or 0.0)}")
    timed, samples = f"{in_words(one.time_s):>8}", f"{one.samples} sample{'' if one.samples == 1 else 's'}"
    if room < _MIN_BAR:
        return Text(f"{timed}  {one.stage if one.note else samples}")
    drawn = bar(one.time_s / longest if longest else 0.0, room, to)
    line = Text.assemble(f"{timed}  ", (f"{drawn:<{room}}", _STYLES[one.stage]), f"  {samples:<10}  {one.note}")
    line.rstrip()
    return line


def _cut(line: Text, width: int) -> Text:
    line.truncate(width, overflow="ellipsis")
    return line
