"""Finds the fastest of some candidates, within a budget.

Each candidate is compiled, then timed alone on its device; one that fails or takes too long is an
outcome like any other. The first to go is the incumbent, so that a tune cut short still knows the
default. It keeps the title unless it is beaten by more than the noise.
"""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, Generic, Protocol

import anyio

from asel.devices import Settings, environment
from asel.errors import InvalidRequestError, TuningError
from asel.events import CandidateFailed, CandidateMeasured, CandidateSkipped, CandidateStart, Event
from asel.kernel import Cfg
from asel.keys import CacheKey, Objective
from asel.lanes import LaneStuck, compile_slots, lane_for
from asel.measure import Measure, Sampler, Trial
from asel.outcomes import Failed, Measured, Outcome, Skipped, Stage, TuneReport
from asel.threads import Busy, run_in_thread

__all__ = ["TuneJob", "Tuner", "Tunes", "as_tuner"]

# Two medians closer than this are a tie, however calm the samples look.
_LEAST_NOISE = 0.01
_NO_KEY = CacheKey("", "", "")


@dataclass(slots=True)
class TuneJob(Generic[Cfg]):
    """One tune: what to try, its limits, and what it has found so far.

    A tuner that is called again with the same job goes on from its outcomes.
    """

    candidates: tuple[Cfg, ...]
    make_fn: Callable[[Cfg], Callable[..., Any]]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    key: CacheKey = _NO_KEY
    checksum: str = ""
    objective: Objective = "forward"
    incumbent: int | None = None
    device: Any = None
    settings: Settings | None = None
    tune_budget_s: float = 60.0
    candidate_timeout_s: float = 30.0
    grace_s: Callable[[], float] = lambda: 0.0
    emit: Callable[[Event], None] = lambda event: None
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:16])

    outcomes: dict[int, Outcome[Cfg]] = field(default_factory=dict)
    spent_s: float = 0.0
    """Compiling and measuring; waiting for one's turn is free."""
    left_behind: list[Busy] = field(default_factory=list)


class Tuner(Generic[Cfg]):
    """Times candidates with a `Measure`, by default JAX's, taking the median of `iters` samples."""

    def __init__(self, warmup: int = 1, iters: int = 3, *, measure: Measure | None = None) -> None:
        if warmup < 0 or iters < 1:
            raise InvalidRequestError(f"Tuner: warmup={warmup} must be 0 or more and iters={iters} 1 or more")
        self.warmup, self.iters = warmup, iters
        self._measure = measure

    async def measure(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> float:
        """Return the median seconds one call of `fn` takes, compiled."""
        job: TuneJob[Any] = TuneJob((None,), lambda cfg: fn, args, kwargs)
        outcome = await self._try(job, 0)
        if isinstance(outcome, Measured):
            return outcome.median_s
        assert isinstance(outcome, Failed)
        raise TuningError(f"could not measure {fn!r}: {_sentence(outcome)}", outcomes=[outcome]) from outcome.error

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
        return (await self.tune(TuneJob(tuple(candidates), make_fn, tuple(args), dict(kwargs)))).winner

    async def tune(self, job: TuneJob[Cfg]) -> TuneReport[Cfg]:
        """Try every candidate the budget allows and report.

        Raises:
            TuningError: none of them could be measured.
        """
        if not job.candidates:
            raise TuningError("there are no candidates to tune among", key=job.key)
        start = anyio.current_time()
        for index in _order(len(job.candidates), job.incumbent):
            if index not in job.outcomes:
                if job.spent_s < job.tune_budget_s:
                    job.outcomes[index] = await self._try(job, index)
                else:
                    reason = f"the tune's budget of {job.tune_budget_s:g} s was spent"
                    job.outcomes[index] = _skip(job, index, reason)
        return _report(job, anyio.current_time() - start)

    async def _try(self, job: TuneJob[Cfg], index: int) -> Outcome[Cfg]:
        cfg, start = job.candidates[index], anyio.current_time()
        job.emit(CandidateStart(key=job.key, start=start, end=start, tune_id=job.id, index=index, cfg=cfg))
        trial: Trial[Cfg] | None = None
        stage: Stage = "build"
        compile_s = 0.0
        try:
            fn = job.make_fn(cfg)
            trial = Trial(cfg, fn, job.args, job.kwargs, job.device, job.objective, job.settings, job.grace_s)
            stage = "compile"
            sampler, compile_s = await self._compile(job, trial)
            stage = "measure"
            samples = await self._sample(job, trial, sampler)
        except LaneStuck:
            return _skip(job, index, "an abandoned candidate still occupies the device")
        except Exception as error:  # one failing candidate is data, never the end of a tune
            return _fail(job, index, start, stage, error, trial)
        finally:
            # Before the await that was cancelled is left, so that a closing chain can name them.
            job.left_behind += trial.left_behind if trial else []
        outcome = Measured(cfg, median(samples), samples, compile_s)
        job.emit(
            CandidateMeasured(
                key=job.key,
                start=start,
                end=anyio.current_time(),
                tune_id=job.id,
                index=index,
                cfg=cfg,
                median_s=outcome.median_s,
                compile_s=compile_s,
                samples=len(samples),
            )
        )
        return outcome

    async def _compile(self, job: TuneJob[Cfg], trial: Trial[Cfg]) -> tuple[Sampler, float]:
        async with compile_slots():
            start = anyio.current_time()
            try:
                with anyio.fail_after(job.candidate_timeout_s):
                    sampler = await self._get_measure().compile(trial)
            finally:
                taken = anyio.current_time() - start
                job.spent_s += taken
        return sampler, taken

    async def _sample(self, job: TuneJob[Cfg], trial: Trial[Cfg], sampler: Sampler) -> tuple[float, ...]:
        samples: list[float] = []
        async with lane_for(job.device).held(trial.left_behind):
            start = anyio.current_time()
            try:
                for _ in range(self.warmup + self.iters):
                    with anyio.fail_after(job.candidate_timeout_s):
                        samples.append(_checked(await sampler()))
            finally:
                job.spent_s += anyio.current_time() - start
        return tuple(samples[self.warmup :])

    def _get_measure(self) -> Measure:
        if self._measure is None:
            from asel.benchmark import JaxMeasure  # JAX is imported when it is first needed

            self._measure = JaxMeasure()
        return self._measure


class Tunes(Protocol[Cfg]):
    """What a chain needs of its tuner."""

    async def tune(self, job: TuneJob[Cfg]) -> TuneReport[Cfg]: ...


class _OnlyAutotune(Generic[Cfg]):
    """A tuner that has `autotune` and no `tune`: it names a winner, and says nothing of the rest."""

    def __init__(self, tuner: Any) -> None:
        self._tuner = tuner

    async def tune(self, job: TuneJob[Cfg]) -> TuneReport[Cfg]:
        start = anyio.current_time()
        given = (job.make_fn, job.args, dict(job.kwargs), job.candidates)
        if inspect.iscoroutinefunction(self._tuner.autotune):
            winner = await self._tuner.autotune(*given)
        else:
            work = partial(self._tuner.autotune, *given)
            winner = await run_in_thread("autotune", work, grace_s=job.grace_s, left_behind=job.left_behind)
        if winner is None:
            raise TuningError(f"the tuner found no config for {job.key.op_id!r}", key=job.key)
        return TuneReport(
            key=job.key,
            winner=winner,
            outcomes=(),
            seconds=anyio.current_time() - start,
            environment=environment(job.device),
            tune_id=job.id,
            checksum=job.checksum,
            objective=job.objective,
        )


def as_tuner(tuner: Any) -> Tunes[Any]:
    """Return `tuner` itself, or an adapter for one that only has ejKernel's `autotune`.

    Raises:
        InvalidRequestError: it has neither method.
    """
    if hasattr(tuner, "tune"):
        return tuner  # type: ignore[no-any-return]
    if hasattr(tuner, "autotune"):
        return _OnlyAutotune(tuner)
    raise InvalidRequestError(f"tuner={tuner!r} has neither a tune nor an autotune method; pass a Tuner")


def _checked(seconds: float) -> float:
    if not seconds >= 0:
        raise ValueError(f"the measure returned {seconds!r}, which is not a duration")
    return float(seconds)


def _order(count: int, incumbent: int | None) -> Iterable[int]:
    if incumbent is not None:
        yield incumbent
    yield from (i for i in range(count) if i != incumbent)


def _skip(job: TuneJob[Cfg], index: int, reason: str) -> Skipped[Cfg]:
    now, cfg = anyio.current_time(), job.candidates[index]
    job.emit(CandidateSkipped(key=job.key, start=now, end=now, tune_id=job.id, index=index, cfg=cfg, reason=reason))
    return Skipped(cfg, reason)


def _fail(
    job: TuneJob[Cfg], index: int, start: float, stage: Stage, error: Exception, trial: Trial[Cfg] | None
) -> Failed[Cfg]:
    cfg, busy = job.candidates[index], trial is not None and any(thread.alive for thread in trial.left_behind)
    message = str(error)
    if isinstance(error, TimeoutError) and not message:
        message = f"took longer than {job.candidate_timeout_s:g} s" + ("; its thread is still busy" if busy else "")
    failed = Failed(cfg, stage, type(error).__name__, message, error)
    job.emit(
        CandidateFailed(
            key=job.key,
            start=start,
            end=anyio.current_time(),
            tune_id=job.id,
            index=index,
            cfg=cfg,
            stage=stage,
            error_type=failed.error_type,
            message=message,
            still_busy=busy,
        )
    )
    return failed


def _sentence(failed: Failed[Any]) -> str:
    return f"{failed.error_type} in the {failed.stage} stage: {failed.message}"


def _report(job: TuneJob[Cfg], seconds: float) -> TuneReport[Cfg]:
    outcomes = tuple(job.outcomes[i] for i in range(len(job.candidates)))
    measured = [outcome for outcome in outcomes if isinstance(outcome, Measured)]
    if not measured:
        raise _all_failed(job, outcomes)
    best = min(measured, key=lambda outcome: outcome.median_s)
    incumbent = outcomes[job.incumbent] if job.incumbent is not None else None
    noise = _LEAST_NOISE
    if isinstance(incumbent, Measured):
        noise = max(_spread(best), _spread(incumbent), _LEAST_NOISE)
        if incumbent.median_s <= best.median_s * (1 + noise):
            best = incumbent
    return TuneReport(
        key=job.key,
        winner=best.cfg,
        outcomes=outcomes,
        seconds=seconds,
        environment={} if job.device is None else environment(job.device),
        tune_id=job.id,
        checksum=job.checksum,
        objective=job.objective,
        incumbent=None if job.incumbent is None else job.candidates[job.incumbent],
        noise=noise,
        tune_budget_s=job.tune_budget_s,
        candidate_timeout_s=job.candidate_timeout_s,
    )


def _spread(outcome: Measured[Any]) -> float:
    """Return the median distance of a sample from the median, as a fraction of it."""
    distance = median(abs(sample - outcome.median_s) for sample in outcome.samples_s)
    return distance / outcome.median_s if outcome.median_s else 0.0


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
