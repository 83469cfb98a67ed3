"""The `asel` command."""

from __future__ import annotations

from collections.abc import Sequence

from asel.cli.interrupts import end_at_once

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command line and exit: 0 on success, 1 if a problem was found, 2 if it failed or was used wrongly.

    Without `arguments` it runs `sys.argv`, and Ctrl-C ends the process with 130, without a traceback.
    """
    if arguments is None:
        end_at_once()
    from asel.cli.app import run

    run(arguments)
