"""Times things side by side: on a shared machine seconds drift, and ratios taken in one run do not.

Every round gives each contender one short slice, so that drift affects all equally, and the best slice counts. The
garbage collector is off while the clock runs.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import cycle, islice
from time import perf_counter
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

__all__ = ["Budget", "Contender", "compare", "once_each", "race", "without_gc"]

Call = tuple[Any, Any]


@dataclass(frozen=True, slots=True)
class Contender:
    """A contender: `step` is a function, or a coroutine function that does not wait, of two arguments."""

    name: str
    step: Callable[[Any, Any], Any]
    calls: Sequence[Call]
    around: Callable[[], AbstractContextManager[None]] = nullcontext


@dataclass(frozen=True, slots=True)
class Budget:
    """A limit on a contender's cost, as a multiple of that of `of`; with `at_least`, a lower limit."""

    factor: float
    of: str
    at_least: bool = False

    def allows(self, ratio: float) -> bool:
        return ratio >= self.factor if self.at_least else ratio <= self.factor


def race(contenders: Sequence[Contender], *, rounds: int, slice_s: float) -> dict[str, float]:
    """Return the seconds of one step of each contender."""
    # Each slice continues where the last one ended, so that many different calls take turns.
    turns = [cycle(contender.calls) for contender in contenders]
    counts = [_steps_in(slice_s, contender, turn) for contender, turn in zip(contenders, turns, strict=True)]
    best = {contender.name: float("inf") for contender in contenders}
    for _ in range(rounds):
        for contender, turn, count in zip(contenders, turns, counts, strict=True):
            best[contender.name] = min(best[contender.name], _slice(contender, turn, count) / count)
    return best


def once_each(contender: Contender) -> float:
    """Return the seconds of all calls of a contender, each made once: for calls that are different the second time."""
    gc.collect()
    return _slice(contender, iter(contender.calls), len(contender.calls))


def _steps_in(slice_s: float, contender: Contender, turn: Iterator[Call]) -> int:
    _slice(contender, turn, len(contender.calls))  # the first call is not timed
    count = 2
    # The best of three: after a disturbance, slices would have only a step or two, which are slower than many in a row.
    while (taken := min(_slice(contender, turn, count) for _ in range(3))) < slice_s / 4:
        count *= 2
    return max(1, round(count * slice_s / taken))


def _slice(contender: Contender, turn: Iterator[Call], count: int) -> float:
    calls = list(islice(turn, count))
    run = _await_each if inspect.iscoroutinefunction(contender.step) else _call_each
    with contender.around(), without_gc():
        return run(contender.step, calls)


@contextmanager
def without_gc() -> Iterator[None]:
    """Disable the garbage collector inside the block."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _await_each(step: Callable[[Any, Any], Any], calls: Sequence[Call]) -> float:
    start = perf_counter()
    for first, second in calls:
        try:
            step(first, second).send(None)
        except StopIteration:
            continue
        raise RuntimeError(f"{step!r} had to wait, so this is not what was to be timed")
    return perf_counter() - start


def _call_each(step: Callable[[Any, Any], Any], calls: Sequence[Call]) -> float:
    start = perf_counter()
    for first, second in calls:
        step(first, second)
    return perf_counter() - start


def compare(seconds: Mapping[str, float | None], budgets: Mapping[str, Budget], *, floor: str) -> tuple[Table, bool]:
    """Return a table of all times, and whether every budget is kept.

    None stands for a contender that is not installed.
    """
    table = Table("what", box=SIMPLE)
    for heading in ("time", f"x {floor}", "budget", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    timed = {name: taken for name, taken in seconds.items() if taken is not None}
    kept = True
    for name, taken in seconds.items():
        if taken is None:
            table.add_row(name, "not installed")
            continue
        row = [name, f"{taken * 1e6:,.2f} us", f"{taken / timed[floor]:,.1f}"]
        if (budget := budgets.get(name)) is not None:
            ratio = taken / timed[budget.of]
            ok = budget.allows(ratio)
            kept = kept and ok
            sign = ">=" if budget.at_least else "<="
            row += [f"{ratio:.1f}x {sign} {budget.factor:g}x {budget.of}", "[green]ok" if ok else "[bold red]OVER"]
        table.add_row(*row)
    return table, kept
