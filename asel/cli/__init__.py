"""The `asel` command."""

from __future__ import annotations

from importlib import metadata
from typing import Annotated

import anyio
import typer
from rich.console import Console

from asel.errors import InvalidRequestError
from asel.redaction import redact

__all__ = ["app", "main"]

# No local variables in tracebacks: one of them may be a URL with a password.
app = typer.Typer(
    pretty_exceptions_show_locals=False,
    no_args_is_help=True,
    add_completion=False,
    help="Pick kernel configurations for JAX, and show why.",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"asel {metadata.version('asel')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True)] = False,
) -> None:
    """Pick kernel configurations for JAX, and show why."""


@app.command()
def demo(
    backend: Annotated[str, typer.Option(help="The event loop to run on: asyncio or trio.")] = "asyncio",
    otlp: Annotated[
        str | None, typer.Option(help="Send traces, metrics and logs there, over HTTP: http://127.0.0.1:4318.")
    ] = None,
) -> None:
    """Tune real JAX kernels on this machine: cold, warm, crowded, traced and restarted."""
    from asel.demo.story import tell

    console = Console()
    if otlp is None:
        anyio.run(tell, console, backend=backend)
        return
    from asel.telemetry import configure

    try:
        telemetry = configure("asel-demo", otlp)
    except InvalidRequestError as error:
        raise typer.BadParameter(str(error)) from None
    with telemetry:
        console.print(str(telemetry), markup=False, highlight=False)
        anyio.run(tell, console, backend=backend)
        if not telemetry.close():
            text = f"{redact(otlp)} did not take all of it within {telemetry.close_timeout_s:g} s"
            console.print(text, style="bold red", markup=False, highlight=False)


def main() -> None:
    app()
