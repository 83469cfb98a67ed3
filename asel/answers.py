"""What a chain says: an answer with its provenance, or an account of every tier."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, Literal

from asel.kernel import Cfg
from asel.keys import CacheKey
from asel.outcomes import TuneReport

__all__ = ["Explanation", "Selection", "Statistics", "Tier", "TierSays"]

Tier = Literal["override", "overlay", "memory", "persistent", "autotune", "heuristics"]


@dataclass(frozen=True, slots=True)
class Selection(Generic[Cfg]):
    """A config, the tier it came from, and why each tier before it declined."""

    cfg: Cfg
    tier: Tier
    key: CacheKey
    checksum: str
    report: TuneReport[Cfg] | None
    declined: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Statistics:
    """What a chain is doing at one moment."""

    pending: Mapping[str, int]
    """Tunes in flight, by op."""
    waiters: Mapping[str, int]
    """Callers that wait for them, by op."""
    queued: int
    """Keys that the loop has yet to see to in the background."""

    @classmethod
    def of(cls, tunes: Iterable[tuple[str, int]], queued: int) -> Statistics:
        pending, waiters = Counter[str](), Counter[str]()
        for op, waiting in tunes:
            pending[op] += 1
            waiters[op] += waiting
        return cls(pending, waiters, queued)


@dataclass(frozen=True, slots=True)
class TierSays(Generic[Cfg]):
    """What one tier would say, and whether that is an answer.

    The autotune tier may have an answer to give and no config yet.
    """

    tier: Tier
    cfg: Cfg | None
    says: str
    answers: bool

    @classmethod
    def of(cls, tier: Tier, cfg: Cfg | None, says: str, why_not: str) -> TierSays[Cfg]:
        return cls(tier, cfg, why_not if cfg is None else says, cfg is not None)


@dataclass(frozen=True, slots=True)
class Explanation(Generic[Cfg]):
    """What every tier would say to a call."""

    key: CacheKey
    checksum: str
    tiers: tuple[TierSays[Cfg], ...]

    @property
    def answered_by(self) -> Tier | None:
        """The tier that would answer; None where the call would fail."""
        return next((said.tier for said in self.tiers if said.answers), None)

    def __str__(self) -> str:
        lines = [f"{self.key.op_id} on {self.key.device} (key {self.key.call_key[:8]})"]
        for said in self.tiers:
            mark = ">" if said.tier == self.answered_by else " "
            lines.append(f"{mark} {said.tier:<10} {said.says}" + ("" if said.cfg is None else f": {said.cfg!r}"))
        if self.answered_by is None:
            lines.append("> error      every tier declines")
        return "\n".join(lines)
