"""The report of a tune and its outcomes, and their serialised form."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Generic, Literal

from asel.kernels.candidates import Objective, same_config
from asel.kernels.config_text import config_text, config_texts, one_line
from asel.kernels.kernel import Cfg
from asel.kernels.keys import CacheKey
from asel.redaction import redact

__all__ = ["MAX_LINE_CHARS", "Failed", "Measured", "Outcome", "Skipped", "Stage", "TuneReport", "in_words", "text_of"]

MAX_LINE_CHARS = 240
"""The longest line of a printed report: a call may be that long."""
_MAX_CONFIG_CHARS = 80
_MAX_LESSONS = 3
_MAX_SKIPPED = 50
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
        return self._measured(self.winner)

    def _measured(self, cfg: Cfg) -> Measured[Cfg] | None:
        return next((o for o in self.outcomes if isinstance(o, Measured) and same_config(o.cfg, cfg)), None)

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
        return replace(report, margin=report._shown_margin)

    @property
    def _shown_margin(self) -> float:
        """The margin computed from the printed times."""
        best, incumbent = self.best, None if self.incumbent is None else self._measured(self.incumbent)
        if best is None or incumbent is None or not (best.shown_s and incumbent.shown_s):
            return 0.0
        return 1 - best.shown_s / incumbent.shown_s

    def __str__(self) -> str:
        """Return a table of the candidates, fastest first, with a bar for each time.

        Configs are shown without the fields they share. No line is longer than `MAX_LINE_CHARS`. If many candidates
        were skipped, they are counted by reason.
        """
        skipped = [o for o in self.outcomes if isinstance(o, Skipped)]
        outcomes = self.outcomes
        if len(skipped) > _MAX_SKIPPED:
            outcomes = tuple(o for o in self.outcomes if not isinstance(o, Skipped))
        texts, shared = config_texts([o.cfg for o in outcomes], _MAX_CONFIG_CHARS)
        shown = _Configs(tuple(zip((o.cfg for o in outcomes), texts, strict=True)))
        width = max(map(len, texts), default=0)
        measured = [(o, text) for o, text in zip(outcomes, texts, strict=True) if isinstance(o, Measured)]
        longest = max((o.shown_s for o, _ in measured), default=0.0)
        op = self.key.op_id or "tune"
        lines = [f"{op}({self.call})" if self.call else op]
        lines.append(f"  {shown[self.winner]} wins {_against(self, shown)}, {self.seconds:.2f} s of tuning")
        if self.learned_from:
            lines.append(f"  {_lesson(self)}")
        for timed, text in sorted(measured, key=lambda pair: pair[0].shown_s):
            bar = "\u2588" * max(1, round(24 * timed.shown_s / longest)) if longest else ""
            marks = ", ".join(_marks(self, timed, shown))
            lines.append(f"  {text:<{width}}  {in_words(timed.shown_s):>9}  {bar:<24}  {marks}".rstrip())
        for outcome, text in zip(outcomes, texts, strict=True):
            if isinstance(outcome, Failed):
                message = one_line(outcome.message, MAX_LINE_CHARS)
                lines.append(f"  {text:<{width}}  {outcome.error_type} in {outcome.stage}: {message}")
            elif isinstance(outcome, Skipped):
                lines.append(f"  {text:<{width}}  skipped: {one_line(outcome.reason, MAX_LINE_CHARS)}")
        if len(skipped) > _MAX_SKIPPED:
            reasons = Counter(o.reason.partition(": ")[0] for o in skipped).most_common()
            lines += [f"  {count:,} skipped: {one_line(reason, MAX_LINE_CHARS)}" for reason, count in reasons]
        lines += [f"  all with {shared}"] if shared else []
        return "\n".join(line if len(line) <= MAX_LINE_CHARS else f"{line[: MAX_LINE_CHARS - 3]}..." for line in lines)

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


def _lesson(report: TuneReport[Any]) -> str:
    count = len(report.learned_from)
    tunes = "1 earlier tune" if count == 1 else f"{count} earlier tunes"
    learned = f"learned from {tunes}: {'; '.join(report.learned_from[:_MAX_LESSONS])}{'; ...' * (count > _MAX_LESSONS)}"
    if report.prediction_error is None:
        return learned
    return f"{learned} (off by {report.prediction_error:.0%})"


def _program(outcome: Measured[Cfg]) -> Cfg:
    return outcome.cfg if outcome.alias_of is None else outcome.alias_of


class _Configs:
    """A mapping from configs, which need not be hashable, to their texts."""

    def __init__(self, texts: tuple[tuple[Any, str], ...]) -> None:
        self._texts = texts

    def __getitem__(self, cfg: Any) -> str:
        texts = (text for other, text in self._texts if same_config(other, cfg))
        return next(texts, None) or config_text(cfg, _MAX_CONFIG_CHARS)


def _against(report: TuneReport[Any], shown: _Configs) -> str:
    if report.incumbent is None:
        return "without an incumbent"
    if same_config(report.incumbent, report.winner):
        return f"as the incumbent, ties within {report.noise:.1%}"
    if report._measured(report.incumbent) is None:
        return f"over {shown[report.incumbent]}, which was not measured"
    return f"by {report._shown_margin:.1%} over {shown[report.incumbent]}, noise {report.noise:.1%}"


def _marks(report: TuneReport[Any], outcome: Measured[Any], shown: _Configs) -> list[str]:
    marks = ["winner"] if same_config(outcome.cfg, report.winner) else []
    marks += ["incumbent"] if report.incumbent is not None and same_config(outcome.cfg, report.incumbent) else []
    if outcome.eliminated is not None:
        marks.append(f"out in round {outcome.eliminated}" if outcome.eliminated else "out at its warm-up")
    marks += [f"same program as {shown[outcome.alias_of]}"] if outcome.alias_of is not None else []
    marks += ["timed earlier"] if outcome.reused else []
    marks += [f"expected {in_words(outcome.predicted_s)}"] if outcome.predicted_s is not None else []
    if report.best is not None and outcome.how != report.best.how:
        return [*marks, f"timed {outcome.how}, so not ranked"]
    return marks + ([f"timed {outcome.how}"] if outcome.how != report.objective else [])


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
