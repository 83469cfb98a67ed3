"""Finds the fastest of some candidates, within a budget.

All are compiled, the incumbent first, equal programs once; then they are sampled in turns, alone on
their device, as the strategy plans it. One that fails or takes too long is an outcome like any other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Generic, Literal, Self

import anyio

from asel.board import Board
from asel.checks import OutputCheck, as_check
from asel.devices import current_settings, default_device, with_settings
from asel.encoding import whereabouts
from asel.errors import InvalidRequestError, TuningError
from asel.jobs import TuneJob, by_way, groups_of
from asel.kernel import Cfg, Invocation
from asel.lanes import LaneStuck
from asel.measure import Measure
from asel.outcomes import Failed, TuneReport
from asel.processes import ProcessMeasure
from asel.readying import check_all, compile_all, prove_all
from asel.reporting import earlier_best, report_on, sentence
from asel.sampling import follow
from asel.steps import STUCK, timed
from asel.strategies import Exhaustive, Race, Sample, Step, Strategy
from asel.threads import leave_to_thread, run_in_thread

__all__ = ["Tuner"]

logger = logging.getLogger("asel")


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
                with timed(job):
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
            await compile_all(self._get_measure(), job, group)
            if self._check is not None and job.incumbent in job.unproven:
                await prove_all(job, [job.incumbent])  # whose outputs all others' are held against
            await self._race(job, group)
            if job.unproven:  # after all others, since one that hangs keeps the device
                await prove_all(job, list(job.unproven))
                await self._race(job, group)
            _let_go(job)  # before the next group is compiled
            if any(job.runs(index) for index in group if index != job.incumbent or len(job.candidates) == 1):
                break  # a success ends it; the groups below are not tried

    async def _race(self, job: TuneJob[Cfg], group: Sequence[int]) -> None:
        if self._check is not None:
            await check_all(self._check, job, group)
        await self._sample_all(job, group)

    async def _sample_all(self, job: TuneJob[Cfg], group: Sequence[int]) -> None:
        """Race those that are timed in the best way any is; of the others only the time is taken.

        Where all of the best way fail, the next best race.
        """
        ready = [index for index in group if index in job.runners]
        if job.board is None:
            job.board = Board([], job.incumbent, self.warmup)
        job.board.earlier_best = earlier_best(job)
        board, untried = job.board, f"the tune's budget of {job.tune_budget_s:g} s was spent"
        earlier = [index for index in board.candidates if index in job.runners and index not in ready]
        measured = False
        try:
            for way in by_way(job, [*earlier, *ready]):
                if measured:
                    await follow(job, board, _glance(job, board, way))
                else:
                    board.enter(way)
                    await follow(job, board, self._strategy.plan(board))
                    board.make_do()  # a warm-up in this way tells more than a sample in the next
                    measured = bool(board.measured)
        except LaneStuck:
            untried = STUCK
        board.make_do()
        unsampled = [index for index in ready if index in job.runners and not board.samples.get(index)]
        for index in unsampled:
            board.remove(index)
            job.skip(index, untried)
            job.let_out(index)

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
