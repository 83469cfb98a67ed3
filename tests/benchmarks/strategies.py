"""What strategies sample and how well they choose, on recorded timings: `python tests/benchmarks/strategies.py`.

The timings are recorded once; every replay deals them out in another order.
"""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import dataclass, replace
from statistics import fmean, quantiles

from families import FAMILIES, Oracle, record
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from asel.strategies import Board, Exhaustive, Race, Sample, Strategy

SAMPLES = 40
REPLAYS = 50
STRATEGIES: dict[str, Strategy] = {
    "Exhaustive(3)": Exhaustive(3),
    "Exhaustive(10)": Exhaustive(10),
    "Exhaustive(30)": Exhaustive(30),
    "Race()": Race(),
    "Race(most_rounds=10)": Race(most_rounds=10),
}


@dataclass(frozen=True, slots=True)
class Replayed:
    """What one replay took, and by how much its choice is slower than the best."""

    samples: int
    seconds: float
    regret: float


def replay(strategy: Strategy, oracle: Oracle, seed: int) -> Replayed:
    """Run a strategy against recorded timings in an order of their own."""
    dealer = random.Random(seed)
    decks = [dealer.sample(taken, len(taken)) for taken in oracle.samples_s]
    if isinstance(strategy, Race):
        strategy = replace(strategy, seed=seed)
    board, samples, seconds = Board(list(range(len(decks)))), 0, 0.0
    for step in strategy.plan(board):
        if isinstance(step, Sample):
            taken = decks[step.index].pop()
            board.record(step.index, taken)
            samples, seconds = samples + 1, seconds + taken
        else:
            board.drop(step.index, step.round)
    return Replayed(samples, seconds, oracle.regret(oracle.family.candidates[board.winner()]))


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare strategies on recorded timings.")
    names = [family.name for family in FAMILIES]
    parser.add_argument("--family", choices=names, default="recurrence")
    family = FAMILIES[names.index(parser.parse_args().family)]
    oracle = record(family, SAMPLES)
    title = f"{family.name}: {len(family.candidates)} candidates, {REPLAYS} replays of {SAMPLES} samples each"
    table = Table("strategy", title=title, title_justify="left", box=SIMPLE)
    for heading in ("samples", "seconds", "regret, mean", "p90", "worst"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, strategy in STRATEGIES.items():
        runs = [replay(strategy, oracle, seed) for seed in range(REPLAYS)]
        regrets = [run.regret for run in runs]
        shown = (fmean(regrets), quantiles(regrets, n=10, method="inclusive")[8], max(regrets))
        taken = f"{fmean(run.samples for run in runs):,.0f}", f"{fmean(run.seconds for run in runs):.3f}"
        table.add_row(name, *taken, *(f"{regret:.2%}" for regret in shown))
    Console(width=None if sys.stdout.isatty() else 110).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
