"""The strategies for many candidates: compile what the model expects most of, then race the best."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from asel.tuning.estimates import TIE
from asel.tuning.outcomes import TuneReport, in_words
from asel.tuning.race import Race
from asel.tuning.scoreboard import Scoreboard
from asel.tuning.strategies import Compile, Compute, Leave, Plan, Sample, Step, Wait

if TYPE_CHECKING:
    from asel.tuning.search.searcher import Estimate, Searcher

__all__ = ["Auto", "Search"]

# Candidates that are raced if they can all be compiled in time. More than that cost a minute at a second each, and of
# that many equal candidates the luckiest would win.
MAX_RACED = 64
# Compiling may take this part of a budget; `CompileQueue` skips what comes later.
_COMPILING_SHARE = 0.75
# The expected gain has to be below a tie this often in a row: the model is fitted anew in between, and its first
# fits are too sure of themselves.
_PATIENCE = 8
# The same where earlier tunes are known, after this many measurements: the incumbent and the best guesses.
_LEARNED_PATIENCE = 2
_MIN_LEARNED = 5
# Samples of each then; one that was disturbed would look like a wrong prediction.
_LEARNED_SAMPLES = 3
_TOO_LARGE = "it is at least as large in every field as a candidate that ran out of memory"


@dataclass(frozen=True, slots=True)
class Search:
    """Compiles the candidates that a model of their fields proposes, and races the best of them.

    While a candidate is compiled, the one before it is sampled and the next one is chosen. It ends when another
    compile is expected to gain less than a tie, when `max_compiles` candidates have been compiled or have failed, at
    three quarters of the budget, or when all are known. Candidates that are left are skipped, with what the
    model expected of them.
    """

    iters: int = 3
    seed: int = 0
    max_compiles: int | None = None

    def plan(self, board: Scoreboard) -> Plan:
        if board.untried:
            yield from _SearchPlan(board, self.seed, self.max_compiles).steps()
        yield from Race(self.iters, seed=self.seed).plan(board)


@dataclass(frozen=True, slots=True)
class Auto:
    """A race if all candidates can be compiled within the budget and are few, else a search.

    What earlier tunes found makes it a search: few candidates have to be compiled then. How long compiling takes is
    told by the first two candidates.
    """

    iters: int = 3
    seed: int = 0
    max_compiles: int | None = None

    def plan(self, board: Scoreboard) -> Plan:
        if (yield from self._races(board)):
            yield from Race(self.iters, seed=self.seed).plan(board)
        else:
            yield from Search(self.iters, self.seed, self.max_compiles).plan(board)

    def _races(self, board: Scoreboard) -> Generator[Step, Any, bool]:
        count, limit_s = len(board.untried), board.budget.limit_s
        if board.lessons and count > _MIN_LEARNED and (yield Compute(partial(_teaches, board))):
            return False
        if self.max_compiles is not None and count > self.max_compiles:
            return False
        if count > MAX_RACED:
            return False
        if count <= 2 or math.isinf(limit_s):
            return True
        begun_s, each_s = board.budget.spent_s, math.inf
        for index in list(board.untried)[:2]:
            yield Compile((index,))
            yield from _until_idle(board)
            each_s, begun_s = min(each_s, board.budget.spent_s - begun_s), board.budget.spent_s
        left_s = _COMPILING_SHARE * limit_s - board.budget.spent_s
        return len(board.untried) * each_s / board.compile_width <= left_s


def _until_idle(board: Scoreboard) -> Plan:
    while board.compiling:
        yield Wait()


class _SearchPlan:
    """One search: what was asked for, and what the model has been told."""

    def __init__(self, board: Scoreboard, seed: int, max_compiles: int | None) -> None:
        self._board, self._seed = board, seed
        self._max_compiles = math.inf if max_compiles is None else max_compiles
        self._asked: dict[int, None] = {}
        self._told: set[int] = set()
        # How often in a row another compile was expected to gain less than a tie.
        self._dull = 0
        self._best_s = math.inf

    def steps(self) -> Plan:
        """Compile, sample and learn in the order of asking, whatever is ready first: equal results, equal plans."""
        board = self._board
        allowed = list(board.untried)
        waiting = deque[int]((*board.candidates, *board.failed, *board.aliases))
        self._asked |= dict.fromkeys(waiting)
        made = partial(_searcher, board.configs, self._seed, allowed, board.call, board.lessons)
        self._searcher, board.learned_from = yield Compute(made)
        proposed = [index for index in (board.incumbent,) if index in board.untried]
        while True:
            yield from self._ask(proposed)
            waiting += proposed
            proposed = []
            if (room := self._room(waiting)) > 0:
                proposed = yield Compute(partial(self._searcher.propose, room))
            if not proposed:
                if not waiting:
                    break
                yield from self._learn_from(waiting.popleft())
        yield from self._leave_rest()
        if self._searcher.predicted:
            found = yield Compute(self._predictions)
            board.predicted.update(found)
            board.prediction_error = self._searcher.prediction_error

    def _room(self, waiting: Collection[int]) -> int:
        """Return how many more to ask for: one more than are compiled at once, so that the slots are never idle.

        With what earlier tunes found, few are compiled and each of them is held against that: nothing is compiled while
        they are sampled, which would slow them on a CPU.
        """
        if self._is_over() or (waiting and self._searcher.trusts_earlier):
            return 0
        ahead = 0 if self._searcher.trusts_earlier else 1
        return min(self._board.compile_width + ahead - len(waiting), self._left())

    def _predictions(self) -> dict[int, float]:
        """Return the seconds that earlier tunes said of what was tried."""
        if not (measured := [index for index in self._asked if index in self._told]) or not self._searcher.has_times:
            return {}
        scale_s = math.exp(self._searcher.offset())
        return {index: scale_s * self._searcher.predicted[index].seconds for index in measured}

    def _left(self) -> int:
        """Return how many more may be compiled. What turns out to be another's program costs no compile."""
        left = self._max_compiles - sum(index not in self._board.aliases for index in self._asked)
        return int(min(left, len(self._board.configs)))

    def _is_over(self) -> bool:
        board, searcher = self._board, self._searcher
        if searcher.is_exhausted or self._left() <= 0:
            return True
        if board.has_run() and board.budget.spent_s >= _COMPILING_SHARE * board.budget.limit_s:
            return True
        return self._dull >= self._patience

    @property
    def _patience(self) -> int:
        return _LEARNED_PATIENCE if self._searcher.trusts_earlier else _PATIENCE

    def _ask(self, indices: Sequence[int]) -> Plan:
        self._asked |= dict.fromkeys(indices)
        for index in indices:
            self._searcher.begin(index)
        if self._searcher.is_modelling and self._searcher.observed >= _MIN_LEARNED:
            self._dull = self._dull + 1 if self._searcher.expected_gain < TIE else 0
        if indices:
            yield Compile(tuple(indices))

    def _learn_from(self, index: int) -> Plan:
        """Wait until a candidate is compiled, warm it up and sample it, and tell the searcher what became of it."""
        board = self._board
        while index in board.compiling:
            yield Wait()
        while index in board.candidates and not board.is_warm(index):
            yield Sample((index,))
        for _ in range(_LEARNED_SAMPLES if self._searcher.trusts_earlier else 1):
            if index in board.candidates and not board.is_long(index):
                board.end_round()  # what is sampled at other times is not compared within rounds
                yield Sample((index,))
        self._tell(index)

    def _tell(self, index: int) -> None:
        board, searcher = self._board, self._searcher
        first = board.aliases.get(index, index)
        self._told.add(index)
        if first in board.candidates and board.is_warm(first):
            seconds = board.best_observed(first)
            searcher.observe(index, seconds)
            if seconds < (1 - TIE) * self._best_s:
                self._best_s, self._dull = seconds, 0  # the model did not expect that
        elif first in board.failed:
            searcher.observe_failure(index, out_of_memory=getattr(board.failed[first], "is_out_of_memory", False))
        else:
            searcher.close(index)  # skipped, or to be timed in a way that does not compare

    def _leave_rest(self) -> Plan:
        board = self._board
        if left := list(board.untried):
            reasons = yield Compute(partial(_reasons, self._searcher, left, self._why()))
            yield Leave(reasons)

    def _why(self) -> str:
        if self._left() <= 0:
            return f"max_compiles={self._max_compiles} were compiled"
        if self._dull >= self._patience:
            return "it is not expected to win"
        return f"the tune's budget of {self._board.budget.limit_s:g} s left no time to compile it"


def _teaches(board: Scoreboard) -> bool:
    from asel.tuning.search.lessons import teaches

    return teaches(board.configs, board.lessons)


def _searcher(
    configs: Sequence[Any], seed: int, allowed: Sequence[int], call: str, reports: Sequence[TuneReport[Any]]
) -> tuple[Searcher, tuple[str, ...]]:
    """Return a searcher, and the calls that it has learned from."""
    from asel.tuning.search.config_fields import ConfigFields  # numpy, which a race does without
    from asel.tuning.search.lessons import lessons_for
    from asel.tuning.search.searcher import Searcher

    lessons = lessons_for(configs, call, reports) if reports else None
    if lessons is None:
        return Searcher(ConfigFields(configs), seed=seed, allowed=allowed), ()
    return Searcher(lessons.fields, seed=seed, allowed=allowed, earlier=lessons.log_times), lessons.calls


def _reasons(searcher: Searcher, left: Sequence[int], why: str) -> dict[int, str]:
    estimates = searcher.estimates(left)
    whys = [_TOO_LARGE if searcher.is_ruled_out(index) else why for index in left]
    if not estimates:
        return dict(zip(left, whys, strict=True))
    return {index: f"{own}: {_expected_text(one)}" for index, own, one in zip(left, whys, estimates, strict=True)}


def _expected_text(estimate: Estimate) -> str:
    return f"the model expects {in_words(estimate.seconds)}, give or take a factor of {estimate.factor:.2f}"
