"""`asel trace FILE`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asel.errors import InvalidRequestError

if TYPE_CHECKING:
    from asel.cli.trace.spans import Span

__all__ = ["trace"]


def trace(
    file: Annotated[Path, typer.Argument(help="OTLP JSON lines: of `asel demo`, or of a collector's file exporter.")],
    only: Annotated[
        str | None, typer.Option("--only", help="Only traces whose id begins with this, or with this in a span's text.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Number of traces to show, the longest first.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """Print the traces of a file as waterfalls; exit with 1 if a part of the file cannot be read."""
    from asel.cli.errors import FOUND_A_PROBLEM, problem
    from asel.cli.output import console, print_json
    from asel.cli.trace.spans import read_spans
    from asel.cli.trace.waterfall import label, print_trace, traces_of

    spans, bad = read_spans(file)
    if not spans:
        why = f": line {bad[0].number}: {bad[0].reason}" if bad else ""
        raise InvalidRequestError(f'{file} has no spans{why}. It should have lines like {{"resourceSpans": [...]}}')
    found = traces_of(spans)
    if only is not None:
        found = [
            one
            for one in found
            if one.trace_id.startswith(only.lower()) or any(only in label(span) for span in one.spans)
        ]
        if not found:
            raise InvalidRequestError(f"no trace in {file} matches {only!r}: `asel trace {file}` shows all of them")
    longest = sorted(found, key=lambda one: one.seconds, reverse=True)[:limit]
    shown = [one for one in found if one in longest]
    if as_json:
        print_json(
            [{"trace": one.trace_id, "seconds": one.seconds, "spans": [*map(_facts, one.spans)]} for one in shown]
        )
    else:
        out = console()
        for number, one in enumerate(shown):
            if number:
                out.print()
            print_trace(out, one)
        if len(found) > len(shown):
            out.print(f"\n{len(found) - len(shown)} shorter traces are not shown: --limit {len(found)} shows all")
    for line in bad:
        problem(f"{file}, line {line.number}: {line.reason}")
    if bad:
        raise typer.Exit(FOUND_A_PROBLEM)


def _facts(span: Span) -> dict[str, Any]:
    return {
        "name": span.name,
        "span": span.span_id,
        "parent": span.parent_id or None,
        "start_ns": span.start_ns,
        "seconds": span.seconds,
        "failed": span.failed,
        "attributes": span.attributes,
        "links": [{"trace": trace_id, "span": span_id} for trace_id, span_id in span.links],
    }
