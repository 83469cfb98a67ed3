"""How often a tune that is repeated has the same winner: `python tests/benchmarks/repeats.py`.

The candidates are near-equals, so that who wins hardly matters and that it changes does. Exits with 1 if
a budget is exceeded.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter

import anyio
from families import NEAR_EQUALS, Blocks, record
from rich.console import Console
from tuning import MOST_REGRET, asel_tune

from asel import Tuner
from asel.jobs import TuneJob

REPEATS = 20
SAME = 0.95


def with_incumbent(index: int) -> Blocks:
    job = TuneJob(NEAR_EQUALS.candidates, NEAR_EQUALS.make, NEAR_EQUALS.args, {}, incumbent=index)
    return anyio.run(Tuner[Blocks]().tune, job).winner


def ejkernel_tune() -> Blocks:
    from ejkernel.ops import Tuner

    cfg: Blocks = Tuner(1, 3).autotune(NEAR_EQUALS.make, NEAR_EQUALS.args, {}, NEAR_EQUALS.candidates)
    return cfg


def main() -> int:
    parser = argparse.ArgumentParser(description="Repeat one tune and count its winners.")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    repeats = parser.parse_args().repeats
    oracle, console, kept = record(NEAR_EQUALS, 30), Console(width=None if sys.stdout.isatty() else 120), True
    times = ", ".join(f"{cfg.a}/{cfg.b}: +{oracle.regret(cfg):.1%}" for cfg in NEAR_EQUALS.candidates)
    console.print(f"{NEAR_EQUALS.name}: the best {oracle.best_s * 1e3:.2f} ms; {times}", highlight=False)
    last = len(NEAR_EQUALS.candidates) - 1
    tuners = {
        "asel": lambda: asel_tune(NEAR_EQUALS),
        "asel, the last one incumbent": lambda: with_incumbent(last),
        "ejKernel, Tuner(1, 3)": ejkernel_tune,
    }
    for name, tune in tuners.items():
        winners = Counter(tune() for _ in range(repeats))
        (_, count), *_ = winners.most_common(1)
        worst = max(oracle.regret(cfg) for cfg in winners)
        ok = count >= SAME * repeats and worst <= MOST_REGRET
        verdict = "" if name.startswith("ej") else "ok" if ok else "OVER"
        kept = kept and verdict != "OVER"
        shown = ", ".join(f"{cfg.a}/{cfg.b} x{times}" for cfg, times in winners.most_common())
        console.print(f"{name}: {count} of {repeats} alike ({shown}), regret <= {worst:.1%} {verdict}", highlight=False)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
