"""Progress and summary of `asel tune`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from asel.cli.cache.ls import speedup_words
from asel.cli.output import print_table
from asel.cli.progress import tune_lines
from asel.cli.tune.run import Job, Row
from asel.kernels.config_text import config_text
from asel.redaction import redact
from asel.serving.batch_summary import BatchItem
from asel.tuning.outcomes import in_words
from asel.tuning.report import reasons_of

__all__ = ["facts", "print_summary", "progress"]

_FRAMES_PER_S = 4


@contextmanager
def progress(job: Job, to: Console) -> Iterator[None]:
    """Show the progress of a job while the block runs: live on a terminal, a line for each call elsewhere."""
    job.on_row = lambda item: to.print(_ended(job, item), soft_wrap=True)
    if not to.is_terminal or to.is_dumb_terminal:
        yield
        return
    with Live(get_renderable=lambda: _frame(job, to), console=to, refresh_per_second=_FRAMES_PER_S, transient=True):
        yield


def _ended(job: Job, item: BatchItem) -> str:
    counted = f"[{len(job.ended)}/{len(job.calls)}]"
    return f"{counted} {item.outcome:<6} {in_words(item.seconds):>8}  {item.op_id}({item.call})  {item.said()}".rstrip()


def _frame(job: Job, to: Console) -> Group:
    if job.selector is not None:
        job.watch.look(job.selector)
    left = "" if job.left_s is None else f", about {in_words(job.left_s)} left"
    stopping = "; stopping, Ctrl-C again to stop at once" if job.interrupted else ""
    lines = [Text(f"{len(job.ended)} of {len(job.calls)} calls done{left}{stopping}", "bold cyan")]
    for tune in job.watch.running:
        lines += [Text(), *tune_lines(tune, to, to.width)]
        best = tune.leader
        words = (
            ""
            if best is None or best.time_s is None
            else f"best so far {config_text(best.cfg)}, {in_words(best.time_s)}"
        )
        if tune.budget_s is not None:
            limit = f"at most {in_words(max(0.0, tune.budget_s - tune.seconds))} left"
            words = f"{words}; {limit}" if words else limit
        lines.append(Text(f"  {words}", "bold"))
    for line in lines:
        line.truncate(to.width, overflow="ellipsis")
    return Group(*lines)


def print_summary(job: Job, to: Console) -> None:
    """Print a table of the calls, and the reasons of those without a config and of failed candidates."""
    names = ["call", "outcome", "config", "speed-up", "time"]
    rows = [
        [
            row.item.op_id + f"({row.item.call})",
            row.item.outcome,
            _config(row),
            _speedup(row),
            "-" if row.item.outcome == "left" else in_words(row.item.seconds),
        ]
        for row in job.rows
    ]
    if rows:
        to.print()
        print_table(to, names, rows)
    for row in job.rows:
        if row.item.error is not None:
            to.print(Text(f"\n{row.item.op_id}({row.item.call}) has no config: {row.item.said()}", "red"))
        elif row.item.outcome == "tuned" and row.entry is not None and row.entry.failed:
            some = f"{len(row.entry.failed)} of {len(row.entry.outcomes)} candidates failed"
            to.print(
                f"\n{row.item.op_id}({row.item.call}): {some}; {redact(reasons_of(row.entry.failed))}", soft_wrap=True
            )
    stores = sorted({row.store for row in job.rows if row.entry is not None})
    if stores:
        to.print(f"\nstored in {', '.join(stores)}", soft_wrap=True)


def _config(row: Row) -> str:
    return "-" if row.item.tier is None or row.item.error is not None else config_text(row.item.cfg)


def _speedup(row: Row) -> str:
    return "-" if row.entry is None or row.item.error is not None else speedup_words(row.entry)


def facts(job: Job) -> list[dict[str, Any]]:
    """Return the result of each call as JSON values, for scripts."""
    found = []
    for row in job.rows:
        item, entry = row.item, row.entry
        found.append(
            {
                "op": item.op_id,
                "call": item.call,
                "outcome": item.outcome,
                "config": None if entry is None or item.error is not None else entry.record.cfg,
                "speedup": None if entry is None else entry.speedup,
                "noise": None if entry is None else entry.noise,
                "seconds": item.seconds,
                "error": item.said() if item.error is not None else None,
                "failures": []
                if entry is None
                else [one for one in entry.facts()["outcomes"] if one["kind"] == "failed"],
                "key": None if item.key is None else item.key.call_key,
                "store": row.store,
            }
        )
    return found
