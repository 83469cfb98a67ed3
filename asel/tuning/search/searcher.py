"""Proposes which configs to try next, from what was measured of others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, log, sqrt

import numpy as np
import numpy.typing as npt

from asel.tuning.search.config_fields import ConfigFields
from asel.tuning.search.gaussian_process import GaussianProcess, Numbers, Rows

__all__ = ["Estimate", "Searcher"]

# Configs that are spread over the space before the model is asked. tests/benchmarks/search.py: with 8 the model starts
# on too little, with 16 it starts too late to matter at 20 evaluations.
SPREAD = 12
# The spread is chosen among this many: of many more, the farthest apart are the corners, which are seldom good.
# Recorded spaces, 50 evaluations: 8.9% with 600, 7.7% with 100.
_SPREAD_POOL = 100
# Configs that are rated for each proposal: all neighbours of the best few, and this many others at random. With 1,500,
# 50 evaluations leave as much (recorded spaces), and a proposal takes 1.7 times as long. What earlier tunes teach needs
# more: from one device's space to another's (ten seeds), 300 leave 591 and 22% of regret, 1,500 leave 6 and 21%.
_POOL = 300
_LEARNED_POOL = 1500
_BEST = 5
# The model is surer of itself than its errors allow, having few measurements for many weights: configs are chosen as if
# its standard deviations were this many times as large. Four recorded and ten synthetic spaces, 50 evaluations, two
# sets of seeds: 0.5% less regret than with 1, give or take 0.25%.
_DOUBT = 2.0
# Measurements that the model is fitted to; its cost is cubic in them. The best half stays, others are drawn.
_MAX_FITTED = 256
# How many compiles ahead the expected gain looks: one at a time promises little long before there is nothing to find.
# Recorded spaces, ending below 2% three times in a row: looking one ahead leaves 6% after 63 compiles on average.
_AHEAD = 8
# A failure counts as this quantile of the times: slow, but no cliff for the model to bend to. Its neighbours are likely
# to fail too, which decays with the squared distance at this rate, against a prior of this weight that configs fail as
# often everywhere. Recorded spaces, 100 evaluations: 1.6%, and 3.0% if failures count as the slowest.
_FAILED_QUANTILE = 0.75
_FAILED_DECAY = 8.0
_FAILED_PRIOR = 0.02
# Earlier tunes are forgotten if what they predict is off by more than this (root mean square of logarithms), once this
# many configs were measured. With few configs they are kept, and the error widens what is tried. Ten shapes each of
# three real families (five of attention), six orders: at equal regret 28, 30 and 30% of the compiles, and 31, 33 and
# 45% if they are forgotten. From one device's thousands to another's: 5 and 25% of regret, 5 and 68% if they are kept.
_MAX_ERROR = 0.3
_FEW = 64
_MIN_CHECKED = 4
# With earlier tunes, after four configs and then after every ten, one is tried that has the most values of fields which
# nothing tried has: those tunes may agree on what this call is slow with. Without it, one of those families is at 5.3%
# of regret instead of 1.1%, and one device at 981% instead of 5%.
_FIRST_PROBE, _PROBE_EVERY = 4, 10
# Slower than the best by more than this factor is bad enough, and how bad says little of how the good ones differ.
_BAD = 2.0
# Evaluations of the likelihood for what earlier tunes found, once.
_LESSON_STEPS = 24
# Evaluations of the likelihood for each fit, and by how much the measurements grow between fits once they are many.
_STEPS = 8
_ALWAYS_FIT = 60
_REFIT_GROWTH = 1.08


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the model expects of a config: seconds, and by which factor they may be off (one standard deviation)."""

    seconds: float
    factor: float


class Searcher:
    """Searches a list of configs for the fastest: `propose` some, `observe` each, and so on.

    It begins with configs that are spread over the space, and goes on with those from which the model expects most:
    a Gaussian process on the logarithms of the times. Every proposal is chosen among neighbours of the best configs so
    far, in one field, and others at random. Equal calls with equal seeds are answered equally.

    The last rows of `fields` may be configs of earlier tunes, and `earlier` the logarithms of how much slower each was
    than the best of its tune, infinite if it failed. Then the model is asked from the start, until what is measured
    proves it wrong.
    """

    def __init__(
        self,
        fields: ConfigFields,
        *,
        seed: int = 0,
        allowed: Sequence[int] | None = None,
        earlier: Sequence[float] = (),
    ) -> None:
        self._fields = fields
        self._random = np.random.default_rng(seed)
        self._model = GaussianProcess(fields)
        self._open = np.zeros(len(fields), dtype=bool)
        count = len(fields) - len(earlier)
        self._open[slice(count) if allowed is None else list(allowed)] = True
        self._dominating = np.zeros(len(fields), dtype=bool)
        self._log_times: dict[int, float] = {}
        self._failed: dict[int, None] = {}
        self._pending: dict[int, None] = {}
        self._last_fit = 0
        slower = np.array(earlier)
        self._earlier: Rows = count + np.flatnonzero(slower < inf)
        self._earlier_logs = np.minimum(slower[slower < inf], log(_BAD))
        # Failures teach where configs fail, and nothing of how fast those beside them are.
        self._earlier_failed: Rows = count + np.flatnonzero(slower == inf)
        self.predicted: Sequence[Estimate] = ()
        """What earlier tunes said of each candidate, as a multiple of the best; nothing without them."""
        self.prediction_error: float | None = None
        """By how much that was wrong (root mean square of logarithms), once enough configs are measured."""
        if len(self._earlier):
            self._model.fit(self._earlier, self._earlier_logs, _LESSON_STEPS)
            self._last_fit = 1
            self.predicted = self.estimates(range(count))
        self.expected_gain = inf
        """The fraction of the best time that the next few proposals may save together, as of the last one."""

    # What is known.

    def observe(self, index: int, seconds: float) -> None:
        """Note what a config takes; a later time replaces an earlier one."""
        self._settle(index)
        self._log_times[index] = log(max(seconds, 1e-12))

    def observe_failure(self, index: int, *, out_of_memory: bool = False) -> None:
        """Note that a config failed. If it ran out of memory, what is larger in every field is ruled out."""
        self._settle(index)
        self._log_times.pop(index, None)
        self._failed[index] = None
        if out_of_memory:
            self._dominating |= self._fields.dominates(index)

    def _settle(self, index: int) -> None:
        self._open[index] = False
        self._pending.pop(index, None)

    def begin(self, index: int) -> None:
        """Note that a config is being tried, whoever chose it."""
        self._open[index] = False
        self._pending[index] = None

    def close(self, index: int) -> None:
        """Never propose this config."""
        self._settle(index)

    @property
    def observed(self) -> int:
        return len(self._log_times) + len(self._failed)

    @property
    def has_times(self) -> bool:
        return bool(self._log_times)

    @property
    def is_modelling(self) -> bool:
        """Tell whether the last proposal was the model's, rather than one of the spread."""
        return self.expected_gain < inf

    @property
    def is_exhausted(self) -> bool:
        """Tell whether there is nothing left to propose."""
        return len(self._candidates()) == 0

    def is_ruled_out(self, index: int) -> bool:
        """Tell whether a config is at least as large in every field as one that ran out of memory."""
        return bool(self._dominating[index])

    @property
    def trusts_earlier(self) -> bool:
        """Tell whether there are earlier tunes, and what was measured has not proved them wrong."""
        return len(self._earlier) > 0

    def offset(self) -> float:
        """Return the logarithm of the time that earlier tunes' multiples are multiples of, by what was measured."""
        return float(np.median([logs - log(self.predicted[index].seconds) for index, logs in self._log_times.items()]))

    def _check_earlier(self) -> None:
        """See how wrong earlier tunes are about what was measured; a long list is searched anew if they mislead."""
        if not self.trusts_earlier or len(self._log_times) < _MIN_CHECKED:
            return
        offset = self.offset()
        errors = [
            min(logs - offset, log(_BAD)) - log(self.predicted[index].seconds)
            for index, logs in self._log_times.items()
        ]
        self.prediction_error = sqrt(sum(error * error for error in errors) / (len(errors) - 1))
        if self.prediction_error > _MAX_ERROR and len(self.predicted) > _FEW:
            self._earlier, self._earlier_logs = self._earlier[:0], self._earlier_logs[:0]
            self._last_fit = 0

    # What to try.

    def propose(self, count: int = 1) -> list[int]:
        """Return up to `count` configs to try next. Those that were proposed and not observed yet are taken for likely.

        Where a list has fewer left, these are all of it.
        """
        proposed = list[int]()
        while len(proposed) < count and not self.is_exhausted:
            proposed.append(self._next())
            self.begin(proposed[-1])
        return proposed

    def _next(self) -> int:
        begun = self.observed + len(self._pending)
        self._check_earlier()
        if self.trusts_earlier and not self._log_times:  # the best guess
            rows = self._candidates()
            guesses = np.array([self.predicted[row].seconds for row in rows])
            return int(rows[int(np.argmin(guesses / self._chance_to_run(rows, self._earlier)))])
        if not self.trusts_earlier and (begun < SPREAD or not self._log_times or not self._fields.names):
            self.expected_gain = inf
            return self._next_of_spread()
        rows = self._pool()
        try:
            gains, expected = self._gains(rows)
        except np.linalg.LinAlgError:  # the search goes on without its model
            return self._next_of_spread()
        ahead = 1 if self.trusts_earlier else _AHEAD
        self.expected_gain = float(-np.expm1(-np.sort(expected)[-ahead:].sum()))
        if self.trusts_earlier and begun % _PROBE_EVERY == _FIRST_PROBE:
            unlike = self._least_like_tried(rows)
            return int(unlike[int(np.argmin(self._model.predict(unlike).means))])
        return int(rows[int(np.argmax(gains))])

    def _next_of_spread(self) -> int:
        """Return the config that is farthest from all that were tried, of some at random."""
        rows = self._candidates()
        if len(rows) > _SPREAD_POOL:
            rows = np.sort(self._random.choice(rows, _SPREAD_POOL, replace=False))
        tried = [*self._log_times, *self._failed, *self._pending]
        if not tried or not self._fields.names:
            return int(self._random.choice(rows))
        numbers, codes = self._fields.numbers, self._fields.codes
        apart = np.full(len(rows), inf)
        for one in tried:
            far = ((numbers[rows] - numbers[one]) ** 2).sum(axis=1) + 0.5 * (codes[rows] != codes[one]).sum(axis=1)
            apart = np.minimum(apart, far)
        return int(rows[int(np.argmax(apart))])

    def _least_like_tried(self, rows: Rows) -> Rows:
        """Return those of some configs that have the most fields with values which nothing tried has."""
        codes = self._fields.codes
        tried = codes[[*self._log_times, *self._failed, *self._pending]]
        untried = sum(~np.isin(codes[rows, column], tried[:, column]) for column in range(codes.shape[1]))
        found: Rows = rows[untried == np.max(untried)]
        return found

    def _candidates(self) -> Rows:
        """Return what may be proposed: what dominates a config that ran out of memory only if nothing else runs."""
        rows = np.flatnonzero(self._open & ~self._dominating)
        others_may_run = self.has_times or not self._dominating[list(self._pending)].all()
        return rows if len(rows) or others_may_run else np.flatnonzero(self._open)

    def _pool(self) -> Rows:
        rows, count = self._candidates(), _LEARNED_POOL if self.trusts_earlier else _POOL
        if len(rows) <= count + count // 2:
            return rows
        best = sorted(self._log_times, key=self._log_times.__getitem__)[:_BEST]
        near = np.zeros(len(rows), dtype=bool)
        for one in best:
            near |= (self._fields.codes[rows] != self._fields.codes[one]).sum(axis=1) == 1
        return np.union1d(rows[near], self._random.choice(rows, count, replace=False))

    # What is expected.

    def estimates(self, indices: Sequence[int]) -> list[Estimate]:
        """Return what the model expects of these configs; nothing before it was fitted."""
        found = list[Estimate]()
        scale_s = float(np.exp(self.offset())) if self.trusts_earlier and self._log_times else 1.0
        for begin in range(0, len(indices) if self._last_fit else 0, _LEARNED_POOL):
            predicted = self._model.predict(np.array(indices[begin : begin + _LEARNED_POOL], np.int64))
            seconds = scale_s * np.exp(predicted.means)
            factors = np.exp(np.minimum(predicted.deviations, 50.0))
            found += [Estimate(float(one), float(factor)) for one, factor in zip(seconds, factors, strict=True)]
        return found

    def _gains(self, rows: Rows) -> tuple[Numbers, Numbers]:
        """Return the expected improvement of each config's log-time: in doubt of the model, and by the model alone."""
        if self.trusts_earlier:
            logs = np.minimum(np.array(list(self._log_times.values())) - self.offset(), log(_BAD))
            known = np.append(np.array(list(self._log_times), np.int64), self._earlier)
            targets = np.append(logs, self._earlier_logs)
        else:
            known, targets = self._targets()
            logs = targets
        self._fit(known, targets)
        if self._pending:  # taken for what they are expected to be, so that the next proposal lies elsewhere
            pending = np.array(list(self._pending), np.int64)
            believed = self._model.predict(pending).means
            self._model.fit(np.append(known, pending), np.append(targets, believed), 0)
        means, deviations = self._model.predict(rows)
        doubt = _DOUBT
        if self.trusts_earlier:  # those that were not measured may be predicted as wrongly as those that were
            deviations, doubt = np.maximum(deviations, self.prediction_error or 0.0), 1.0
        runs, best = self._chance_to_run(rows, known), float(logs.min())
        expected = _expected_improvement(means, deviations, best) * runs
        return _expected_improvement(means, doubt * deviations, best) * runs, expected

    def _chance_to_run(self, rows: Rows, known: Rows) -> Numbers:
        """Return how likely some configs run, by the failures near them and what ran near them."""
        if self.trusts_earlier:
            known = np.concatenate([known, np.array(list(self._failed), np.int64), self._earlier_failed])
        failed = np.isin(known, [*self._failed, *self._earlier_failed])
        if not failed.any():
            return np.ones(len(rows))
        closeness = np.exp(-_FAILED_DECAY * self._model.apart(rows, known))
        likely_failures = closeness[:, failed].sum(axis=1) + _FAILED_PRIOR * failed.mean()
        chance: Numbers = 1 - likely_failures / (closeness.sum(axis=1) + _FAILED_PRIOR)
        return chance

    def _fit(self, known: Rows, targets: Numbers) -> None:
        due = self.observed <= _ALWAYS_FIT or self.observed >= self._last_fit * _REFIT_GROWTH
        refit = due and self.observed != self._last_fit
        self._model.fit(known, targets, _STEPS if refit else 0)
        if refit:
            self._last_fit = self.observed

    def _targets(self) -> tuple[Rows, Numbers]:
        """Return the observed configs, with the logarithms of their times. A failure counts as slow."""
        known = np.array([*self._log_times, *self._failed], np.int64)
        times = np.array(list(self._log_times.values()))
        logs = np.append(times, np.full(len(self._failed), np.quantile(times, _FAILED_QUANTILE)))
        if len(known) > _MAX_FITTED:
            order = np.argsort(logs, kind="stable")
            half = _MAX_FITTED // 2
            others = self._random.choice(order[half:], _MAX_FITTED - half, replace=False)
            kept = np.sort(np.concatenate([order[:half], others]))
            known, logs = known[kept], logs[kept]
        return known, logs


def _expected_improvement(means: Numbers, deviations: Numbers, best: float) -> Numbers:
    ahead = (best - means) / deviations
    density = np.exp(-ahead * ahead / 2) / sqrt(2 * np.pi)
    improvement: Numbers = deviations * (ahead * _normal_cdf(ahead) + density)
    return np.maximum(improvement, 0)


def _normal_cdf(values: Numbers) -> npt.NDArray[np.float64]:
    """Return the normal distribution function, good to 1e-7 (Abramowitz and Stegun 26.2.17)."""
    size = np.abs(values)
    t = 1 / (1 + 0.2316419 * size)
    poly = t * (0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))))
    tail = np.exp(-size * size / 2) / sqrt(2 * np.pi) * poly
    return np.where(values > 0, 1 - tail, tail)
