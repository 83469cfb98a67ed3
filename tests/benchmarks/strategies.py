"""How strategies sample and choose on recorded timings: `python tests/benchmarks/strategies.py`.

The timings are recorded once, round by round; every replay begins with another round, so that what slowed a round slows
all of its samples. With `--timings FILE` they are stored there, or read from there, so that two versions of a strategy
replay the same. As in a tune, a sample of short runs is the best of several batches.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median, quantiles

import anyio
from families import EQUALS, FAMILIES, LONG, NEAR_EQUALS, Blocks, Family, Oracle, record
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from asel import Tuner
from asel.testing import ReplayMeasure
from asel.tuning.race import Race
from asel.tuning.strategies import Exhaustive, Strategy
from asel.tuning.timing import SampleSize

SAMPLES = 64
REPLAYS = 50
STRATEGIES: dict[str, Strategy] = {
    "Exhaustive(3)": Exhaustive(3),
    "Exhaustive(10)": Exhaustive(10),
    "Exhaustive(30)": Exhaustive(30),
    "Race()": Race(),
    "Race(10)": Race(10),
}


@dataclass(frozen=True, slots=True)
class Replayed:
    """The cost of one replay, and by how much its choice is slower than the best."""

    samples: int
    seconds: float
    regret: float
    winner: Blocks


def as_sampled(samples: list[float]) -> list[float]:
    """Return the best of as many runs as a sample of such a candidate has; runs of one sample are not adjacent."""
    batches, count = SampleSize(batch_s=median(samples)).batches, len(samples)
    return [min(samples[(first + 7 * more) % count] for more in range(batches)) for first in range(count)]


async def replay(strategy: Strategy, oracle: Oracle, seed: int) -> Replayed:
    """Run a strategy against recorded timings, starting with the given round."""
    if isinstance(strategy, Race):
        strategy = replace(strategy, seed=seed)
    family = oracle.family
    samples = map(as_sampled, oracle.samples_s)
    measure = ReplayMeasure(dict(zip(family.candidates, samples, strict=True)), seed)
    tuner = Tuner[Blocks](measure=measure, strategy=strategy)
    winner = await tuner.autotune(family.make, (), {}, family.candidates)
    return Replayed(measure.sampled, measure.simulated_s, oracle.regret(winner), winner)


async def replays(strategy: Strategy, oracle: Oracle) -> list[Replayed]:
    return [await replay(strategy, oracle, seed) for seed in range(REPLAYS)]


def oracle_of(family: Family, timings: Path | None) -> Oracle:
    """Return a family's recorded timings, from a file if it exists."""
    known = json.loads(timings.read_text()) if timings is not None and timings.exists() else {}
    if family.name in known:
        return Oracle.of_recorded(family, known[family.name]["programs"], known[family.name]["rounds"])
    oracle = record(family, SAMPLES)
    if timings is not None:
        timings.write_text(json.dumps({**known, family.name: oracle.recorded}))
    return oracle


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare strategies on recorded timings.")
    families = {family.name: family for family in (*FAMILIES, EQUALS, NEAR_EQUALS, LONG)}
    parser.add_argument("--family", choices=families, default="recurrence")
    parser.add_argument("--timings", type=Path, help="a file to keep timings in, or to take them from")
    given = parser.parse_args()
    family = families[given.family]
    oracle = oracle_of(family, given.timings)
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
