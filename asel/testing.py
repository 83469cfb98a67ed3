"""For tests of code that selects through asel: virtual time, scripted measures, fake devices.

In virtual time, a test that waits an hour takes no time: whenever every task is asleep, the clock jumps to the time at
which the next one wakes. It moves only by such jumps, so durations by `anyio.current_time()` are exact. The clock would
also jump while a thread works, so use a `ScriptedMeasure` instead of real compiling and timing.
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
    """A selector that moves its clock forward instead of sleeping."""

    now: float = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:  # no task is asleep: only another thread can wake the loop
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
    """Run an async function in virtual time, without a test framework."""
    name, options = virtual_backend(backend)
    return anyio.run(fn, *args, backend=name, backend_options=options)


Script = Mapping[Any, T] | Callable[[Any], T]


class ScriptedMeasure(BaseMeasure):
    """A `Measure` that follows a script and never touches a device: `Tuner(measure=ScriptedMeasure(...))`.

    `costs` and `compile_s` are the seconds of each config: one number for all, a mapping, or a function of the config.
    `compile_errors` and `run_errors` are the errors of configs that raise, and `hangs` has the configs that never
    return. `compiled` and `sampled` record the requests, in order.
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
    """A `Measure` that replays recorded samples, to compare strategies without a device.

    `timings` has the samples of each config, or is a `TuneReport`. The samples of a config are repeated in order,
    starting with a round that `seed` picks for all configs, so that a slow round stays a slow round. Nothing waits;
    `sampled` and `simulated_s` are the cost that a strategy would have had.
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
    """A sink that has recorded every event by the time the call that caused it returns."""

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
    """A device that this machine does not have. Calls with arguments on it are keyed and tuned for it."""

    device_kind: str
    platform: str = "gpu"
    id: int = 0
    platform_version: str = "fake"

    @property
    def client(self) -> SimpleNamespace:
        return SimpleNamespace(platform_version=self.platform_version)

    def array(self, shape: tuple[int, ...], dtype: str = "float32") -> FakeArray:
        """Return an argument on this device."""
        return FakeArray(shape, dtype, self)


@dataclass(frozen=True, slots=True)
class FakeArray:
    """An argument with a shape, a dtype and a device, and no contents."""

    shape: tuple[int, ...]
    dtype: str
    device: FakeDevice

    def devices(self) -> set[FakeDevice]:
        return {self.device}
