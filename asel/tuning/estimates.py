"""Statistics of samples: the time of a candidate, and the gap between two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf, log, pi, sqrt, tan
from statistics import NormalDist, fmean

__all__ = ["CONFIDENCE", "MAX_TIE", "TIE", "Gap", "gaps_to", "trimmed_mean"]

# Two times are a tie if they differ by less than this, as a difference of logarithms.
TIE = 0.02
# Even the favourite loses to a candidate that looks this much faster, however uncertain the difference is. Without it,
# replays of attention with four times the noise choose 473% too slow on average, and 13% with it; replays of timings as
# they were recorded are the same either way.
MAX_TIE = 0.1
# The confidence that no candidate is wrongly called slower than the leader.
CONFIDENCE = 0.999
# The weight of the variance pooled across candidates, in samples: a candidate's own first samples underestimate it.
# Between 1 and 6 the replays hardly differ (tests/benchmarks/strategies.py).
_PRIOR_SAMPLES = 3
# The resolution of the finest timer. Shorter times are raised to it, so that their logarithm exists.
_MIN_S = 1e-9


def trimmed_mean(samples: Sequence[float]) -> float:
    """Return the mean of the fastest three quarters: disturbed samples are late, and rarely early.

    It varies less than the median, which uses one sample, or the minimum, which is the luckiest sample. Of three
    samples it is the middle one.
    """
    late = (len(samples) + 1) // 4
    early = late if len(samples) < 4 else 0
    return fmean(sorted(samples)[early : len(samples) - late])


@dataclass(frozen=True, slots=True)
class Gap:
    """By how much a candidate is slower than the leader, as a difference of logarithms, with a margin of error."""

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
    """The trimmed mean of log-ratios (of the middle half), their winsorized variance, and the size of that half."""

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
    """Compare candidates with the leader over the rounds in which both ran: a disturbance slows a whole round.

    This is Yuen's test for trimmed means, with a moderated variance: with few samples, it is pooled across candidates.
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
    """Return the log-ratio for each shared round; without rounds, for each pair of samples in order."""
    pairs = [(taken[index], taken[leader]) for taken in rounds if index in taken and leader in taken]
    if len(pairs) < 2:
        pairs = list(zip(samples[index], samples[leader], strict=False))
    return [log(max(one, _MIN_S) / max(other, _MIN_S)) for one, other in pairs]


@cache
def _t_quantile(comparisons: int, degrees: int) -> float:
    """Return how many standard errors count as significant, in one of several comparisons (Bonferroni).

    A quantile of Student's t by the Cornish-Fisher expansion: SciPy, which has it exactly, takes a second to import.
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
