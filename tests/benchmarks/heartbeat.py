"""The lateness of a heartbeat on an event loop, and in a program that does nothing else."""

from __future__ import annotations

import subprocess
import sys
from ast import literal_eval
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time

import anyio


@dataclass(frozen=True, slots=True)
class Lateness:
    """The interval from the time a heartbeat was due until it came, on a clock that all programs share."""

    due: float
    came: float
    computed_s: float = 0.0
    """The processor time of all the program's threads in that interval."""
    queued_s: float = 0.0
    """The time that the event loop's thread was ready and waited for a core, if the system reports it."""

    @property
    def seconds(self) -> float:
        return self.came - self.due

    @property
    def own_s(self) -> float:
        """The part that the program itself may have caused, and not other programs on the cores."""
        return min(self.seconds - self.queued_s, self.computed_s)

    def beside(self, others: Sequence[Lateness]) -> float:
        """Return the seconds in which no other heartbeat was late."""
        shared = (min(self.came, other.came) - max(self.due, other.due) for other in others)
        return self.seconds - sum(each for each in shared if each > 0)


async def beat(late: list[Lateness], beat_s: float) -> None:
    """Record the lateness of each heartbeat, until cancelled."""
    while True:
        queued, computed, due = _queued_s(), process_time(), perf_counter() + beat_s
        await anyio.sleep(beat_s)
        late.append(Lateness(due, perf_counter(), process_time() - computed, _queued_s() - queued))


def _queued_s() -> float:
    """Return the time this thread has waited for a core, which Linux reports."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except FileNotFoundError:
        return 0.0


# Waits for the end of its input, one beat at a time, and then prints the late beats.
_SECOND_HEART = """
import select, sys, time
late, ended = [], False
while not ended:
    due = time.perf_counter() + {beat_s}
    ended = bool(select.select([sys.stdin], [], [], {beat_s})[0])
    came = time.perf_counter()
    if came > due + {beat_s}:
        late.append((due, came))
print(late)
"""


@contextmanager
def second_heart(beat_s: float) -> Iterator[Callable[[], list[Lateness]]]:
    """Run a heartbeat in another program. Yields a function that ends it and returns its late intervals."""
    command = [sys.executable, "-S", "-c", _SECOND_HEART.format(beat_s=beat_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as heart:
        yield lambda: [Lateness(*each) for each in literal_eval(heart.communicate()[0])]
