"""Which candidate to sample next, and when to stop.

A strategy is one method over a `Board` of samples. It knows no device: the same plan runs against
recorded timings, so strategies are compared without hardware.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

from asel.board import JITTER_S, LONG_S, Board

__all__ = ["Drop", "Exhaustive", "Race", "Sample", "Step", "Strategy"]


@dataclass(frozen=True, slots=True)
class Sample:
    """Take one sample of a candidate.

    `then` are those that are sure to be next, whatever this one finds, but for any that fail: where they are quick
    they are taken in one go, and wait for the plan to come to them.
    """

    index: int
    then: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Drop:
    """A candidate is out of the race, unless the one it lost to fails."""

    index: int
    round: int
    best: int | None = None


Step = Sample | Drop

# A busy neighbour slows a core by up to this factor, and mostly for longer than this: quick rounds all see the same
# of it, so that they agree says little.
_DISTURBED = 1.5
_LOOK_S = 0.1
# How many times the leader's level the best of a candidate may be to stay after a round, whatever the scatter is.
_ALLOWED = {1: 2.5, 2: _DISTURBED}


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

    A round drops those that are too slow to win beyond doubt (`Board.losers`), unless the best that was seen of
    them is as good as the leader: samples are late and seldom early, so the best one is a fair witness. After
    the first round, when nothing is known of their scatter, they are those of which even the best takes two and a
    half times as long, after the second one and a half times: a neighbour on one of two cores doubles the time of
    what needs both for as long as it takes to look at it once. To that come the milliseconds that the system takes
    from a run now and then whatever its length (`JITTER_S`, over the number of the round), so that long ones are
    precise and drop out sooner: by a tenth, later a twentieth. Two always stay, and so does the incumbent: it is what
    the winner is held against. Without one, the first declared wins ties, so where runs are short it stays for five
    rounds, unless it is twice as slow: a bad start would make every repeat of a tune among equals another tune. Where
    the one that others lost to fails, they are back.

    It is over when all that are left have `iters` samples at the least, and more would hardly change who wins; where
    two are close, not before a tenth of a second, which is longer than most of what disturbs a machine. After
    `most_rounds` at the latest, or when the rounds have cost what is at stake: as much as the first pass up to a
    second, a quarter of it beyond that, and `least_s` in any case; and twice that where the favourite is still in it,
    which would win for want of samples. So short kernels, which are noisy and cheap, are sampled often, and long
    ones, which are neither, seldom.
    """

    iters: int = 3
    most_rounds: int = 300
    seed: int = 0
    least_s: float = 0.6

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
                best = self._out_at_once(board, index)
                yield Sample(index) if best is None else Drop(index, 0, best)
        first_s, begun_s = board.cost_s - begun_s, board.cost_s
        effort_s = max(self.least_s, min(first_s, 1.0), first_s / 4)
        look = 1
        for number in range(1, max(self.iters, self.most_rounds) + 1):
            order = board.alive if number > 1 else []
            shuffle(order)
            for place, index in enumerate(order, 1):
                if index in board.candidates:
                    yield Sample(index, then=tuple(order[place:]))
            if not board.measured:
                return
            if number < look:
                continue
            look = number + max(1, number // 10)  # what one of many rounds adds is not worth looking at
            best = board.leader()
            for index in self._losers(board, number, best):
                yield Drop(index, number, best)
            if self._is_over(board, board.cost_s - begun_s, effort_s):
                return

    def _is_over(self, board: Board, taken_s: float, effort_s: float) -> bool:
        if min(len(board.samples.get(index, ())) for index in board.alive) < self.iters:
            return False
        if board.is_settled:
            return taken_s >= _look_s(board)
        favoured = board.favourite in board.alive and board.favourite not in board.losers()
        return taken_s >= (2 * effort_s if favoured else effort_s)

    def _out_at_once(self, board: Board, index: int) -> int | None:
        """Return the one whose warm-up shows that a long candidate is too slow, if there is one."""
        taken = board.witness(index)
        faster = sorted((i for i in board.alive if board.witness(i) < taken), key=board.witness)
        if index == board.incumbent or len(faster) < 2:
            return None
        best = board.witness(faster[0])
        return faster[0] if best >= LONG_S and taken > best * 1.15 + JITTER_S else None

    def _losers(self, board: Board, number: int, leader: int) -> Sequence[int]:
        best = board.level(leader)
        allowed = _ALLOWED.get(number, inf) if best < LONG_S else 1.1 if number == 1 else 1.05
        allowed_s = best * allowed + JITTER_S / number
        slow = board.losers() if number > 1 else []
        standing = sorted((i for i in board.alive if board.samples.get(i)), key=board.level)
        losers = [i for i in standing[2:] if (i in slow and board.witness(i) > best) or board.witness(i) > allowed_s]
        return [i for i in losers if not self._stays(board, number, i, best)]

    def _stays(self, board: Board, number: int, index: int, best: float) -> bool:
        early = number < 5 and best < LONG_S and board.witness(index) < 2 * best + JITTER_S
        return index == board.incumbent or (index == board.favourite and early)


def _look_s(board: Board) -> float:
    """Return how long rounds have to take until those that are left may be told apart."""
    best = board.level(board.leader())
    rivals = [i for i in board.alive if board.samples.get(i) and board.level(i) < _DISTURBED * best]
    return _LOOK_S if len(rivals) > 1 else 0.0


def _incumbent_first(board: Board) -> list[int]:
    # A tune that is cut short still knows the default.
    return sorted(board.candidates, key=lambda index: index != board.incumbent)
