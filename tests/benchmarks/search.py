"""Search on recorded spaces: asel beside random, kernel_tuner's strategies and optuna.

    pip install kernel_tuner optuna
    python tests/benchmarks/search.py DIRECTORY [--seeds 20] [--only asel,random]

`DIRECTORY` has recorded spaces, `*.json.gz`: parameters, rows of indices, times (null where it failed), compile and
benchmark milliseconds. One evaluation is one configuration compiled and timed, and a failure costs one as well. Regret
is the best found over the best there is, less one.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import random
import sys
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import numpy as np

from asel.tuning.search.config_fields import ConfigFields
from asel.tuning.search.searcher import Searcher

BUDGETS = (20, 50, 100, 220)
KERNEL_TUNER = (
    *("adaptive_tabu_greywolf", "simulated_annealing", "genetic_algorithm", "hybrid_vndx", "dual_annealing"),
    *("firefly_algorithm", "pso", "diff_evo", "greedy_ils", "bayes_opt"),
)
OPTUNA_SEEDS = 3  # 31 ms an evaluation
CLOSE = 0.05


@dataclass
class Space:
    """Every configuration of a kernel, and what it takes."""

    name: str
    params: dict[str, list]
    rows: list[list[int]]
    times: list[float | None]
    tried_ms: list[float]

    def __post_init__(self):
        names = list(self.params)
        self.configs = [{name: self.params[name][i] for name, i in zip(names, row, strict=True)} for row in self.rows]
        self.best = min(seconds for seconds in self.times if seconds is not None)
        self.index = {tuple(row): i for i, row in enumerate(self.rows)}

    @classmethod
    def load(cls, path):
        with gzip.open(path) as file:
            facts = json.load(file)
        costs = zip(facts["compile_ms"], facts["bench_ms"], strict=True)
        tried_ms = [(compiled or 0.0) + (ran or 0.0) for compiled, ran in costs]
        return cls(facts["name"], facts["params"], facts["rows"], facts["time"], tried_ms)


# Each of these returns the configurations that a strategy tries, in order.


def asel(space, seed, tries, ahead=1):
    """Propose one at a time, with `ahead` others not measured yet: one is compiled while another is sampled."""
    if not hasattr(space, "fields"):
        space.fields = ConfigFields(space.configs)
    searcher, tried, waiting = Searcher(space.fields, seed=seed), [], []
    while len(tried) < tries:
        waiting += searcher.propose(ahead + 1 - len(waiting))
        if not waiting:
            break
        index = waiting.pop(0)
        tried.append(index)
        seconds = space.times[index]
        searcher.observe_failure(index) if seconds is None else searcher.observe(index, seconds)
    return tried


def shuffled(space, seed, tries):
    order = list(range(len(space.rows)))
    random.Random(seed).shuffle(order)
    return order[:tries]


def kernel_tuner(strategy):
    """Return one of kernel_tuner's strategies, in its simulation mode and with its defaults."""
    from kernel_tuner import util
    from kernel_tuner.interface import Options, strategy_map
    from kernel_tuner.runners.simulation import SimulationRunner
    from kernel_tuner.searchspace import Searchspace

    def key_of(config):
        return ",".join(map(str, config.values()))

    def prepare(space):
        cache = {}
        for config, seconds, cost in zip(space.configs, space.times, space.tried_ms, strict=True):
            facts = {"compile_time": cost, "verification_time": 0.0, "benchmark_time": 0.0, "time": seconds}
            facts |= {} if seconds is not None else {"__error__": util.RuntimeFailedConfig()}
            cache[key_of(config)] = config | facts
        given = {"tune_params": dict(space.params), "cache": cache}
        return cache, Searchspace(None, None, None, from_cache=given)

    def run(space, seed, tries):
        random.seed(seed)
        np.random.seed(seed)
        if not hasattr(space, "simulated"):
            space.simulated = prepare(space)
            space.places = {key_of(config): i for i, config in enumerate(space.configs)}
        cache, searchspace = space.simulated
        runner = SimulationRunner(None, Options(kernel_name=space.name), Options(quiet=True), 1, [])
        tried = []

        class Visited(set):
            def add(self, key):
                tried.append(space.places[key])
                set.add(self, key)

        runner.visited_results = Visited()
        given = {"cache": cache, "objective": ["time"], "objective_higher_is_better": [False], "metrics": None}
        given |= {"verbose": False, "tune_params": dict(space.params), "restrictions": None, "seed": seed}
        given |= {"strategy": strategy, "simulated_time": 0, "time_limit": None}
        options = Options(given | {"strategy_options": Options(max_fevals=tries)})
        dict.__setitem__(options, "budget", util.TuningBudget(None, tries))
        with suppress(util.StopCriterionReached):
            strategy_map[strategy].tune(searchspace, runner, options)
        return tried[:tries]

    run.depends_on_budget = True  # annealing plans its temperatures by it
    return run


def optuna(space, seed, tries):
    """Optuna's TPE. What violates the constraints, or was tried before, costs nothing."""
    import optuna as library

    library.logging.set_verbosity(library.logging.ERROR)
    study = library.create_study(sampler=library.samplers.TPESampler(seed=seed))
    tried = {}
    for _ in range(20 * tries):
        if len(tried) >= tries:
            break
        trial = study.ask()
        row = tuple(trial.suggest_int(name, 0, len(values) - 1) for name, values in space.params.items())
        index = space.index.get(row)
        if index is None or space.times[index] is None:
            study.tell(trial, state=library.trial.TrialState.FAIL)
        else:
            study.tell(trial, math.log(space.times[index]))
        if index is not None:
            tried[index] = None
    return list(tried)[:tries]


def regret(space, tried):
    return min((space.times[i] for i in tried if space.times[i] is not None), default=math.inf) / space.best - 1


def ms_until_close(space, tried):
    """Return the milliseconds of compiling and running until the best so far is within 5% of the optimum."""
    spent = 0.0
    for index in tried:
        spent += space.tried_ms[index]
        if space.times[index] is not None and space.times[index] <= (1 + CLOSE) * space.best:
            return spent
    return math.inf


def geometric(regrets):
    return math.exp(fmean(math.log1p(one) for one in regrets)) - 1


def compare(name, strategy, spaces, seeds):
    """Print a line for each space and budget, and return the mean regrets by budget and space."""
    means, cpu_s, evaluations, until_ms = {}, 0.0, 0, {}
    for space in spaces:
        runs = {budget: [] for budget in BUDGETS}
        close = []
        for seed in range(seeds):
            begun = time.process_time()
            longest = strategy(space, seed, BUDGETS[-1])
            cpu_s, evaluations = cpu_s + time.process_time() - begun, evaluations + len(longest)
            close.append(ms_until_close(space, longest))
            for budget in BUDGETS:
                own = getattr(strategy, "depends_on_budget", False) and budget < BUDGETS[-1]
                tried = strategy(space, seed, budget) if own else longest[:budget]
                runs[budget].append(regret(space, tried))
        until_ms[space.name] = median(close)
        for budget in BUDGETS:
            means[budget, space.name] = fmean(runs[budget])
        shown = [f"{100 * fmean(runs[b]):6.1f}% ({100 * median(runs[b]):.1f}%)" for b in BUDGETS]
        near = f"{until_ms[space.name] / 1e3:.0f} s" if math.isfinite(until_ms[space.name]) else "-"
        print(f"| {name} | {space.name} | {' | '.join(shown)} | {near} |", flush=True)
    overall = [geometric([means[b, space.name] for space in spaces]) for b in BUDGETS]
    shown = [f"{100 * one:.1f}%" for one in overall]
    print(
        f"| **{name}** | geometric mean | {' | '.join(shown)} | {1e3 * cpu_s / evaluations:.1f} ms CPU each |",
        flush=True,
    )
    return means, overall


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--only", default="", help="names of strategies, with commas between them")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    spaces = [Space.load(path) for path in sorted(args.directory.glob("*.json.gz"))]
    if not spaces:
        sys.exit(f"there are no *.json.gz in {args.directory}")
    strategies = {"asel": asel, "random": shuffled, "optuna": optuna}
    strategies |= dict.fromkeys(KERNEL_TUNER)
    wanted = args.only.split(",") if args.only else list(strategies)
    print(f"| strategy | space | {' | '.join(map(str, BUDGETS))} | until within 5% |\n|{' --- |' * (3 + len(BUDGETS))}")
    found = {}
    for name in wanted:
        strategy = strategies[name] or kernel_tuner(name)
        seeds = min(args.seeds, OPTUNA_SEEDS) if name == "optuna" else args.seeds
        found[name] = compare(name, strategy, spaces, seeds)
    peers = [name for name in wanted if name in KERNEL_TUNER]
    if "asel" in found and peers:
        verdict(found, peers, spaces)


def verdict(found, peers, spaces):
    """Hold asel against the best single strategy of kernel_tuner over all budgets: half its regret, nowhere worse."""
    peer = min(peers, key=lambda name: fmean(found[name][1][1:]))
    (ours, overall), (theirs, their_overall) = found["asel"], found[peer]
    print(f"\nkernel_tuner's best single strategy: {peer}")
    for i, budget in enumerate(BUDGETS[1:], 1):
        part = overall[i] / their_overall[i] if their_overall[i] else math.inf
        worse = [space.name for space in spaces if ours[budget, space.name] > theirs[budget, space.name] + 0.01]
        kept = "kept" if part <= 0.5 and not worse else "NOT KEPT"
        print(f"{budget} evaluations: {part:.2f} of its regret (budget 0.5), worse on {worse or 'none'}: {kept}")


if __name__ == "__main__":
    main()
