"""The time of `import asel` and `asel --help`, beside an empty program: `python tests/benchmarks/startup.py`.

The budgets are 20 and 25 times an empty program, in processor time of the fastest of ten runs: with compiled
bytecode, and in this environment, which may have none (an editable installation with PYTHONDONTWRITEBYTECODE compiles
asel each time). Exits with 1 if a budget is exceeded.
"""

from __future__ import annotations

import math
import os
import resource
import subprocess
import sys
import tempfile

HELP = "from asel.cli import main; main(['--help'])"
BUDGETS = {"import asel": 20, HELP: 25}
RUNS = 10
PROGRAMS = (
    "pass",
    "import asel",
    "from asel import ConfigSelectorChain",
    "from asel import ConfigSelectorChain, Executor, PersistentCache",
    HELP,
)


def seconds(program: str, environment: dict[str, str]) -> float:
    """Return the processor time of a program."""
    taken = []
    for _ in range(RUNS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", program], check=True, env=environment, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(taken)


def main() -> int:
    kept = True
    with tempfile.TemporaryDirectory() as cache:
        bare = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        ways = {
            "with bytecode": {**bare, "PYTHONPYCACHEPREFIX": cache},
            "as it is here": dict(os.environ),
        }
        for way, environment in ways.items():
            empty = seconds("pass", environment)
            for program in PROGRAMS:
                took = seconds(program, environment)
                print(f"{way:17} {program:66} {took * 1e3:6.1f} ms {took / empty:6.1f} x an empty program")
                kept = kept and took / empty <= BUDGETS.get(program, math.inf)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
