"""What a chain says: an answer with its provenance, or an account of every tier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal

from asel.kernel import Cfg
from asel.keys import CacheKey
from asel.outcomes import TuneReport

__all__ = ["Explanation", "Selection", "Tier", "TierSays"]

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
class TierSays(Generic[Cfg]):
    """What one tier would say. `cfg` is None where it would decline, or has yet to find out."""

    tier: Tier
    cfg: Cfg | None
    says: str


@dataclass(frozen=True, slots=True)
class Explanation(Generic[Cfg]):
    """What every tier would say to a call, and which one would answer."""

    key: CacheKey
    checksum: str
    answered_by: Tier | None
    tiers: tuple[TierSays[Cfg], ...]

    def __str__(self) -> str:
        lines = [f"{self.key.op_id} on {self.key.device} (key {self.key.call_key[:8]})"]
        for said in self.tiers:
            mark = ">" if said.tier == self.answered_by else " "
            lines.append(f"{mark} {said.tier:<10} {said.says}{_shown(said.cfg)}")
        if self.answered_by is None:
            lines.append("> error      every tier declines")
        return "\n".join(lines)


def _shown(cfg: Any) -> str:
    return "" if cfg is None else f": {cfg!r}"
