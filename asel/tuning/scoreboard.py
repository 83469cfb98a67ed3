"""The samples of a tune so far: the leader, the losers, and whether more samples would change the winner."""

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

# A run this long has its one-off costs behind it in a small part of it, so that even its warm-up tells something.
LONG_S = 50e-3
# What a sample costs at the least: handing it over, and repeating a short run until a timer can see it.
_MIN_COST_S = 1e-3


@dataclass(slots=True)
class Scoreboard:
    """What a strategy sees of a tune: configs, times and failures, and no device.

    `candidates` are compiled, and race each other; `warmup` samples of each are taken and not counted.
    """

    candidates: list[int]
    incumbent: int | None = None
    warmup: int = 1
    samples: dict[int, list[float]] = field(default_factory=dict)
    warmups: dict[int, list[float]] = field(default_factory=dict)
    dropped: dict[int, int] = field(default_factory=dict)
    rounds: list[dict[int, float]] = field(default_factory=list)
    """The samples again, those together that were taken in one round."""
    cost_s: float = 0.0
    """What sampling has taken."""
    configs: Sequence[Any] = ()
    """All of the tune's configs, by index."""
    untried: dict[int, None] = field(default_factory=dict)
    """The candidates that may be asked for, in the order in which to try them; the incumbent is the first."""
    compiling: set[int] = field(default_factory=set)
    """The candidates that were asked for and are neither compiled yet nor failed."""
    failed: dict[int, Any] = field(default_factory=dict)
    """The candidates that failed, with their outcomes."""
    aliases: Mapping[int, int] = field(default_factory=dict)
    """The candidates whose program turned out to be another's."""
    compile_width: int = 1
    """How many candidates are compiled at once."""
    call: str = ""
    """What is tuned, as people read it: `a=f32[512,512]`."""
    lessons: Sequence[TuneReport[Any]] = ()
    """Earlier tunes of the same kernel, in the same environment: other calls, other versions, other candidates."""
    learned_from: tuple[str, ...] = ()
    """The calls of those that the strategy used."""
    predicted: dict[int, float] = field(default_factory=dict)
    """The seconds that it expected of candidates by those, before it measured them."""
    prediction_error: float | None = None
    """By how much that was wrong, as a root mean square of logarithms."""
    budget: Budget = field(default_factory=lambda: Budget(inf))
    _lost_to: dict[int, int | None] = field(default_factory=dict)
    _gaps: dict[int, Gap] | None = None

    def record(self, index: int, seconds: float, cost_s: float = 0.0) -> None:
        """Note a sample, and what it cost: more than its time, if it is the best of several runs."""
        self.cost_s += max(seconds, cost_s, _MIN_COST_S)
        warm = self.warmups.setdefault(index, [])
        if len(warm) < self.warmup:
            warm.append(seconds)
        else:
            self.samples.setdefault(index, []).append(seconds)
            if not self.rounds or index in self.rounds[-1]:
                self.rounds.append({})
            self.rounds[-1][index] = seconds
            self._has_changed()

    def end_round(self) -> None:
        """Begin another round with the next sample."""
        self.rounds.append({})

    def offer(self, indices: Iterable[int]) -> None:
        """Let the strategy ask for these candidates, and for no others."""
        self.compiling.clear()
        self.untried = dict.fromkeys(indices)

    def ask(self, index: int) -> bool:
        """Note that a candidate is asked for; return False if it cannot be, or has been before."""
        if index not in self.untried:
            return False
        del self.untried[index]
        self.compiling.add(index)
        return True

    def note_settled(self, index: int) -> None:
        """Note that a candidate is compiled, has failed, or is not going to be compiled."""
        self.untried.pop(index, None)
        self.compiling.discard(index)

    def has_run(self) -> bool:
        """Tell whether any candidate in the race has had a run, if only a warm-up."""
        return any(self.samples.get(index) or self.warmups.get(index) for index in self.candidates)

    def is_warm(self, index: int) -> bool:
        return len(self.warmups.get(index, ())) >= self.warmup

    def drop(self, index: int, number: int, best: int | None = None) -> None:
        """Take a candidate out of the race, which it lost to `best` in round `number`.

        If it has only been warmed up, its last warm-up counts as its sample.
        """
        self.dropped[index] = number
        self._lost_to[index] = best
        self._count_warmup(index)
        self._has_changed()

    def count_warmups_as_samples(self) -> None:
        """Count a long warm-up as the sample of a candidate without one; any warm-up, if no candidate has a sample."""
        nothing_else = not self.measured
        for index in self.alive:
            if self.is_long(index) or (nothing_else and self.warmups.get(index)):
                self._count_warmup(index)
        self._has_changed()

    def _count_warmup(self, index: int) -> None:
        self.samples.setdefault(index, self.warmups.get(index, [])[-1:])

    def is_long(self, index: int) -> bool:
        """Tell whether a candidate's runs are so long that its warm-up counts as a measurement."""
        return bool(self.warmups.get(index)) and self.is_warm(index) and self.best_observed(index) >= LONG_S

    def best_observed(self, index: int) -> float:
        """Return the best that was seen of a candidate, its warm-up included."""
        return min((*self.samples.get(index, ()), *self.warmups.get(index, ())), default=inf)

    def remove(self, index: int) -> None:
        """Forget a candidate that failed; those that it eliminated rejoin the race."""
        if index in self.candidates:
            self.candidates.remove(index)
        self.samples.pop(index, None)
        for loser in [loser for loser, best in self._lost_to.items() if best == index]:
            if self.dropped.pop(loser) == 0:
                del self.samples[loser]  # which was but its warm-up
            del self._lost_to[loser]
        self._has_changed()

    def enter(self, candidates: Sequence[int]) -> None:
        """Have these in the race, and no others."""
        self.candidates = list(candidates)
        self._has_changed()

    def _has_changed(self) -> None:
        self._gaps = None

    @property
    def alive(self) -> list[int]:
        return [index for index in self.candidates if index not in self.dropped]

    @property
    def measured(self) -> list[int]:
        """The candidates with a sample that counts, dropped or not."""
        return [index for index in self.candidates if self.samples.get(index)]

    def median(self, index: int) -> float:
        return median(self.samples[index])

    def trimmed_mean(self, index: int) -> float:
        """Return what a candidate is ranked by."""
        return trimmed_mean(self.samples[index])

    def time_beside(self, winner: int, index: int) -> float:
        """Return the time of a candidate as it would be in the winner's rounds.

        A dropped candidate missed the later rounds: if the machine was busier then, its own samples look too fast.
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
        """By how much each finalist is slower than the leader, by the rounds in which both ran."""
        if self._gaps is None:
            samples = {index: self.samples[index] for index in self.finalists}
            self._gaps = gaps_to(self.leader(), samples, self.rounds)
        return self._gaps

    def losers(self) -> list[int]:
        """Return the finalists that are slower than a tie with the leader, beyond doubt."""
        return [index for index, gap in self.gaps.items() if gap.lower > TIE]

    def winner(self) -> int:
        """Return the favourite, unless it is slower than a tie beyond doubt; else the first declared that ties.

        What was dropped cannot come back on the strength of few samples.
        """
        gaps, favourite = self.gaps, self.favourite
        if favourite in gaps and gaps[favourite].mean <= self.noise():
            return favourite
        return next(index for index in self._by_preference() if gaps[index].mean <= TIE)

    def noise(self) -> float:
        """Return how much slower than the leader the favourite may be and still win."""
        margin = self.gaps[self.favourite].margin if self.favourite in self.gaps else 0.0
        if margin == inf:  # nothing tells how samples scatter, so what was seen is all there is
            margin = 0.0
        return min(TIE + margin, MAX_TIE)

    @property
    def is_settled(self) -> bool:
        """Whether more samples would hardly change the winner, or would not matter.

        Those that would be preferred to it are slower than a tie beyond doubt, and it costs hardly more than one.
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
