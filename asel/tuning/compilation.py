"""Compiles candidates in the order of a queue, and equal programs once."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import anyio
from anyio.abc import TaskGroup

from asel.events import CandidateStart
from asel.redaction import redact
from asel.tuning.candidate_steps import (
    STUCK,
    alone_on_devices,
    is_outcome,
    outcome_of_failing,
    ready_to_run,
    step,
    timed,
)
from asel.tuning.device_lock import DeviceStuck, compile_slots, lowering
from asel.tuning.measure import BaseMeasure, as_sampler
from asel.tuning.outcomes import Failed
from asel.tuning.state import Runner, TuneState, Uncompilable

__all__ = ["CompileQueue", "keep_winner", "try_uncompilable"]

logger = logging.getLogger("asel")

# The share of the remaining budget that compiling may use: a candidate that is compiled but never measured is wasted.
_MAX_BUDGET_SHARE = 0.75


class CompileQueue:
    """Compiles the candidates that a strategy asks for, `width` at once, while the strategy goes on."""

    def __init__(self, measure: BaseMeasure, state: TuneState[Any], width: int, tasks: TaskGroup) -> None:
        self._measure, self._state = measure, state
        self._width, self._tasks = width, tasks
        self._waiting: deque[int] = deque()
        self._workers = 0
        self._compiling: set[int] = set()
        self._until_s = state.budget.spent_s + _MAX_BUDGET_SHARE * (state.budget.limit_s - state.budget.spent_s)
        self._one_settled = anyio.Event()

    def add(self, indices: Iterable[int]) -> None:
        """Append candidates to the queue."""
        assert self._state.board is not None
        for index in indices:
            if self._state.board.ask(index):
                self._waiting.append(index)
        for _ in range(min(self._width - self._workers, len(self._waiting))):
            self._workers += 1
            self._tasks.start_soon(self._work)

    async def one_settled(self) -> None:
        """Return once another candidate is compiled or has failed; immediately if the queue is empty."""
        if self._waiting or self._compiling:
            self._one_settled = anyio.Event()
            await self._one_settled.wait()

    async def _work(self) -> None:
        try:
            while self._waiting:
                index = self._waiting.popleft()
                self._compiling.add(index)
                worked_s = 0.0
                try:
                    async with compile_slots(self._width):
                        start = anyio.current_time()
                        await self._compile(index)
                        worked_s = anyio.current_time() - start
                finally:
                    self._compiling.discard(index)
                    self._one_settled.set()
                await self._state.rest(worked_s)
        finally:
            self._workers -= 1

    def _is_too_late(self, index: int) -> bool:
        """Return whether no time is left to compile a candidate. The first candidate is always tried."""
        state = self._state
        if state.budget.spent_s < self._until_s:
            return False
        failed = any(isinstance(outcome, Failed) for outcome in state.outcomes.values())
        return bool(state.runners or state.uncompilable or failed or self._compiling - {index})

    async def _compile(self, index: int) -> None:
        """Compile a candidate, unless it is an alias of another."""
        state, start = self._state, anyio.current_time()
        if self._is_too_late(index):
            state.skip(index, f"the tune's budget of {state.budget.limit_s:g} s left no time to compile it", start)
            return
        trial = state.trial(index)
        state.emit(CandidateStart, index, start)
        with outcome_of_failing(state, index, start, trial):
            async with self._measure.turn(state.budget.running) as measure:
                # The clock starts after the lock is held, so waiting for another candidate does not count for this one.
                async with lowering():
                    with step(state, index, "compile") as lowering_s:
                        lowered = await measure.lower(trial)
                program = lowered.fingerprint or str(index)
                first = state.first_with_program(program, index)
                if first != index:
                    state.alias(index, first, start)
                    state.release_later(lowered)
                elif lowered.runs:
                    state.set_aside(index, Uncompilable(trial, lowered, start, lowering_s()))
                else:
                    with step(state, index, "compile", lowering_s()) as compiling_s:
                        sampler = as_sampler(await lowered.compile())
                    state.add_runner(index, Runner(trial, sampler, start, lowering_s() + compiling_s()))


async def try_uncompilable(state: TuneState[Any], indices: Iterable[int]) -> None:
    """Try to run candidates that cannot be compiled."""
    for index in sorted(indices, key=lambda i: i != state.request.incumbent):
        one = state.take_uncompilable(index)
        if state.budget.is_spent and state.runners:
            state.skip(index, f"the tune's budget of {state.budget.limit_s:g} s was spent")
            state.release_later(one.lowered)
            continue
        with outcome_of_failing(state, index, one.started, one.trial):
            try:
                async with alone_on_devices(state, one.trial.left_behind):
                    with step(state, index, "compile", one.lowering_s) as running_s:
                        sampler = as_sampler(await one.lowered.compile())
                state.add_runner(index, Runner(one.trial, sampler, one.started, one.lowering_s + running_s()))
            except DeviceStuck:
                state.skip(index, STUCK)
                state.release_later(one.lowered)


async def keep_winner(state: TuneState[Any], keep: Callable[[Any], None]) -> None:
    """Pass the winner's compiled program to the selector's executors.

    If the measure has none, the first call compiles the winner again.
    """
    assert state.report is not None
    winner = next((i for i, cfg in enumerate(state.request.candidates) if cfg is state.report.winner), None)
    if winner is None or not state.is_runnable(winner):
        return
    index = state.aliases.get(winner, winner)
    runner = state.runners[index]
    try:
        async with ready_to_run(state, index):
            with timed(state):
                runnable = await runner.sampler.runnable()
    except BaseException as error:  # it still wins; a real call will show whether it runs
        if not is_outcome(error):
            raise
        logger.debug("the winner's program is not kept: %s", redact(error))
    else:
        if runnable is not None:
            runnable.cfg = state.report.winner
            keep(runnable)
    finally:
        state.note_left_behind(runner.trial.left_behind)
