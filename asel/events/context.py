"""The context of an event for telemetry: the call or tune that it belongs to, and the selector's statistics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Asked", "Statistics", "asking", "inside_a_tune", "tune_context"]


class Asked(NamedTuple):
    """A call that has no answer yet: its number, which identifies it in telemetry, and its time."""

    id: int
    start: float


asking: ContextVar[Asked | None] = ContextVar("asel_asking", default=None)
"""The call for which the current task walks the tiers. It holds no arrays, since events keep it until delivery."""

tune_context: ContextVar[str] = ContextVar("asel_inside_a_tune", default="")
inside_a_tune = tune_context.get
"""The id of the running tune, also inside its candidates: waiting for a tune from there could deadlock."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """A snapshot of a selector's tunes, waiters and background queue."""

    pending: Mapping[str, int]
    """Running tunes, by op."""
    waiters: Mapping[str, int]
    """Callers that wait for a tune, by op."""
    queued: int
    """Keys in the background queue."""

    @classmethod
    def of(cls, tunes: Iterable[tuple[str, int]], queued: int) -> Statistics:
        pending, waiters = Counter[str](), Counter[str]()
        for op, waiting in tunes:
            pending[op] += 1
            waiters[op] += waiting
        return cls(pending, waiters, queued)
