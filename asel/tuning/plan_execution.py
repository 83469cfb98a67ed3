"""Carries out a strategy's plan: compiles in the background, and takes samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, assert_never

import anyio
import anyio.lowlevel

from asel.errors import InvalidRequestError
from asel.events import CandidateEliminated
from asel.runtime.threads import run_in_thread
from asel.tuning.compilation import CompileQueue, try_uncompilable
from asel.tuning.measure import BaseMeasure
from asel.tuning.output_check import Check
from asel.tuning.sampling import check_outputs, take_round
from asel.tuning.scoreboard import Scoreboard
from asel.tuning.state import TuneState
from asel.tuning.strategies import Compile, Compute, Drop, Leave, Plan, Sample, Wait

__all__ = ["carry_out"]

# A step may change nothing, such as one for failed candidates. A plan with this many in a row would never end.
_MAX_IDLE_STEPS = 1_000
# The number of candidates that are left out in one go: a millisecond on the event loop.
_AT_ONCE = 500


async def carry_out(
    plan: Plan, state: TuneState[Any], board: Scoreboard, measure: BaseMeasure, check: Check | None = None
) -> None:
    """Carry out the plan until it ends or the budget is spent. Candidates still being compiled are abandoned.

    Raises:
        DeviceStuck: an abandoned candidate keeps the device.
        InvalidRequestError: the plan goes in circles.
    """
    failure: BaseException | None = None
    async with anyio.create_task_group() as tasks:
        execution = _Execution(state, board, CompileQueue(measure, state, board.compile_width, tasks), check)
        try:
            await execution.run(plan)
        except (Exception, KeyboardInterrupt) as error:
            failure = error  # raised outside the task group, which would put it into an ExceptionGroup
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure


class _Execution:
    def __init__(self, state: TuneState[Any], board: Scoreboard, queue: CompileQueue, check: Check | None) -> None:
        self._state, self._board, self._queue, self._check = state, board, queue, check

    async def run(self, plan: Plan) -> None:
        found: Any = None
        idle_steps, before = 0, self._progress()
        while True:
            try:
                step = plan.send(found)
            except StopIteration:
                return
            found = None
            match step:
                case Compile(indices):
                    self._queue.add(indices)
                case Wait():
                    await self._queue.one_settled()
                case Sample(indices):
                    if not await self._sample(indices):
                        return
                case Drop(index, number, best):
                    self._drop(index, number, best)
                case Leave(reasons):
                    await self._leave_out(reasons)
                case Compute(work):
                    with self._state.budget.running():
                        found = await run_in_thread("planning a tune", work, grace_s=self._state.request.grace_s)
                case _:
                    assert_never(step)
            idle_steps, before = (idle_steps + 1, before) if before == (now := self._progress()) else (0, now)
            if idle_steps >= _MAX_IDLE_STEPS:
                raise InvalidRequestError(f"the strategy goes in circles: {idle_steps} steps changed nothing")
            if idle_steps:
                # Let other tasks run. Not after a step with an effect: the tune would give up its device to the next in
                # line, and then many cold keys would all be answered late, instead of one by one.
                await anyio.lowlevel.checkpoint()

    def _progress(self) -> tuple[object, ...]:
        """Return a value that changes with every step that has an effect, except `Compute`."""
        board = self._board
        return board.cost_s, len(board.untried), len(board.compiling), len(board.dropped), len(board.failed)

    async def _leave_out(self, reasons: Mapping[int, str]) -> None:
        for number, (index, reason) in enumerate(reasons.items(), 1):
            if index in self._board.untried:
                self._state.leave_out(index, reason)
            if number % _AT_ONCE == 0:
                await anyio.lowlevel.checkpoint()

    async def _sample(self, indices: tuple[int, ...]) -> bool:
        state = self._state
        if self._check is not None:
            if state.request.incumbent in state.uncompilable:  # all others are compared with its outputs
                await try_uncompilable(state, [state.request.incumbent])
            await check_outputs(self._check, state)
        return await take_round(state, self._board, indices)

    def _drop(self, index: int, number: int, best: int | None) -> None:
        self._board.drop(index, number, best)
        self._state.emit(CandidateEliminated, index, self._state.runners[index].started, round=number)
