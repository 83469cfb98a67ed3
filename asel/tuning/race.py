"""The strategy for short lists: compile all candidates, then race them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import inf

from asel.tuning.scoreboard import LONG_S, Scoreboard
from asel.tuning.strategies import Drop, Plan, Sample, compile_all

__all__ = ["Race"]

# The time that rounds may take: a share of the warm-ups' time, and at least this many seconds. With 0.6 s, replays of a
# busy machine chose worse by 1.5% on average and 22% at worst; with 1 s, right each time. Quiet machines need less.
_EFFORT_SHARE = 0.5
_MIN_EFFORT_S = 1.0
# Long runs that take this many times as long as the best observed run are dropped, although their variance is unknown.
# Without this, sampling "recurrence, long" takes 31 s instead of 13 s.
_HOPELESS = 1.5


@dataclass(frozen=True, slots=True)
class Race:
    """After the warm-ups, samples every survivor once in each round, in an order shuffled by `seed`.

    After a round, candidates that are significantly slower than a tie with the leader drop out (`Scoreboard.losers`).
    The race is over once all survivors have `iters` samples, and either more samples would hardly change the winner or
    the rounds have used up their time. So short kernels, noisy and cheap, get many samples, and long ones get few.
    """

    iters: int = 3
    seed: int = 0

    def plan(self, board: Scoreboard) -> Plan:
        yield from compile_all(board)
        begun_s, shuffle = board.cost_s, random.Random(self.seed).shuffle
        for _ in range(board.warmup):
            order = [index for index in board.alive if not board.is_warm(index)]
            shuffle(order)
            yield Sample(tuple(sorted(order, key=lambda index: index != board.incumbent)))
        yield from _drop_hopeless(board, 0)
        effort_s = max(_MIN_EFFORT_S, _EFFORT_SHARE * (board.cost_s - begun_s))
        number, look, begun_s = 0, 1, board.cost_s
        while board.alive:
            number += 1
            order = board.alive
            shuffle(order)
            yield Sample(tuple(order))
            if number < look or not board.measured:
                continue
            look = number + max(1, number // 10)  # after many rounds, one more changes little
            yield from _drop_hopeless(board, number)
            leader = board.leader()
            for index in board.losers():
                yield Drop(index, number, leader)
            sampled = min(len(board.samples.get(index, ())) for index in board.alive)
            if sampled >= self.iters and (board.is_settled or board.cost_s - begun_s >= effort_s):
                return


def _drop_hopeless(board: Scoreboard, number: int) -> Plan:
    best = min(board.alive, key=board.best_observed, default=None)
    if best is not None and board.best_observed(best) >= LONG_S:
        for index in board.alive:
            if _HOPELESS * board.best_observed(best) < board.best_observed(index) < inf:
                yield Drop(index, number, best)
