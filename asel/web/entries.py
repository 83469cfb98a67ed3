"""A stored record prepared for display: for tables, pages and JSON output."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from asel.kernels.candidates import same_config
from asel.kernels.config_text import MAX_CONFIG_CHARS, one_line
from asel.redaction import redact
from asel.stores.records import Record
from asel.tuning.outcomes import Failed, Measured, Outcome, Skipped, TuneReport

__all__ = ["Entry", "config_words", "differing_fields"]


@dataclass(frozen=True, slots=True)
class Entry:
    """A record, its report if it can be read, and the cache it is in."""

    record: Record
    report: TuneReport[Any] | None
    cache: str

    @classmethod
    def of(cls, record: Record, cache: str) -> Entry:
        try:
            report = None if record.report is None else TuneReport[Any].from_facts(record.report)
        except (ValueError, TypeError, KeyError, AttributeError):  # of another version of asel
            report = None
        return cls(record, report, cache)

    @property
    def short_key(self) -> str:
        """The first digits of a key, which logs and messages show."""
        return self.record.key.call_key[:8]

    @property
    def op(self) -> str:
        return self.record.key.op_id

    @property
    def name(self) -> str:
        """The call in Python's notation: `matmul@v1(a=f32[8,8])`; with the key if the call is unknown."""
        return f"{self.op}({self.record.call or f'key {self.short_key}'})"

    @property
    def device(self) -> str:
        """The device without its platform version."""
        return self.record.key.device.partition("|")[0]

    @property
    def config(self) -> str:
        return config_words(self.record.cfg)

    @property
    def software(self) -> str:
        """The software it was measured with: `jax 0.10.2, jaxlib 0.10.2`."""
        versions = self.record.environment
        return ", ".join(f"{name} {versions[name]}" for name in ("jax", "jaxlib") if name in versions)

    @property
    def speedup(self) -> float | None:
        """The heuristic's time over the winner's; None if the heuristic was not measured."""
        report = self.report
        if report is None or report.incumbent is None or not self._is_measured(report.incumbent):
            return None
        return 1 / (1 - report.margin) if report.margin < 1 else None

    @property
    def noise(self) -> float | None:
        return None if self.report is None else self.report.noise

    def is_winner(self, cfg: Any) -> bool:
        return self.report is not None and same_config(cfg, self.report.winner)

    def is_heuristic(self, cfg: Any) -> bool:
        report = self.report
        return report is not None and report.incumbent is not None and same_config(cfg, report.incumbent)

    def marks(self, one: Measured[Any]) -> list[str]:
        """Return a measured candidate's marks, a few words each: winner, heuristic, ..."""
        marks = ["winner"] if self.is_winner(one.cfg) else []
        marks += ["heuristic"] if self.is_heuristic(one.cfg) else []
        if one.eliminated is not None:
            marks.append(f"out after round {one.eliminated}" if one.eliminated else "out after its warm-up")
        marks += [f"same program as {config_words(one.alias_of)}"] if one.alias_of is not None else []
        marks += ["timed by an earlier tune"] if one.reused else []
        return marks + ([f"timed {one.how}"] if self.report is not None and one.how != self.report.objective else [])

    def _is_measured(self, cfg: Any) -> bool:
        return any(isinstance(one, Measured) and same_config(one.cfg, cfg) for one in self.outcomes)

    @property
    def outcomes(self) -> tuple[Outcome[Any], ...]:
        return () if self.report is None else self.report.outcomes

    @property
    def measured(self) -> list[Measured[Any]]:
        """The candidates that were measured, the winner first and then by time."""
        found = [one for one in self.outcomes if isinstance(one, Measured)]
        return sorted(found, key=lambda one: (not self.is_winner(one.cfg), one.shown_s))

    @property
    def failed(self) -> list[Failed[Any]]:
        return [one for one in self.outcomes if isinstance(one, Failed)]

    @property
    def skipped(self) -> list[Skipped[Any]]:
        return [one for one in self.outcomes if isinstance(one, Skipped)]

    def facts(self) -> dict[str, Any]:
        """Return everything as JSON values: for scripts, and for the report page."""
        report = self.report
        return {
            "key": self.record.key.call_key,
            "op": self.op,
            "call": redact(self.record.call),
            "device": self.record.key.device,
            "cache": self.cache,
            "config": self.record.cfg,
            "config_text": self.config,
            "checksum": self.record.checksum,
            "environment": self.record.environment,
            "created": self.record.created,
            "writer": self.record.writer,
            "tune_s": self.record.seconds,
            "objective": None if report is None else report.objective,
            "speedup": self.speedup,
            "margin": None if report is None else report.margin,
            "noise": self.noise,
            "heuristic": None if report is None else report.incumbent,
            "outcomes": [self._outcome_facts(one) for one in self.outcomes],
        }

    def _outcome_facts(self, one: Outcome[Any]) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "kind": type(one).__name__.lower(),
            "config": config_words(one.cfg),
            "winner": self.is_winner(one.cfg),
            "heuristic": self.is_heuristic(one.cfg),
        }
        if isinstance(one, Measured):
            same_as = None if one.alias_of is None else config_words(one.alias_of)
            return facts | {
                "ranked_s": one.shown_s,
                "median_s": one.median_s,
                "samples_s": one.samples_s,
                "compile_s": one.compile_s,
                "eliminated": one.eliminated,
                "how": one.how,
                "same_program_as": same_as,
                "reused": one.reused,
            }
        if isinstance(one, Failed):
            return facts | {"stage": one.stage, "error": one.error_type, "message": redact(one.message)}
        return facts | {"reason": redact(one.reason)}


def config_words(cfg: Any, limit: int = MAX_CONFIG_CHARS) -> str:
    """Return a config that was read as JSON: `m=64, n=128`."""
    if isinstance(cfg, Mapping) and cfg:
        return one_line(redact(", ".join(f"{name}={_word(value)}" for name, value in cfg.items())), limit)
    return one_line(redact(_word(cfg)), limit)


def _word(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)


def differing_fields(cfgs: Iterable[Any]) -> list[str]:
    """Return each config as text, without the fields that all have in common."""
    given = list(cfgs)
    if len(given) < 2 or not all(isinstance(cfg, Mapping) and cfg.keys() == given[0].keys() for cfg in given):
        return [config_words(cfg) for cfg in given]
    differ = [name for name in given[0] if any(cfg[name] != given[0][name] for cfg in given)]
    return [config_words({name: cfg[name] for name in differ} if differ else cfg) for cfg in given]
