"""What a tune found, and its serialised form."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Literal

from asel.kernel import Cfg
from asel.keys import CacheKey, Objective

__all__ = ["Failed", "Measured", "Outcome", "Skipped", "Stage", "TuneReport"]

Stage = Literal["build", "compile", "measure"]


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
    """The round after which it was out of the race; None for a finalist."""


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
    """How far apart two medians may be and still be a tie, as a fraction."""
    margin: float = 0.0
    """By how much of the incumbent's time the winner is faster."""
    tune_budget_s: float | None = None
    candidate_timeout_s: float | None = None

    @property
    def best(self) -> Measured[Cfg] | None:
        """The winner's own measurement."""
        return next((o for o in self.outcomes if isinstance(o, Measured) and o.cfg == self.winner), None)

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
        read: Callable[[Any], Any] = load or (lambda value: value)
        facts = json.loads(text)
        facts["key"] = CacheKey(*facts["key"])
        facts["winner"] = read(facts["winner"])
        facts["incumbent"] = None if facts["incumbent"] is None else read(facts["incumbent"])
        facts["outcomes"] = tuple(_outcome_from_dict(o, read) for o in facts["outcomes"])
        return cls(**facts)


def _plain(cfg: Any) -> Any:
    return dataclasses.asdict(cfg) if dataclasses.is_dataclass(cfg) and not isinstance(cfg, type) else cfg


def _outcome_to_dict(outcome: Outcome[Any], dump: Callable[[Any], Any]) -> dict[str, Any]:
    facts = {f.name: getattr(outcome, f.name) for f in dataclasses.fields(outcome) if f.name != "error"}
    facts["cfg"] = dump(outcome.cfg)
    if facts.get("alias_of") is not None:
        facts["alias_of"] = dump(facts["alias_of"])
    return {"kind": type(outcome).__name__.lower(), **facts}


def _outcome_from_dict(facts: dict[str, Any], load: Callable[[Any], Any]) -> Outcome[Any]:
    kind = _KINDS[facts.pop("kind")]
    facts["cfg"] = load(facts["cfg"])
    if kind is Measured:
        facts["samples_s"] = tuple(facts["samples_s"])
        facts["alias_of"] = None if facts["alias_of"] is None else load(facts["alias_of"])
    return kind(**facts)  # type: ignore[no-any-return]
