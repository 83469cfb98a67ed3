"""What a tune costs and how good its choice is, beside its peers: `python tests/benchmarks/tuning.py`.

Regret is how much slower the chosen candidate is than the best, by an oracle of interleaved samples of
every candidate. Exits with 1 if a budget is exceeded.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import anyio
from families import FAMILIES, Blocks, Family, Oracle, record
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from asel import Tuner

MOST_REGRET = 0.03
# Two regrets closer than this are equal: the oracle knows no better.
SAME_REGRET = 0.01
FASTER_AT_EQUAL_REGRET = 2.0
PEER_ITERS = (3, 10, 30)

Tune = Callable[[Family], Blocks]


@dataclass(frozen=True, slots=True)
class Run:
    """One tune."""

    seconds: float
    regret: float


def asel_tune(family: Family) -> Blocks:
    async def tune() -> Blocks:
        return await Tuner[Blocks]().autotune(family.make, family.args, {}, family.candidates)

    return anyio.run(tune)


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


def timed(tune: Tune, oracle: Oracle) -> Run | None:
    """Return what a tune took and how good its choice is; None where the tuner is not installed."""
    gc.collect()
    start = perf_counter()
    try:
        cfg = tune(oracle.family)
    except ImportError:
        return None
    return Run(perf_counter() - start, oracle.regret(cfg))


def compare_tuners(family: Family, samples: int) -> tuple[Table, bool]:
    """Return a table of all tuners on one family, and whether every budget is kept."""
    oracle = record(family, samples)  # first, so that what JAX traces only once is paid by nobody
    peers: dict[str, Run | None] = {}
    peers["ejKernel, Tuner(1, 3)"] = least = timed(partial(ejkernel_tune, 3), oracle)
    asel = timed(asel_tune, oracle)
    assert asel is not None
    equal = least
    for iters in PEER_ITERS[1:]:
        if equal is not None and equal.regret > asel.regret + SAME_REGRET:
            peers[f"ejKernel, Tuner(1, {iters})"] = equal = timed(partial(ejkernel_tune, iters), oracle)
    peers["tune_jax"] = timed(tune_jax_tune, oracle)

    title = f"{family.name}: {len(family.candidates)} candidates, the best {oracle.best_s * 1e3:.2f} ms"
    table = Table("tuner", title=title, title_justify="left", box=SIMPLE)
    for heading in ("time", "x asel", "regret", "budget", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    kept = _row(table, "asel", asel, asel, f"regret <= {MOST_REGRET:.0%}", asel.regret <= MOST_REGRET)
    for name, run in peers.items():
        # The largest setting need not have reached asel's regret: then there is none to be compared with.
        reached = run is not None and run is equal and run.regret <= asel.regret + SAME_REGRET
        factor = FASTER_AT_EQUAL_REGRET if reached else 1.0 if run is least else None
        budget = "" if factor is None or run is None else f"asel >= {factor:g}x as fast"
        ok = run is None or factor is None or run.seconds >= asel.seconds * factor
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
    parser.add_argument("--quick", action="store_true", help="one family, and an oracle of fewer samples")
    parser.add_argument("--family", help="only the family of this name")
    given = parser.parse_args()
    families = [family for family in FAMILIES if given.family in (None, family.name)]
    console = Console(width=None if sys.stdout.isatty() else 110)
    kept = True
    for family in families[:1] if given.quick else families:
        table, ok = compare_tuners(family, 10 if given.quick else 30)
        console.print(table)
        kept = kept and ok
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
