"""The protocol of strategies, the steps of a plan, and the simplest strategy.

A strategy decides which candidates to compile, to sample and to drop, and when to stop. It reads a `Scoreboard` and
knows nothing of devices: the same plan runs against recorded timings, so strategies can be compared without hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from asel.tuning.scoreboard import Scoreboard

__all__ = [
    "Compile",
    "Compute",
    "Drop",
    "Exhaustive",
    "Leave",
    "Plan",
    "Sample",
    "Step",
    "Strategy",
    "Wait",
    "compile_all",
]


@dataclass(frozen=True, slots=True)
class Compile:
    """Ask for these candidates to be compiled, in this order. The plan goes on at once."""

    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until another requested candidate is compiled or has failed."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Take one sample of each of these candidates, in this order. Candidates that are not compiled are ignored."""

    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Drop:
    """Take a candidate out of the race. If `best` fails later, it rejoins."""

    index: int
    round: int
    best: int | None = None


@dataclass(frozen=True, slots=True)
class Leave:
    """Skip these candidates, for these reasons."""

    reasons: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class Compute:
    """Run a computation in a thread, off the event loop: `found = yield Compute(work)`."""

    work: Callable[[], Any]


Step = Compile | Wait | Sample | Drop | Leave | Compute
Plan = Generator[Step, Any, None]


class Strategy(Protocol):
    """Plans a tune: yields steps, and reads their results from the board.

    There is a plan for each group of candidates; `board.untried` are the candidates it may ask for. It samples the
    incumbent first, so that a tune that is cut short has timed the default. If all candidates of a race fail, and some
    in another timing mode are left, another plan is made for those on the same board.
    """

    def plan(self, board: Scoreboard) -> Plan: ...


def compile_all(board: Scoreboard) -> Plan:
    """Plan to compile all untried candidates and to wait for them, so that no compilation disturbs later samples."""
    yield Compile(tuple(board.untried))
    while board.compiling:
        yield Wait()


@dataclass(frozen=True, slots=True)
class Exhaustive:
    """Takes `iters` samples of every candidate, one candidate after the other."""

    iters: int = 3

    def plan(self, board: Scoreboard) -> Plan:
        yield from compile_all(board)
        for index in sorted(board.candidates, key=lambda index: index != board.incumbent):
            while index in board.candidates and len(board.samples.get(index, ())) < self.iters:
                yield Sample((index,))
