"""What a tune found, and its serialised form."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Generic, Literal

from asel.kernel import Cfg
from asel.keys import CacheKey, Objective, alike
from asel.redaction import redact

__all__ = ["Failed", "Measured", "Outcome", "Skipped", "Stage", "TuneReport", "in_words", "text_of"]

Stage = Literal["build", "compile", "check", "measure", "run"]
"""Where a candidate broke; `run`: it won its tune, and failed in a real call."""


@dataclass(frozen=True, slots=True)
class Measured(Generic[Cfg]):
    """A candidate that ran, and how long it took."""

    cfg: Cfg
    median_s: float
    samples_s: tuple[float, ...]
    compile_s: float
    how: str = "forward"
    """What was timed: `forward+backward`, `forward`, or `eager` where it could not be compiled."""
    alias_of: Cfg | None = None
    """The candidate with the same program, whose samples these are."""
    eliminated: int | None = None
    """The round after which it was out of the race, 0 for its warm-up; None for a finalist."""
    reused: bool = False
    """Measured by an earlier tune of the same key; the incumbent's new timing puts it in today's terms."""
    measure_s: float = 0.0
    """The seconds it was measured for, with warm-ups, and with all runs of those that are repeated in a sample."""


@dataclass(frozen=True, slots=True)
class Failed(Generic[Cfg]):
    """A candidate that did not make it, and where it broke."""

    cfg: Cfg
    stage: Stage
    error_type: str
    message: str
    error: Exception | None = field(default=None, compare=False, repr=False)
    """What was raised, while the process that saw it lives; never serialised."""


@dataclass(frozen=True, slots=True)
class Skipped(Generic[Cfg]):
    """A candidate that was not tried."""

    cfg: Cfg
    reason: str


Outcome = Measured[Cfg] | Failed[Cfg] | Skipped[Cfg]
_KINDS: dict[str, type[Any]] = {"measured": Measured, "failed": Failed, "skipped": Skipped}


@dataclass(frozen=True, slots=True)
class TuneReport(Generic[Cfg]):
    """A whole tune: the winner, and what every candidate did.

    Outcomes are in the candidates' declared order. `incumbent` is the heuristic's config, where the
    kernel has one: it keeps the title unless it is beaten by more than `noise`.
    """

    key: CacheKey
    winner: Cfg
    outcomes: tuple[Outcome[Cfg], ...]
    seconds: float
    environment: dict[str, str]
    tune_id: str = ""
    checksum: str = ""
    objective: Objective = "forward"
    incumbent: Cfg | None = None
    noise: float = 0.0
    """How far apart two may be and still be a tie, as a fraction."""
    margin: float = 0.0
    """By how much of the incumbent's time the winner is faster."""
    tune_budget_s: float | None = None
    candidate_timeout_s: float | None = None

    @property
    def best(self) -> Measured[Cfg] | None:
        """The winner's own measurement."""
        return self._measured(self.winner)

    def _measured(self, cfg: Cfg) -> Measured[Cfg] | None:
        return next((o for o in self.outcomes if isinstance(o, Measured) and alike(o.cfg, cfg)), None)

    def runners_up(self, failed: Iterable[Cfg]) -> list[Cfg]:
        """Return what else was measured, best first, without those that failed and whoever has their program.

        Who stayed in the race longer was faster then and there; among those that left together, times tell.
        """
        measured = [o for o in self.outcomes if isinstance(o, Measured)]
        gone = list(failed)
        gone += [_program(o) for o in measured if any(alike(o.cfg, cfg) for cfg in gone)]
        left = [o for o in measured if not any(alike(cfg, name) for cfg in gone for name in (o.cfg, _program(o)))]
        how = self.best.how if self.best is not None else self.objective

        def rank(one: Measured[Cfg]) -> tuple[bool, float, float]:
            return one.how != how, -(inf if one.eliminated is None else one.eliminated), one.median_s

        return [one.cfg for one in sorted(left, key=rank)]

    def without(self, cfg: Cfg, winner: Cfg, error: Exception) -> TuneReport[Cfg]:
        """Return the report as it reads once `cfg` failed in a real call and `winner` took its place."""
        failed: Outcome[Cfg] = Failed(cfg, "run", type(error).__name__, text_of(error))
        outcomes = tuple(failed if alike(o.cfg, cfg) else o for o in self.outcomes)
        report = replace(self, winner=winner, outcomes=outcomes, margin=0.0)
        best, incumbent = report.best, None if self.incumbent is None else report._measured(self.incumbent)
        if best is None or incumbent is None or not (best.median_s and incumbent.median_s):
            return report
        return replace(report, margin=1 - best.median_s / incumbent.median_s)

    def __str__(self) -> str:
        """Return a table of the candidates, fastest first, with a bar for each time."""
        measured = [o for o in self.outcomes if isinstance(o, Measured)]
        longest = max((o.median_s for o in measured), default=0.0)
        width = max((len(str(o.cfg)) for o in self.outcomes), default=0)
        lines = [f"{self.key.op_id or 'tune'}: {self.winner} wins {_against(self)}, {self.seconds:.2f} s of tuning"]
        for timed in sorted(measured, key=lambda o: o.median_s):
            bar = "\u2588" * max(1, round(24 * timed.median_s / longest)) if longest else ""
            marks = ", ".join(_marks(self, timed))
            lines.append(f"  {timed.cfg!s:<{width}}  {in_words(timed.median_s):>9}  {bar:<24}  {marks}".rstrip())
        for outcome in self.outcomes:
            if isinstance(outcome, Failed):
                lines.append(f"  {outcome.cfg!s:<{width}}  {outcome.error_type} in {outcome.stage}: {outcome.message}")
            elif isinstance(outcome, Skipped):
                lines.append(f"  {outcome.cfg!s:<{width}}  skipped: {outcome.reason}")
        return "\n".join(lines)

    def to_json(self, dump: Callable[[Cfg], Any] | None = None) -> str:
        """Return the report as JSON; `dump` turns a config into a JSON value."""
        shown = dump or _plain
        facts = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        facts["winner"] = shown(self.winner)
        facts["incumbent"] = None if self.incumbent is None else shown(self.incumbent)
        facts["outcomes"] = [_outcome_to_dict(o, shown) for o in self.outcomes]
        return json.dumps(facts)

    @classmethod
    def from_json(cls, text: str, load: Callable[[Any], Cfg] | None = None) -> TuneReport[Cfg]:
        """Return the report `to_json` wrote; `load` turns a JSON value back into a config."""
        return cls.from_facts(json.loads(text), load)

    @classmethod
    def from_facts(cls, given: Mapping[str, Any], load: Callable[[Any], Cfg] | None = None) -> TuneReport[Cfg]:
        """Return the report that some parsed JSON is."""
        read: Callable[[Any], Any] = load or (lambda value: value)
        facts = dict(given)
        facts["key"] = CacheKey(*facts["key"])
        facts["winner"] = read(facts["winner"])
        facts["incumbent"] = None if facts["incumbent"] is None else read(facts["incumbent"])
        facts["outcomes"] = tuple(_outcome_from_dict(o, read) for o in facts["outcomes"])
        return cls(**facts)


def _program(outcome: Measured[Cfg]) -> Cfg:
    return outcome.cfg if outcome.alias_of is None else outcome.alias_of


def _against(report: TuneReport[Any]) -> str:
    if report.incumbent is None:
        return "without an incumbent"
    if alike(report.incumbent, report.winner):
        return f"as the incumbent, ties within {report.noise:.1%}"
    if report._measured(report.incumbent) is None:
        return f"over {report.incumbent}, which was not measured"
    return f"by {report.margin:.1%} over {report.incumbent}, noise {report.noise:.1%}"


def _marks(report: TuneReport[Any], outcome: Measured[Any]) -> list[str]:
    marks = ["winner"] if alike(outcome.cfg, report.winner) else []
    marks += ["incumbent"] if report.incumbent is not None and alike(outcome.cfg, report.incumbent) else []
    if outcome.eliminated is not None:
        marks.append(f"out in round {outcome.eliminated}" if outcome.eliminated else "out at its warm-up")
    marks += [f"same program as {outcome.alias_of}"] if outcome.alias_of is not None else []
    marks += ["timed earlier"] if outcome.reused else []
    if report.best is not None and outcome.how != report.best.how:
        return [*marks, f"timed {outcome.how}, so not ranked"]
    return marks + ([f"timed {outcome.how}"] if outcome.how != report.objective else [])


def text_of(error: BaseException) -> str:
    """Return an error's message without secrets, whatever class of a user's it is."""
    try:
        return redact(error)
    except Exception as why:
        return f"(its message raised {type(why).__name__})"


def in_words(seconds: float) -> str:
    """Return a duration as a person would write it."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def _plain(cfg: Any) -> Any:
    return dataclasses.asdict(cfg) if dataclasses.is_dataclass(cfg) and not isinstance(cfg, type) else cfg


def _outcome_to_dict(outcome: Outcome[Any], dump: Callable[[Any], Any]) -> dict[str, Any]:
    facts = {f.name: getattr(outcome, f.name) for f in dataclasses.fields(outcome) if f.name != "error"}
    facts["cfg"] = dump(outcome.cfg)
    if facts.get("alias_of") is not None:
        facts["alias_of"] = dump(facts["alias_of"])
    return {"kind": type(outcome).__name__.lower(), **facts}


def _outcome_from_dict(given: dict[str, Any], load: Callable[[Any], Any]) -> Outcome[Any]:
    facts = dict(given)
    kind = _KINDS[facts.pop("kind")]
    facts["cfg"] = load(facts["cfg"])
    if kind is Measured:
        facts["samples_s"] = tuple(facts["samples_s"])
        facts["alias_of"] = None if facts["alias_of"] is None else load(facts["alias_of"])
    return kind(**facts)  # type: ignore[no-any-return]
