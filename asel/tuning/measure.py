"""The protocol between a tuner and a device: a measure compiles a candidate into a sampler."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol

from asel.errors import InvalidRequestError
from asel.kernels.candidates import Objective
from asel.kernels.kernel import Cfg
from asel.runtime.jax_settings import Settings
from asel.runtime.threads import AbandonedThread

if TYPE_CHECKING:
    from asel.tuning.runnable import Runnable

__all__ = [
    "BaseMeasure",
    "BaseSampler",
    "Bench",
    "Charge",
    "Lowered",
    "Measure",
    "Sampler",
    "TimingMode",
    "Trial",
    "as_measure",
    "as_sampler",
]

Charge = Callable[[], AbstractContextManager[object]]
"""Charges the tune for what is done within it."""

TimingMode = Literal["forward+backward", "forward", "eager"]
"""What a sample really is: what cannot be differentiated is timed forward, and what cannot be traced, as it is."""


class Sampler(Protocol):
    """Runs the candidate once, alone on its device, and returns the seconds that took: an async function will do.

    A `BaseSampler` may say and do more.
    """

    def __call__(self) -> Awaitable[float]: ...


class BaseSampler:
    """A sampler with all that one may have, and the defaults."""

    how: TimingMode | None = None
    """What a sample really is; None: the trial's objective."""
    bench: Bench | None = None
    """Where it is sampled, for one without turns and without steps before a sample."""
    nan_outputs: frozenset[int] | None = None
    """Which outputs of a first sample contain NaN; None: unknown."""

    def __call__(self) -> Awaitable[float]:
        raise NotImplementedError

    def turn(self, charge: Charge) -> AbstractAsyncContextManager[object]:
        """Hold what others may hold, around each step. Waiting is free; work for this tune is paid in `charge()`."""
        return nullcontext()

    def ready(self) -> Sequence[Callable[[], Awaitable[object]]]:
        """Return the steps to be awaited one by one before a sample."""
        return ()

    async def outputs(self) -> list[Any]:
        """Return what a run returns, on the host.

        Raises:
            InvalidRequestError: this sampler cannot show them.
        """
        raise InvalidRequestError(f"{type(self).__name__} has no outputs to check; pass check=None")

    async def runnable(self) -> Runnable | None:
        """Return what an executor is to run, compiled; None: the first call compiles it again."""
        return None

    def release(self) -> None:
        """Release everything, in a thread, once the tune is over."""


class _FunctionSampler(BaseSampler):
    """An async function as a sampler."""

    def __init__(self, sample: Sampler) -> None:
        self._sample = sample

    def __call__(self) -> Awaitable[float]:
        return self._sample()


def as_sampler(sampler: Sampler) -> BaseSampler:
    return sampler if isinstance(sampler, BaseSampler) else _FunctionSampler(sampler)


class Bench(Protocol):
    """Where some samplers are sampled one after the other, without the event loop in between.

    On a busy machine, waking a thread and then the loop takes as long as a short sample.
    """

    async def series(
        self, samplers: Sequence[Any], taken: list[tuple[float, float]], left_behind: list[AbandonedThread]
    ) -> None:
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
        factory_is_portable: bool = False,
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
        self.left_behind: list[AbandonedThread] = []
        # A place for what a measure makes once for all candidates of a tune.
        self.shared: dict[str, Any] = {} if shared is None else shared
        # Where it would have broken, if it has before it can be sampled.
        self.stage: Literal["build", "compile"] = "compile"
        # What makes `fn`, where a worker process may call it in our place: it holds nothing of the call.
        self.portable_make = make_fn if factory_is_portable else None
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

    `release` frees one that is not to be compiled. `runs` says that compiling runs it: it needs
    the device for itself, and its turn is the last, since it may not come back.
    """

    fingerprint: str | None
    compile: Callable[[], Awaitable[Sampler]]
    release: Callable[[], None] = lambda: None
    runs: bool = False


class Measure(Protocol):
    """Makes a candidate ready to be timed: any class with this method. Whatever it raises is that candidate's outcome.

    A `BaseMeasure` may do more.
    """

    async def compile(self, trial: Trial[Any]) -> Sampler: ...


class BaseMeasure:
    """A measure with all that one may do, and the defaults."""

    runs_on_device = False
    """Whether it samples on a real device, whose lock it then shares with the other processes of this host."""

    async def compile(self, trial: Trial[Any]) -> Sampler:
        raise NotImplementedError

    async def lower(self, trial: Trial[Any]) -> Lowered:
        """Return the candidate's program, so that equal ones are compiled once."""
        return Lowered(None, partial(self.compile, trial))

    def turn(self, charge: Charge) -> AbstractAsyncContextManager[BaseMeasure]:
        """Wait, as a sampler's turn does, for the measure to compile with."""
        return nullcontext(self)

    def end_tune(self, shared: dict[str, Any]) -> None:
        """Release what was made once for all candidates of a tune."""

    async def aclose(self) -> None:
        """Release everything that outlives a tune."""


class _CompileOnly(BaseMeasure):
    """A measure that is a user's own class."""

    def __init__(self, measure: Measure) -> None:
        self._measure = measure

    async def compile(self, trial: Trial[Any]) -> Sampler:
        return await self._measure.compile(trial)


def as_measure(measure: Measure) -> BaseMeasure:
    return measure if isinstance(measure, BaseMeasure) else _CompileOnly(measure)
