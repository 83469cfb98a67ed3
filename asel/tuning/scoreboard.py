"""The samples of a tune so far: who leads, who loses, and whether more samples would change the winner."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, inf
from statistics import median
from typing import Any

from asel.tuning.budget import Budget
from asel.tuning.estimates import MAX_TIE, TIE, Gap, gaps_to, trimmed_mean
from asel.tuning.outcomes import TuneReport

__all__ = ["LONG_S", "Scoreboard"]

# In a run this long, one-off costs are a small part, so even its warm-up counts for something.
LONG_S = 50e-3
# The minimum cost of a sample: the hand-over to a thread, and repeating a short run until a timer can see it.
_MIN_COST_S = 1e-3


@dataclass(slots=True)
class Scoreboard:
    """A strategy's view of a tune: configs, times and failures.

    `candidates` are compiled and race each other. The first `warmup` samples of each are not counted.
    """

    candidates: list[int]
    incumbent: int | None = None
    warmup: int = 1
    samples: dict[int, list[float]] = field(default_factory=dict)
    warmups: dict[int, list[float]] = field(default_factory=dict)
    dropped: dict[int, int] = field(default_factory=dict)
    rounds: list[dict[int, float]] = field(default_factory=list)
    """The same samples, by round."""
    cost_s: float = 0.0
    """The time that sampling has taken."""
    configs: Sequence[Any] = ()
    """All of the tune's configs, by index."""
    untried: dict[int, None] = field(default_factory=dict)
    """The candidates that the strategy may ask for, in the order in which to try them, the incumbent first."""
    compiling: set[int] = field(default_factory=set)
    """The candidates that were asked for, and have neither been compiled nor failed."""
    failed: dict[int, Any] = field(default_factory=dict)
    """The candidates that failed, with their outcomes."""
    aliases: Mapping[int, int] = field(default_factory=dict)
    """The candidates whose program equals another's."""
    compile_width: int = 1
    """The number of candidates compiled at once."""
    call: str = ""
    """The readable call: `a=f32[512,512]`."""
    lessons: Sequence[TuneReport[Any]] = ()
    """Earlier tunes of the same kernel, in the same environment: other calls, other versions, other candidates."""
    learned_from: tuple[str, ...] = ()
    """The calls of the lessons that the strategy used."""
    predicted: dict[int, float] = field(default_factory=dict)
    """The times of candidates, in seconds, predicted from the lessons before they were measured."""
    prediction_error: float | None = None
    """The root mean square error of the predictions, in logarithms."""
    budget: Budget = field(default_factory=lambda: Budget(inf))
    _lost_to: dict[int, int | None] = field(default_factory=dict)
    _gaps: dict[int, Gap] | None = None

    def record(self, index: int, seconds: float, cost_s: float = 0.0) -> None:
        """Record a sample and its cost, which exceeds its time if it is the best of several runs."""
        self.cost_s += max(seconds, cost_s, _MIN_COST_S)
        warm = self.warmups.setdefault(index, [])
        if len(warm) < self.warmup:
            warm.append(seconds)
        else:
            self.samples.setdefault(index, []).append(seconds)
            if not self.rounds or index in self.rounds[-1]:
                self.rounds.append({})
            self.rounds[-1][index] = seconds
            self._clear_gaps()

    def end_round(self) -> None:
        """Let the next sample begin another round."""
        self.rounds.append({})

    def offer(self, indices: Iterable[int]) -> None:
        """Let the strategy ask for these candidates, and for no others."""
        self.compiling.clear()
        self.untried = dict.fromkeys(indices)

    def ask(self, index: int) -> bool:
        """Record a request for a candidate. Return False if it may not be asked for, or not again."""
        if index not in self.untried:
            return False
        del self.untried[index]
        self.compiling.add(index)
        return True

    def note_settled(self, index: int) -> None:
        """Record that a candidate was compiled, has failed, or will not be compiled."""
        self.untried.pop(index, None)
        self.compiling.discard(index)

    def has_run(self) -> bool:
        """Return whether any candidate in the race has run, at least as a warm-up."""
        return any(self.samples.get(index) or self.warmups.get(index) for index in self.candidates)

    def is_warm(self, index: int) -> bool:
        return len(self.warmups.get(index, ())) >= self.warmup

    def drop(self, index: int, number: int, best: int | None = None) -> None:
        """Take a candidate out of the race, which it lost to `best` in round `number`.

        If it has no sample, its last warm-up counts as one.
        """
        self.dropped[index] = number
        self._lost_to[index] = best
        self._count_warmup(index)
        self._clear_gaps()

    def count_warmups_as_samples(self) -> None:
        """Count a long warm-up as the sample of a candidate without one; any warm-up, if no candidate has a sample."""
        nothing_else = not self.measured
        for index in self.alive:
            if self.is_long(index) or (nothing_else and self.warmups.get(index)):
                self._count_warmup(index)
        self._clear_gaps()

    def _count_warmup(self, index: int) -> None:
        self.samples.setdefault(index, self.warmups.get(index, [])[-1:])

    def is_long(self, index: int) -> bool:
        """Return whether a candidate's runs are so long that its warm-up counts as a sample."""
        return bool(self.warmups.get(index)) and self.is_warm(index) and self.best_observed(index) >= LONG_S

    def best_observed(self, index: int) -> float:
        """Return a candidate's shortest time, including warm-ups."""
        return min((*self.samples.get(index, ()), *self.warmups.get(index, ())), default=inf)

    def remove(self, index: int) -> None:
        """Forget a candidate that failed; those that it eliminated rejoin the race."""
        if index in self.candidates:
            self.candidates.remove(index)
        self.samples.pop(index, None)
        for loser in [loser for loser, best in self._lost_to.items() if best == index]:
            if self.dropped.pop(loser) == 0:
                del self.samples[loser]  # dropped in round 0, it had only its warm-up as a sample
            del self._lost_to[loser]
        self._clear_gaps()

    def enter(self, candidates: Sequence[int]) -> None:
        """Let these candidates race, and no others."""
        self.candidates = list(candidates)
        self._clear_gaps()

    def _clear_gaps(self) -> None:
        self._gaps = None

    @property
    def alive(self) -> list[int]:
        return [index for index in self.candidates if index not in self.dropped]

    @property
    def measured(self) -> list[int]:
        """The candidates with at least one sample, dropped or not."""
        return [index for index in self.candidates if self.samples.get(index)]

    def median(self, index: int) -> float:
        return median(self.samples[index])

    def trimmed_mean(self, index: int) -> float:
        """Return the time that a candidate is ranked by."""
        return trimmed_mean(self.samples[index])

    def time_beside(self, winner: int, index: int) -> float:
        """Return a candidate's time, corrected to the rounds of the winner.

        A dropped candidate missed the later rounds. If the machine was busier then, its own samples look too fast.
        """
        shared = sum(index in taken and winner in taken for taken in self.rounds)
        if index not in self.dropped or shared < 2:
            return self.trimmed_mean(index)
        samples = {one: self.samples[one] for one in (winner, index)}
        return self.trimmed_mean(winner) * exp(gaps_to(winner, samples, self.rounds)[index].mean)

    @property
    def finalists(self) -> list[int]:
        """The measured candidates that were not dropped; if all of those have failed, the dropped ones."""
        return [i for i in self.measured if i not in self.dropped] or self.measured

    def leader(self) -> int:
        """Return the finalist with the lowest time."""
        return min(self.finalists, key=self.trimmed_mean)

    @property
    def gaps(self) -> dict[int, Gap]:
        """By how much each finalist is slower than the leader, over the rounds in which both ran."""
        if self._gaps is None:
            samples = {index: self.samples[index] for index in self.finalists}
            self._gaps = gaps_to(self.leader(), samples, self.rounds)
        return self._gaps

    def losers(self) -> list[int]:
        """Return the finalists that are significantly slower than a tie with the leader."""
        return [index for index, gap in self.gaps.items() if gap.lower > TIE]

    def winner(self) -> int:
        """Return the favourite unless it is significantly slower than a tie; otherwise the first declared that ties.

        Dropped candidates cannot win: they have fewer samples.
        """
        gaps, favourite = self.gaps, self.favourite
        if favourite in gaps and gaps[favourite].mean <= self.noise():
            return favourite
        return next(index for index in self._by_preference() if gaps[index].mean <= TIE)

    def noise(self) -> float:
        """Return how much slower than the leader the favourite may be and still win."""
        margin = self.gaps[self.favourite].margin if self.favourite in self.gaps else 0.0
        if margin == inf:  # the variance is unknown, so only the observed gap counts
            margin = 0.0
        return min(TIE + margin, MAX_TIE)

    @property
    def is_settled(self) -> bool:
        """Whether more samples would hardly change the winner, or gain next to nothing.

        True iff every candidate that is preferred to the winner is significantly slower than a tie, and either the
        winner leads and no other may be faster by more than a tie, or it is at most two ties slower than the leader.
        """
        gaps, winner, preferred = self.gaps, self.winner(), self._by_preference()
        if any(gaps[index].lower <= TIE for index in preferred[: preferred.index(winner)]):
            return False
        if winner == self.leader():
            return all(gap.lower >= -TIE for gap in gaps.values())
        # Without this end, replays of near-equals take 1,053 samples and not 192, of equals 1,096 and not 175, and
        # choose no better (tests/benchmarks/strategies.py).
        return gaps[winner].upper <= 2 * TIE

    def _by_preference(self) -> list[int]:
        return sorted(self.finalists, key=lambda index: (index != self.incumbent, index))

    @property
    def favourite(self) -> int:
        """The candidate that wins every tie: the incumbent, or else the first declared."""
        return self.incumbent if self.incumbent in self.candidates else min(self.candidates)
