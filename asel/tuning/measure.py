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
"""Charges the tune for the time spent inside the block."""

TimingMode = Literal["forward+backward", "forward", "eager"]
"""What a sample times. A kernel that cannot be differentiated runs forward, one that cannot be traced runs eagerly."""


class Sampler(Protocol):
    """Runs the candidate once, alone on its device, and returns the seconds: any async function.

    A `BaseSampler` has further methods.
    """

    def __call__(self) -> Awaitable[float]: ...


class BaseSampler:
    """The optional attributes and methods of samplers, with their defaults."""

    how: TimingMode | None = None
    """The timing mode of the samples; None for the trial's objective."""
    bench: Bench | None = None
    """The bench that can take a series of samples, if this sampler needs neither `turn` nor `ready`."""
    nan_outputs: frozenset[int] | None = None
    """The positions of outputs that contained NaN in the first sample; None if unknown."""

    def __call__(self) -> Awaitable[float]:
        raise NotImplementedError

    def turn(self, charge: Charge) -> AbstractAsyncContextManager[object]:
        """Hold a resource shared with other tunes, such as a worker, around each step.

        Waiting is free; work for this tune runs inside `charge()`.
        """
        return nullcontext()

    def ready(self) -> Sequence[Callable[[], Awaitable[object]]]:
        """Return steps to await, one by one, before a sample."""
        return ()

    async def outputs(self) -> list[Any]:
        """Return the outputs of a run, on the host.

        Raises:
            InvalidRequestError: this sampler cannot return them.
        """
        raise InvalidRequestError(f"{type(self).__name__} has no outputs to check; pass check=None")

    async def runnable(self) -> Runnable | None:
        """Return the compiled program for executors; None if the first call has to compile it again."""
        return None

    def release(self) -> None:
        """Release everything, in a thread, once the tune is over."""


class _FunctionSampler(BaseSampler):
    """Adapts an async function."""

    def __init__(self, sample: Sampler) -> None:
        self._sample = sample

    def __call__(self) -> Awaitable[float]:
        return self._sample()


def as_sampler(sampler: Sampler) -> BaseSampler:
    return sampler if isinstance(sampler, BaseSampler) else _FunctionSampler(sampler)


class Bench(Protocol):
    """Takes samples of several samplers in a row, without a return to the event loop.

    On a busy machine, waking a thread and then the loop takes as long as a short sample.
    """

    async def series(
        self, samplers: Sequence[Any], taken: list[tuple[float, float]], left_behind: list[AbandonedThread]
    ) -> None:
        """Take one sample of each sampler, appending the seconds of one run and of the whole sample to `taken`.

        An exception belongs to the first sampler without a sample. An abandoned thread is added to
        `left_behind`, and takes no further samples.
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
        # How long a cancelled step waits for its thread: zero, except while a selector is closing.
        self.grace_s = grace_s
        # Threads that were abandoned during a step.
        self.left_behind: list[AbandonedThread] = []
        # Objects that a measure makes once for all candidates of a tune.
        self.shared: dict[str, Any] = {} if shared is None else shared
        # The current stage, for the outcome if this candidate fails before it can be sampled.
        self.stage: Literal["build", "compile"] = "compile"
        # The factory of `fn`, if a worker process may call it: it holds nothing of the call.
        self.portable_make = make_fn if factory_is_portable else None
        self._fn = fn
        self._make_fn = make_fn

    @property
    def fn(self) -> Callable[..., Any]:
        """The function to be timed."""
        return self.build()

    def build(self) -> Callable[..., Any]:
        """Return `fn`. The first call makes it with the candidate's own code, which may be slow."""
        if self._fn is None:
            assert self._make_fn is not None
            self.stage = "build"
            self._fn = self._make_fn(self.cfg)
            self.stage = "compile"
        return self._fn


@dataclass(frozen=True, slots=True)
class Lowered:
    """A candidate's program before it is compiled. Equal fingerprints mean equal programs.

    `release` frees a program that will not be compiled. If `runs`, compiling also runs it, so it needs the device and
    comes last, since it may hang.
    """

    fingerprint: str | None
    compile: Callable[[], Awaitable[Sampler]]
    release: Callable[[], None] = lambda: None
    runs: bool = False


class Measure(Protocol):
    """Makes a candidate ready to be timed: any class with this method. An exception is that candidate's outcome.

    A `BaseMeasure` has further methods.
    """

    async def compile(self, trial: Trial[Any]) -> Sampler: ...


class BaseMeasure:
    """The optional attributes and methods of measures, with their defaults."""

    runs_on_device = False
    """Whether it samples on a real device, so that other processes of this host must be locked out."""

    async def compile(self, trial: Trial[Any]) -> Sampler:
        raise NotImplementedError

    async def lower(self, trial: Trial[Any]) -> Lowered:
        """Return the candidate's program, so that equal programs are compiled once."""
        return Lowered(None, partial(self.compile, trial))

    def turn(self, charge: Charge) -> AbstractAsyncContextManager[BaseMeasure]:
        """Return the measure to compile with, holding a shared resource as `BaseSampler.turn` does."""
        return nullcontext(self)

    def end_tune(self, shared: dict[str, Any]) -> None:
        """Release the objects made once for all candidates of a tune."""

    async def aclose(self) -> None:
        """Release everything that outlives a tune."""


class _CompileOnly(BaseMeasure):
    """Adapts a user's own class."""

    def __init__(self, measure: Measure) -> None:
        self._measure = measure

    async def compile(self, trial: Trial[Any]) -> Sampler:
        return await self._measure.compile(trial)


def as_measure(measure: Measure) -> BaseMeasure:
    return measure if isinstance(measure, BaseMeasure) else _CompileOnly(measure)
