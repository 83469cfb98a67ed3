"""For tests of code that selects through asel: virtual time, scripted measures, fake devices.

In virtual time a test that waits an hour takes no time at all: whenever every task is asleep, the
clock jumps to the moment the next one wakes. It moves only by such jumps, so what a test measures
with `anyio.current_time()` is exact. The clock knows nothing of threads and would jump while one
works: use a `ScriptedMeasure` in the place of real compiling and timing.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from types import SimpleNamespace
from typing import Any, Literal, TypeVar

import anyio

from asel.errors import InvalidRequestError
from asel.events import BaseSink, Event
from asel.telemetry.capture import CapturedTelemetry, SpanTree
from asel.tuning.measure import BaseMeasure, Sampler, Trial
from asel.tuning.outcomes import Measured, TuneReport

__all__ = [
    "CapturedTelemetry",
    "FakeArray",
    "FakeDevice",
    "RecordingSink",
    "ReplayMeasure",
    "ScriptedMeasure",
    "SpanTree",
    "VirtualTimeLoop",
    "run_in_virtual_time",
    "virtual_backend",
]

T = TypeVar("T")
Backend = Literal["asyncio", "trio"]


class _JumpingSelector(selectors.DefaultSelector):
    """Where a real selector would sleep, this one moves its clock forward."""

    now: float = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:  # no task is asleep: only another thread can bring news
            return super().select(None)
        ready = super().select(0)
        if not ready and timeout > 0:
            self.now += timeout
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An asyncio event loop in virtual time."""

    virtual = True

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def virtual_backend(name: Backend) -> tuple[str, dict[str, Any]]:
    """Return an anyio backend in virtual time, as the `anyio_backend` fixture takes it.

    Make one for each test: clocks are not shared.
    """
    if name == "asyncio":
        return "asyncio", {"loop_factory": VirtualTimeLoop}
    if name == "trio":
        from trio.testing import MockClock

        return "trio", {"clock": MockClock(autojump_threshold=0)}
    raise InvalidRequestError(f"virtual_backend({name!r}): the backends are 'asyncio' and 'trio'")


def run_in_virtual_time(fn: Callable[..., Awaitable[T]], *args: Any, backend: Backend = "asyncio") -> T:
    """Run an async function to its end in virtual time, outside any test framework."""
    name, options = virtual_backend(backend)
    return anyio.run(fn, *args, backend=name, backend_options=options)


Script = Mapping[Any, T] | Callable[[Any], T]


class ScriptedMeasure(BaseMeasure):
    """A `Measure` that follows a script and never touches a device: `Tuner(measure=ScriptedMeasure(...))`.

    `costs` and `compile_s` say how many seconds a config takes: one number for all, a mapping, or a
    function of the config. `compile_errors` and `run_errors` say which configs raise what, and
    `hangs` which never come back. What was asked for is in `compiled` and `sampled`, in order.
    """

    def __init__(
        self,
        costs: Script[float] | float = 0.001,
        *,
        compile_s: Script[float] | float = 0.0,
        compile_errors: Script[Exception | None] | None = None,
        run_errors: Script[Exception | None] | None = None,
        hangs: Collection[Any] = (),
    ) -> None:
        self._costs = costs
        self._compile_s = compile_s
        self._compile_errors = compile_errors or {}
        self._run_errors = run_errors or {}
        self._hangs = hangs
        self.compiled: list[Any] = []
        self.sampled: list[Any] = []

    async def compile(self, trial: Trial[Any]) -> Sampler:
        cfg = trial.cfg
        trial.build()
        self.compiled.append(cfg)
        await anyio.sleep(_scripted(self._compile_s, cfg))
        if (error := _scripted(self._compile_errors, cfg)) is not None:
            raise error

        async def sample() -> float:
            self.sampled.append(cfg)
            if cfg in self._hangs:
                await anyio.sleep_forever()
            if (error := _scripted(self._run_errors, cfg)) is not None:
                raise error
            cost: float = _scripted(self._costs, cfg)
            await anyio.sleep(cost)
            return cost

        return sample


class ReplayMeasure(BaseMeasure):
    """A `Measure` that hands out recorded samples: strategies are compared with no device.

    `timings` has the samples of each config, or is a `TuneReport`. Those of a config come in their order, over
    and over, from a round on that `seed` picks for all: what slowed a round slows all of its samples again.
    Nothing is waited for; `sampled` and `simulated_s` are what a strategy would have cost.
    """

    def __init__(self, timings: Mapping[Any, Sequence[float]] | TuneReport[Any], seed: int = 0) -> None:
        if isinstance(timings, TuneReport):
            self._timings = [(o.cfg, o.samples_s) for o in timings.outcomes if isinstance(o, Measured)]
        else:
            self._timings = [(cfg, tuple(samples)) for cfg, samples in timings.items()]
        rounds = max((len(samples) for _, samples in self._timings), default=0)
        self._first = random.Random(seed).randrange(max(rounds, 1))
        self.sampled = 0
        self.simulated_s = 0.0

    async def compile(self, trial: Trial[Any]) -> Sampler:
        recorded = next((samples for cfg, samples in self._timings if cfg == trial.cfg), ())
        if not recorded:
            raise InvalidRequestError(f"nothing was recorded of {trial.cfg!r}")
        samples = islice(cycle(recorded), self._first % len(recorded), None)

        async def sample() -> float:
            seconds = next(samples)
            self.sampled += 1
            self.simulated_s += seconds
            return seconds

        return sample


def _scripted(script: Any, cfg: Any) -> Any:
    if callable(script):
        return script(cfg)
    if not isinstance(script, Mapping):
        return script
    return next((value for key, value in script.items() if key == cfg), None)  # configs may be unhashable


class RecordingSink(BaseSink):
    """A sink that keeps every event, before the call that caused it returns, however busy the machine is."""

    on_loop = True

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)

    @property
    def names(self) -> list[str]:
        return [event.name for event in self.events]

    def named(self, name: str) -> list[Any]:
        """Return the events of one kind."""
        return [event for event in self.events if event.name == name]


@dataclass(frozen=True, slots=True)
class FakeDevice:
    """Hardware this machine does not have: a call whose arguments live on it is keyed and tuned for it."""

    device_kind: str
    platform: str = "gpu"
    id: int = 0
    platform_version: str = "fake"

    @property
    def client(self) -> SimpleNamespace:
        return SimpleNamespace(platform_version=self.platform_version)

    def array(self, shape: tuple[int, ...], dtype: str = "float32") -> FakeArray:
        """Return an argument that lives on this device."""
        return FakeArray(shape, dtype, self)


@dataclass(frozen=True, slots=True)
class FakeArray:
    """An argument with a shape, a dtype and a device, and no contents."""

    shape: tuple[int, ...]
    dtype: str
    device: FakeDevice

    def devices(self) -> set[FakeDevice]:
        return {self.device}
