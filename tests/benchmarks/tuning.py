"""The cost of a tune and the quality of its choice, beside its peers: `python tests/benchmarks/tuning.py`.

Contenders take turns with an oracle that takes interleaved samples of every candidate: regret is by how much the choice
is slower than the oracle's best. Shown are medians, including those of the ratios within a turn. Exits with 1 if a
budget is exceeded.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from time import perf_counter, process_time

import anyio
import jax
from families import CLAMPED, CLAMPED_MORE, FAMILIES, LONG, WIDE, Blocks, Family, Oracle, program_text
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from asel import Tuner, TuneReport
from asel.tuning.request import TuneRequest
from asel.tuning.state import TuneState

MAX_REGRET = 0.03
# Two regrets closer than this count as equal: the oracle is no more precise.
SAME_REGRET = 0.01
# A ratio of times within this of its budget keeps it: a shared machine is no more precise.
TOLERANCE = 0.05
PEER_ITERS = (10, 30)

Tune = Callable[[Family], Blocks]


@dataclass(frozen=True, slots=True)
class Case:
    """A family, the required speed of asel relative to `Tuner(1, 3)`, and the number of samples and turns.

    If compiling dominates and all programs differ, no tuner can be twice as fast: a serial compile keeps 1.6 of two
    cores busy, and samples are nearly free for all.
    """

    family: Family
    tune: Tune
    factor: float = 1.0
    samples: int = 30
    """The oracle's samples of every candidate in every turn."""
    turns: int = 3
    why: str = ""
    with_tune_jax: bool = True
    max_regret: float | None = MAX_REGRET


@dataclass(frozen=True, slots=True)
class Run:
    """The seconds of some tunes, those of asel's tunes in the same turns, and their choices."""

    seconds: list[float]
    cpu_s: list[float]
    asel_s: list[float]
    chosen: list[Blocks]

    @property
    def ratio(self) -> float:
        return median(mine / asel for mine, asel in zip(self.seconds, self.asel_s, strict=True))

    def regret(self, oracle: Oracle) -> float:
        return median(map(oracle.regret, self.chosen))


def asel_tune(family: Family) -> Blocks:
    async def tune() -> Blocks:
        return await Tuner[Blocks]().autotune(family.make, family.args, {}, family.candidates)

    return anyio.run(tune)


def in_groups(family: Family) -> Blocks:
    """asel with a priority group for long chunks, so that the others are tried only if these fail."""
    groups = tuple((int(cfg.b >= 64), 0) for cfg in family.candidates)
    job = TuneState(TuneRequest(family.candidates, family.make, family.args, {}, groups=groups))
    return anyio.run(Tuner[Blocks]().tune, job).winner


class OneMore:
    """asel with all but the last candidate tuned before."""

    def __init__(self) -> None:
        self._earlier: tuple[TuneReport[Blocks], ...] = ()

    def __call__(self, family: Family) -> Blocks:
        job = TuneState(
            TuneRequest(family.candidates, family.make, family.args, {}, incumbent=0, earlier=self._earlier)
        )
        return anyio.run(Tuner[Blocks]().tune, job).winner

    def prepare(self, family: Family) -> None:
        job = TuneState(TuneRequest(family.candidates[:-1], family.make, family.args, {}, incumbent=0))
        self._earlier = (anyio.run(Tuner[Blocks]().tune, job),)


def ejkernel_tune(iters: int, family: Family) -> Blocks:
    from ejkernel.ops import Tuner

    cfg: Blocks = Tuner(1, iters).autotune(family.make, family.args, {}, family.candidates)
    return cfg


def tune_jax_tune(family: Family) -> Blocks:
    import tune_jax

    logging.getLogger("tune_jax").setLevel(logging.CRITICAL)  # without a profiler, it logs long messages
    tuned = tune_jax.tune(lambda *args, cfg: family.make(cfg)(*args), hyperparams={"cfg": family.candidates})
    tuned(*family.args)
    cfg: Blocks = tuned.optimal_hyperparams["cfg"]
    return cfg


def compile_alone(family: Family) -> Blocks:
    """Compile every program once, which is the floor of any tune; the returned choice has no meaning."""
    args, programs = family.args, set[str]()
    for cfg in family.candidates:
        lowered = jax.jit(family.make(cfg)).lower(*args)
        if (text := program_text(lowered)) not in programs:
            programs.add(text)
            lowered.compile()
    return family.candidates[0]


CASES = (
    *(Case(family, asel_tune, turns=5, why="compiling dominates, no two programs alike") for family in FAMILIES),
    Case(
        WIDE,
        asel_tune,
        turns=5,
        why="the best need both cores: whether they are the best is up to the neighbours, so regret has no budget",
        max_regret=None,
    ),
    Case(CLAMPED, asel_tune, why="half are aliases, found before they are compiled"),
    Case(CLAMPED_MORE, asel_tune, 2.0, why="most are aliases, found before they are compiled"),
    Case(
        replace(FAMILIES[1], name="attention in groups"),
        in_groups,
        2.0,
        why="10 of 25 are in the first group",
        with_tune_jax=False,
    ),
    Case(
        replace(FAMILIES[1], name="attention, one candidate added"),
        OneMore(),
        2.0,
        why="the others' timings are reused",
        with_tune_jax=False,
    ),
    Case(LONG, asel_tune, 2.0, samples=10, why="running dominates", with_tune_jax=False),
)


def take_turns(case: Case, oracle: Oracle, turns: int, *tunes: Tune) -> list[Run | None]:
    """Return the figures of asel's tunes and others; None for a tuner that is not installed."""
    tunes = (case.tune, *tunes)
    runs = [Run([], [], [], []) for _ in tunes]
    in_turn = list(zip(tunes, runs, strict=True))
    for turn in range(turns):
        oracle.watch(case.samples)
        first = turn % len(tunes)  # another one each time, since the first tuner runs right after the oracle
        for tune, run in in_turn[first:] + in_turn[:first]:
            if isinstance(tune, OneMore):
                tune.prepare(case.family)
            gc.collect()
            start, busy = perf_counter(), process_time()
            with suppress(ImportError):
                run.chosen.append(tune(case.family))
                run.seconds.append(perf_counter() - start)
                run.cpu_s.append(process_time() - busy)
        for run in runs:
            run.asel_s.append(runs[0].seconds[-1])
    return [run if run.chosen else None for run in runs]


def compare_tuners(case: Case, turns: int) -> tuple[Table, bool]:
    """Return a table of all tuners on one family, and whether every budget is kept."""
    oracle = Oracle(case.family)  # first, so that one-off work of JAX is charged to no tuner
    equal = least = "ejKernel, Tuner(1, 3)"
    asel, run, floor = take_turns(case, oracle, turns, partial(ejkernel_tune, 3), compile_alone)
    assert asel is not None
    runs = {least: run}

    def reached() -> bool:
        return run is not None and run.regret(oracle) <= asel.regret(oracle) + SAME_REGRET

    for iters in PEER_ITERS:
        if run is not None and not reached():
            equal = f"ejKernel, Tuner(1, {iters})"
            _, run = take_turns(case, oracle, 1, partial(ejkernel_tune, iters))
            runs[equal] = run
    if case.with_tune_jax:
        _, runs["tune_jax"] = take_turns(case, oracle, 1, tune_jax_tune)

    title = f"{case.family.name}: {len(case.family.candidates)} candidates, the best {oracle.best_s * 1e3:.2f} ms"
    table = Table("tuner", title=f"{title}\n{case.why}", title_justify="left", box=SIMPLE)
    for heading in ("time", "x asel", "CPU", "regret", "budget", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    limit = case.max_regret
    asked = "" if limit is None else f"regret <= {limit:.0%}"
    kept = _row(table, "asel", asel, oracle, asked, limit is None or asel.regret(oracle) <= limit)
    for name, run in runs.items():
        factor = case.factor if name == least or (name == equal and reached()) else None
        budget = "" if factor is None else f"asel >= {factor:g}x as fast"
        ok = run is None or factor is None or run.ratio >= factor * (1 - TOLERANCE)
        kept = _row(table, name, run, oracle, budget, ok) and kept
    if floor is not None:
        table.add_row("compiling alone", f"{median(floor.seconds):.2f} s", f"{floor.ratio:.2f}")
    return table, kept


def _row(table: Table, name: str, run: Run | None, oracle: Oracle, budget: str, ok: bool) -> bool:
    if run is None:
        table.add_row(name, "not installed")
    else:
        mark = "" if not budget else "[green]ok" if ok else "[bold red]OVER"
        times = f"{median(run.seconds):.2f} s", f"{run.ratio:.2f}", f"{median(run.cpu_s):.1f} s"
        table.add_row(name, *times, f"{run.regret(oracle):.1%}", budget, mark)
    return ok


def main() -> int:
    parser = argparse.ArgumentParser(description="Time tunes beside those of asel's peers.")
    parser.add_argument("--quick", action="store_true", help="the first case, and one turn")
    parser.add_argument("--family", help="only families whose names begin like this")
    given = parser.parse_args()
    cases = [case for case in CASES if case.family.name.startswith(given.family or "")]
    console = Console(width=None if sys.stdout.isatty() else 110)
    kept = True
    for case in cases[:1] if given.quick else cases:
        table, ok = compare_tuners(case, 1 if given.quick else case.turns)
        console.print(table)
        kept = kept and ok
    console.print(f"A ratio within {TOLERANCE:.0%} of its budget keeps it: the machine knows no better.")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
