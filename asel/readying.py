"""What becomes of candidates before they are sampled: compiled, equal programs once; tried, if need be; checked."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from typing import Any

import anyio

from asel.checks import Check
from asel.events import CandidateStart
from asel.jobs import Runner, TuneJob, Unproven
from asel.lanes import LaneStuck, compile_slots, lowering
from asel.measure import Lowered, Measure, lower
from asel.outcomes import Failed
from asel.steps import STUCK, at_work, lanes, outcome_of_failing, step, turn
from asel.threads import Busy, run_in_thread
from asel.traffic import loop_traffic

__all__ = ["check_all", "compile_all", "prove_all"]

# Compiling may take so much of what is left of a budget: what is compiled and never measured was for nothing.
_COMPILING = 0.75


async def compile_all(measure: Measure, job: TuneJob[Any], group: Sequence[int]) -> None:
    begun = (job.outcomes, job.runners, job.aliases, job.unproven)
    await _Compiling(measure, job, [index for index in group if not any(index in those for those in begun)]).run()


class _Compiling:
    """Makes the candidates of a group ready to be sampled, one after the other in each of its slots.

    While nobody else uses the loop, the next is lowered meanwhile: a thread that lowers has the interpreter.
    """

    def __init__(self, measure: Measure, job: TuneJob[Any], indices: Iterable[int]) -> None:
        self._measure, self._job = measure, job
        self._waiting = deque(indices)
        self._lowered: dict[int, None] = {}  # those that are compiled, or wait for it, in the order they were lowered
        self._until_s = job.spent_s + _COMPILING * (job.tune_budget_s - job.spent_s)
        # One that takes turns does one thing at a time, as a worker process does.
        self._can_lower_ahead = hasattr(measure, "lower") and not hasattr(measure, "turn")

    async def run(self) -> None:
        workers = int(compile_slots().total_tokens) + self._can_lower_ahead
        async with anyio.create_task_group() as tasks:
            for _ in range(min(workers, len(self._waiting))):
                tasks.start_soon(self._work)

    async def _work(self) -> None:
        while self._waiting:
            index = self._waiting.popleft()
            ahead = self._can_lower_ahead and loop_traffic().is_quiet
            async with nullcontext() if ahead else compile_slots():
                start = anyio.current_time()
                if not self._skipped_as_late(index, start):
                    await self._make_ready(index, start, ahead)

    def _skipped_as_late(self, index: int, start: float) -> bool:
        """Skip a candidate for which there is no time left. One is tried, whatever it took to begin."""
        job = self._job
        failed = any(isinstance(outcome, Failed) for outcome in job.outcomes.values())
        is_first = index == next(iter(self._lowered), index)
        late = job.spent_s >= self._until_s and bool(job.runners or job.unproven or failed or not is_first)
        if late:
            job.skip(index, f"the tune's budget of {job.tune_budget_s:g} s left no time to compile it", start)
        return late

    async def _make_ready(self, index: int, start: float, ahead: bool) -> None:
        """Have a candidate compiled; or note that it is another's alias, or why it failed."""
        job, trial = self._job, self._job.trial(index)
        job.tell(CandidateStart, index, start)
        with outcome_of_failing(job, index, start, trial):
            async with turn(self._measure, job) as desk:
                # The lock first and the clock after it: a neighbour that hangs costs nobody else's time.
                async with lowering():
                    with step(job, index, "compile") as lowering_s, loop_traffic().expected():
                        lowered = await lower(desk, trial)
                program = lowered.fingerprint or str(index)
                first = job.programs.setdefault(program, index)
                one = Unproven(trial, lowered, start, lowering_s())
                if first != index:
                    job.alias(index, first, start)
                    job.out.append(lowered)
                elif lowered.runs:
                    job.unproven[index] = one
                elif not await self._compile(index, one, ahead):
                    del job.programs[program]  # whose equals may still be tried, in another group

    async def _compile(self, index: int, one: Unproven, ahead: bool) -> bool:
        """Compile a candidate in its turn; False if that came too late."""
        self._lowered[index] = None
        try:
            async with self._slot(one.lowered) if ahead else nullcontext():
                if ahead and self._skipped_as_late(index, one.started):
                    self._job.out.append(one.lowered)
                    return False
                with step(self._job, index, "compile", one.lowering_s) as compiling_s, loop_traffic().watched():
                    sampler = await one.lowered.compile()
            self._job.runners[index] = Runner(one.trial, sampler, one.started, one.lowering_s + compiling_s())
            return True
        finally:
            del self._lowered[index]

    @asynccontextmanager
    async def _slot(self, lowered: Lowered) -> AsyncIterator[None]:
        """Wait for the turn of a program that was lowered ahead of it."""
        try:
            await compile_slots().acquire()
        except BaseException:  # cancelled: whoever takes the job up lowers it again
            self._job.out.append(lowered)
            raise
        try:
            yield
        finally:
            compile_slots().release()


async def prove_all(job: TuneJob[Any], indices: Iterable[int]) -> None:
    """See whether these run, which cannot be compiled."""
    for index in sorted(indices, key=lambda i: i != job.incumbent):
        one = job.unproven.pop(index)
        if job.is_broke and job.runners:
            job.skip(index, f"the tune's budget of {job.tune_budget_s:g} s was spent")
            job.out.append(one.lowered)
            continue
        with outcome_of_failing(job, index, one.started, one.trial):
            try:
                async with lanes(job, one.trial.left_behind):
                    with step(job, index, "compile", one.lowering_s) as proving_s:
                        sampler = await one.lowered.compile()
                job.runners[index] = Runner(one.trial, sampler, one.started, one.lowering_s + proving_s())
            except LaneStuck:
                job.skip(index, STUCK)
                job.out.append(one.lowered)


async def check_all(check: Check, job: TuneJob[Any], group: Sequence[int]) -> None:
    """Compare outputs with those of the incumbent, or else of the first candidate that runs."""
    unchecked = [i for i in group if i in job.runners and i not in job.checked]
    for index in sorted(unchecked, key=lambda i: i != job.incumbent):
        runner = job.runners[index]
        if job.is_broke and job.expected is not None:
            job.skip(index, f"the tune's budget of {job.tune_budget_s:g} s was spent before it was checked")
            job.let_out(index)
            continue
        comparing: list[Busy] = []
        try:
            async with at_work(job, index):
                with step(job, index, "check"):
                    outputs = await runner.outputs()
            with step(job, index, "check"):  # which is the host's business, and may take as long
                compare = partial(job.compare, outputs, check)
                what = f"comparing the outputs of {job.candidates[index]!r}"
                await run_in_thread(what, compare, grace_s=job.grace_s, left_behind=comparing)
            job.checked.add(index)
        except LaneStuck:
            job.skip(index, f"{STUCK}, so it was not checked")
            job.let_out(index)
        except (Exception, SystemExit) as error:  # one failing candidate is data, never the end of a tune
            job.fail(index, runner.started, "check", error, [*runner.trial.left_behind, *comparing])
            job.let_out(index)
        finally:
            job.note_left_behind([*runner.trial.left_behind, *comparing])
