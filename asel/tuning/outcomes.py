"""The report of a tune and its outcomes, and their serialised form."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Generic, Literal

from asel.kernels.candidates import Objective, same_config
from asel.kernels.kernel import Cfg
from asel.kernels.keys import CacheKey
from asel.redaction import redact

__all__ = [
    "Failed",
    "Measured",
    "Outcome",
    "Skipped",
    "Stage",
    "TuneReport",
    "in_words",
    "measurement_of",
    "shown_margin",
    "text_of",
]

Stage = Literal["build", "compile", "check", "measure", "run"]
"""The stage in which a candidate failed. `run`: it won its tune and failed in a real call."""


@dataclass(frozen=True, slots=True)
class Measured(Generic[Cfg]):
    """A candidate that was measured."""

    cfg: Cfg
    median_s: float
    samples_s: tuple[float, ...]
    compile_s: float
    how: str = "forward"
    """The timing mode: `forward+backward`, `forward`, or `eager` if it could not be compiled."""
    alias_of: Cfg | None = None
    """The candidate with an equal program, whose samples these are."""
    eliminated: int | None = None
    """The round after which it dropped out of the race, 0 for its warm-up; None for a finalist."""
    reused: bool = False
    """Whether the timing is that of an earlier tune of the same key, as it was recorded."""
    measure_s: float = 0.0
    """The seconds that measuring it took, with warm-ups and all repeated runs."""
    ranked_s: float | None = None
    """The time that it was ranked by: the mean of its fastest samples, corrected for slow rounds."""
    predicted_s: float | None = None
    """The time that was predicted from earlier tunes of the kernel's other calls."""

    @property
    def shown_s(self) -> float:
        """The time that reports print: the one it was ranked by, if known, so that times and margins agree."""
        return self.median_s if self.ranked_s is None else self.ranked_s


_OUT_OF_MEMORY = ("resource_exhausted", "out of memory", "out_of_memory", "memoryerror", "outofmemory")


@dataclass(frozen=True, slots=True)
class Failed(Generic[Cfg]):
    """A candidate that failed, with the stage and the error."""

    cfg: Cfg
    stage: Stage
    error_type: str
    message: str
    error: Exception | None = field(default=None, compare=False, repr=False)
    """The exception, in the process that caught it; never serialised."""

    @property
    def is_out_of_memory(self) -> bool:
        said = f"{self.error_type} {self.message}".lower()
        return any(words in said for words in _OUT_OF_MEMORY)


@dataclass(frozen=True, slots=True)
class Skipped(Generic[Cfg]):
    """A candidate that was not tried."""

    cfg: Cfg
    reason: str


Outcome = Measured[Cfg] | Failed[Cfg] | Skipped[Cfg]
_KINDS: dict[str, type[Any]] = {"measured": Measured, "failed": Failed, "skipped": Skipped}


@dataclass(frozen=True, slots=True)
class TuneReport(Generic[Cfg]):
    """The result of a tune: the winner, and the outcome of every candidate.

    Outcomes are in the candidates' declared order. `incumbent` is the heuristic's config, if the kernel has one: it
    wins unless it is slower by more than `noise`.
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
    """The largest difference that still counted as a tie, as a fraction."""
    margin: float = 0.0
    """The share of the incumbent's time that the winner saves."""
    tune_budget_s: float | None = None
    candidate_timeout_s: float | None = None
    learned_from: tuple[str, ...] = ()
    """The earlier tunes that guided the choice of what to compile: each one's kernel, version and call."""
    prediction_error: float | None = None
    """The root mean square error of their predictions, in logarithms; above 0.3 they were not used any more."""

    @property
    def call(self) -> str:
        """The readable call: `q=bf16[8,1024,128], causal=True`."""
        return self.key.call

    @property
    def best(self) -> Measured[Cfg] | None:
        """The winner's own measurement."""
        return measurement_of(self, self.winner)

    def runners_up(self, failed: Iterable[Cfg]) -> list[Cfg]:
        """Return the other measured configs, best first, without failed ones and those that share their program.

        Configs that stayed in the race longer come first; among those that left in the same round, times decide.
        """
        measured = [o for o in self.outcomes if isinstance(o, Measured)]
        gone = list(failed)
        gone += [_program(o) for o in measured if any(same_config(o.cfg, cfg) for cfg in gone)]
        left = [o for o in measured if not any(same_config(cfg, name) for cfg in gone for name in (o.cfg, _program(o)))]
        how = self.best.how if self.best is not None else self.objective

        def rank(one: Measured[Cfg]) -> tuple[bool, float, float]:
            return one.how != how, -(inf if one.eliminated is None else one.eliminated), one.shown_s

        return [one.cfg for one in sorted(left, key=rank)]

    def without(self, cfg: Cfg, winner: Cfg, error: Exception) -> TuneReport[Cfg]:
        """Return the report with `cfg` as failed in a real call, and `winner` in its place."""
        failed: Outcome[Cfg] = Failed(cfg, "run", type(error).__name__, text_of(error))
        outcomes = tuple(failed if same_config(o.cfg, cfg) else o for o in self.outcomes)
        report = replace(self, winner=winner, outcomes=outcomes, margin=0.0)
        return replace(report, margin=shown_margin(report))

    def __str__(self) -> str:
        """Return a table of the candidates, fastest first, with a bar for each time.

        Configs are shown without the fields they share.
        """
        from asel.tuning.report_text import report_text  # here, because it imports this module

        return report_text(self)

    def to_json(self, dump: Callable[[Cfg], Any] | None = None) -> str:
        """Return the report as JSON; `dump` turns a config into a JSON value."""
        shown = dump or _plain
        facts = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        facts["winner"] = shown(self.winner)
        facts["incumbent"] = None if self.incumbent is None else shown(self.incumbent)
        facts["outcomes"] = [_outcome_to_dict(o, shown) for o in self.outcomes]
        facts |= {"call": self.call} if self.call else {}
        return json.dumps(facts)

    @classmethod
    def from_json(cls, text: str, load: Callable[[Any], Cfg] | None = None) -> TuneReport[Cfg]:
        """Return the report that `to_json` wrote; `load` turns a JSON value back into a config."""
        return cls.from_facts(json.loads(text), load)

    @classmethod
    def from_facts(cls, given: Mapping[str, Any], load: Callable[[Any], Cfg] | None = None) -> TuneReport[Cfg]:
        """Return the report in parsed JSON."""
        read: Callable[[Any], Any] = load or (lambda value: value)
        facts = dict(given)
        device, op_id, name = facts["key"]
        facts["key"] = CacheKey(device, op_id, name, facts.pop("call", ""))
        facts["winner"] = read(facts["winner"])
        facts["incumbent"] = None if facts["incumbent"] is None else read(facts["incumbent"])
        facts["learned_from"] = tuple(facts.get("learned_from", ()))
        facts["outcomes"] = tuple(_outcome_from_dict(o, read) for o in facts["outcomes"])
        return cls(**facts)


def measurement_of(report: TuneReport[Cfg], cfg: Cfg) -> Measured[Cfg] | None:
    return next((o for o in report.outcomes if isinstance(o, Measured) and same_config(o.cfg, cfg)), None)


def shown_margin(report: TuneReport[Any]) -> float:
    """Return the margin computed from the printed times."""
    best, incumbent = report.best, None if report.incumbent is None else measurement_of(report, report.incumbent)
    if best is None or incumbent is None or not (best.shown_s and incumbent.shown_s):
        return 0.0
    return 1 - best.shown_s / incumbent.shown_s


def _program(outcome: Measured[Cfg]) -> Cfg:
    return outcome.cfg if outcome.alias_of is None else outcome.alias_of


def text_of(error: BaseException) -> str:
    """Return an error's message without secrets, even if its `__str__` raises."""
    try:
        return redact(error)
    except Exception as why:
        return f"(its message raised {type(why).__name__})"


def in_words(seconds: float) -> str:
    """Return a duration in three digits and a suitable unit."""
    if round(seconds * 1e9) < 1000:
        return f"{seconds * 1e9:.0f} ns"
    for unit, scale in (("us", 1e6), ("ms", 1e3), ("s", 1.0)):
        if float(digits := f"{seconds * scale:.3g}") < 1000:
            return f"{digits} {unit}"
    return f"{seconds:.0f} s"


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
