"""The strategy for few candidates: compile all, then race them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import inf

from asel.tuning.scoreboard import LONG_S, Scoreboard
from asel.tuning.strategies import Drop, Plan, Sample, compile_all

__all__ = ["Race"]

# Rounds may take this part of what the warm-ups took, and at least as many seconds as this. With 0.6 s, replays of a
# busy machine chose worse by 1.5% on average, by 22% at worst; with 1 s, right each time. Quiet ones end long before.
_EFFORT_SHARE = 0.5
_MIN_EFFORT_S = 1.0
# Of long runs the best that was observed tells enough to drop those that took this many times as long, though nothing
# is known of their scatter. Without that, sampling "recurrence, long" takes 31 s instead of 13 s.
_HOPELESS = 1.5


@dataclass(frozen=True, slots=True)
class Race:
    """Rounds in which every survivor is sampled once, in an order shuffled by `seed`; warm-ups first.

    After each round those drop out that are slower than a tie with the leader, beyond doubt (`Scoreboard.losers`). The
    race is over once all that are left have `iters` samples, and more would hardly change the winner or the rounds have
    cost what is at stake. So short kernels, which are noisy and cheap, are sampled often, and long ones, which are
    neither, seldom.
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
            look = number + max(1, number // 10)  # what one of many rounds adds is not worth looking at
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
