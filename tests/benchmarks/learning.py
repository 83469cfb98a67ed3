"""What later shapes of a kernel cost once the first are tuned: three real families on a CPU, and recorded spaces.

    python tests/benchmarks/learning.py [--families matmul,attention] [--spaces DIRECTORY]

Each family is tuned for ten shapes, one after the other in one selector, and each shape again with `learn=False`. The
regret is that of the learned winner over the other one, by interleaved samples of both. With recorded spaces, what a
search of one device's space measured is learned from by that of another device's.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from statistics import fmean, median
from time import perf_counter

import anyio
import jax
from families import FAMILIES, Family
from search import Space

from asel import AutotunePolicy, ConfigCache, ConfigSelectorChain, Failed, Invocation, Kernel, Measured, Tuner
from asel.tuning.search.config_fields import ConfigFields
from asel.tuning.search.searcher import Searcher

SHAPES = {
    "matmul": [
        ((m, k), (k, n))
        for m, k, n in [
            *((256, 256, 256), (512, 256, 256), (256, 128, 256), (256, 512, 256), (256, 256, 512)),
            *((512, 128, 512), (512, 512, 256), (256, 64, 512), (768, 256, 256), (512, 256, 512)),
        ]
    ],
    "attention": [
        ((n, width),) * 3
        for n, width in [
            *((512, 64), (256, 64), (1024, 64), (384, 64), (768, 64)),
            *((512, 32), (1024, 32), (512, 128), (640, 64), (896, 64)),
        ]
    ],
    "recurrence": [
        ((n, width),) * 2
        for n, width in [
            *((4096, 64), (2048, 64), (8192, 64), (4096, 32), (4096, 128)),
            *((1024, 64), (2048, 128), (6144, 64), (8192, 32), (3072, 64)),
        ]
    ],
}
SAMPLES = 30
MAX_REGRET = 0.03


def kernel_of(family: Family):
    class Tuned(Kernel):
        op_id = family.name
        version = "1"

        def run(self, *args, cfg):
            return family.run(*args, cfg=cfg)

        def heuristic_cfg(self, inv):
            return family.candidates[len(family.candidates) // 2]

        def candidate_cfgs(self, inv):
            return family.candidates

    return Tuned()


def compared(family, args, one, other):
    """Return how much slower one config is than another, by interleaved samples."""
    programs = [jax.jit(family.make(cfg)) for cfg in (one, other)]
    times = [[], []]
    for program in programs:
        jax.block_until_ready(program(*args))
    for _ in range(SAMPLES):
        for program, taken in zip(programs, times, strict=True):
            begun = perf_counter()
            jax.block_until_ready(program(*args))
            taken.append(perf_counter() - begun)
    return median(a / b for a, b in zip(*times, strict=True)) - 1


async def tune_family(family):
    kernel = kernel_of(family)
    print(f"\n| {family.name} | compiled | seconds | regret | off by |\n| --- | --- | --- | --- | --- |")
    later, regrets, first = [], [], 0
    policy = AutotunePolicy(tune_budget_s=120.0)
    async with (
        ConfigSelectorChain(ConfigCache(), policy, Tuner(), sinks=()) as learning,
        ConfigSelectorChain(ConfigCache(), policy, Tuner(learn=False), sinks=()) as anew,
    ):
        for shapes in SHAPES[family.name]:
            keys = jax.random.split(jax.random.key(0), len(shapes))
            args = tuple(jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
            inv = Invocation(family.name, args, {})
            report = (await learning.select(inv, kernel)).report
            full = (await anew.select(inv, kernel)).report
            regret = 0.0
            if report.winner != full.winner:
                regret = max(0.0, await anyio.to_thread.run_sync(compared, family, args, report.winner, full.winner))
            compiled = sum(
                isinstance(o, Failed) or (isinstance(o, Measured) and o.alias_of is None) for o in report.outcomes
            )
            regrets.append(regret)
            later += [compiled] if first else []
            first = first or compiled
            off = "" if report.prediction_error is None else f"{report.prediction_error:.0%}"
            print(
                f"| {report.call} | {compiled} | {report.seconds:.1f} of {full.seconds:.1f} | {regret:.1%} | {off} |",
                flush=True,
            )
    part, mean = fmean(later) / first, fmean(regrets[1:])
    kept = "kept" if part <= 1 / 3 and mean <= MAX_REGRET else "NOT KEPT"
    print(f"{family.name}: {part:.0%} of the first shape's compiles, regret {mean:.1%} on average: {kept}")


def transfer(one: Space, other: Space, tries: int, seeds: int) -> None:
    """Search one space, and then the other with a third of the tries and what was learned."""
    shared = [name for name in one.params if name in other.params]
    one, other = common(one, shared), common(other, shared)
    plain, learned = [], []
    for seed in range(seeds):
        lessons = run(Searcher(ConfigFields(one.configs), seed=seed), one, tries)
        least = min(lessons.values())
        rows = [(c, 0) for c in other.configs] + [(one.configs[i], 1) for i in lessons]
        logs = [math.log(ms / least) for ms in lessons.values()]
        for found, searcher in (
            (learned, Searcher(ConfigFields(rows), seed=seed, earlier=logs)),
            (plain, Searcher(ConfigFields(other.configs), seed=seed)),
        ):
            found.append(min(run(searcher, other, tries // 3).values()) / other.best - 1)
    print(f"| {one.name} | {other.name} | {fmean(learned):.1%} | {fmean(plain):.1%} |", flush=True)


def common(space: Space, shared: list[str]) -> Space:
    """Return the part of a space in which parameters that the other device does not have are as its best has them."""
    best = space.configs[space.times.index(space.best)]
    kept = [i for i, c in enumerate(space.configs) if all(c[name] == best[name] for name in c if name not in shared)]
    names = list(space.params)
    rows = [[space.rows[i][names.index(name)] for name in shared] for i in kept]
    params = {name: space.params[name] for name in shared}
    return Space(space.name, params, rows, [space.times[i] for i in kept], [space.tried_ms[i] for i in kept])


def run(searcher: Searcher, space: Space, tries: int) -> dict[int, float]:
    found = {}
    for _ in range(tries):
        (index,) = searcher.propose()
        if (ms := space.times[index]) is None:
            searcher.observe_failure(index)
        else:
            searcher.observe(index, ms)
            found[index] = ms
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", default=",".join(family.name for family in FAMILIES))
    parser.add_argument("--spaces", type=Path)
    parser.add_argument("--tries", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=10)
    args = parser.parse_args()
    for family in FAMILIES:
        if family.name in args.families.split(","):
            anyio.run(tune_family, family)
    if args.spaces is not None:
        spaces = [Space.load(path) for path in sorted(args.spaces.glob("*.json.gz"))]
        print(f"\n| learned from, {args.tries} tries | searched, {args.tries // 3} tries | regret | without |")
        print("| --- | --- | --- | --- |")
        for one in spaces:
            for other in spaces:
                if one is not other and one.name.partition("_")[0] == other.name.partition("_")[0]:
                    transfer(one, other, args.tries, args.seeds)


if __name__ == "__main__":
    main()
