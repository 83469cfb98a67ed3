"""Which candidate to sample next, and when to stop.

A strategy is one method over a `Board` of samples. It knows no device: the same plan runs against
recorded timings, so strategies are compared without hardware.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from statistics import fmean, median, quantiles
from typing import Protocol

__all__ = ["Board", "Drop", "Exhaustive", "Race", "Sample", "Step", "Strategy", "level"]

# Two levels closer than this are a tie, however calm the samples look.
LEAST_NOISE = 0.02
# Where samples scatter, so much is a tie for anyone: what it may cost is bounded by what a choice may cost.
MOST_TIE = 0.03
# And farther apart than this they are none even for the incumbent: a guess is not kept at any price.
MOST_NOISE = 0.1
# Levels known as well as this are not sampled on: a winner that ties by twice that is the same next time.
PRECISE = 0.01
# What the system takes from a run now and then, whatever its length: long samples are precise, short ones are not.
JITTER_S = 5e-3
# A run this long has its one-off costs behind it in a small part of it, so that even the first one tells something.
LONG_S = 10e-3
# So many rounds, and samples of all candidates together, are needed to tell what slowed a round from what is slow.
LEAST_ROUNDS, LEAST_TOGETHER = 5, 24
# With fewer samples than this, more is in doubt than their scatter shows.
MANY = 10
# What a sample costs at the least: handing it over, and repeating a short run until a timer can see it.
LEAST_COST_S = 1e-3


@dataclass(frozen=True, slots=True)
class Sample:
    """Take one sample of a candidate."""

    index: int


@dataclass(frozen=True, slots=True)
class Drop:
    """A candidate is out of the race."""

    index: int
    round: int


Step = Sample | Drop


def level(samples: Sequence[float]) -> float:
    """Return the mean of the faster half: samples are late and never early, so the slower half knows less.

    On a busy machine medians of equal candidates lie up to twice as far apart.
    """
    return fmean(sorted(samples)[: (len(samples) + 1) // 2])


@dataclass(slots=True)
class Board:
    """What has been sampled so far. `warmup` samples of each candidate are taken and not counted."""

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
    _paired: dict[int, list[float]] | None = None
    _levels: dict[int, tuple[float, float]] = field(default_factory=dict)

    def record(self, index: int, seconds: float, cost_s: float = 0.0) -> None:
        """Note a sample, and what it took to get it: more than it says, where it is one of many runs."""
        self.cost_s += max(seconds, cost_s, LEAST_COST_S)
        warm = self.warmups.setdefault(index, [])
        if len(warm) < self.warmup:
            warm.append(seconds)
        else:
            self.samples.setdefault(index, []).append(seconds)
            if not self.rounds or index in self.rounds[-1]:
                self.rounds.append({})
            self.rounds[-1][index] = seconds
            self._has_changed()

    def is_warm(self, index: int) -> bool:
        return len(self.warmups.get(index, ())) >= self.warmup

    def drop(self, index: int, number: int) -> None:
        """Take a candidate out of the race; where it has only been warmed up, that is all that is known of it."""
        self.dropped[index] = number
        self._make_do(index)
        self._has_changed()

    def make_do(self) -> None:
        """End here: long warm-ups count for those that have not come further."""
        for index in self.alive:
            if self.is_long(index):
                self._make_do(index)
        self._has_changed()

    def _make_do(self, index: int) -> None:
        self.samples.setdefault(index, self.warmups.get(index, [])[-1:])

    def is_long(self, index: int) -> bool:
        """Tell whether a candidate had a warm-up, and even that says something of it."""
        return bool(self.warmups.get(index)) and self.is_warm(index) and self.witness(index) >= LONG_S

    def witness(self, index: int) -> float:
        """Return the best that was seen of a candidate, its warm-up included."""
        return min((*self.samples.get(index, ()), *self.warmups.get(index, ())), default=inf)

    def remove(self, index: int) -> None:
        """Forget a candidate that failed."""
        if index in self.candidates:
            self.candidates.remove(index)
        self.samples.pop(index, None)
        self._has_changed()

    def enter(self, candidates: Sequence[int]) -> None:
        """Have these in the race, and no others."""
        self.candidates = list(candidates)
        self._has_changed()

    def _has_changed(self) -> None:
        self._paired = None
        self._levels.clear()

    @property
    def alive(self) -> list[int]:
        return [index for index in self.candidates if index not in self.dropped]

    @property
    def measured(self) -> list[int]:
        """The candidates with a sample that counts, dropped or not."""
        return [index for index in self.candidates if self.samples.get(index)]

    def median(self, index: int) -> float:
        return median(self.samples[index])

    def level(self, index: int) -> float:
        """Return what a candidate is ranked by."""
        return self._known(index)[0]

    def spread(self, index: int) -> float:
        """Return how well a level is known, as a fraction; 0 where nothing tells.

        McGill's notch: 1.58 IQR / sqrt(n) to either side. Wider where samples are few: they show less
        scatter than there is.
        """
        return self._known(index)[1]

    def _known(self, index: int) -> tuple[float, float]:
        if index not in self._levels:
            paired = self._in_pairs().get(index)
            samples = self.samples[index] if paired is None else paired
            middle = level(samples) if paired is None else median(samples)
            reach = 0.0
            if len(samples) > 1 and middle > 0:
                low, _, high = quantiles(samples, n=4, method="inclusive")
                reach = 1.58 * (high - low) / len(samples) ** 0.5 * (1 + 4 / len(samples)) / middle
            self._levels[index] = middle, reach
        return self._levels[index]

    def _in_pairs(self) -> dict[int, list[float]]:
        """Return the finalists' samples, freed of what slowed a whole round: each as a part of its round's median.

        What is left scatters half as much. Needs enough rounds in which all of them ran.
        """
        if self._paired is None:
            self._paired = {}
            racing = [i for i in self.finalists if any(i in samples for samples in self.rounds)]
            rounds = [samples for samples in self.rounds if all(i in samples for i in racing)]
            middles = [median(samples[i] for i in racing) for samples in rounds]
            is_enough = len(rounds) >= LEAST_ROUNDS and len(rounds) * len(racing) >= LEAST_TOGETHER
            if is_enough and len(racing) > 1 and min(middles) > 0:
                scale = level(middles)
                for index in racing:
                    parts = zip(rounds, middles, strict=True)
                    self._paired[index] = [samples[index] / middle * scale for samples, middle in parts]
        return self._paired

    def noise(self, *indices: int) -> float:
        """Return how far apart two levels may be and still be a tie, as a fraction."""
        return min(max(LEAST_NOISE, *map(self.spread, indices)), MOST_NOISE)

    def tie(self, *indices: int) -> float:
        """Return the same for two of which neither is the incumbent: more than a choice may cost is no tie."""
        return min(LEAST_NOISE + max(map(self.spread, indices)), MOST_TIE)

    @property
    def finalists(self) -> list[int]:
        """The measured candidates that are still in; where all of those have failed, what was dropped for them."""
        return [i for i in self.measured if i not in self.dropped] or self.measured

    def leader(self) -> int:
        """Return the finalist with the lowest level."""
        return min(self.finalists, key=self.level)

    def winner(self) -> int:
        """Return the incumbent where it is within the noise of the leader, else the first declared of its equals.

        Equals are within the noise too, but never by more than `MOST_TIE`. What was dropped was clearly
        slower, and cannot come back on the strength of few samples.
        """
        leader = self.leader()
        return next(i for i in self._by_preference() if i == leader or self._excess(i, leader)[0] <= 0)

    def losers(self) -> list[int]:
        """Return the finalists that are clearly too slow to win."""
        leader = self.leader()
        excesses = {i: self._excess(i, leader) for i in self.finalists if i != leader}
        return [i for i, (over, doubt) in excesses.items() if over > doubt]

    @property
    def is_settled(self) -> bool:
        """Whether more samples would hardly change the winner.

        Whichever of the others were the best, it would clearly be an equal; and those that would be
        preferred to it clearly are none. Or as much of that as matters is known to within `PRECISE`.
        """
        leader, winner = self.leader(), self.winner()
        preferred = self._by_preference()
        asked = [self._excess(winner, index) for index in preferred if index != winner]
        asked += [self._excess(index, leader) for index in preferred[: preferred.index(winner)]]
        return all(abs(over) >= doubt or doubt <= PRECISE for over, doubt in asked)

    def _by_preference(self) -> list[int]:
        return sorted(self.finalists, key=lambda index: (index != self.incumbent, index))

    def _excess(self, index: int, best: int) -> tuple[float, float]:
        """Return by how much a candidate is too slow to win over the best, as a fraction, and how uncertain that is."""
        level_s, best_s = self.level(index), self.level(best)
        allowed = (self.noise if index == self.incumbent else self.tie)(best, index)
        ratio = level_s / best_s if best_s > 0 else 1.0 if level_s == best_s else inf
        few = min(len(self.samples[index]), len(self.samples[best]))
        return ratio - 1 - allowed, max(self.spread(best), self.spread(index)) * max(1.0, MANY / few)


class Strategy(Protocol):
    """Plans a tune: yields steps, reading from the board what the steps before have found."""

    def plan(self, board: Board) -> Iterator[Step]: ...


@dataclass(frozen=True, slots=True)
class Exhaustive:
    """Every candidate gets `iters` samples, one candidate after the other."""

    iters: int = 3

    def plan(self, board: Board) -> Iterator[Step]:
        for index in _incumbent_first(board):
            while index in board.candidates and len(board.samples.get(index, ())) < self.iters:
                yield Sample(index)


@dataclass(frozen=True, slots=True)
class Race:
    """A first pass over all, then rounds in which every survivor is sampled once; orders shuffled by `seed`.

    The first pass goes candidate by candidate, the incumbent first: a warm-up and a sample, so that
    whatever hangs later leaves something measured. Where runs are long (`LONG_S`) a warm-up tells enough
    to let the sample wait until all are warm; those slower than the best by a seventh and `JITTER_S` get none.

    A round drops the clear losers: those of which the best that was seen, at the warm-up or since, is slower
    than what the leader's level may be, by half after the first round, a quarter after the second, a seventh
    after the third, a tenth after the fourth; from then on those that are too slow to win beyond doubt.
    Samples are late and never early, so the best one is a fair witness. What makes them late is a few
    milliseconds, whatever their length, so long ones are precise and drop out sooner: by a tenth, later a
    twentieth, and `JITTER_S` over the number of the round. Two always stay, and so does the incumbent: it
    is what the winner is held against.

    It is over after `iters` rounds at the earliest, when more samples would hardly change who wins; after
    `most_rounds` at the latest, or when the rounds have cost what is at stake: as much as the first pass
    up to a second, a quarter of it beyond that, and `least_s` in any case. So short kernels, which are
    noisy and cheap, are sampled often, and long ones, which are neither, seldom.
    """

    iters: int = 3
    most_rounds: int = 60
    seed: int = 0
    least_s: float = 0.4

    def plan(self, board: Board) -> Iterator[Step]:
        shuffle = random.Random(self.seed).shuffle
        begun_s = board.cost_s
        order, waiting = board.alive, list[int]()
        shuffle(order)
        for index in sorted(order, key=lambda index: index != board.incumbent):
            while index in board.candidates and not board.is_warm(index):
                yield Sample(index)
            if index in board.candidates and not board.samples.get(index):
                if board.measured and board.is_long(index):
                    waiting.append(index)
                else:
                    yield Sample(index)
        for index in waiting:
            if index in board.candidates:
                yield Drop(index, 0) if self._is_out_at_once(board, index) else Sample(index)
        first_s, begun_s = board.cost_s - begun_s, board.cost_s
        effort_s = max(self.least_s, min(first_s, 1.0), first_s / 4)
        for number in range(1, max(self.iters, self.most_rounds) + 1):
            order = board.alive if number > 1 else []
            shuffle(order)
            for index in order:
                if index in board.candidates:
                    yield Sample(index)
            if not board.measured:
                return
            for index in self._losers(board, number):
                yield Drop(index, number)
            if number >= self.iters and (board.is_settled or board.cost_s - begun_s >= effort_s):
                return

    def _is_out_at_once(self, board: Board, index: int) -> bool:
        taken = board.witness(index)
        faster = [best for i in board.alive if (best := board.witness(i)) < taken]
        if index == board.incumbent or len(faster) < 2:
            return False
        return min(faster) >= LONG_S and taken > min(faster) * 1.15 + JITTER_S

    def _losers(self, board: Board, number: int) -> Sequence[int]:
        leader = board.leader()
        best = board.level(leader) * (1 + board.spread(leader))
        allowed = {1: 1.5, 2: 1.25, 3: 1.15, 4: 1.1}.get(number, inf)
        allowed_s = min(best * allowed, best * (1.1 if number == 1 else 1.05) + JITTER_S / number)
        slow = set(board.losers()) if number > 4 else set[int]()
        standing = sorted((i for i in board.alive if board.samples.get(i)), key=board.level)
        losers = [i for i in standing[2:] if i in slow or board.witness(i) > allowed_s]
        return [i for i in losers if i != board.incumbent]


def _incumbent_first(board: Board) -> list[int]:
    # A tune that is cut short still knows the default.
    return sorted(board.candidates, key=lambda index: index != board.incumbent)
