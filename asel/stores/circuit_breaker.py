"""A circuit breaker: after a failure, a store is not tried for a while, longer each time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import anyio

from asel.errors import StoreError
from asel.events import StoreFailed, StoreRecovered, StoreRetry
from asel.events.dispatcher import Dispatcher
from asel.kernels.keys import CacheKey
from asel.redaction import redact
from asel.runtime.loop import ordinary_errors
from asel.stores.config_store import StoreQuery

__all__ = ["CircuitBreaker", "timeout_error"]

Operation = Literal["get", "put", "claim"]
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 1.0, 30.0


@dataclass(slots=True)
class Outage:
    """The state of an operation that failed: why, its back-off, and the time of the next attempt."""

    why: str
    backoff_s: float
    until: float
    is_retrying: bool = False


class CircuitBreaker:
    """Decides which operations of a store may be tried now, and reports outages and recoveries.

    If reads fail, no operation is tried; if only writes or claims fail, reads continue. Once one operation works again,
    the others may be tried immediately. Recovery is reported when all of them work: a store that answers reads may
    still refuse writes.
    """

    def __init__(self, events: Dispatcher, on_change: Callable[[], object]) -> None:
        self.last_failed: StoreQuery[Any] | None = None
        """The latest failed request, to probe the store with."""
        self._events = events
        self._on_change = on_change
        self._outages: dict[Operation, Outage] = {}
        self._since = 0.0

    def begin_attempt(self, operation: Operation) -> str | None:
        """Begin an attempt and return None; if none is allowed now, return the reason.

        After the back-off, one caller at a time tries again. It has to call `end_attempt`.
        """
        outage = self._outages.get("get") or self._outages.get(operation)
        if outage is None:
            return None
        if (left := outage.until - self._events.now()) > 0:
            return f"the store failed ({outage.why}), and the next attempt is in {left:.1f} s"
        if outage.is_retrying:
            return f"the store failed ({outage.why}), and another caller is trying it again"
        outage.is_retrying = outage is self._outages.get(operation)
        return None

    @property
    def is_failing(self) -> bool:
        return bool(self._outages)

    def has_failed(self, operation: Operation) -> bool:
        return operation in self._outages

    def backoff_left_s(self) -> float:
        """Return the seconds until some operation may be tried again."""
        now, get = self._events.now(), self._outages.get("get")
        outages = self._outages.values() if get is None else [get]
        left_s = (_FIRST_BACKOFF_S if outage.is_retrying else outage.until - now for outage in outages)
        return max(0.0, min(left_s, default=0.0))

    @contextmanager
    def attempt(self, operation: Operation, query: StoreQuery[Any], timeout_s: float = math.inf) -> Iterator[None]:
        """Run an operation within a time limit, and note its failure.

        Raises:
            StoreError: it failed or took too long.
        """
        start = self._events.now()
        try:
            with anyio.fail_after(timeout_s), ordinary_errors("the store"):
                yield
        except Exception as failure:
            error = timeout_error(timeout_s) if isinstance(failure, TimeoutError) and not str(failure) else failure
            self.note_failure(operation, error, query, start)
            raise StoreError(_text(error)) from error
        finally:
            self.end_attempt(operation)

    def note_failure(self, operation: Operation, error: Exception, query: StoreQuery[Any], start: float) -> None:
        now, before = self._events.now(), self._outages.get(operation)
        was_working = not self._outages
        backoff_s = _FIRST_BACKOFF_S if before is None else min(2 * before.backoff_s, _LONGEST_BACKOFF_S)
        self._outages[operation] = Outage(_text(error), backoff_s, now + backoff_s)
        if was_working:
            self._since = start
        kind = StoreFailed if was_working else StoreRetry
        self._events(kind.of(query.key, operation, start, now, error))
        self.last_failed = query
        self._on_change()

    def note_success(self, operation: Operation, key: CacheKey) -> None:
        over = [self._outages.pop(operation, None)]
        if operation == "put":  # a store that takes a record can be read, too
            over.append(self._outages.pop("get", None))
        if not any(over):
            return
        now = self._events.now()
        for outage in self._outages.values():
            outage.until = min(outage.until, now)
        self._on_change()
        if not self._outages:
            self._events(
                StoreRecovered(key=key, start=self._since, end=now, operation=operation, failing_s=now - self._since)
            )

    def allow_all(self) -> None:
        """End every back-off, so that every operation may be tried immediately."""
        for outage in self._outages.values():
            outage.until, outage.is_retrying = self._events.now(), False

    def end_attempt(self, operation: Operation) -> None:
        """Allow other callers to try, in case this one was cancelled before there was an answer."""
        if (outage := self._outages.get(operation)) is not None:
            outage.is_retrying = False


def timeout_error(timeout_s: float) -> TimeoutError:
    return TimeoutError(f"the store did not answer within {timeout_s:g} s")


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {redact(error)}"
