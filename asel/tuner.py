"""Finds the fastest of some candidates, within a budget.

All are compiled, the incumbent first, equal programs once; then they are sampled in turns, alone on
their device, as the strategy plans it. One that fails or takes too long is an outcome like any other.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from functools import partial
from typing import Any, Generic, Literal, Self

import anyio

from asel.board import Board
from asel.checks import OutputCheck, as_check
from asel.devices import current_settings, default_device, with_settings
from asel.encoding import whereabouts
from asel.errors import InvalidRequestError, TuningError
from asel.events import CandidateEliminated, CandidateStart
from asel.jobs import Runner, TuneJob, Unproven, by_way, groups_of
from asel.kernel import Cfg, Invocation
from asel.lanes import LaneStuck, alone_on, compile_slots, lowering
from asel.measure import Measure, Trial, lower
from asel.outcomes import Failed, Stage, TuneReport
from asel.processes import ProcessMeasure
from asel.reporting import report_on, sentence
from asel.strategies import Drop, Exhaustive, Race, Sample, Step, Strategy
from asel.threads import Busy, leave_to_thread, run_in_thread

__all__ = ["Tuner"]

logger = logging.getLogger("asel")

_STUCK = "an abandoned candidate still occupies the device"
# Compiling may take so much of what is left of a budget: what is compiled and never measured was for nothing.
_COMPILING = 0.75


class Tuner(Generic[Cfg]):
    """Times candidates with a `Measure`, by default JAX's.

    `iters` is the least number of samples a finalist gets, `warmup` those that are thrown away first;
    with none, the first run counts, which is cold. `strategy` is `"race"`, `"exhaustive"` or an object
    with a `plan` method. With `check`, a candidate whose outputs differ from the incumbent's cannot
    win: True, an `OutputCheck`, or a function of both outputs. With `isolation="process"`, candidates
    run in worker processes that are killed when one hangs or dies; they are kept while a chain that
    uses the tuner is open, or the tuner itself is, with `async with`.
    """

    def __init__(
        self,
        warmup: int = 1,
        iters: int = 3,
        *,
        measure: Measure | None = None,
        strategy: Literal["race", "exhaustive"] | Strategy = "race",
        seed: int = 0,
        check: bool | OutputCheck | Callable[..., Any] | None = None,
        isolation: Literal["thread", "process"] = "thread",
    ) -> None:
        if isolation not in ("thread", "process"):
            raise InvalidRequestError(f"Tuner: isolation={isolation!r} is neither 'thread' nor 'process'")
        if warmup < 0 or iters < 1:
            raise InvalidRequestError(f"Tuner: warmup={warmup} must be 0 or more and iters={iters} 1 or more")
        self.warmup, self.iters = warmup, iters
        self._measure: Measure | None = ProcessMeasure() if measure is None and isolation == "process" else measure
        self._users = 0
        self._strategy: Strategy = _as_strategy(strategy, iters, seed)
        self._check = as_check(check)

    async def __aenter__(self) -> Self:
        self._users += 1
        return self

    async def __aexit__(self, *error: object) -> None:
        self._users -= 1
        await self._end_workers()

    async def _end_workers(self) -> None:
        if self._users == 0 and (close := getattr(self._measure, "aclose", None)) is not None:
            with anyio.CancelScope(shield=True):
                await close()

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
            why = sentence(outcome) if isinstance(outcome, Failed) else getattr(outcome, "reason", "")
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
        self._users += 1  # the workers are ours until we are done, whoever else is
        try:
            if self._check is not None:
                job.known = {}  # nobody knows what they computed
            if job.example is not None:
                make = partial(with_settings, job.settings, job.example)
                with _timed(job):
                    job.args, job.kwargs = await run_in_thread(
                        "making example inputs", make, grace_s=job.grace_s, left_behind=job.left_behind
                    )
                job.example = None
            await self._try_groups(job)
            if job.yardstick_is_lost:
                job.known = {}  # so all are new
                await self._try_groups(job)
        finally:
            job.seconds += anyio.current_time() - start
            self._users -= 1
            await self._end_workers()
        try:
            job.report = report_on(job)
        finally:
            job.out += [runner.sampler for runner in job.runners.values()]
            job.runners = {}
            job.shared.clear()
            _let_go(job)
        return job.report

    async def _try_groups(self, job: TuneJob[Cfg]) -> None:
        for group in groups_of(job):
            await self._compile_all(job, group)
            await self._check_all(job, group)
            await self._sample_all(job, group)
            if job.unproven:
                await self._prove_all(job)
                await self._check_all(job, group)
                await self._sample_all(job, group)
            _let_go(job)  # before the next group is compiled
            if any(job.runs(index) for index in group if index != job.incumbent or len(job.candidates) == 1):
                break  # a success ends it; the groups below are not tried

    # Compiling.

    async def _compile_all(self, job: TuneJob[Cfg], group: Sequence[int]) -> None:
        begun = (job.outcomes, job.runners, job.aliases, job.unproven)
        waiting = deque(index for index in group if not any(index in those for those in begun))
        until_s = job.spent_s + _COMPILING * (job.tune_budget_s - job.spent_s)

        async def work() -> None:
            while waiting:
                index = waiting.popleft()
                if job.spent_s >= until_s and job.steps:  # one is tried, whatever it took to begin
                    job.skip(index, f"the tune's budget of {job.tune_budget_s:g} s left no time to compile it")
                else:
                    await self._compile(job, index)

        async with anyio.create_task_group() as tasks:
            for _ in range(min(int(compile_slots().total_tokens), len(waiting))):
                tasks.start_soon(work)

    async def _compile(self, job: TuneJob[Cfg], index: int) -> None:
        """Make a candidate ready to be sampled; or note that it is another's alias, or why it failed."""
        start, trial = anyio.current_time(), job.trial(index)
        job.tell(CandidateStart, index, start)
        with _outcome_of_failing(job, index, start, trial):
            async with compile_slots(), _turn(self._get_measure(), job) as measure:
                # The lock first and the clock after it: a neighbour that hangs costs nobody else's time.
                async with lowering():
                    with _step(job, index, "compile") as lowering_s:
                        lowered = await lower(measure, trial)
                first = job.programs.setdefault(lowered.fingerprint or str(index), index)
                if first != index:
                    job.alias(index, first, start)
                    job.out.append(lowered)
                elif lowered.runs:
                    job.unproven[index] = Unproven(trial, lowered, start, lowering_s())
                else:
                    with _step(job, index, "compile", lowering_s()) as compiling_s:
                        sampler = await lowered.compile()
                    job.runners[index] = Runner(trial, sampler, start, lowering_s() + compiling_s())

    async def _prove_all(self, job: TuneJob[Cfg]) -> None:
        """See whether those run that cannot be compiled: after all others, since one that hangs keeps the device."""
        for index in sorted(job.unproven, key=lambda i: i != job.incumbent):
            one = job.unproven.pop(index)
            if job.is_broke and job.board is not None and job.board.measured:
                job.skip(index, f"the tune's budget of {job.tune_budget_s:g} s was spent")
                job.out.append(one.lowered)
                continue
            with _outcome_of_failing(job, index, one.started, one.trial):
                try:
                    async with self._lanes(job, one.trial):
                        with _step(job, index, "compile", one.lowering_s) as proving_s:
                            sampler = await one.lowered.compile()
                    job.runners[index] = Runner(one.trial, sampler, one.started, one.lowering_s + proving_s())
                except LaneStuck:
                    job.skip(index, _STUCK)
                    job.out.append(one.lowered)

    # Checking.

    async def _check_all(self, job: TuneJob[Cfg], group: Sequence[int]) -> None:
        """Compare outputs with those of the incumbent, or else of the first candidate that runs."""
        if self._check is None:
            return
        unchecked = [i for i in group if i in job.runners and i not in job.checked]
        for index in sorted(unchecked, key=lambda i: i != job.incumbent):
            runner = job.runners[index]
            if job.is_broke and job.expected is not None:
                job.skip(index, f"the tune's budget of {job.tune_budget_s:g} s was spent before it was checked")
                job.let_out(index)
                continue
            comparing: list[Busy] = []
            try:
                async with self._at_work(job, index):
                    with _step(job, index, "check"):
                        outputs = await runner.outputs()
                with _step(job, index, "check"):  # which is the host's business, and may take as long
                    compare = partial(job.compare, outputs, self._check)
                    what = f"comparing the outputs of {job.candidates[index]!r}"
                    await run_in_thread(what, compare, grace_s=job.grace_s, left_behind=comparing)
                job.checked.add(index)
            except LaneStuck:
                job.skip(index, f"{_STUCK}, so it was not checked")
                job.let_out(index)
            except (Exception, SystemExit) as error:  # one failing candidate is data, never the end of a tune
                job.fail(index, runner.started, "check", error, [*runner.trial.left_behind, *comparing])
                job.let_out(index)
            finally:
                job.note_left_behind([*runner.trial.left_behind, *comparing])

    # Sampling.

    async def _sample_all(self, job: TuneJob[Cfg], group: Sequence[int]) -> None:
        """Race those that are timed in the best way any is; of the others only the time is taken.

        Where all of the best way fail, the next best race.
        """
        ready = [index for index in group if index in job.runners]
        if job.board is None:
            job.board = Board([], job.incumbent, self.warmup)
        board, untried = job.board, f"the tune's budget of {job.tune_budget_s:g} s was spent"
        earlier = [index for index in board.candidates if index in job.runners and index not in ready]
        measured = False
        try:
            for way in by_way(job, [*earlier, *ready]):
                if measured:
                    await self._follow(job, board, _glance(job, board, way))
                else:
                    board.enter(way)
                    await self._follow(job, board, self._strategy.plan(board))
                    board.make_do()  # a warm-up in this way tells more than a sample in the next
                    measured = bool(board.measured)
        except LaneStuck:
            untried = _STUCK
        board.make_do()
        unsampled = [index for index in ready if index in job.runners and not board.samples.get(index)]
        for index in unsampled:
            board.remove(index)
            job.skip(index, untried)
            job.let_out(index)

    async def _follow(self, job: TuneJob[Cfg], board: Board, plan: Iterator[Step]) -> None:
        first = None
        for step in plan:
            if first is None or first not in job.runners:  # the one before has failed
                first = step.index
            if isinstance(step, Drop):
                board.drop(step.index, step.round, step.best)
                job.tell(CandidateEliminated, step.index, job.runners[step.index].started, round=step.round)
            elif job.is_broke and (board.measured or board.warmups.get(first) or step.index != first):
                break  # the best so far wins; until there is one, the first that runs has one run
            else:
                await self._sample(job, board, step.index)

    async def _sample(self, job: TuneJob[Cfg], board: Board, index: int) -> None:
        runner = job.runners[index]
        try:
            async with self._at_work(job, index):
                with _step(job, index, "measure") as taken_s:
                    seconds = _checked(await runner.sampler())
                runner.measure_s += taken_s()
                board.record(index, seconds, taken_s())
        except LaneStuck:
            raise
        except (Exception, SystemExit) as error:  # one failing candidate is data, never the end of a tune
            board.remove(index)
            job.fail(index, runner.started, "measure", error, runner.trial.left_behind)
            job.let_out(index)
        finally:
            job.note_left_behind(runner.trial.left_behind)

    @asynccontextmanager
    async def _at_work(self, job: TuneJob[Cfg], index: int) -> AsyncIterator[None]:
        """Hold the device, and whatever else the candidate runs on, for one step."""
        runner = job.runners[index]
        async with self._lanes(job, runner.trial), _turn(runner.sampler, job):
            if (ready := getattr(runner.sampler, "ready", None)) is not None:
                for step in ready():  # compiled again, where another candidate took its worker along
                    with _timed(job):
                        await step()
            yield

    def _lanes(self, job: TuneJob[Cfg], trial: Trial[Cfg]) -> AbstractAsyncContextManager[None]:
        return alone_on(job.devices, trial.left_behind, job.candidate_timeout_s)

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
        device = await run_in_thread("finding the device", partial(with_settings, settings, default_device))
    return TuneJob(candidates, make_fn, args, dict(kwargs), make_travels=True, device=device, settings=settings)


@contextmanager
def _timed(job: TuneJob[Any], so_far_s: float = 0.0) -> Iterator[None]:
    """Bound something that is done for a candidate by what is left of its timeout, and charge it to the tune."""
    with job.meter.running(), anyio.fail_after(job.candidate_timeout_s - so_far_s):
        yield


@contextmanager
def _step(job: TuneJob[Any], index: int, step: Stage, so_far_s: float = 0.0) -> Iterator[Callable[[], float]]:
    """The same for a step of its way, noted for those who trace it; gives the seconds it took."""
    start = end = anyio.current_time()
    try:
        with _timed(job, so_far_s):
            yield lambda: end - start
    finally:
        end = anyio.current_time()
        job.note_step(index, step, start, end)


@contextmanager
def _outcome_of_failing(job: TuneJob[Any], index: int, start: float, trial: Trial[Any]) -> Iterator[None]:
    """Note why a candidate could not be made ready: one that fails is data, never the end of a tune."""
    try:
        yield
    except (Exception, SystemExit) as error:
        job.fail(index, start, trial.stage, error, trial.left_behind)
    finally:
        job.note_left_behind(trial.left_behind)


def _turn(one: Any, job: TuneJob[Any]) -> AbstractAsyncContextManager[Any]:
    """Wait until a measure or a sampler can be asked, and give what is to be asked: waiting is free."""
    turn = getattr(one, "turn", None)
    return nullcontext(one) if turn is None else turn(job.meter.running)


def _let_go(job: TuneJob[Any]) -> None:
    """Release the candidates that are out, in a thread that nobody waits for.

    All that JAX keeps for a program goes with it, which takes milliseconds. A group's programs are all there when
    the first of them is sampled, so that letting go of a loser sooner would only make the tune longer. What that
    raises harms nobody; there is no one left whose outcome it would be.
    """
    releases = [release for one in job.out if (release := getattr(one, "release", None)) is not None]
    job.out = []

    def work() -> None:
        for release in releases:
            try:
                release()
            except Exception:
                logger.exception("a candidate could not be let go of")

    if releases:
        try:
            leave_to_thread("letting go of candidates", work)
        except RuntimeError:  # no thread can be started; what is not released now goes with the job
            logger.exception("candidates could not be let go of")


def _glance(job: TuneJob[Any], board: Board, indices: Sequence[int]) -> Iterator[Step]:
    """Plan a warm-up and one sample of each candidate, for the report alone."""
    for index in indices:
        while index in job.runners and not board.samples.get(index):
            yield Sample(index)


def _checked(seconds: float) -> float:
    if not 0 <= seconds < math.inf:
        raise ValueError(f"the measure returned {seconds!r}, which is not a duration")
    return float(seconds)
