"""The state of one tune, and the functions that change it."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Generic

import anyio

from asel.events import CandidateFailed, CandidateSkipped, Event, Interval
from asel.kernels.call_encoding import devices_of
from asel.kernels.kernel import Cfg
from asel.redaction import redact
from asel.runtime.threads import AbandonedThread, leave_to_thread
from asel.tuning.budget import Budget
from asel.tuning.measure import BaseSampler, Bench, Lowered, TimingMode, Trial
from asel.tuning.outcomes import Failed, Measured, Outcome, Skipped, Stage, TuneReport, text_of
from asel.tuning.output_check import ExpectedOutputs
from asel.tuning.request import TuneRequest
from asel.tuning.scoreboard import Scoreboard

__all__ = ["Runner", "TuneState", "Uncompilable"]

logger = logging.getLogger("asel")

# Steps with a shorter pause between them are shown as one row in a trace.
_APART_S = 0.01
_BEST_TO_WORST: tuple[TimingMode, ...] = ("forward+backward", "forward", "eager")


class TuneState(Generic[Cfg]):
    """One running tune. A tuner that is called again with the same state resumes it."""

    def __init__(self, request: TuneRequest[Cfg]) -> None:
        self.request = request
        self.args = request.args
        self.kwargs = request.kwargs
        self.has_example = False
        # Whether samples must not overlap with those of the host's other processes; set from the measure.
        self.runs_on_device = False
        self.reports = tuple(request.earlier)
        # Reports of the kernel's tunes for other calls.
        self.lessons: tuple[TuneReport[Cfg], ...] = ()
        # Timings of earlier tunes that are reused.
        self.recorded: dict[int, Measured[Cfg]] = {}
        # Settled outcomes: failures and skips as they happen, measurements at the end.
        self.outcomes: dict[int, Outcome[Cfg]] = dict(request.settled)
        # The candidates that are compiled and can be sampled, and those that only run uncompiled, if at all.
        self.runners: dict[int, Runner] = {}
        self.uncompilable: dict[int, Uncompilable] = {}
        # To be released: programs that failed, were not sampled in time, equal another's, or are reported.
        self._to_release: list[Lowered | BaseSampler] = []
        # The first candidate with each program, and the other candidates with an equal program.
        self._programs: dict[str, int] = {}
        self.aliases: dict[int, int] = {}
        self.board: Scoreboard | None = None
        self.expected = ExpectedOutputs()
        # Objects that a measure makes once for all candidates.
        self.shared: dict[str, Any] = {}
        self.budget = Budget(request.tune_budget_s)
        self.seconds = 0.0
        self.report: TuneReport[Cfg] | None = None
        self.left_behind: list[AbandonedThread] = []
        # Throttles a background tune: called after each step with the seconds it took.
        self.pace: Callable[[float], Awaitable[None]] | None = None
        self._steps: dict[tuple[int, str], list[Interval]] = {}
        self._devices: set[Any] | None = None

    async def rest(self, worked_s: float) -> None:
        """Pause after a step of a throttled tune."""
        if self.pace is not None:
            await self.pace(worked_s)

    # The inputs.

    def replace_inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Replace the arguments of the request for all measurements."""
        self.args, self.kwargs = args, kwargs
        self.has_example = True

    def add_reports(self, reports: Iterable[TuneReport[Cfg]]) -> None:
        """Add reports from a store. Those of the request are newer."""
        self.reports = (*reports, *self.reports)

    def add_lessons(self, reports: Iterable[TuneReport[Cfg]]) -> None:
        """Add reports of the kernel's other calls, versions and lists of candidates."""
        self.lessons = (*self.lessons, *reports)

    def reuse(self, recorded: Mapping[int, Measured[Cfg]]) -> None:
        """Reuse recorded timings: their candidates are not measured, and cannot win."""
        self.recorded = {i: one for i, one in recorded.items() if i != self.request.incumbent}

    @property
    def devices(self) -> set[Any]:
        """The devices that candidates run on."""
        if self._devices is None:
            self._devices = devices_of(self.args, self.kwargs) or {self.request.device}
        return self._devices

    def trial(self, index: int) -> Trial[Cfg]:
        """Return a candidate to be compiled."""
        request = self.request
        return Trial(
            request.candidates[index],
            None,
            self.args,
            self.kwargs,
            request.device,
            request.objective,
            request.settings,
            make_fn=request.make_fn,
            factory_is_portable=request.factory_is_portable,
            grace_s=request.grace_s,
            shared=self.shared,
        )

    # Candidates that are compiled.

    def has_begun(self, index: int) -> bool:
        """Return whether a candidate is compiled, or settled without being compiled."""
        return any(index in those for those in (self.outcomes, self.runners, self.aliases, self.uncompilable))

    def add_runner(self, index: int, runner: Runner) -> None:
        """Add a compiled candidate. Only candidates in the best timing mode so far race each other."""
        self.runners[index] = runner
        self._settle(index)
        if self.board is not None:
            racing = [one for one in self.board.candidates if one in self.runners]
            mode = _BEST_TO_WORST.index(runner.how)
            best = min((_BEST_TO_WORST.index(self.runners[one].how) for one in racing), default=mode)
            if mode <= best:
                self.board.enter([index] if mode < best else [*self.board.candidates, index])

    def first_with_program(self, program: str, index: int) -> int:
        """Return the first candidate with this program, which may be this one."""
        return self._programs.setdefault(program, index)

    def set_aside(self, index: int, one: Uncompilable) -> None:
        """Keep a candidate for later: one that hangs while it runs keeps the device."""
        self.uncompilable[index] = one
        self._settle(index)

    def take_uncompilable(self, index: int) -> Uncompilable:
        """Return a candidate that was set aside, to be tried now."""
        return self.uncompilable.pop(index)

    def release_later(self, one: Lowered | BaseSampler) -> None:
        """Release an object together with the retired candidates."""
        self._to_release.append(one)

    def retire(self, index: int) -> None:
        """Remove a compiled candidate from the tune."""
        self._to_release.append(self.runners.pop(index).sampler)
        if self.board is not None:
            self.board.remove(index)

    def release_retired(self) -> None:
        """Release retired candidates in a thread, without waiting for it.

        Releasing a program holds the interpreter for 2 to 20 ms, so the thread pauses for as long after each one.
        (Without pauses, 24 releases made requests of 3 ms take 60 ms.) Errors are only logged: they are not part of a
        candidate's outcome.
        """
        releases = [one.release for one in self._to_release]
        self._to_release = []

        def work() -> None:
            for release in releases:
                begun = time.perf_counter()
                try:
                    release()
                except Exception:
                    logger.exception("a candidate could not be released")
                time.sleep(time.perf_counter() - begun)

        if releases:
            try:
                leave_to_thread("releasing candidates", work)
            except RuntimeError:  # no thread can be started; programs are then freed with the tune
                logger.exception("candidates could not be released")

    def release_all(self) -> None:
        self._to_release += [runner.sampler for runner in self.runners.values()]
        self.runners = {}
        self.shared.clear()
        self.release_retired()

    def is_runnable(self, index: int) -> bool:
        """Return whether a candidate's program can be sampled, possibly as an alias of another's."""
        return self.aliases.get(index, index) in self.runners

    def by_timing_mode(self, indices: Iterable[int]) -> list[list[int]]:
        """Return compiled candidates grouped by timing mode, the best mode first."""
        compiled = [index for index in indices if index in self.runners]
        groups = [[i for i in compiled if self.runners[i].how == how] for how in _BEST_TO_WORST]
        return [group for group in groups if group]

    def refuse_new_nan(self, index: int) -> None:
        """Check the first sample of a candidate for NaN in outputs in which the incumbent has none.

        Raises:
            OutputMismatch: there is such an output.
        """
        runner = self.runners[index]
        if (found := runner.sampler.nan_outputs) is not None:
            self.expected.refuse_new_nan(found, runner.how, is_incumbent=index == self.request.incumbent)

    # Outcomes, and their events.

    def emit(self, kind: type[Event], index: int, start: float, **facts: Any) -> None:
        """Emit an event about a candidate."""
        request = self.request
        about = {"tune_id": request.id, "index": index, "cfg": request.candidates[index]}
        request.emit(kind(key=request.key, start=start, **{"end": anyio.current_time(), **about, **facts}))

    def alias(self, index: int, first: int, start: float) -> None:
        """Record that a candidate's program equals another's."""
        self.aliases[index] = first
        self._settle(index)
        self.emit(CandidateSkipped, index, start, reason=f"its program is that of {self.request.candidates[first]!r}")

    def skip(self, index: int, reason: str, start: float | None = None) -> None:
        self.emit(CandidateSkipped, index, anyio.current_time() if start is None else start, reason=reason)
        self.leave_out(index, reason)

    def leave_out(self, index: int, reason: str) -> None:
        """Skip a candidate without an event: a search skips thousands."""
        self.settle(index, Skipped(self.request.candidates[index], reason))

    def fail(
        self, index: int, start: float, stage: Stage, error: BaseException, left_behind: list[AbandonedThread]
    ) -> None:
        """Record the failure of a candidate. Even SystemExit ends only the candidate."""
        if not isinstance(error, Exception):
            error = RuntimeError(f"{type(error).__name__}: {redact(error)}")
        still_busy = any(thread.alive for thread in left_behind)
        message = text_of(error)
        if isinstance(error, TimeoutError) and not message:
            ending = "; its thread is still busy" if still_busy else ""
            message = f"took longer than {self.request.candidate_timeout_s:g} s{ending}"
        kind = getattr(error, "type_name", None) or type(error).__name__  # errors from a worker carry their type's name
        failed = Failed(self.request.candidates[index], stage, kind, message, error)
        facts = {"stage": stage, "error_type": failed.error_type, "message": message, "still_busy": still_busy}
        self.emit(CandidateFailed, index, start, **facts, **self.times(index))
        if self.board is not None:
            self.board.failed[index] = failed
        self.settle(index, failed)

    def settle(self, index: int, outcome: Outcome[Cfg]) -> None:
        """Record the outcome of a candidate, without an event."""
        self.outcomes[index] = outcome
        self._settle(index)

    def _settle(self, index: int) -> None:
        if self.board is not None:
            self.board.note_settled(index)

    # Times.

    def note_step(self, index: int, step: str, start: float, end: float) -> None:
        """Record the interval of a candidate's step, which may occur more than once.

        All samples count as one step, from the first to the last: a race may take hundreds.
        """
        taken = self._steps.setdefault((index, step), [])
        if taken and (step == "measure" or start - taken[-1][1] < _APART_S):
            taken[-1] = (taken[-1][0], end)
        else:
            taken.append((start, end))

    def steps(self, index: int, step: str) -> tuple[Interval, ...]:
        """Return the intervals of a candidate's step."""
        return tuple(self._steps.get((index, step), ()))

    def times(self, index: int) -> dict[str, Any]:
        """Return the `compiled` and `measured` fields of a candidate's events."""
        return {
            "compiled": self.steps(index, "compile"),
            "measured": next(iter(self.steps(index, "measure")), None),
        }

    def note_left_behind(self, threads: Iterable[AbandonedThread]) -> None:
        """Record the threads that a candidate left behind, so that a closing selector can name them."""
        self.left_behind += [thread for thread in threads if thread not in self.left_behind]


@dataclass(frozen=True, slots=True)
class Uncompilable:
    """A candidate that cannot be lowered. Running it uncompiled shows whether it runs at all."""

    trial: Trial[Any]
    lowered: Lowered
    started: float
    lowering_s: float


@dataclass(slots=True)
class Runner:
    """A compiled candidate."""

    trial: Trial[Any]
    sampler: BaseSampler
    started: float
    compile_s: float
    measure_s: float = 0.0
    sampled: int = 0
    is_checked: bool = False

    def note_sample(self, taken_s: float) -> None:
        self.measure_s += taken_s
        self.sampled += 1

    @property
    def expected_s(self) -> float:
        """The mean duration of the samples so far; infinite without any."""
        return self.measure_s / self.sampled if self.sampled else inf

    @property
    def bench(self) -> Bench | None:
        return self.sampler.bench

    @property
    def how(self) -> TimingMode:
        return self.sampler.how or self.trial.objective
