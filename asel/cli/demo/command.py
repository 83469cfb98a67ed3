"""`asel demo`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asel.errors import InvalidRequestError

if TYPE_CHECKING:
    from rich.console import Console

    from asel.cli.demo.story import Demo

__all__ = ["demo", "run", "spans_in", "summarize"]


def demo(
    backend: Annotated[str, typer.Option(help="The event loop to run on: asyncio or trio.")] = "asyncio",
    otlp: Annotated[
        str | None, typer.Option(help="Send traces, metrics and logs to this URL, over HTTP: http://127.0.0.1:4318.")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            help="Keep the cache, the report and the trace in this folder.", show_default="a new temporary directory"
        ),
    ] = None,
) -> None:
    """Serve requests with real JAX kernels on this machine, and watch their configs being tuned."""
    from asel.cli.device import started_device
    from asel.cli.output import console

    if backend not in ("asyncio", "trio"):
        raise InvalidRequestError(f"--backend {backend}: use asyncio or trio")
    started_device()
    run(console(), backend, otlp, _new_folder(folder))


def _new_folder(folder: Path | None) -> Path:
    import tempfile

    if folder is None:
        return Path(tempfile.mkdtemp(prefix="asel-demo-"))
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise InvalidRequestError(f"{folder} is not empty, and the demo starts cold: name a new folder")
    return folder


def run(out: Console, backend: str, otlp: str | None, folder: Path) -> None:
    """Run the demo and print its summary."""
    from asel.cli.demo import story
    from asel.cli.interrupts import run_loop
    from asel.telemetry import default_sinks

    cache, trace_file = folder / "cache", folder / "trace.jsonl"
    if otlp is not None:
        with _sent_to(out, otlp):
            demo = story.Demo(cache, default_sinks())
            with _shown(demo, out):
                run_loop(story.run_demo, demo, backend=backend)
    else:
        with spans_in(trace_file) as (tracer, sinks):
            demo = story.Demo(cache, sinks, tracer)
            with _shown(demo, out):
                run_loop(story.run_demo, demo, backend=backend)
    summarize(out, demo, folder / "report.html", None if otlp is not None else trace_file, otlp)


def _shown(demo: Demo, out: Console) -> AbstractContextManager[None]:
    from asel.cli.demo.view import live, plain

    return live(demo, out) if out.is_terminal and not out.is_dumb_terminal else plain(demo, out)


@contextmanager
def _sent_to(out: Console, otlp: str) -> Iterator[None]:
    from asel.redaction import redact
    from asel.telemetry import configure

    with configure("asel-demo", otlp) as telemetry:
        out.print(str(telemetry), soft_wrap=True)
        yield
        if not telemetry.close():
            text = f"{redact(otlp)} did not take all of it within {telemetry.close_timeout_s:g} s"
            out.print(text, style="bold red", soft_wrap=True)


@contextmanager
def spans_in(path: Path) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Give a tracer and sinks whose spans go to a file."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from asel.cli.trace.span_file import SpanFile
    from asel.events.pipeline import shared_pipeline
    from asel.telemetry import OpenTelemetrySink
    from asel.telemetry.names import VERSION

    provider = TracerProvider(resource=Resource({"service.name": "asel-demo"}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(SpanFile(path)))
    try:
        yield provider.get_tracer("asel.demo", VERSION), (OpenTelemetrySink(provider.get_tracer("asel", VERSION)),)
    finally:
        shared_pipeline().flush(5.0)
        provider.shutdown()


def summarize(out: Console, demo: Demo, report: Path, trace_file: Path | None, otlp: str | None) -> None:
    """Write the report; print the results and the paths of the files."""
    import time

    from rich.text import Text

    from asel.cli.cache.record_lookup import read_entries
    from asel.cli.demo.summary import places, sentences
    from asel.cli.output import print_item
    from asel.redaction import redact
    from asel.web.report import report_page

    entries = read_entries(str(demo.cache))[0] if demo.cache.exists() else []
    if not entries:
        return
    report.write_text(report_page(entries, (), title="asel demo", created=time.time()), encoding="utf-8")
    out.print(Text("\nWhat happened", "bold cyan"))
    for sentence in sentences(demo, entries):
        print_item(out, "-", sentence)
    out.print(Text("\nSee for yourself", "bold cyan"))
    for name, command in places(demo.cache, report, trace_file, None if otlp is None else redact(otlp)):
        out.print(f"  {name:<10} {command}", soft_wrap=True)
