"""Whether anyone else uses the event loop that a tune runs on.

A thread that lowers a program holds the interpreter, and on a machine whose cores are all compiling it holds it for
long. That is nobody's loss while the loop has no one else to serve.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from anyio.lowlevel import RunVar

try:
    import resource
except ImportError:  # Windows has none
    resource = None  # type: ignore[assignment]

__all__ = ["LoopTraffic", "loop_traffic"]

# None where the system does not count by thread: for all we know the loop is in use there.
_BY_THREAD: int | None = getattr(resource, "RUSAGE_THREAD", None)

# What is known of a shorter time is not enough: a task that is woken every few milliseconds would not be seen in it.
_LEAST_S = 50e-3
# The loop is quiet if others wake it no more often than this and keep it no longer than this part of the time. Whoever
# comes so seldom is late for a few milliseconds once in many times.
_QUIET_PER_S = 10
_QUIET_PART = 0.05
# How often it wakes for the end of what is awaited: it may have to ask for the interpreter, too.
_WAKES = 2


@dataclass(slots=True)
class LoopTraffic:
    """How often and for how long others used a loop lately, as far as it was watched. Unknown is not quiet."""

    is_quiet: bool = False
    _ours: int = field(default=0, init=False)
    _watched_s: float = field(default=0.0, init=False)
    _busy_s: float = field(default=0.0, init=False)
    _woken: int = field(default=0, init=False)

    def woken_by_us(self, times: int) -> None:
        """Note that a step of ours has ended, for which the loop woke so many times at the most."""
        self._ours += times

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the loop while something is awaited that keeps none of its time."""
        start, ours, (busy_s, woken) = time.perf_counter(), self._ours, _use_of_thread()
        try:
            yield
        finally:
            busy_until_s, woken_until = _use_of_thread()
            others = woken_until - woken - (self._ours - ours) - _WAKES
            self.note(time.perf_counter() - start, busy_until_s - busy_s, max(0, others))

    def note(self, seconds: float, busy_s: float, woken: int) -> None:
        """Note that others kept the loop for `busy_s` of some seconds, and woke it so many times."""
        self._watched_s += seconds
        self._busy_s += busy_s
        self._woken += woken
        if self._watched_s >= _LEAST_S and _BY_THREAD is not None:
            seldom = self._woken <= _QUIET_PER_S * self._watched_s
            self.is_quiet = seldom and self._busy_s <= _QUIET_PART * self._watched_s
            self._watched_s, self._busy_s, self._woken = 0.0, 0.0, 0


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
