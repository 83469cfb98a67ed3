"""A batch's progress as a bar on stderr. The only module of the room that imports rich."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from asel.serving.batch_summary import BatchProgress

__all__ = ["progress_bar"]


@contextmanager
def progress_bar(console: Console | None = None) -> Iterator[Callable[[BatchProgress], None]]:
    """Show a bar during the block; yields the function that moves it."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console or Console(stderr=True)) as shown:
        task = shown.add_task("", total=None)

        def move(progress: BatchProgress) -> None:
            failed = f"  ({progress.failed} failed)" if progress.failed else ""
            description = f"{progress.begun}{failed}" if progress.begun else None
            shown.update(task, total=progress.total, completed=progress.done, description=description)

        yield move
