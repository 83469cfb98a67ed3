"""How often a repeated tune has the same winner: `python tests/benchmarks/repeats.py`.

Among equals it has to be the same one each time. Among candidates that differ by about a tie, the table shows how much
slower the winners are than the best. Exits with 1 if a budget is exceeded.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable

import anyio
from families import EQUALS, NEAR_EQUALS, Blocks, Family, Oracle
from rich.console import Console
from tuning import MAX_REGRET, asel_tune

from asel import Tuner
from asel.tuning.request import TuneRequest
from asel.tuning.state import TuneState

REPEATS = 20
# The oracle's samples of each candidate before every tune, so that both see the machine in the same minutes.
WATCHED = 5
SAME = 0.95


def with_incumbent(family: Family) -> Blocks:
    last = len(family.candidates) - 1
    job = TuneState(TuneRequest(family.candidates, family.make, family.args, {}, incumbent=last))
    return anyio.run(Tuner[Blocks]().tune, job).winner


def ejkernel_tune(family: Family) -> Blocks:
    from ejkernel.ops import Tuner

    cfg: Blocks = Tuner(1, 3).autotune(family.make, family.args, {}, family.candidates)
    return cfg


TUNERS: dict[str, Callable[[Family], Blocks]] = {
    "asel": asel_tune,
    "asel, the last one incumbent": with_incumbent,
    "ejKernel, Tuner(1, 3)": ejkernel_tune,
}


def repeat(family: Family, repeats: int, same: float, console: Console) -> bool:
    """Print the winners of each tuner, and return whether asel's were the same often enough and never slow."""
    oracle, found = Oracle(family), dict[str, Counter[Blocks]]()
    for name, tune in TUNERS.items():
        try:
            found[name] = Counter(_watched(oracle, tune) for _ in range(repeats))
        except ImportError:
            console.print(f"{name}: not installed")
    times = ", ".join(f"{cfg.a}/{cfg.b}: +{oracle.regret(cfg):.1%}" for cfg in family.candidates)
    console.print(f"{family.name}: the best {oracle.best_s * 1e3:.2f} ms; {times}", highlight=False)
    kept = True
    for name, winners in found.items():
        (_, count), *_ = winners.most_common(1)
        worst = max(oracle.regret(cfg) for cfg in winners)
        ok = count >= same * repeats and (worst <= MAX_REGRET or same == SAME)
        verdict = "" if name.startswith("ej") else "ok" if ok else "OVER"
        kept = kept and verdict != "OVER"
        shown = ", ".join(f"{cfg.a}/{cfg.b} x{times}" for cfg, times in winners.most_common())
        console.print(f"{name}: {count} of {repeats} alike ({shown}), regret <= {worst:.1%} {verdict}", highlight=False)
    return kept


def _watched(oracle: Oracle, tune: Callable[[Family], Blocks]) -> Blocks:
    oracle.watch(WATCHED)
    return tune(oracle.family)


def main() -> int:
    parser = argparse.ArgumentParser(description="Repeat one tune and count its winners.")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    repeats = parser.parse_args().repeats
    console = Console(width=None if sys.stdout.isatty() else 120)
    kept = [repeat(family, repeats, same, console) for family, same in ((EQUALS, SAME), (NEAR_EQUALS, 0.0))]
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
