"""Output of commands: tables and bars for people, JSON for scripts.

On a terminal a table fits its width, and in a narrow window each row becomes a block of lines. Elsewhere a row is one
line of any length, so that `grep` and `cut` work. Colours follow `NO_COLOR`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["NARROW", "bar", "console", "counted", "print_item", "print_json", "print_table", "spread_bar"]

NARROW = 72
"""The width, in columns, below which a table is printed as blocks of lines."""
_UNBOUNDED = 10_000


def console(*, stderr: bool = False) -> Console:
    """Return a console as wide as the terminal, or of unlimited width if there is none."""
    made = Console(stderr=stderr, highlight=False, markup=False, soft_wrap=False)
    if not made.is_terminal:
        made.width = _UNBOUNDED
    return made


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 record`, `1,024 records`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def print_json(value: Any) -> None:
    """Print one JSON value, for scripts."""
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def print_table(to: Console, names: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> None:
    """Print rows under column names. The caller formats the numbers."""
    if to.is_terminal and to.width < NARROW:
        _print_blocks(to, names, rows)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(name, overflow="fold", no_wrap=not to.is_terminal)
    for row in rows:
        table.add_row(*row)
    if to.is_terminal:
        to.print(table)
        return
    with to.capture() as captured:
        to.print(table)
    for line in captured.get().splitlines():
        to.print(line.rstrip(), soft_wrap=True)


def print_item(to: Console, mark: str, text: str, style: str = "") -> None:
    """Print a mark and a text, with a hanging indent on a terminal."""
    if not to.is_terminal:
        to.print(f"{mark} {text}", soft_wrap=True)
        return
    item = Table.grid(padding=(0, 1, 0, 0))
    item.add_column(style=style, no_wrap=True)
    item.add_column(overflow="fold")
    item.add_row(mark, text)
    to.print(item)


def _print_blocks(to: Console, names: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> None:
    width = max(map(len, names), default=0)
    for number, row in enumerate(rows):
        if number:
            to.print()
        for name, value in zip(names, row, strict=True):
            to.print(Text.assemble((f"{name:<{width}}  ", "bold"), value))


def bar(part: float, width: int, to: Console) -> str:
    """Return a bar whose length is the share `part` of `width`."""
    filled = round(max(0.0, min(1.0, part)) * width)
    return ("\u2588" if _has_blocks(to) else "#") * filled


def spread_bar(low: float, middle: float, high: float, longest: float, width: int, to: Console) -> str:
    """Return a bar that is solid up to `low` and shaded up to `high`, with a mark at `middle`."""
    solid, shaded, mark = ("\u2588", "\u2591", "\u2503") if _has_blocks(to) else ("#", "-", "|")

    def place(value: float) -> int:
        return min(width - 1, round(value / longest * (width - 1))) if longest else 0

    cells = [solid] * (place(low) + 1) + [shaded] * (place(high) - place(low))
    cells[place(middle)] = mark
    return "".join(cells)


def _has_blocks(to: Console) -> bool:
    return to.encoding.lower().startswith("utf")
