"""One tune: what it tries, what it has found, and what it reports in the end."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic

import anyio

from asel.board import Board, level
from asel.checks import Check, OutputMismatch
from asel.devices import Settings, environment
from asel.encoding import devices_of
from asel.errors import InvalidRequestError, TuningError
from asel.events import CandidateFailed, CandidateMeasured, CandidateSkipped, Event, Interval
from asel.kernel import Cfg
from asel.keys import CacheKey, Objective, config_form
from asel.measure import How, Sampler, Trial
from asel.meter import Meter
from asel.outcomes import Failed, Measured, Outcome, Skipped, Stage, TuneReport
from asel.threads import Busy

__all__ = ["Runner", "TuneJob", "by_way", "groups_of", "report_on", "sentence", "timings_in"]

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
    example: Callable[[], tuple[tuple[Any, ...], Mapping[str, Any]]] | None = None
    """Makes the arguments to measure with, where all that is known of them are shapes."""
    known: Mapping[int, Measured[Cfg]] = field(default_factory=dict)
    """What an earlier tune in this environment measured of these candidates. Used where the incumbent is
    among them: it is measured again, and tells how the old timings compare."""
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
    out: list[Any] = field(default_factory=list)
    """What is to be let go of: programs that failed, had no time to be sampled, are another's, or are reported on."""
    programs: dict[str, int] = field(default_factory=dict)
    """The first candidate of each program."""
    aliases: dict[int, int] = field(default_factory=dict)
    """The candidates whose program is another's."""
    board: Board | None = None
    checked: set[int] = field(default_factory=set)
    """The candidates that compute what they should, where outputs are checked."""
    expected: list[Any] | None = None
    """The outputs that every candidate's are compared with, where outputs are checked."""
    shared: dict[str, Any] = field(default_factory=dict)
    """What a measure makes once for all candidates."""
    steps: dict[tuple[int, str], Interval] = field(default_factory=dict)
    """When each candidate was compiled, and when it was measured: from its first sample to its last."""
    meter: Meter = field(default_factory=Meter)
    seconds: float = 0.0
    report: TuneReport[Cfg] | None = None
    left_behind: list[Busy] = field(default_factory=list)
    _devices: set[Any] | None = None

    def tell(self, kind: type[Event], index: int, start: float, **facts: Any) -> None:
        """Emit an event about a candidate."""
        about = {"tune_id": self.id, "index": index, "cfg": self.candidates[index]}
        self.emit(kind(key=self.key, start=start, **{"end": anyio.current_time(), **about, **facts}))

    def note_step(self, index: int, step: str, start: float, end: float) -> None:
        """Note when a candidate was at a step, again perhaps."""
        first, _ = self.steps.get((index, step), (start, end))
        self.steps[index, step] = (first, end)

    def times(self, index: int) -> dict[str, Interval | None]:
        return {"compiled": self.steps.get((index, "compile")), "measured": self.steps.get((index, "measure"))}

    def alias(self, index: int, first: int, start: float) -> None:
        """Note that a candidate's program is another's."""
        self.aliases[index] = first
        self.tell(CandidateSkipped, index, start, reason=f"its program is that of {self.candidates[first]!r}")

    def skip(self, index: int, reason: str) -> None:
        self.tell(CandidateSkipped, index, anyio.current_time(), reason=reason)
        self.outcomes[index] = Skipped(self.candidates[index], reason)

    def fail(self, index: int, start: float, stage: Stage, error: BaseException, left_behind: list[Busy]) -> None:
        """Note that a candidate broke; what would end the program ends the candidate alone."""
        if not isinstance(error, Exception):
            error = RuntimeError(f"{type(error).__name__}: {error}")
        busy = any(thread.alive for thread in left_behind)
        message = _text_of(error)
        if isinstance(error, TimeoutError) and not message:
            message = f"took longer than {self.candidate_timeout_s:g} s" + (
                "; its thread is still busy" if busy else ""
            )
        kind = getattr(error, "type_name", None) or type(error).__name__  # a worker's errors are known by name
        failed = Failed(self.candidates[index], stage, kind, message, error)
        facts = {"stage": stage, "error_type": failed.error_type, "message": message, "still_busy": busy}
        self.tell(CandidateFailed, index, start, **facts, **self.times(index))
        self.outcomes[index] = failed

    def note_left_behind(self, threads: Iterable[Busy]) -> None:
        """Remember the threads a candidate has left, so that a closing chain can name them."""
        self.left_behind += [thread for thread in threads if thread not in self.left_behind]

    def compare(self, outputs: list[Any], check: Check) -> None:
        """Take the first outputs for right, and hold all others against them.

        Raises:
            OutputMismatch: they differ.
        """
        if self.expected is None:
            self.expected = outputs
        elif (wrong := check(self.expected, outputs)) is not None:
            raise OutputMismatch(wrong)

    def trial(self, index: int) -> Trial[Cfg]:
        """Return a candidate to be compiled."""
        return Trial(
            self.candidates[index],
            None,
            self.args,
            self.kwargs,
            self.device,
            self.objective,
            self.settings,
            make_fn=self.make_fn,
            grace_s=self.grace_s,
            shared=self.shared,
        )

    def let_out(self, index: int) -> None:
        """Have done with a compiled candidate."""
        self.out.append(self.runners.pop(index).sampler)

    def runs(self, index: int) -> bool:
        """Tell whether a candidate's program can be sampled, be it compiled as another's."""
        return self.aliases.get(index, index) in self.runners

    @property
    def devices(self) -> set[Any]:
        """Where the candidates run."""
        if self._devices is None:
            self._devices = devices_of(self.args, self.kwargs) or {self.device}
        return self._devices

    @property
    def reused(self) -> list[int]:
        """The candidates whose earlier timings stand in for new ones: those timed as the incumbent was."""
        if self.incumbent is None or self.incumbent not in self.known:
            return []
        how = self.known[self.incumbent].how
        return [i for i, earlier in self.known.items() if i != self.incumbent and earlier.how == how]

    @property
    def yardstick_is_lost(self) -> bool:
        """Whether the incumbent, which earlier timings are held against, failed or is not timed as it was."""
        if not self.reused:
            return False
        assert self.incumbent is not None
        then, runner = self.known[self.incumbent], self.runners.get(self.incumbent)
        return runner is None or runner.how != then.how or not level(then.samples_s)

    @property
    def spent_s(self) -> float:
        """The time in which at least one candidate was compiled or measured; waiting for one's turn is free."""
        return self.meter.seconds

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
    measure_s: float = 0.0

    @property
    def how(self) -> How:
        how: How = getattr(self.sampler, "how", None) or self.trial.objective
        return how

    async def outputs(self) -> list[Any]:
        """Return what the candidate computes, on the host."""
        outputs = getattr(self.sampler, "outputs", None)
        if outputs is None:
            raise InvalidRequestError(f"{type(self.sampler).__name__} has no outputs to check; pass check=None")
        found: list[Any] = await outputs()
        return found


def groups_of(job: TuneJob[Any]) -> list[list[int]]:
    """Return the candidates' indices, group by group, highest first; the incumbent goes before all."""
    ranks = job.groups or ((0, 0),) * len(job.candidates)
    wanted = [i for i, (group, priority) in enumerate(ranks) if (group >= 0 and priority >= 0) or i == job.incumbent]
    for index in range(len(job.candidates)):
        if index not in wanted and index not in job.outcomes:
            job.skip(index, "the kernel gives it a negative priority")
    reused = job.reused
    wanted = [i for i in wanted if i not in reused]
    least = max((ranks[i][0] for i in reused), default=0)  # a success of then ends it as one of today does
    levels = sorted({ranks[i][0] for i in wanted if i != job.incumbent and ranks[i][0] >= least}, reverse=True)
    groups = [[i for i in wanted if ranks[i][0] == level and i != job.incumbent] for level in levels]
    groups = [sorted(group, key=lambda i: -ranks[i][1]) for group in groups] or [[]]
    if job.incumbent is not None:
        groups[0].insert(0, job.incumbent)
    return groups


def timings_in(
    reports: Iterable[TuneReport[Cfg]], candidates: Sequence[Cfg], objective: Objective, software: Mapping[str, str]
) -> dict[int, Measured[Cfg]]:
    """Return what earlier tunes with the same software and objective measured of these candidates."""
    found: dict[Any, Measured[Cfg]] = {}
    for report in reports:
        if report.environment == software and report.objective == objective:
            found.update({config_form(o.cfg): o for o in report.outcomes if isinstance(o, Measured)})
    forms = map(config_form, candidates) if found else ()
    return {i: found[form] for i, form in enumerate(forms) if form in found}


def sentence(failed: Failed[Any]) -> str:
    return f"{failed.error_type} in the {failed.stage} stage: {failed.message}"


def report_on(job: TuneJob[Cfg]) -> TuneReport[Cfg]:
    """Settle every candidate's outcome and name the winner."""
    board = job.board
    comparable = _comparable(job)
    comparable += _reuse(job, comparable)
    for index, runner in job.runners.items():
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
                measure_s=runner.measure_s,
            )
            facts = {"median_s": board.median(index), "compile_s": runner.compile_s, "samples": len(samples)}
            if (measured := job.steps.get((index, "measure"))) is not None:
                facts["end"] = measured[1]  # others were sampled since
            job.tell(CandidateMeasured, index, runner.started, **facts, **job.times(index))
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
    board.enter(comparable)
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
        margin=_margin(board, winner, incumbent),
        tune_budget_s=job.tune_budget_s,
        candidate_timeout_s=job.candidate_timeout_s,
    )


def _margin(board: Board, winner: int, incumbent: int | None) -> float:
    if incumbent is None or board.level(incumbent) == 0:
        return 0.0
    return 1 - board.level(winner) / board.level(incumbent)


def _reuse(job: TuneJob[Cfg], comparable: list[int]) -> list[int]:
    """Put earlier timings on the board, in today's terms; return those that may win, as the incumbent may."""
    board, incumbent = job.board, job.incumbent
    if board is None or incumbent is None or not job.reused or not board.samples.get(incumbent):
        return []
    then = job.known[incumbent]
    ratio = board.level(incumbent) / level(then.samples_s)
    reused = [i for i in job.reused if i not in job.outcomes]
    for index in reused:
        earlier = job.known[index]
        board.samples[index] = [seconds * ratio for seconds in earlier.samples_s]
        job.outcomes[index] = replace(
            earlier,
            cfg=job.candidates[index],
            median_s=earlier.median_s * ratio,
            samples_s=tuple(board.samples[index]),
            compile_s=0.0,
            measure_s=0.0,
            alias_of=None,
            reused=True,
        )
    return reused if incumbent in comparable else []


def by_way(job: TuneJob[Any], indices: Sequence[int]) -> list[list[int]]:
    """Return compiled candidates grouped by how they are timed, the best way first."""
    groups = [[i for i in indices if job.runners[i].how == how] for how in _BEST_TO_WORST]
    return [group for group in groups if group]


def _comparable(job: TuneJob[Any]) -> list[int]:
    """Return the measured candidates that were timed in the best way any was: only they may win."""
    measured = [] if job.board is None else [i for i in job.runners if job.board.samples.get(i)]
    return next(iter(by_way(job, measured)), [])


def _settle_alias(job: TuneJob[Cfg], index: int, first: int) -> None:
    """Give a candidate the outcome of the one whose program it has."""
    if index in job.outcomes:
        return
    cfg, original = job.candidates[index], job.outcomes.get(first)
    if isinstance(original, Measured):
        job.outcomes[index] = Measured(
            cfg,
            original.median_s,
            original.samples_s,
            0.0,
            how=original.how,
            eliminated=original.eliminated,
            alias_of=original.cfg,
        )
    elif isinstance(original, Failed):
        job.outcomes[index] = Failed(cfg, original.stage, original.error_type, original.message, original.error)
    else:
        job.outcomes[index] = Skipped(cfg, f"its program is that of {job.candidates[first]!r}, which was not measured")


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as why:  # it is the candidate's own class
        return f"(its message raised {type(why).__name__})"


def _all_failed(job: TuneJob[Any], outcomes: Sequence[Outcome[Any]]) -> TuningError:
    failed = [outcome for outcome in outcomes if isinstance(outcome, Failed)]
    causes = [outcome.error for outcome in failed if outcome.error is not None]
    first = f" The first: {sentence(failed[0])}." if failed else ""
    op = job.key.op_id or "the function"
    error = TuningError(
        f"none of the {len(outcomes)} candidates of {op!r} could be measured: {len(failed)} failed, "
        f"{len(outcomes) - len(failed)} were skipped.{first}",
        key=job.key,
        outcomes=outcomes,
    )
    error.__cause__ = ExceptionGroup("what the candidates raised", causes) if causes else None
    return error
