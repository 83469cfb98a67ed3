"""How samples compare: the time of one candidate, and by how much another is slower."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf, log, pi, sqrt, tan
from statistics import NormalDist, fmean

__all__ = ["CONFIDENCE", "MAX_TIE", "TIE", "Gap", "gaps_to", "trimmed_mean"]

# Two times closer than this are a tie, as a difference of logarithms.
TIE = 0.02
# Even the favourite loses its title to one that looks faster by this much, however uncertain that is.
# Without it, replays of attention with four times the noise choose 473% too slow on average, and 13% with it. Replays
# as they were recorded are the same either way.
MAX_TIE = 0.1
# The confidence that no candidate is called slower than the leader by mistake.
CONFIDENCE = 0.999
# The scatter of all candidates weighs as much as this many samples of one's own, which show too little of it at first.
# Between 1 and 6 the replays differ by nothing that matters (tests/benchmarks/strategies.py).
_PRIOR_SAMPLES = 3
# The resolution of the finest timer: a time below it is as good as none, and has a logarithm all the same.
_MIN_S = 1e-9


def trimmed_mean(samples: Sequence[float]) -> float:
    """Return the mean of the fastest three quarters: samples are late, now and then by much, and seldom early.

    Steadier than a median, which knows one sample, or a minimum, which is the luckiest. Of three it is the middle one.
    """
    late = (len(samples) + 1) // 4
    early = late if len(samples) < 4 else 0
    return fmean(sorted(samples)[early : len(samples) - late])


@dataclass(frozen=True, slots=True)
class Gap:
    """By how much a candidate is slower than the leader, as a difference of logarithms, and how far off that may be."""

    mean: float
    margin: float = inf

    @property
    def lower(self) -> float:
        return self.mean - self.margin

    @property
    def upper(self) -> float:
        return self.mean + self.margin


@dataclass(frozen=True, slots=True)
class _Ratios:
    """The mean of the middle half of some log-ratios, their winsorized variance, and how many are in that half."""

    mean: float
    variance: float
    count: int

    @classmethod
    def of(cls, ratios: Sequence[float]) -> _Ratios:
        cut = len(ratios) // 4
        middle = sorted(ratios)[cut : len(ratios) - cut]
        winsorized = [middle[0]] * cut + middle + [middle[-1]] * cut
        centre, degrees = fmean(winsorized), len(middle) - 1
        squares = sum((ratio - centre) ** 2 for ratio in winsorized)
        return cls(fmean(middle), squares / degrees if degrees else 0.0, len(middle))


def gaps_to(
    leader: int, samples: Mapping[int, Sequence[float]], rounds: Sequence[Mapping[int, float]]
) -> dict[int, Gap]:
    """Compare candidates with the leader over the rounds in which both ran: what slows a round slows all in it.

    Yuen's test for trimmed means. The variance is moderated: with few samples, it is pooled across candidates.
    """
    found = {index: _Ratios.of(_log_ratios(index, leader, samples, rounds)) for index in samples if index != leader}
    degrees = sum(ratios.count - 1 for ratios in found.values())
    pooled = sum(ratios.variance * (ratios.count - 1) for ratios in found.values()) / degrees if degrees else inf
    gaps = {leader: Gap(0.0, 0.0)}
    for index, ratios in found.items():
        if not degrees:
            gaps[index] = Gap(ratios.mean)
            continue
        own = ratios.count - 1
        variance = (_PRIOR_SAMPLES * pooled + own * ratios.variance) / (_PRIOR_SAMPLES + own)
        needed = _t_quantile(len(found), min(_PRIOR_SAMPLES + own, degrees))
        gaps[index] = Gap(ratios.mean, needed * sqrt(variance / ratios.count))
    return gaps


def _log_ratios(
    index: int, leader: int, samples: Mapping[int, Sequence[float]], rounds: Sequence[Mapping[int, float]]
) -> list[float]:
    """Return the ratios of each shared round; or of the samples as they come, if they were not taken in rounds."""
    pairs = [(taken[index], taken[leader]) for taken in rounds if index in taken and leader in taken]
    if len(pairs) < 2:
        pairs = list(zip(samples[index], samples[leader], strict=False))
    return [log(max(one, _MIN_S) / max(other, _MIN_S)) for one, other in pairs]


@cache
def _t_quantile(comparisons: int, degrees: int) -> float:
    """Return how many standard errors count as significant, in one of several comparisons (Bonferroni).

    Student's t, by Cornish and Fisher's expansion: SciPy, which knows it exactly, takes a second to import.
    """
    p = 1 - (1 - CONFIDENCE) / comparisons
    if degrees == 1:
        return tan(pi * (p - 0.5))
    if degrees == 2:
        return (2 * p - 1) / sqrt(2 * p * (1 - p))
    z = NormalDist().inv_cdf(p)
    return (
        z
        + (z**3 + z) / (4 * degrees)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees**3)
    )
