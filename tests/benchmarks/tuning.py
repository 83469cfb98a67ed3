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
from time import perf_counter, process_time

import anyio
import jax
from families import CLAMPED, CLAMPED_MORE, FAMILIES, LONG, Blocks, Family, Oracle, program_text, record
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
PEER_ITERS = (10, 30)

Tune = Callable[[Family], Blocks]


@dataclass(frozen=True, slots=True)
class Case:
    """A family, how fast asel has to be beside `Tuner(1, 3)`, and how thoroughly that is found out.

    Where compiling dominates and no two programs are alike, nobody is twice as fast: a serial compile
    keeps 1.6 of two cores busy, and samples are nearly free for everyone.
    """

    family: Family
    tune: Tune
    factor: float = 1.0
    samples: int = 30
    repeats: int = 3
    why: str = ""
    with_tune_jax: bool = True


@dataclass(frozen=True, slots=True)
class Run:
    """What tunes took, what asel's took that had its turn beside them, and the regret of what they chose: medians."""

    seconds: float
    cpu_s: float
    asel_s: float
    regret: float

    @property
    def ratio(self) -> float:
        return self.seconds / self.asel_s


def asel_tune(family: Family) -> Blocks:
    async def tune() -> Blocks:
        return await Tuner[Blocks]().autotune(family.make, family.args, {}, family.candidates)

    return anyio.run(tune)


def in_groups(family: Family) -> Blocks:
    """asel where the kernel's author has said that long chunks go first: what is behind them is tried if they fail."""
    groups = tuple((int(cfg.b >= 256), 0) for cfg in family.candidates)
    job = TuneJob(family.candidates, family.make, family.args, {}, groups=groups)
    return anyio.run(Tuner[Blocks]().tune, job).winner


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


def compiling_alone(family: Family) -> float:
    """Return the seconds that go into compiling every program once, which is the floor of any tune."""
    args, programs = family.args, set[str]()
    start = perf_counter()
    for cfg in family.candidates:
        lowered = jax.jit(family.make(cfg)).lower(*args)
        if (text := program_text(lowered)) not in programs:
            programs.add(text)
            lowered.compile()
    return perf_counter() - start


CASES = (
    *(Case(family, asel_tune, why="compiling dominates, no two programs alike") for family in FAMILIES),
    Case(CLAMPED, asel_tune, why="half are aliases, found before they are compiled"),
    Case(CLAMPED_MORE, asel_tune, 2.0, why="most are aliases, found before they are compiled"),
    Case(replace(FAMILIES[1], name="attention in groups"), in_groups, 2.0, why="10 of 25 are in the first group"),
    Case(
        replace(FAMILIES[1], name="attention, one candidate added"),
        OneMore(),
        2.0,
        why="the others' timings are reused",
    ),
    Case(LONG, asel_tune, 2.0, why="running dominates", with_tune_jax=False),
)


def timed(tune: Tune, case: Case, oracle: Oracle, repeats: int) -> tuple[Run | None, Run]:
    """Return what a tune and asel's took, taking turns; None where the tuner is not installed."""
    seconds: dict[Tune, list[float]] = {tune: [], case.tune: []}
    cpu: dict[Tune, list[float]] = {tune: [], case.tune: []}
    regrets: dict[Tune, list[float]] = {tune: [], case.tune: []}
    for _ in range(repeats):
        for one in (tune, case.tune):
            if isinstance(one, OneMore):
                one.prepare(oracle.family)
            gc.collect()
            start, busy = perf_counter(), process_time()
            try:
                cfg = one(oracle.family)
            except ImportError:
                continue
            seconds[one].append(perf_counter() - start)
            cpu[one].append(process_time() - busy)
            regrets[one].append(oracle.regret(cfg))
    asel_s = median(seconds[case.tune])

    def run(one: Tune) -> Run:
        return Run(median(seconds[one]), median(cpu[one]), asel_s, median(regrets[one]))

    return run(tune) if seconds[tune] else None, run(case.tune)


def compare_tuners(case: Case, repeats: int) -> tuple[Table, bool]:
    """Return a table of all tuners on one family, and whether every budget is kept."""
    oracle = record(case.family, case.samples)  # first, so that what JAX traces only once is paid by nobody
    equal = least = "ejKernel, Tuner(1, 3)"
    run, asel = timed(partial(ejkernel_tune, 3), case, oracle, repeats)
    runs = {least: run}
    for iters in PEER_ITERS:
        if run is not None and run.regret > asel.regret + SAME_REGRET:
            equal = f"ejKernel, Tuner(1, {iters})"
            runs[equal], _ = run, _ = timed(partial(ejkernel_tune, iters), case, oracle, 1)
    reached = run is not None and run.regret <= asel.regret + SAME_REGRET  # the largest setting need not
    if case.with_tune_jax:
        runs["tune_jax"], _ = timed(tune_jax_tune, case, oracle, 1)

    floor_s = median(compiling_alone(case.family) for _ in range(repeats))
    title = f"{case.family.name}: {len(case.family.candidates)} candidates, the best {oracle.best_s * 1e3:.2f} ms"
    table = Table("tuner", title=f"{title}\n{case.why}", title_justify="left", box=SIMPLE)
    for heading in ("time", "x asel", "CPU", "regret", "budget", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    kept = _row(table, "asel", asel, f"regret <= {MOST_REGRET:.0%}", asel.regret <= MOST_REGRET)
    for name, run in runs.items():
        factor = case.factor if name == least or (name == equal and reached) else None
        budget = "" if factor is None else f"asel >= {factor:g}x as fast"
        ok = run is None or factor is None or run.ratio >= factor * (1 - TOLERANCE)
        kept = _row(table, name, run, budget, ok) and kept
    table.add_row("compiling alone", f"{floor_s:.2f} s", f"{floor_s / asel.seconds:.2f}")
    return table, kept


def _row(table: Table, name: str, run: Run | None, budget: str, ok: bool) -> bool:
    if run is None:
        table.add_row(name, "not installed")
    else:
        mark = "" if not budget else "[green]ok" if ok else "[bold red]OVER"
        times = f"{run.seconds:.2f} s", f"{run.ratio:.2f}", f"{run.cpu_s:.1f} s"
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
    console.print(f"Each beside asel's own, taking turns; a ratio within {TOLERANCE:.0%} of its budget keeps it.")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
