"""What a tune costs and how good its choice is, beside its peers: `python tests/benchmarks/tuning.py`.

Regret is how much slower the chosen candidate is than the best, by an oracle of interleaved samples of
every candidate. Contenders take turns and medians are compared. Exits with 1 if a budget is exceeded.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from time import perf_counter

import anyio
from families import CLAMPED, FAMILIES, LONG, Blocks, Family, Oracle, record
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from asel import Measured, Tuner
from asel.jobs import TuneJob

MOST_REGRET = 0.03
# Two regrets closer than this are equal: the oracle knows no better.
SAME_REGRET = 0.01
# And two times: a machine that others use too does not know better.
TOLERANCE = 0.05
AT_EQUAL_REGRET = 2.0
PEER_ITERS = (10, 30)

Tune = Callable[[Family], Blocks]


@dataclass(frozen=True, slots=True)
class Case:
    """A family, how fast asel has to be beside `Tuner(1, 3)`, and how thoroughly that is found out."""

    family: Family
    tune: Tune
    factor: float = 1.0
    samples: int = 30
    repeats: int = 3
    why: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """What tunes took, and the regret of what they chose: medians."""

    seconds: float
    regret: float


def asel_tune(family: Family) -> Blocks:
    async def tune() -> Blocks:
        return await Tuner[Blocks]().autotune(family.make, family.args, {}, family.candidates)

    return anyio.run(tune)


class OneMore:
    """asel where all but the last candidate were tuned before."""

    def __init__(self) -> None:
        self._known: dict[int, Measured[Blocks]] = {}

    def __call__(self, family: Family) -> Blocks:
        job = TuneJob(family.candidates, family.make, family.args, {}, incumbent=0, known=self._known)
        return anyio.run(Tuner[Blocks]().tune, job).winner

    def prepare(self, family: Family) -> None:
        job = TuneJob(family.candidates[:-1], family.make, family.args, {}, incumbent=0)
        outcomes = anyio.run(Tuner[Blocks]().tune, job).outcomes
        self._known = {index: one for index, one in enumerate(outcomes) if isinstance(one, Measured)}


def ejkernel_tune(iters: int, family: Family) -> Blocks:
    from ejkernel.ops import Tuner

    cfg: Blocks = Tuner(1, iters).autotune(family.make, family.args, {}, family.candidates)
    return cfg


def tune_jax_tune(family: Family) -> Blocks:
    import tune_jax

    logging.getLogger("tune_jax").setLevel(logging.CRITICAL)  # where it cannot profile, it says so at length
    tuned = tune_jax.tune(lambda *args, cfg: family.make(cfg)(*args), hyperparams={"cfg": family.candidates})
    tuned(*family.args)
    cfg: Blocks = tuned.optimal_hyperparams["cfg"]
    return cfg


CASES = (
    *(Case(family, asel_tune, why="compiling dominates, no two programs alike") for family in FAMILIES),
    Case(CLAMPED, asel_tune, 1.5, repeats=2, why="aliases are found before they are compiled"),
    Case(
        replace(FAMILIES[1], name="attention, one candidate added"),
        OneMore(),
        2.0,
        repeats=2,
        why="the others' timings are reused",
    ),
    Case(LONG, asel_tune, 2.0, samples=6, repeats=2, why="running dominates"),
)


def timed(tunes: dict[str, Tune], oracle: Oracle, repeats: int) -> dict[str, Run | None]:
    """Return what each tune took, taking turns; None where a tuner is not installed."""
    taken: dict[str, list[Run]] = {name: [] for name in tunes}
    for _ in range(repeats):
        for name, tune in tunes.items():
            gc.collect()
            start = perf_counter()
            try:
                cfg = tune(oracle.family)
            except ImportError:
                continue
            taken[name].append(Run(perf_counter() - start, oracle.regret(cfg)))
    return {
        name: Run(median(run.seconds for run in runs), median(run.regret for run in runs)) if runs else None
        for name, runs in taken.items()
    }


def compare_tuners(case: Case, repeats: int) -> tuple[Table, bool]:
    """Return a table of all tuners on one family, and whether every budget is kept."""
    oracle = record(case.family, case.samples)  # first, so that what JAX traces only once is paid by nobody
    if isinstance(case.tune, OneMore):
        case.tune.prepare(case.family)
    least = "ejKernel, Tuner(1, 3)"
    runs = timed({least: partial(ejkernel_tune, 3), "asel": case.tune}, oracle, repeats)
    asel = runs.pop("asel")
    assert asel is not None
    equal: str | None = least
    for iters in PEER_ITERS:
        run = runs[equal] if equal else None
        if run is not None and run.regret > asel.regret + SAME_REGRET:
            equal = f"ejKernel, Tuner(1, {iters})"
            runs |= timed({equal: partial(ejkernel_tune, iters)}, oracle, 1)
    if (run := runs[equal or least]) is None or run.regret > asel.regret + SAME_REGRET:
        equal = None  # the largest setting need not have reached asel's regret
    runs |= timed({"tune_jax": tune_jax_tune}, oracle, 1)

    title = f"{case.family.name}: {len(case.family.candidates)} candidates, the best {oracle.best_s * 1e3:.2f} ms"
    table = Table("tuner", title=f"{title}; {case.why}", title_justify="left", box=SIMPLE)
    for heading in ("time", "x asel", "regret", "budget", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    kept = _row(table, "asel", asel, asel, f"regret <= {MOST_REGRET:.0%}", asel.regret <= MOST_REGRET)
    for name, run in runs.items():
        factor = case.factor if name == least else AT_EQUAL_REGRET if name == equal else None
        budget = "" if factor is None else f"asel >= {factor:g}x as fast"
        ok = run is None or factor is None or run.seconds >= asel.seconds * factor * (1 - TOLERANCE)
        kept = _row(table, name, run, asel, budget, ok) and kept
    return table, kept


def _row(table: Table, name: str, run: Run | None, asel: Run, budget: str, ok: bool) -> bool:
    if run is None:
        table.add_row(name, "not installed")
    else:
        mark = "" if not budget else "[green]ok" if ok else "[bold red]OVER"
        times = f"{run.seconds:.2f} s", f"{run.seconds / asel.seconds:.2f}"
        table.add_row(name, *times, f"{run.regret:.1%}", budget, mark)
    return ok


def main() -> int:
    parser = argparse.ArgumentParser(description="Time tunes beside those of asel's peers.")
    parser.add_argument("--quick", action="store_true", help="the first case, and one repeat")
    parser.add_argument("--family", help="only families whose names begin like this")
    given = parser.parse_args()
    cases = [case for case in CASES if case.family.name.startswith(given.family or "")]
    console = Console(width=None if sys.stdout.isatty() else 110)
    kept = True
    for case in cases[:1] if given.quick else cases:
        table, ok = compare_tuners(case, 1 if given.quick else case.repeats)
        console.print(table)
        kept = kept and ok
    console.print(f"Medians of contenders that took turns; a time within {TOLERANCE:.0%} of its budget keeps it.")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
