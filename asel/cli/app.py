"""The command line: its commands, and its handling of errors.

Modules of commands are imported for `--help`, so they import JAX, the SDK and the engine inside functions.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated

import typer

from asel.cli.cache import cache_app
from asel.cli.demo.command import demo
from asel.cli.doctor.command import doctor
from asel.cli.errors import FAILED, FOUND_A_PROBLEM, problem, report_error
from asel.cli.examples import examples
from asel.cli.report import report
from asel.cli.trace.command import trace
from asel.cli.tune.command import tune
from asel.cli.version import show_version

__all__ = ["app", "run"]

# No local variables in tracebacks: they may hold a URL with a password.
app = typer.Typer(
    name="asel",
    pretty_exceptions_show_locals=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Pick kernel configurations for JAX, and show why.",
    epilog=examples("asel demo", "asel doctor", "asel tune jobs.toml --store configs.json", "asel cache ls"),
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(cache_app, name="cache")
app.command(epilog=examples("asel demo", "asel demo --otlp http://127.0.0.1:4318"))(demo)
app.command(
    epilog=examples(
        "asel tune serving.kernels:attention --shapes 'q=bf16[8,1024,128], k=bf16[8,1024,128]'",
        "asel tune kernels.py:matmul --shapes 'a=f32[512,512], b=f32[512,512]' --store redis://cache.example:6379",
        "asel tune jobs.toml --budget 30 --isolation process",
    )
)(tune)
app.command(epilog=examples("asel doctor", "asel doctor --store redis://cache.example:6379 --json"))(doctor)
app.command(
    epilog=examples(
        "asel report", "asel report redis://cache.example:6379 -o report.html", "asel report matmul --png plots"
    )
)(report)
app.command(epilog=examples("asel trace demo-trace.jsonl", "asel trace spans.jsonl --only asel.autotune --limit 1"))(
    trace
)


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show asel, JAX and the device.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error. May stand anywhere.")] = False,
) -> None:
    """Pick kernel configurations for JAX, and show why."""


def run(arguments: Sequence[str] | None = None) -> None:
    """Run a command line, by default `sys.argv`, and exit with its code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        _run(given)
    except SystemExit as end:
        if arguments is None:
            _end_process(end.code)
        raise
    except Exception as error:  # with --debug
        if arguments is not None:
            raise
        sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(FAILED) from None


def _run(given: list[str]) -> None:
    debug = "--debug" in given
    try:
        arguments = [argument for argument in given if argument != "--debug"]
        code = app(args=arguments, prog_name="asel", standalone_mode=False)
    except typer.Abort:
        problem("there was no answer, so nothing was done")
        raise SystemExit(FOUND_A_PROBLEM) from None
    except Exception as error:
        if debug:
            raise
        raise SystemExit(report_error(error)) from None
    raise SystemExit(code or 0)


def _end_process(code: object) -> None:
    """End the process here if a thread is still inside JAX: a normal exit of the interpreter would abort."""
    threads = sys.modules.get("asel.runtime.threads")
    if threads is None or not threads.threads_are_busy():
        return
    atexit._run_exitfuncs()
    with suppress(OSError, ValueError):  # the reader may have closed them
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
