"""The result of a batch: a table for people, and an overlay for programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from asel.kernels.config_text import config_text, one_line
from asel.kernels.keys import CacheKey
from asel.redaction import redact
from asel.selection.results import Tier

__all__ = ["BatchItem", "BatchProgress", "BatchSummary", "Outcome"]

Outcome = Literal["tuned", "known", "heuristic", "failed", "left"]
_MAX_ERROR_CHARS = 300


@dataclass(frozen=True, slots=True)
class BatchItem:
    """One call of a batch, with its config, or the reason why it has none."""

    op_id: str
    call: str
    """The readable call."""
    seen: int = 1
    key: CacheKey | None = None
    cfg: Any = None
    tier: Tier | None = None
    seconds: float = 0.0
    error: Exception | None = None

    @property
    def outcome(self) -> Outcome:
        """`known`: memory or the store had the config already. `left`: the budget was spent first."""
        if self.error is not None:
            return "failed"
        if self.tier is None:
            return "left"
        if self.tier == "heuristics":
            return "heuristic"
        return "tuned" if self.tier == "autotune" else "known"

    def said(self) -> str:
        """Return the config or the error, as one line."""
        if self.error is not None:
            return f"{type(self.error).__name__}: {one_line(redact(self.error), _MAX_ERROR_CHARS)}"
        return "" if self.tier is None else config_text(self.cfg)


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """The progress of a batch; passed to `progress` when a call begins and when it has ended."""

    total: int
    done: int
    failed: int
    elapsed_s: float
    begun: str = ""
    """The call that begins; empty if a call has ended."""
    ended: BatchItem | None = None


@dataclass(frozen=True, slots=True)
class BatchSummary:
    """The result of each call of a batch. It prints as a table."""

    items: tuple[BatchItem, ...] = ()
    seconds: float = 0.0

    @property
    def chosen(self) -> dict[CacheKey, Any]:
        """The config of each call that has one, its heuristic's included."""
        return {item.key: item.cfg for item in self.items if item.tier is not None and item.key is not None}

    @property
    def failed(self) -> list[tuple[str, Exception]]:
        """The op and the error of each call that has no config."""
        return [(item.op_id, item.error) for item in self.items if item.error is not None]

    @property
    def left(self) -> list[BatchItem]:
        """The calls that the budget did not reach. The next batch continues from the configs that this one stored."""
        return [item for item in self.items if item.outcome == "left"]

    def as_overlay(self) -> dict[tuple[str, str, str], Any]:
        """Return the configs as a mapping for `overlay_cache`, without heuristics, which would hide a later tune."""
        found = (item for item in self.items if item.outcome in ("tuned", "known"))
        return {(item.key.device, item.key.op_id, item.key.call_key): item.cfg for item in found if item.key}

    def __str__(self) -> str:
        """Return a line with the counts, then a line for each call."""
        outcomes = [item.outcome for item in self.items]
        counts = [f"{outcomes.count(kind)} {kind}" for kind in ("tuned", "known", "heuristic", "failed", "left")]
        lines = [f"{len(outcomes)} {'call' if len(outcomes) == 1 else 'calls'}: {', '.join(counts)}"]
        calls = [f"{item.key.op_id if item.key else item.op_id}({item.call})" for item in self.items]
        width = max(map(len, calls), default=0)
        for item, call in zip(self.items, calls, strict=True):
            lines.append(f"{item.outcome:<9}  {item.seconds:7.2f} s  {call:<{width}}  {item.said()}".rstrip())
        return "\n  ".join(lines)
