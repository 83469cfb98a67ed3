"""The examples at the end of every command's `--help`."""

from __future__ import annotations

__all__ = ["examples"]


def examples(*lines: str) -> str:
    """Return an epilog with example command lines."""
    return "\n\n".join(
        ["[bold]Examples[/bold]", *(f"[cyan]{line.replace('[', chr(92) + '[')}[/cyan]" for line in lines)]
    )
