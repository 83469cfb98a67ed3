"""The limits on background tunes, which share the machine with requests.

They no longer apply to a tune once a caller waits for it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import anyio

from asel.errors import InvalidRequestError

__all__ = ["BackgroundLimits", "BackgroundPace"]


@dataclass(frozen=True, slots=True)
class BackgroundLimits:
    """At most `max_tunes` run at once, each works for `duty_cycle` of the time, and only while the selector is idle.

    It is idle once nothing has been selected for `idle_s` seconds. None means no limit.
    """

    max_tunes: int | None = None
    duty_cycle: float = 1.0
    idle_s: float | None = None

    def __post_init__(self) -> None:
        if self.max_tunes is not None and (isinstance(self.max_tunes, bool) or self.max_tunes < 1):
            raise InvalidRequestError(
                f"ConfigSelectorChain: max_background_tunes={self.max_tunes!r} must be 1 or more, or None for no limit"
            )
        if isinstance(self.duty_cycle, bool) or not 0 < self.duty_cycle <= 1:
            raise InvalidRequestError(
                f"ConfigSelectorChain: background_duty_cycle={self.duty_cycle!r} must be above 0, and 1 at most"
            )
        if self.idle_s is not None and (isinstance(self.idle_s, bool) or not self.idle_s > 0):
            raise InvalidRequestError(
                f"ConfigSelectorChain: background_idle_s={self.idle_s!r} must be seconds above zero, or None"
            )


class _Paced(Protocol):
    """A tune; the limits apply while it is in the background."""

    background: bool


class BackgroundPace:
    """Applies the limits to the background tunes of one selector. `calls` returns the number of selections so far."""

    def __init__(self, limits: BackgroundLimits, calls: Callable[[], int]) -> None:
        self._limits = limits
        self._calls = calls
        self._calls_when_idle = -1
        self._running = 0
        self._changed = anyio.Event()

    def notify(self) -> None:
        """Have delayed tunes check the limits again, because a tune has ended or a caller waits for one."""
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    def may_delay(self, tune: _Paced) -> bool:
        """Return whether the limits may delay the beginning of a tune."""
        return tune.background and self._limits != BackgroundLimits()

    @asynccontextmanager
    async def slot(self, tune: _Paced) -> AsyncIterator[None]:
        """Wait until a tune may begin, and count it as running during the block."""
        max_tunes = self._limits.max_tunes
        while tune.background and max_tunes is not None and self._running >= max_tunes:
            await self._changed.wait()
        counts = tune.background
        self._running += counts
        try:
            await self._until_idle(tune)
            yield
        finally:
            self._running -= counts
            self.notify()

    async def rest(self, tune: _Paced, worked_s: float) -> None:
        """Pause after a step of `worked_s` seconds, and then until the selector is idle."""
        if not tune.background:
            return
        duty = self._limits.duty_cycle
        if duty < 1:
            with anyio.move_on_after(worked_s * (1 - duty) / duty):
                await self._until_waited_for(tune)
        await self._until_idle(tune)

    async def _until_idle(self, tune: _Paced) -> None:
        """Return once nothing was selected for `idle_s`; immediately if that was so and nothing was selected since."""
        if self._limits.idle_s is None:
            return
        while tune.background and self._calls() != self._calls_when_idle:
            seen = self._calls()
            with anyio.move_on_after(self._limits.idle_s) as quiet:
                await self._until_waited_for(tune)
            if quiet.cancelled_caught and self._calls() == seen:
                self._calls_when_idle = seen

    async def _until_waited_for(self, tune: _Paced) -> Any:
        while tune.background:
            await self._changed.wait()
