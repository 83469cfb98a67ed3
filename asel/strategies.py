"""Which candidate to sample next, and when to stop.

A strategy is one method over a `Board` of samples. It knows no device: the same plan runs against
recorded timings, so strategies are compared without hardware.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Protocol

__all__ = ["Board", "Drop", "Exhaustive", "Race", "Sample", "Step", "Strategy"]

# Two medians closer than this are a tie, however calm the samples look.
LEAST_NOISE = 0.02
# And farther apart than this they are none, however wild: a guess is not kept at any price.
MOST_NOISE = 0.1


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


@dataclass(slots=True)
class Board:
    """What has been sampled so far. `warmup` samples of each candidate are taken and not counted."""

    candidates: list[int]
    incumbent: int | None = None
    warmup: int = 1
    samples: dict[int, list[float]] = field(default_factory=dict)
    warmed: dict[int, int] = field(default_factory=dict)
    dropped: dict[int, int] = field(default_factory=dict)

    def record(self, index: int, seconds: float) -> None:
        if self.warmed.get(index, 0) < self.warmup:
            self.warmed[index] = self.warmed.get(index, 0) + 1
        else:
            self.samples.setdefault(index, []).append(seconds)

    def remove(self, index: int) -> None:
        """Forget a candidate that failed."""
        self.candidates.remove(index)
        self.samples.pop(index, None)

    @property
    def alive(self) -> list[int]:
        return [index for index in self.candidates if index not in self.dropped]

    @property
    def measured(self) -> list[int]:
        """The candidates with a sample that counts, dropped or not."""
        return [index for index in self.candidates if self.samples.get(index)]

    def median(self, index: int) -> float:
        return median(self.samples[index])

    def interval(self, index: int) -> tuple[float, float]:
        """Return the bounds within which the median lies: McGill's notch, 1.58 IQR / sqrt(n) to either side."""
        samples = self.samples[index]
        if len(samples) < 2:
            return 0.0, float("inf")
        low, _, high = quantiles(samples, n=4, method="inclusive")
        reach = 1.58 * (high - low) / len(samples) ** 0.5
        middle = median(samples)
        return middle - reach, middle + reach

    def noise(self, *indices: int) -> float:
        """Return how far apart two medians may be and still be a tie, as a fraction."""
        reach = LEAST_NOISE
        for index in indices:
            if len(self.samples[index]) > 1 and (middle := self.median(index)) > 0:
                reach = max(reach, (self.interval(index)[1] - middle) / middle)
        return min(reach, MOST_NOISE)

    def leader(self) -> int:
        """Return the candidate with the lowest median of those that are still in."""
        return min((i for i in self.measured if i not in self.dropped), key=self.median)

    def winner(self) -> int:
        """Return the incumbent where it is within the noise of the leader, else the first declared of its equals.

        What was dropped was clearly slower, and cannot come back on the strength of few samples.
        """
        leader = self.leader()
        best, finalists = self.median(leader), [i for i in self.measured if i not in self.dropped]
        if self.incumbent in finalists and self.median(self.incumbent) <= best * (
            1 + self.noise(leader, self.incumbent)
        ):
            return self.incumbent
        return min(i for i in finalists if self.median(i) <= best * (1 + LEAST_NOISE))


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
    """Rounds in which every survivor is sampled once, in an order shuffled by `seed`.

    A round drops the clear losers: those whose best sample is slower than the leader's median, twice
    as slow after the first round, by a quarter after the second, a tenth after the third, and by more
    than a tie from then on. Samples are late and never early, so the best one is a fair witness. Two
    always stay, and so does the incumbent: it is what the
    winner is held against. It is over after `iters` rounds at the
    earliest, when every survivor's interval lies clear of the leader's or both are known to within the
    noise, and after `most_rounds` at the latest.
    """

    iters: int = 3
    most_rounds: int = 20
    seed: int = 0

    def plan(self, board: Board) -> Iterator[Step]:
        shuffle = random.Random(self.seed).shuffle
        for _ in range(board.warmup):
            for index in _incumbent_first(board):
                if index in board.candidates and board.warmed.get(index, 0) < board.warmup:
                    yield Sample(index)
        for number in range(1, max(self.iters, self.most_rounds) + 1):
            order = board.alive
            shuffle(order)
            for index in order:
                if index in board.candidates:
                    yield Sample(index)
            if not board.measured:
                return
            for index in self._losers(board, number):
                yield Drop(index, number)
            if number >= self.iters and self._is_settled(board):
                return

    def _losers(self, board: Board, number: int) -> Sequence[int]:
        leader = board.leader()
        best = board.median(leader)
        allowed = {1: 2.0, 2: 1.25, 3: 1.1}.get(number, 1 + LEAST_NOISE)
        standing = sorted((i for i in board.alive if board.samples.get(i)), key=board.median)
        losers = [i for i in standing[2:] if min(board.samples[i]) > best * allowed]
        return [i for i in losers if i != board.incumbent]

    def _is_settled(self, board: Board) -> bool:
        leader = board.leader()
        _, high = board.interval(leader)
        for index in board.alive:
            if index == leader or not board.samples.get(index):
                continue
            low, _ = board.interval(index)
            precise = board.noise(leader) <= LEAST_NOISE and board.noise(index) <= LEAST_NOISE
            if low <= high and not precise:
                return False
        return True


def _incumbent_first(board: Board) -> list[int]:
    # A tune that is cut short still knows the default.
    return sorted(board.candidates, key=lambda index: index != board.incumbent)
