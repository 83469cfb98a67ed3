"""What stands between a tuner and a device: one candidate in, a function that takes samples out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol

from asel.devices import Settings
from asel.kernel import Cfg
from asel.keys import Objective
from asel.threads import Busy

__all__ = ["How", "Lowered", "Measure", "Sampler", "Trial", "lower"]

How = Literal["forward+backward", "forward", "eager"]
"""What a sample really is: what cannot be differentiated is timed forward, and what cannot be traced, as it is."""


class Sampler(Protocol):
    """Runs the candidate, alone on its device, and returns the seconds one run took.

    May also have `how`, where that is not the trial's objective; `turn()`, an async context manager
    around each step, in which to wait for what others hold: that wait is not timed; `ready()`, awaited
    before each sample as a step of its own; `outputs()`, what a run returns, on the host; and
    `release()`, called in a thread once the tune is over.
    """

    def __call__(self) -> Awaitable[float]: ...


@dataclass(slots=True)
class Trial(Generic[Cfg]):
    """One candidate on its way through a measure."""

    cfg: Cfg
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    device: Any = None
    objective: Objective = "forward"
    settings: Settings | None = None
    # How long a cancelled step waits for its thread: zero, except while a chain is closing.
    grace_s: Callable[[], float] = lambda: 0.0
    # Threads that had to be left behind, each still at its step when it was.
    left_behind: list[Busy] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Lowered:
    """A candidate's program before it is compiled. Equal fingerprints are equal programs."""

    fingerprint: str | None
    compile: Callable[[], Awaitable[Sampler]]


class Measure(Protocol):
    """Makes a candidate ready to be timed. Whatever it raises is that candidate's outcome.

    May also have `lower(trial)`, returning a `Lowered`, so that equal programs are compiled once;
    `turn()`, an async context manager that waits, untimed, and gives the measure to compile with; and
    `aclose()`, when no more is to come.
    """

    async def compile(self, trial: Trial[Any]) -> Sampler: ...


async def lower(measure: Measure, trial: Trial[Any]) -> Lowered:
    """Return the candidate's program; a measure that does not lower tells nothing of it."""
    lowers = getattr(measure, "lower", None)
    if lowers is None:
        return Lowered(None, lambda: measure.compile(trial))
    lowered: Lowered = await lowers(trial)
    return lowered
