"""Tunes without a selector, and plans without a tune."""

from __future__ import annotations

from asel import Tuner
from asel.testing import ScriptedMeasure
from asel.tuning.measure import BaseSampler
from asel.tuning.request import TuneRequest
from asel.tuning.scoreboard import Scoreboard
from asel.tuning.state import TuneState
from asel.tuning.strategies import Compile, Compute, Drop, Sample, Step

__all__ = ["SamplerOf", "kinds", "play", "play_on", "tune_among", "tune_of", "tuner_of"]


def tune_of(candidates, make_fn=lambda cfg: lambda: cfg, args=(), kwargs=None, **facts) -> TuneState:
    """Return a tune of some candidates, for `Tuner.tune`."""
    return TuneState(TuneRequest(candidates, make_fn, args, kwargs or {}, **facts))


def tune_among(*candidates, **facts) -> TuneState:
    return tune_of(candidates, **facts)


def tuner_of(costs=0.001, *, warmup=0, iters=1, **script) -> tuple[Tuner, ScriptedMeasure]:
    """Return a tuner that samples every candidate equally often, and its script."""
    measure = ScriptedMeasure(costs, **script)
    return Tuner(warmup=warmup, iters=iters, measure=measure, strategy="exhaustive"), measure


def kinds(outcomes) -> list[type]:
    return [type(outcome) for outcome in outcomes]


def play(strategy, draw, count, **facts) -> Scoreboard:
    """Carry out a plan with `count` candidates; `draw(index)` is one sample, or None if the candidate fails."""
    board = Scoreboard(list(range(count)), **facts)
    play_on(strategy, board, draw)
    return board


def play_on(strategy, board, draw) -> list[Step]:
    """Carry out a plan on a board, and return its steps."""
    steps, plan, found = [], strategy.plan(board), None
    while True:
        try:
            step = plan.send(found)
        except StopIteration:
            return steps
        steps.append(step)
        found = None
        match step:
            case Sample(indices):
                for index in indices:
                    assert index not in board.dropped, "a candidate that is out is not sampled"
                    if index not in board.candidates:
                        continue
                    if (seconds := draw(index)) is None:
                        board.remove(index)
                    else:
                        board.record(index, seconds)
            case Drop(index, number, best):
                board.drop(index, number, best)
            case Compile(indices):
                for index in indices:
                    if board.ask(index):
                        board.note_settled(index)
                        board.enter([*board.candidates, index])
            case Compute(work):
                found = work()


class SamplerOf(BaseSampler):
    """A sampler made from an async function, with the given optional attributes."""

    def __init__(self, sample, **facts) -> None:
        self._sample = sample
        vars(self).update(facts)

    async def __call__(self) -> float:
        return await self._sample()
