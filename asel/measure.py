"""What stands between a tuner and a device: one candidate in, a function that takes samples out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol

from asel.devices import Settings
from asel.kernel import Cfg
from asel.keys import Objective
from asel.threads import Busy

__all__ = ["Bench", "How", "Lowered", "Measure", "Sampler", "Trial", "lower"]

How = Literal["forward+backward", "forward", "eager"]
"""What a sample really is: what cannot be differentiated is timed forward, and what cannot be traced, as it is."""


class Sampler(Protocol):
    """Runs the candidate, alone on its device, and returns the seconds one run took.

    May also have `how`, where that is not the trial's objective; `turn(charge)`, an async context manager
    around each step, in which to wait for what others hold: that wait is not timed, and what is done in it
    for this tune alone is paid within `charge()`; `ready()`, the steps to be awaited one by one before each
    sample; `bench`, the `Bench` that it is sampled on, where it has neither of these; `outputs()`, what a run returns,
    on the host; and `release()`, called in a thread once the tune is over.
    """

    def __call__(self) -> Awaitable[float]: ...


class Bench(Protocol):
    """Where some samplers are sampled one after the other, without the event loop in between.

    On a busy machine, waking a thread and then the loop takes as long as a short sample.
    """

    async def series(self, samplers: Sequence[Any], taken: list[tuple[float, float]], left_behind: list[Busy]) -> None:
        """Take a sample of each, and append the seconds one run took and those that the sample did, as it is taken.

        What this raises is the outcome of the sampler that it has come to. A thread that had to be left behind
        is said to be in `left_behind`, and takes no further samples.
        """


class Trial(Generic[Cfg]):
    """One candidate on its way through a measure."""

    def __init__(
        self,
        cfg: Cfg,
        fn: Callable[..., Any] | None,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        device: Any = None,
        objective: Objective = "forward",
        settings: Settings | None = None,
        *,
        make_fn: Callable[[Cfg], Callable[..., Any]] | None = None,
        make_travels: bool = False,
        grace_s: Callable[[], float] = lambda: 0.0,
        shared: dict[str, Any] | None = None,
    ) -> None:
        self.cfg = cfg
        self.args = args
        self.kwargs = kwargs
        self.device = device
        self.objective: Objective = objective
        self.settings = settings
        # How long a cancelled step waits for its thread: zero, except while a chain is closing.
        self.grace_s = grace_s
        # Threads that had to be left behind, each still at its step when it was.
        self.left_behind: list[Busy] = []
        # A place for what a measure makes once for all candidates of a tune.
        self.shared: dict[str, Any] = {} if shared is None else shared
        # Where it would have broken, if it has before it can be sampled.
        self.stage: Literal["build", "compile"] = "compile"
        # What makes `fn`, where a worker process may call it in our place: it holds nothing of the call.
        self.portable_make = make_fn if make_travels else None
        self._fn = fn
        self._make_fn = make_fn

    @property
    def fn(self) -> Callable[..., Any]:
        """What is to be timed."""
        return self.build()

    def build(self) -> Callable[..., Any]:
        """Have `fn`, made when first asked for: by the candidate's own code, which may take its time."""
        if self._fn is None:
            assert self._make_fn is not None
            self.stage = "build"
            self._fn = self._make_fn(self.cfg)
            self.stage = "compile"
        return self._fn


@dataclass(frozen=True, slots=True)
class Lowered:
    """A candidate's program before it is compiled. Equal fingerprints are equal programs.

    `release` lets go of one that is not to be compiled. `runs` says that compiling runs it: it needs
    the device for itself, and its turn is the last, since it may not come back.
    """

    fingerprint: str | None
    compile: Callable[[], Awaitable[Sampler]]
    release: Callable[[], None] = lambda: None
    runs: bool = False


class Measure(Protocol):
    """Makes a candidate ready to be timed. Whatever it raises is that candidate's outcome.

    May also have `lower(trial)`, returning a `Lowered`, so that equal programs are compiled once;
    `turn(charge)`, an async context manager that waits as a sampler's does, and gives the measure to
    compile with; and `aclose()`, when no more is to come.
    """

    async def compile(self, trial: Trial[Any]) -> Sampler: ...


async def lower(measure: Measure, trial: Trial[Any]) -> Lowered:
    """Return the candidate's program; a measure that does not lower tells nothing of it."""
    lowers = getattr(measure, "lower", None)
    if lowers is None:
        return Lowered(None, lambda: measure.compile(trial))
    lowered: Lowered = await lowers(trial)
    return lowered
