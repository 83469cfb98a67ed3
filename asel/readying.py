"""What becomes of candidates before they are sampled: compiled, equal programs once; tried, if need be; checked."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import anyio
from anyio import CapacityLimiter

from asel.checks import Check
from asel.events import CandidateStart
from asel.jobs import Runner, TuneJob, Unproven
from asel.lanes import LaneStuck, compile_slots, lowering
from asel.measure import Measure, lower
from asel.steps import STUCK, at_work, lanes, outcome_of_failing, step, turn
from asel.threads import Busy, run_in_thread
from asel.traffic import loop_traffic

__all__ = ["check_all", "compile_all", "prove_all"]

# Compiling may take so much of what is left of a budget: what is compiled and never measured was for nothing.
_COMPILING = 0.75
# How often the loop wakes at the end of a lowering: it may have to ask again and again for the interpreter, which a
# thread that lowers has.
_WAKES_LOWERING = 6


async def compile_all(measure: Measure, job: TuneJob[Any], group: Sequence[int]) -> None:
    begun = (job.outcomes, job.runners, job.aliases, job.unproven)
    waiting = deque(index for index in group if not any(index in those for those in begun))
    until_s = job.spent_s + _COMPILING * (job.tune_budget_s - job.spent_s)
    can_lower_ahead = hasattr(measure, "lower") and not hasattr(measure, "turn")  # a worker does one thing at a time

    def is_late(index: int) -> bool:
        """Note that there is no time left for a candidate: one is tried, whatever it took to begin."""
        late = job.spent_s >= until_s and any(other != index for other, _ in job.steps)
        if late:
            job.skip(index, f"the tune's budget of {job.tune_budget_s:g} s left no time to compile it")
        return late

    async def work() -> None:
        while waiting:
            ahead = can_lower_ahead and loop_traffic().is_quiet
            async with nullcontext() if ahead else compile_slots():
                if waiting and not is_late(index := waiting.popleft()):
                    await _compile(measure, job, index, compile_slots() if ahead else None, is_late)

    # There may be one more than can be compiled at once: it is lowered meanwhile.
    workers = int(compile_slots().total_tokens) + can_lower_ahead
    async with anyio.create_task_group() as tasks:
        for _ in range(min(workers, len(waiting))):
            tasks.start_soon(work)


async def _compile(
    measure: Measure, job: TuneJob[Any], index: int, slots: CapacityLimiter | None, is_late: Callable[[int], bool]
) -> None:
    """Make a candidate ready to be sampled; or note that it is another's alias, or why it failed.

    With `slots` it is lowered ahead of its turn to be compiled.
    """
    start, trial = anyio.current_time(), job.trial(index)
    job.tell(CandidateStart, index, start)
    with outcome_of_failing(job, index, start, trial):
        async with turn(measure, job) as desk:
            # The lock first and the clock after it: a neighbour that hangs costs nobody else's time.
            async with lowering():
                with step(job, index, "compile") as lowering_s:
                    lowered = await lower(desk, trial)
            loop_traffic().woken_by_us(_WAKES_LOWERING)
            first = job.programs.setdefault(lowered.fingerprint or str(index), index)
            if first != index:
                job.alias(index, first, start)
                job.out.append(lowered)
            elif lowered.runs:
                job.unproven[index] = Unproven(trial, lowered, start, lowering_s())
            else:
                async with slots or nullcontext():
                    if slots is not None and is_late(index):
                        job.out.append(lowered)
                        return
                    with step(job, index, "compile", lowering_s()) as compiling_s, loop_traffic().watched():
                        sampler = await lowered.compile()
                job.runners[index] = Runner(trial, sampler, start, lowering_s() + compiling_s())


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
