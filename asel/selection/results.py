"""The results of a selector: a config with the tier it came from, or the answers of every tier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, Literal, get_args

from asel.kernels.config_text import config_text
from asel.kernels.kernel import Cfg
from asel.kernels.keys import CacheKey
from asel.tuning.outcomes import TuneReport

__all__ = ["TIERS", "Explanation", "Selection", "Tier", "TierAnswer"]

Tier = Literal["override", "overlay", "memory", "persistent", "autotune", "heuristics"]
TIERS: tuple[Tier, ...] = get_args(Tier)
"""The tiers, in the order in which they are asked."""


@dataclass(frozen=True, slots=True)
class Selection(Generic[Cfg]):
    """A config, the tier it came from, and why each tier before it declined."""

    cfg: Cfg
    tier: Tier
    key: CacheKey
    checksum: str
    report: TuneReport[Cfg] | None
    declined: Mapping[str, str]

    @property
    def call(self) -> str:
        """The call as people read it: `q=bf16[8,1024,128], causal=True`."""
        return self.key.call


@dataclass(frozen=True, slots=True)
class TierAnswer(Generic[Cfg]):
    """One tier's answer, or its reason for having none.

    The autotune tier may answer without a config: the tune has yet to find it.
    """

    tier: Tier
    cfg: Cfg | None
    says: str
    answers: bool


@dataclass(frozen=True, slots=True)
class Explanation(Generic[Cfg]):
    """What every tier would answer to a call."""

    key: CacheKey
    checksum: str
    tiers: tuple[TierAnswer[Cfg], ...]

    @property
    def call(self) -> str:
        """The call as people read it: `q=bf16[8,1024,128], causal=True`."""
        return self.key.call

    @property
    def answered_by(self) -> Tier | None:
        """The tier that would answer; None if the call would fail."""
        return next((said.tier for said in self.tiers if said.answers), None)

    def __str__(self) -> str:
        lines = [f"{self.key.op_id}({self.call}) on {self.key.device} (key {self.key.call_key[:8]})"]
        for said in self.tiers:
            mark = ">" if said.tier == self.answered_by else " "
            lines.append(
                f"{mark} {said.tier:<10} {said.says}" + ("" if said.cfg is None else f": {config_text(said.cfg)}")
            )
        if self.answered_by is None:
            lines.append("> error      every tier declines")
        return "\n".join(lines)
