"""Prints errors as one clear sentence each, and defines the exit codes."""

from __future__ import annotations

import sys
from typing import Any

from asel.errors import AselError
from asel.redaction import redact

__all__ = ["FAILED", "FOUND_A_PROBLEM", "INTERRUPTED", "problem", "report_error"]

FOUND_A_PROBLEM = 1
"""The exit code of a command that worked and found a problem."""
FAILED = 2
"""The exit code of a command that failed or was used wrongly."""
INTERRUPTED = 130
"""The exit code that shells expect after Ctrl-C."""


def report_error(error: Exception) -> int:
    """Print an error in one paragraph and return the exit code."""
    if isinstance(error, BrokenPipeError):  # the reader, such as `head`, has ended
        sys.stderr.close()
        return FOUND_A_PROBLEM
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    if hasattr(error, "format_message"):  # a usage error of typer, whose class depends on its version
        _report_usage(error)
    elif isinstance(error, AselError):
        problem(redact(error))
    elif isinstance(error, OSError):
        problem(_about_file(error))
    else:
        problem(f"{type(error).__name__}: {redact(error)}. This error is unexpected; --debug shows its traceback.")
    return FAILED


def _report_usage(error: Any) -> None:
    """Print a wrong option or argument; if there are no arguments at all, print the help."""
    message = redact(error.format_message()).strip()
    if type(error).__name__ == "NoArgsIsHelpError":
        if message:
            print(message, file=sys.stderr)
        return
    context = getattr(error, "ctx", None)
    command = "asel" if context is None else context.command_path
    end = "" if message.endswith(("?", ".")) else "."
    problem(f"{message}{end} `{command} --help` shows the usage")


def _about_file(error: OSError) -> str:
    if error.filename is None or error.strerror is None:
        return redact(error)
    fix = ""
    if isinstance(error, PermissionError):
        fix = "; give this user the right to it, or name another path"
    elif isinstance(error, FileNotFoundError | NotADirectoryError | FileExistsError | IsADirectoryError):
        fix = "; check the path"
    return f"{redact(error.filename)}: {error.strerror}{fix}"


def problem(text: str) -> None:
    """Print a problem on stderr. The text must have been redacted."""
    print(f"asel: {text}", file=sys.stderr)
