"""What strategies sample and how well they choose, on recorded timings: `python tests/benchmarks/strategies.py`.

The timings are recorded once, round by round; every replay begins with another round, so that what slowed
a round slows all of its samples.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import dataclass, replace
from statistics import fmean, quantiles

import anyio
from families import FAMILIES, NEAR_EQUALS, Blocks, Oracle, record
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from asel import Tuner
from asel.strategies import Exhaustive, Race, Strategy
from asel.testing import ReplayMeasure

SAMPLES = 64
REPLAYS = 50
STRATEGIES: dict[str, Strategy] = {
    "Exhaustive(3)": Exhaustive(3),
    "Exhaustive(10)": Exhaustive(10),
    "Exhaustive(30)": Exhaustive(30),
    "Race()": Race(),
    "Race(most_rounds=10)": Race(most_rounds=10),
    "Race(least_s=0)": Race(least_s=0.0),
}


@dataclass(frozen=True, slots=True)
class Replayed:
    """What one replay took, and by how much its choice is slower than the best."""

    samples: int
    seconds: float
    regret: float
    winner: Blocks


async def replay(strategy: Strategy, oracle: Oracle, seed: int) -> Replayed:
    """Run a strategy against recorded timings, from a round of its own on."""
    if isinstance(strategy, Race):
        strategy = replace(strategy, seed=seed)
    family = oracle.family
    measure = ReplayMeasure(dict(zip(family.candidates, oracle.samples_s, strict=True)), seed)
    tuner = Tuner[Blocks](measure=measure, strategy=strategy)
    winner = await tuner.autotune(family.make, (), {}, family.candidates)
    return Replayed(measure.sampled, measure.simulated_s, oracle.regret(winner), winner)


async def replays(strategy: Strategy, oracle: Oracle) -> list[Replayed]:
    return [await replay(strategy, oracle, seed) for seed in range(REPLAYS)]


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare strategies on recorded timings.")
    families = {family.name: family for family in (*FAMILIES, NEAR_EQUALS)}
    parser.add_argument("--family", choices=families, default="recurrence")
    family = families[parser.parse_args().family]
    oracle = record(family, SAMPLES)
    title = f"{family.name}: {len(family.candidates)} candidates, {REPLAYS} replays of {SAMPLES} samples each"
    table = Table("strategy", title=title, title_justify="left", box=SIMPLE)
    for heading in ("samples", "seconds", "regret, mean", "p90", "worst", "same winner"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, strategy in STRATEGIES.items():
        runs = anyio.run(replays, strategy, oracle)
        regrets = [run.regret for run in runs]
        shown = (fmean(regrets), quantiles(regrets, n=10, method="inclusive")[8], max(regrets))
        taken = f"{fmean(run.samples for run in runs):,.0f}", f"{fmean(run.seconds for run in runs):.3f}"
        same = Counter(run.winner for run in runs).most_common(1)[0][1] / REPLAYS
        table.add_row(name, *taken, *(f"{regret:.2%}" for regret in shown), f"{same:.0%}")
    Console(width=None if sys.stdout.isatty() else 110).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
