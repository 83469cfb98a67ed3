"""The protocol of strategies, the steps of a plan, and the simplest strategy.

A strategy says which candidates to compile, which to sample and which to drop, and when to stop. It reads a
`Scoreboard` and knows no device: the same plan runs against recorded timings, so strategies are compared without
hardware.
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
    """Wait until one more of the candidates that were asked for is compiled, or has failed."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Take a round: one sample of each of these, in this order. Those that are not compiled are passed over."""

    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Drop:
    """Take a candidate out of the race, unless the one it lost to fails."""

    index: int
    round: int
    best: int | None = None


@dataclass(frozen=True, slots=True)
class Leave:
    """Do not try these candidates, for these reasons."""

    reasons: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class Compute:
    """Work something out in a thread, since it would keep the event loop: `found = yield Compute(work)`."""

    work: Callable[[], Any]


Step = Compile | Wait | Sample | Drop | Leave | Compute
Plan = Generator[Step, Any, None]


class Strategy(Protocol):
    """Plans a tune: yields steps, and reads from the board what the steps before have found.

    A plan is made for each group of candidates: `board.untried` are those that may be asked for. It samples the
    incumbent first, if that is among them, so that a tune that is cut short knows the default. Another plan is made on
    the same board if all that raced have failed, and others are left that are timed in another mode.
    """

    def plan(self, board: Scoreboard) -> Plan: ...


def compile_all(board: Scoreboard) -> Plan:
    """Plan to compile all that may be, and to wait for them: nothing disturbs the samples that are taken later."""
    yield Compile(tuple(board.untried))
    while board.compiling:
        yield Wait()


@dataclass(frozen=True, slots=True)
class Exhaustive:
    """Every candidate gets `iters` samples, one candidate after the other."""

    iters: int = 3

    def plan(self, board: Scoreboard) -> Plan:
        yield from compile_all(board)
        for index in sorted(board.candidates, key=lambda index: index != board.incumbent):
            while index in board.candidates and len(board.samples.get(index, ())) < self.iters:
                yield Sample((index,))
