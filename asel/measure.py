"""What stands between a tuner and a device: one candidate in, a function that takes samples out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol

from asel.devices import Settings
from asel.kernel import Cfg
from asel.keys import Objective
from asel.threads import Busy

__all__ = ["Measure", "Sampler", "Trial"]

Sampler = Callable[[], Awaitable[float]]
"""Runs the candidate once, alone on its device, and returns the seconds it took."""


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


class Measure(Protocol):
    """Makes a candidate ready to be timed. Whatever it raises is that candidate's outcome."""

    async def compile(self, trial: Trial[Any]) -> Sampler: ...
