"""How late a heartbeat is on an event loop, and in a program that does nothing else meanwhile."""

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
    """From when a heartbeat was due until it came, on a clock that all programs of a machine share."""

    due: float
    came: float
    computed_s: float = 0.0
    """Processor time that the program took meanwhile, in all of its threads."""
    queued_s: float = 0.0
    """How long the event loop's thread could have run and waited for a core, if the system tells."""

    @property
    def seconds(self) -> float:
        return self.came - self.due

    @property
    def own_s(self) -> float:
        """The part that the program itself can have caused, and not other programs that took the cores."""
        return min(self.seconds - self.queued_s, self.computed_s)

    def beside(self, others: Sequence[Lateness]) -> float:
        """Return the seconds in which none of the others was late, too."""
        shared = (min(self.came, other.came) - max(self.due, other.due) for other in others)
        return self.seconds - sum(each for each in shared if each > 0)


async def beat(late: list[Lateness], beat_s: float) -> None:
    """Note how late each heartbeat is, until cancelled."""
    while True:
        queued, computed, due = _queued_s(), process_time(), perf_counter() + beat_s
        await anyio.sleep(beat_s)
        late.append(Lateness(due, perf_counter(), process_time() - computed, _queued_s() - queued))


def _queued_s() -> float:
    """Return how long this thread has waited for a core; Linux knows."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except FileNotFoundError:
        return 0.0


# Ends when its input does. It waits for that, a beat at a time, and prints the beats that it missed.
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
    """Have another program do nothing but beat; gives what ends it and returns when it was late."""
    command = [sys.executable, "-S", "-c", _SECOND_HEART.format(beat_s=beat_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as heart:
        yield lambda: [Lateness(*each) for each in literal_eval(heart.communicate()[0])]
