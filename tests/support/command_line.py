"""The `asel` command in this process, and caches for it to look at."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio

from asel import CacheKey, Failed, Measured, PersistentCache, Skipped, TuneReport
from asel.cli import main

ENVIRONMENT = {"jax": "0.10.2", "jaxlib": "0.10.2", "platform_version": "cpu"}


@dataclass(frozen=True)
class Ran:
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def asel(*arguments: object, answer: str = "", terminal: bool = False) -> Ran:
    """Run a command line; `answer` is what the user types."""
    out, err = _Terminal() if terminal else io.StringIO(), io.StringIO()
    code, typed = 0, sys.stdin
    sys.stdin = io.StringIO(answer)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main([str(argument) for argument in arguments])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1 if end.code else 0
    finally:
        sys.stdin = typed
    return Ran(code, out.getvalue(), err.getvalue())


def report(size: int = 512, op: str = "matmul@v1", fastest: int = 64, jax: str = "0.10.2") -> TuneReport[Any]:
    """Return a tune of four candidates: the heuristic's is `rows=32`, one failed and one was skipped."""
    times = {8: 4e-4, 32: 2e-4, 64: 2.2e-4} | {fastest: 1e-4}
    outcomes = [
        Measured(
            {"rows": rows}, s, (s * 1.01, s * 0.99, s, s * 1.3), 0.1, eliminated=1 if rows == 8 else None, ranked_s=s
        )
        for rows, s in times.items()
    ]
    failed = Failed({"rows": 96}, "compile", "TypeError", "cannot reshape 512 into 96")
    return TuneReport(
        CacheKey("NVIDIA H100|12.8", op, f"{size:08x}cafe", f"a=f32[{size},{size}], causal=True"),
        {"rows": fastest},
        (*outcomes, failed, Skipped({"rows": 4096}, "the tune's budget of 60 s was spent")),
        1.5,
        ENVIRONMENT | {"jax": jax},
        checksum=f"checksum {size}",
        incumbent={"rows": 32},
        noise=0.02,
        margin=1 - times[fastest] / times[32],
    )


def fill(path: Path | str, *reports: TuneReport[Any]) -> str:
    """Store reports, by default of two calls; return the path as text."""

    async def keep() -> None:
        async with PersistentCache[Any]("test", str(path)) as cache:
            for one in reports or (report(512), report(1024)):
                await cache.keep(one, replace=True)

    anyio.run(keep)
    return str(path)
