"""The context of an event for telemetry: the call or tune that it belongs to, and the selector's statistics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Asked", "Statistics", "asking", "inside_a_tune", "tune_context"]


class Asked(NamedTuple):
    """A call without an answer yet: the number by which telemetry identifies it, and the time it was made."""

    id: int
    start: float


asking: ContextVar[Asked | None] = ContextVar("asel_asking", default=None)
"""The call that the current task is walking the tiers for. Holds no arrays, since events keep it until delivery."""

tune_context: ContextVar[str] = ContextVar("asel_inside_a_tune", default="")
inside_a_tune = tune_context.get
"""The id of the running tune, also in code that its candidates call: a tune that waited for a tune could deadlock."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """A snapshot of a selector's tunes, waiters and background queue."""

    pending: Mapping[str, int]
    """Tunes in flight, by op."""
    waiters: Mapping[str, int]
    """Callers waiting for them, by op."""
    queued: int
    """Keys still waiting in the background queue."""

    @classmethod
    def of(cls, tunes: Iterable[tuple[str, int]], queued: int) -> Statistics:
        pending, waiters = Counter[str](), Counter[str]()
        for op, waiting in tunes:
            pending[op] += 1
            waiters[op] += waiting
        return cls(pending, waiters, queued)
