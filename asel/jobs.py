"""One tune: what it tries, within which limits, and what it has found so far."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Generic

import anyio

from asel.board import Board, level
from asel.checks import Check, OutputMismatch
from asel.devices import Settings
from asel.encoding import devices_of
from asel.errors import InvalidRequestError
from asel.events import CandidateFailed, CandidateSkipped, Event, Interval
from asel.kernel import Cfg
from asel.keys import CacheKey, Objective
from asel.measure import Bench, How, Lowered, Sampler, Trial
from asel.meter import Meter
from asel.outcomes import Failed, Measured, Outcome, Skipped, Stage, TuneReport, text_of
from asel.redaction import redact
from asel.threads import Busy

__all__ = ["Runner", "TuneJob", "by_way", "groups_of"]

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
    make_travels: bool = False
    """Whether `make_fn` may be sent to a worker process, to be called there: it is a user's, and holds no arguments."""
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
    unproven: dict[int, Unproven] = field(default_factory=dict)
    """The candidates that have to run before it is known whether they can."""
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

    def skip(self, index: int, reason: str, start: float | None = None) -> None:
        self.tell(CandidateSkipped, index, anyio.current_time() if start is None else start, reason=reason)
        self.outcomes[index] = Skipped(self.candidates[index], reason)

    def fail(self, index: int, start: float, stage: Stage, error: BaseException, left_behind: list[Busy]) -> None:
        """Note that a candidate broke; what would end the program ends the candidate alone."""
        if not isinstance(error, Exception):
            error = RuntimeError(f"{type(error).__name__}: {redact(error)}")
        busy = any(thread.alive for thread in left_behind)
        message = text_of(error)
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
            make_travels=self.make_travels,
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


@dataclass(frozen=True, slots=True)
class Unproven:
    """A candidate that is lowered, and not known to compile, or to run where it cannot be compiled."""

    trial: Trial[Any]
    lowered: Lowered
    started: float
    lowering_s: float


@dataclass(slots=True)
class Runner:
    """A compiled candidate."""

    trial: Trial[Any]
    sampler: Sampler
    started: float
    compile_s: float
    measure_s: float = 0.0
    sampled: int = 0

    def note_sample(self, taken_s: float) -> None:
        self.measure_s += taken_s
        self.sampled += 1

    @property
    def expected_s(self) -> float:
        """What a sample takes, by those that were taken."""
        return self.measure_s / self.sampled if self.sampled else inf

    @property
    def bench(self) -> Bench | None:
        return getattr(self.sampler, "bench", None)

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


def by_way(job: TuneJob[Any], indices: Sequence[int]) -> list[list[int]]:
    """Return compiled candidates grouped by how they are timed, the best way first."""
    groups = [[i for i in indices if job.runners[i].how == how] for how in _BEST_TO_WORST]
    return [group for group in groups if group]
