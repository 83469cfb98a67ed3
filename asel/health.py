"""Whether a store works: one that fails is left alone for a while, longer each time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from asel.events import StoreFailed, StoreRecovered, StoreRetry
from asel.fanout import FanOut
from asel.keys import CacheKey
from asel.persistence import Sought
from asel.redaction import redact

__all__ = ["Health", "in_words"]

Operation = Literal["get", "put", "claim"]
_FIRST_REST_S, _LONGEST_REST_S = 1.0, 30.0


@dataclass(slots=True)
class Trouble:
    """An operation that failed, and when it may be tried again."""

    why: str
    rest_s: float
    until: float
    trying: bool = False


class Health:
    """Whether a store works.

    A store that cannot be read is taken for gone, and nothing is tried; one that cannot be written
    is still read. When one operation works again, the others may be tried at once. Recovery is reported when all of
    them work: a store that answers reads may still refuse writes.
    """

    def __init__(self, events: FanOut, on_change: Callable[[], object]) -> None:
        self.last_failed: Sought[Any] | None = None
        """The latest failed request, to probe the store with."""
        self._events = events
        self._on_change = on_change
        self._troubles: dict[Operation, Trouble] = {}
        self._since = 0.0

    def why_not(self, operation: Operation) -> str | None:
        """Say why an operation is not to be tried now; after a rest, one caller at a time tries again."""
        trouble = self._troubles.get("get") or self._troubles.get(operation)
        if trouble is None:
            return None
        if (left := trouble.until - self._events.now()) > 0:
            return f"the store failed ({trouble.why}) and is tried again in {left:.1f} s"
        if trouble.trying:
            return f"the store failed ({trouble.why}) and is being tried again"
        trouble.trying = trouble is self._troubles.get(operation)
        return None

    @property
    def is_failing(self) -> bool:
        return bool(self._troubles)

    def has_failed(self, operation: Operation) -> bool:
        return operation in self._troubles

    def rest_left_s(self) -> float:
        """Return the seconds until some operation may be tried again."""
        now, get = self._events.now(), self._troubles.get("get")
        troubles = self._troubles.values() if get is None else [get]
        left_s = (_FIRST_REST_S if trouble.trying else trouble.until - now for trouble in troubles)
        return max(0.0, min(left_s, default=0.0))

    def failed(self, operation: Operation, error: Exception, sought: Sought[Any], start: float) -> None:
        now, before = self._events.now(), self._troubles.get(operation)
        was_well = not self._troubles
        rest_s = _FIRST_REST_S if before is None else min(2 * before.rest_s, _LONGEST_REST_S)
        self._troubles[operation] = Trouble(in_words(error), rest_s, now + rest_s)
        if was_well:
            self._since = start
        kind = StoreFailed if was_well else StoreRetry
        self._events(kind.of(sought.key, operation, start, now, error))
        self.last_failed = sought
        self._on_change()

    def worked(self, operation: Operation, key: CacheKey) -> None:
        over = [self._troubles.pop(operation, None)]
        if operation == "put":  # a store that takes a record can be read, too
            over.append(self._troubles.pop("get", None))
        if not any(over):
            return
        now = self._events.now()
        for trouble in self._troubles.values():
            trouble.until = min(trouble.until, now)
        self._on_change()
        if not self._troubles:
            self._events(
                StoreRecovered(key=key, start=self._since, end=now, operation=operation, failing_s=now - self._since)
            )

    def forgive(self) -> None:
        """Let everything be tried at once."""
        for trouble in self._troubles.values():
            trouble.until, trouble.trying = self._events.now(), False

    def let_go(self, operation: Operation) -> None:
        """Let another caller try: this one was cancelled before there was an answer."""
        if (trouble := self._troubles.get(operation)) is not None:
            trouble.trying = False


def in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {redact(error)}"
