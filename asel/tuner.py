"""Finds the fastest of some candidates, within a budget.

All are compiled, the incumbent first, equal programs once; then they are sampled in turns, alone on
their device, as the strategy plans it. One that fails or takes too long is an outcome like any other.
"""

from __future__ import annotations

import math
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal

import anyio

from asel.devices import Settings, current_settings, default_device, environment
from asel.errors import InvalidRequestError, TuningError
from asel.events import (
    CandidateEliminated,
    CandidateFailed,
    CandidateMeasured,
    CandidateSkipped,
    CandidateStart,
    Event,
)
from asel.kernel import Cfg, Invocation
from asel.keys import CacheKey, Objective
from asel.lanes import LaneStuck, compile_slots, lane_for
from asel.measure import How, Measure, Sampler, Trial, lower
from asel.outcomes import Failed, Measured, Outcome, Skipped, Stage, TuneReport
from asel.signatures import whereabouts
from asel.strategies import Board, Drop, Exhaustive, Race, Strategy
from asel.threads import Busy, run_in_thread

__all__ = ["TuneJob", "Tuner"]

_NO_KEY = CacheKey("", "", "")
_BEST_TO_WORST: tuple[How, ...] = ("forward+backward", "forward", "eager")


@dataclass(slots=True)
class TuneJob(Generic[Cfg]):
    """One tune: what to try, its limits, and what it has found so far.

    A tuner that is called again with the same job goes on from there.
    """

    candidates: tuple[Cfg, ...]
    make_fn: Callable[[Cfg], Callable[..., Any]]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    key: CacheKey = _NO_KEY
    checksum: str = ""
    objective: Objective = "forward"
    incumbent: int | None = None
    groups: tuple[tuple[int, int], ...] | None = None
    """Each candidate's group and priority in it; None: one group, in declared order."""
    device: Any = None
    settings: Settings | None = None
    tune_budget_s: float = 60.0
    candidate_timeout_s: float = 30.0
    grace_s: Callable[[], float] = lambda: 0.0
    emit: Callable[[Event], None] = lambda event: None
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:16])

    outcomes: dict[int, Outcome[Cfg]] = field(default_factory=dict)
    """What is settled: failures and skips as they happen, measurements at the end."""
    runners: dict[int, Runner] = field(default_factory=dict)
    """The candidates that are compiled and can be sampled."""
    aliases: dict[int, int] = field(default_factory=dict)
    """The candidates whose program is another's."""
    board: Board | None = None
    spent_s: float = 0.0
    """Compiling and measuring; waiting for one's turn is free."""
    seconds: float = 0.0
    report: TuneReport[Cfg] | None = None
    left_behind: list[Busy] = field(default_factory=list)

    def tell(self, kind: type[Event], index: int, start: float, **facts: Any) -> None:
        """Emit an event about a candidate."""
        now = anyio.current_time()
        about = {"tune_id": self.id, "index": index, "cfg": self.candidates[index]}
        self.emit(kind(key=self.key, start=start, end=now, **about, **facts))

    def skip(self, index: int, reason: str) -> None:
        self.tell(CandidateSkipped, index, anyio.current_time(), reason=reason)
        self.outcomes[index] = Skipped(self.candidates[index], reason)

    def fail(self, index: int, start: float, stage: Stage, error: Exception, left_behind: list[Busy]) -> None:
        busy = any(thread.alive for thread in left_behind)
        message = str(error)
        if isinstance(error, TimeoutError) and not message:
            message = f"took longer than {self.candidate_timeout_s:g} s" + (
                "; its thread is still busy" if busy else ""
            )
        failed = Failed(self.candidates[index], stage, type(error).__name__, message, error)
        facts = {"stage": stage, "error_type": failed.error_type, "message": message, "still_busy": busy}
        self.tell(CandidateFailed, index, start, **facts)
        self.outcomes[index] = failed

    @property
    def is_broke(self) -> bool:
        return self.spent_s >= self.tune_budget_s


@dataclass(slots=True)
class Runner:
    """A compiled candidate."""

    trial: Trial[Any]
    sampler: Sampler
    started: float
    compile_s: float

    @property
    def how(self) -> How:
        how: How = getattr(self.sampler, "how", None) or self.trial.objective
        return how

    def release(self) -> None:
        """Let go of the executable; its timings are on the board."""
        if (release := getattr(self.sampler, "release", None)) is not None:
            release()


class Tuner(Generic[Cfg]):
    """Times candidates with a `Measure`, by default JAX's.

    `iters` is the least number of samples a finalist gets, `warmup` those that are thrown away
    first. `strategy` is `"race"`, `"exhaustive"` or an object with a `plan` method.
    """

    def __init__(
        self,
        warmup: int = 1,
        iters: int = 3,
        *,
        measure: Measure | None = None,
        strategy: Literal["race", "exhaustive"] | Strategy = "race",
        seed: int = 0,
    ) -> None:
        if warmup < 0 or iters < 1:
            raise InvalidRequestError(f"Tuner: warmup={warmup} must be 0 or more and iters={iters} 1 or more")
        self.warmup, self.iters = warmup, iters
        self._measure = measure
        self._strategy: Strategy = _as_strategy(strategy, iters, seed)

    async def measure(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> float:
        """Return the median seconds one call of `fn` takes, compiled.

        Raises:
            TuningError: it could not be measured.
        """
        job = await _job_alone(lambda cfg: fn, args, kwargs, (None,))
        try:
            report = await self.tune(job)
        except TuningError as error:
            (outcome,) = error.outcomes
            why = _sentence(outcome) if isinstance(outcome, Failed) else getattr(outcome, "reason", "")
            cause = outcome.error if isinstance(outcome, Failed) else None
            raise TuningError(f"could not measure {fn!r}: {why}", outcomes=error.outcomes) from cause
        assert report.best is not None
        return report.best.median_s

    async def autotune(
        self,
        make_fn: Callable[[Cfg], Callable[..., Any]],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        candidates: Iterable[Cfg],
    ) -> Cfg:
        """Return the candidate whose `make_fn(cfg)(*args, **kwargs)` is fastest.

        Raises:
            RuntimeError: there are no candidates.
            TuningError: none of them could be measured.
        """
        job: TuneJob[Cfg] = await _job_alone(make_fn, tuple(args), kwargs, tuple(candidates))
        return (await self.tune(job)).winner

    async def tune(self, job: TuneJob[Cfg]) -> TuneReport[Cfg]:
        """Try every candidate the budget allows and report.

        Raises:
            TuningError: none of them could be measured.
        """
        if not job.candidates:
            raise TuningError("there are no candidates to tune among", key=job.key)
        if job.report is not None:
            return job.report
        start = anyio.current_time()
        try:
            for group in _groups(job):
                await self._compile_all(job, group)
                await self._sample_all(job, group)
                if any(index in job.runners for index in group if index != job.incumbent or len(job.candidates) == 1):
                    break  # a success ends it; the groups below are not tried
        finally:
            job.seconds += anyio.current_time() - start
        job.report = _report(job)
        return job.report

    # Compiling.

    async def _compile_all(self, job: TuneJob[Cfg], group: Sequence[int]) -> None:
        waiting = deque(i for i in group if i not in job.outcomes and i not in job.runners and i not in job.aliases)
        programs: dict[str, int] = {}
        lowering = anyio.Lock()

        async def work() -> None:
            while waiting:
                index = waiting.popleft()
                if job.is_broke:
                    job.skip(index, f"the tune's budget of {job.tune_budget_s:g} s was spent")
                else:
                    await self._compile(job, index, programs, lowering)

        async with anyio.create_task_group() as tasks:
            for _ in range(min(int(compile_slots().total_tokens), len(waiting))):
                tasks.start_soon(work)

    async def _compile(self, job: TuneJob[Cfg], index: int, programs: dict[str, int], lowering: anyio.Lock) -> None:
        """Make a candidate ready to be sampled; or note that it is another's alias, or why it failed."""
        cfg, start, stage = job.candidates[index], anyio.current_time(), "build"
        trial: Trial[Cfg] | None = None
        job.tell(CandidateStart, index, start)
        try:
            fn = job.make_fn(cfg)
            trial = Trial(cfg, fn, job.args, job.kwargs, job.device, job.objective, job.settings, job.grace_s)
            stage = "compile"
            async with compile_slots():
                begun = anyio.current_time()
                try:
                    with anyio.fail_after(job.candidate_timeout_s):
                        async with lowering:
                            lowered = await lower(self._get_measure(), trial)
                        first = programs.setdefault(lowered.fingerprint or str(index), index)
                        if first != index:
                            job.aliases[index] = first
                            return
                        sampler = await lowered.compile()
                finally:
                    taken = anyio.current_time() - begun
                    job.spent_s += taken
        except Exception as error:  # one failing candidate is data, never the end of a tune
            job.fail(index, start, stage, error, trial.left_behind if trial else [])  # type: ignore[arg-type]
        else:
            job.runners[index] = Runner(trial, sampler, start, taken)
        finally:
            job.left_behind += trial.left_behind if trial else []

    # Sampling.

    async def _sample_all(self, job: TuneJob[Cfg], group: Sequence[int]) -> None:
        ready = [index for index in group if index in job.runners]
        if job.board is None:
            job.board = Board(list(ready), job.incumbent, self.warmup)
        board = job.board
        board.candidates += [index for index in ready if index not in board.candidates]
        untried = f"the tune's budget of {job.tune_budget_s:g} s was spent"
        try:
            for step in self._strategy.plan(board):
                if isinstance(step, Drop):
                    board.dropped[step.index] = step.round
                    job.tell(CandidateEliminated, step.index, job.runners[step.index].started, round=step.round)
                    job.runners[step.index].release()
                elif job.is_broke and board.measured:
                    break
                else:
                    await self._sample(job, board, step.index)
        except LaneStuck:
            untried = "an abandoned candidate still occupies the device"
        for index in ready:
            if index in job.runners and not board.samples.get(index):
                if index in board.candidates:
                    board.remove(index)
                del job.runners[index]
                job.skip(index, untried)

    async def _sample(self, job: TuneJob[Cfg], board: Board, index: int) -> None:
        runner = job.runners[index]
        try:
            async with lane_for(job.device).held(runner.trial.left_behind):
                start = anyio.current_time()
                try:
                    with anyio.fail_after(job.candidate_timeout_s):
                        board.record(index, _checked(await runner.sampler()))
                finally:
                    job.spent_s += anyio.current_time() - start
        except LaneStuck:
            raise
        except Exception as error:  # one failing candidate is data, never the end of a tune
            board.remove(index)
            del job.runners[index]
            job.fail(index, runner.started, "measure", error, runner.trial.left_behind)
        finally:
            job.left_behind += [thread for thread in runner.trial.left_behind if thread not in job.left_behind]

    def _get_measure(self) -> Measure:
        if self._measure is None:
            from asel.benchmark import JaxMeasure  # JAX is imported when it is first needed

            self._measure = JaxMeasure()
        return self._measure


def _as_strategy(strategy: Any, iters: int, seed: int) -> Strategy:
    if strategy == "race":
        return Race(iters, seed=seed)
    if strategy == "exhaustive":
        return Exhaustive(iters)
    if callable(getattr(strategy, "plan", None)):
        return strategy  # type: ignore[no-any-return]
    raise InvalidRequestError(f"Tuner: strategy={strategy!r} is neither 'race', 'exhaustive' nor an object with a plan")


async def _job_alone(
    make_fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], candidates: tuple[Any, ...]
) -> TuneJob[Any]:
    """Return a job that belongs to no chain: on its arguments' device, with its caller's settings."""
    settings = current_settings()
    device, _ = whereabouts(Invocation("", args, kwargs))
    if device is None:
        device = settings.default_device or await run_in_thread("finding the device", default_device)
    return TuneJob(candidates, make_fn, args, dict(kwargs), device=device, settings=settings)


def _checked(seconds: float) -> float:
    if not 0 <= seconds < math.inf:
        raise ValueError(f"the measure returned {seconds!r}, which is not a duration")
    return float(seconds)


def _groups(job: TuneJob[Any]) -> list[list[int]]:
    """Return the candidates' indices, group by group, highest first; the incumbent goes before all."""
    ranks = job.groups or ((0, 0),) * len(job.candidates)
    wanted = [i for i, (group, priority) in enumerate(ranks) if (group >= 0 and priority >= 0) or i == job.incumbent]
    for index in range(len(job.candidates)):
        if index not in wanted and index not in job.outcomes:
            job.skip(index, "the kernel gives it a negative priority")
    levels = sorted({ranks[i][0] for i in wanted if i != job.incumbent}, reverse=True) or [0]
    groups = [[i for i in wanted if ranks[i][0] == level and i != job.incumbent] for level in levels]
    groups = [sorted(group, key=lambda i: -ranks[i][1]) for group in groups]
    if job.incumbent is not None:
        groups[0].insert(0, job.incumbent)
    return groups


def _sentence(failed: Failed[Any]) -> str:
    return f"{failed.error_type} in the {failed.stage} stage: {failed.message}"


def _report(job: TuneJob[Cfg]) -> TuneReport[Cfg]:
    """Settle every candidate's outcome and name the winner."""
    board = job.board
    comparable = _comparable(job)
    for index, runner in job.runners.items():
        runner.release()
        if index not in job.outcomes:
            assert board is not None
            samples = tuple(board.samples[index])
            job.outcomes[index] = Measured(
                job.candidates[index],
                board.median(index),
                samples,
                runner.compile_s,
                how=runner.how,
                eliminated=board.dropped.get(index),
            )
            facts = {"median_s": board.median(index), "compile_s": runner.compile_s, "samples": len(samples)}
            job.tell(CandidateMeasured, index, runner.started, **facts)
    for index, first in job.aliases.items():
        _settle_alias(job, index, first)
    for index in range(len(job.candidates)):
        if index not in job.outcomes:
            job.skip(index, "a group of higher priority had a success")
    outcomes = tuple(job.outcomes[i] for i in range(len(job.candidates)))
    if board is None or not comparable:
        raise _all_failed(job, outcomes)
    # A report is kept for long; an exception would keep all that its traceback refers to.
    outcomes = tuple(replace(o, error=None) if isinstance(o, Failed) else o for o in outcomes)
    board.candidates = comparable
    winner, leader = board.winner(), board.leader()
    incumbent = job.incumbent if job.incumbent in comparable else None
    return TuneReport(
        key=job.key,
        winner=job.candidates[winner],
        outcomes=outcomes,
        seconds=job.seconds,
        environment=environment(job.device),
        tune_id=job.id,
        checksum=job.checksum,
        objective=job.objective,
        incumbent=None if job.incumbent is None else job.candidates[job.incumbent],
        noise=board.noise(leader, winner),
        margin=0.0 if incumbent is None else 1 - board.median(winner) / (board.median(incumbent) or 1.0),
        tune_budget_s=job.tune_budget_s,
        candidate_timeout_s=job.candidate_timeout_s,
    )


def _comparable(job: TuneJob[Any]) -> list[int]:
    """Return the measured candidates that were timed in the best way any was: only they may win."""
    measured = [] if job.board is None else [i for i in job.board.measured if i in job.runners]
    ways = {job.runners[i].how for i in measured}
    best = next((how for how in _BEST_TO_WORST if how in ways), None)
    return [i for i in measured if job.runners[i].how == best]


def _settle_alias(job: TuneJob[Cfg], index: int, first: int) -> None:
    """Give a candidate the outcome of the one whose program it has."""
    if index in job.outcomes:
        return
    cfg, original = job.candidates[index], job.outcomes.get(first)
    if isinstance(original, Measured):
        job.outcomes[index] = Measured(
            cfg, original.median_s, original.samples_s, 0.0, how=original.how, alias_of=original.cfg
        )
    elif isinstance(original, Failed):
        job.outcomes[index] = Failed(cfg, original.stage, original.error_type, original.message, original.error)
    else:
        job.skip(index, f"its program is that of {job.candidates[first]!r}, which was not measured")


def _all_failed(job: TuneJob[Any], outcomes: Sequence[Outcome[Any]]) -> TuningError:
    failed = [outcome for outcome in outcomes if isinstance(outcome, Failed)]
    causes = [outcome.error for outcome in failed if outcome.error is not None]
    first = f" The first: {_sentence(failed[0])}." if failed else ""
    op = job.key.op_id or "the function"
    error = TuningError(
        f"none of the {len(outcomes)} candidates of {op!r} could be measured: {len(failed)} failed, "
        f"{len(outcomes) - len(failed)} were skipped.{first}",
        key=job.key,
        outcomes=outcomes,
    )
    error.__cause__ = ExceptionGroup("what the candidates raised", causes) if causes else None
    return error
