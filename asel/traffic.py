"""Whether anyone else uses the event loop that a tune runs on.

A thread that lowers a program holds the interpreter, and on a machine whose cores are all compiling it holds it for
long. No task is late for that while the loop has no one else to serve.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf

from anyio.lowlevel import RunVar

try:
    import resource
except ImportError:  # Windows has none
    resource = None  # type: ignore[assignment]

__all__ = ["LoopTraffic", "loop_traffic"]

# None where the system does not count by thread: for all we know a loop is always in use there.
_BY_THREAD: int | None = getattr(resource, "RUSAGE_THREAD", None)

# What is known of a shorter time is not enough: a task that is woken every few milliseconds would not be seen in it.
_LEAST_S = 50e-3
# What was seen longer ago than this says nothing of now.
_FRESH_S = 1.0
# The loop is quiet if others wake it no more often than this and keep it no longer than this part of the time. Whoever
# comes so seldom is late for a few milliseconds once in many times.
_QUIET_PER_S = 10
_QUIET_PART = 0.05
# How often it wakes for the end of a step of ours: it may have to ask for the interpreter, too.
_WAKES = 2


class LoopTraffic:
    """How often and for how long others used a loop lately, as far as it was watched. Unknown is not quiet."""

    def __init__(self) -> None:
        self._ours = 0
        self._quiet_until = -inf
        self._forget()

    def _forget(self) -> None:
        self._watched_s = self._busy_s = 0.0
        self._woken = 0
        self._since = -inf

    @property
    def is_quiet(self) -> bool:
        return time.perf_counter() < self._quiet_until

    @contextmanager
    def expected(self) -> Iterator[None]:
        """Have the loop woken for the end of a step of ours, which is no traffic for whoever watches it meanwhile."""
        try:
            yield
        finally:
            self._ours += _WAKES

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the loop while the end of a step is awaited that keeps none of its time."""
        start, ours, (busy_s, woken) = time.perf_counter(), self._ours, _use_of_thread()
        try:
            with self.expected():
                yield
        finally:
            busy_until_s, woken_until = _use_of_thread()
            others = max(0, woken_until - woken - (self._ours - ours))
            seconds = time.perf_counter() - start
            # One that never slept was at work all the time; or nothing is counted here.
            self.note(seconds, busy_until_s - busy_s if woken_until > woken else seconds, others)

    def note(self, seconds: float, busy_s: float, woken: int) -> None:
        """Note that others kept the loop for `busy_s` of the last `seconds`, and woke it so many times."""
        now = time.perf_counter()
        if now - seconds - self._since > _FRESH_S:
            self._forget()
        self._since = now
        self._watched_s += seconds
        self._busy_s += busy_s
        self._woken += woken
        if self._watched_s >= _LEAST_S:
            seldom = self._woken <= _QUIET_PER_S * self._watched_s
            is_quiet = seldom and self._busy_s <= _QUIET_PART * self._watched_s
            self._quiet_until = now + _FRESH_S if is_quiet else -inf
            self._forget()


def _use_of_thread() -> tuple[float, int]:
    """Return the processor time this thread has had, and how often it gave up its core to wait."""
    if _BY_THREAD is None:
        return 0.0, 0
    used = resource.getrusage(_BY_THREAD)
    return used.ru_utime + used.ru_stime, used.ru_nvcsw


_traffic: RunVar[LoopTraffic] = RunVar("asel_loop_traffic")


def loop_traffic() -> LoopTraffic:
    """Return what is known of the running loop."""
    traffic = _traffic.get(None)
    if traffic is None:
        _traffic.set(traffic := LoopTraffic())
    return traffic
