"""`asel doctor`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from asel.cli.errors import FOUND_A_PROBLEM
from asel.cli.locations import StoreOption

if TYPE_CHECKING:
    from asel.cli.doctor.findings import Finding

__all__ = ["doctor"]

_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}


def doctor(
    store: StoreOption = None,
    otlp: Annotated[str | None, typer.Option(help="A collector to check: http://127.0.0.1:4318.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """Check this machine, and give advice for each problem; exit with 1 if there is one."""
    from asel.cli.locations import caches_at
    from asel.cli.output import console, print_item, print_json
    from asel.telemetry.environment import check_endpoint

    findings = []
    out = console()
    if store is not None:  # wrong options are refused before the checks
        caches_at(store)
    if otlp is not None:
        check_endpoint(otlp)
    for finding in _examined(store, otlp):
        findings.append(finding)
        if not as_json:
            print_item(out, f"{finding.state:<8}", f"{finding.topic}: {finding.text}", _STYLES[finding.state])
            if finding.fix:
                print_item(out, f"{'->':>8}", finding.fix)
    problems = sum(finding.state == "problem" for finding in findings)
    if as_json:
        print_json({"problems": problems, "findings": [dataclasses.asdict(finding) for finding in findings]})
    else:
        count = "No problems" if not problems else f"{problems} problem{'s' if problems > 1 else ''}"
        out.print(f"{count} found.", style="bold")
    if problems:
        raise typer.Exit(FOUND_A_PROBLEM)


def _examined(store: str | None, otlp: str | None) -> Iterator[Finding]:
    from asel.cli.doctor.collector import collector
    from asel.cli.doctor.machine import devices, software, timer_noise
    from asel.cli.doctor.stores import stores
    from asel.cli.doctor.variables import variables

    environment = dict(os.environ)  # JAX sets variables of its own when it is imported
    yield from software()
    yield from devices()
    yield from timer_noise()
    yield from stores(store)
    yield from collector(otlp)
    yield from variables(environment)
