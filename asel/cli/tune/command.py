"""`asel tune TARGET`."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asel.cli.errors import FOUND_A_PROBLEM, INTERRUPTED, problem
from asel.cli.interrupts import run_loop, set_stop_message
from asel.errors import InvalidRequestError
from asel.redaction import redact

if TYPE_CHECKING:
    from asel.cli.tune.run import Job, Options

__all__ = ["tune"]

_FIELDS = {"budget": "budget_s", "total": "total_s"}


def tune(
    target: Annotated[
        str,
        typer.Argument(
            help="A kernel (package.module:name or path/to/file.py:name), a file of recorded calls, or a TOML job file."
        ),
    ],
    shapes: Annotated[
        list[str] | None,
        typer.Option("--shapes", help="A call of the kernel: 'q=bf16[8,1024,128], causal=True'. May be repeated."),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            "--store",
            "-s",
            envvar="ASEL_STORE",
            help="A directory, a *.json document or a redis:// URL for the results. Commands with one store "
            "share work.",
            show_default="the operation's own, in the cache directory",
        ),
    ] = None,
    budget: Annotated[
        float | None, typer.Option(help="Time limit of each call, in seconds.", show_default="60")
    ] = None,
    total: Annotated[
        float | None,
        typer.Option(help="Time limit of all calls, in seconds: no tune begins later.", show_default="no limit"),
    ] = None,
    strategy: Annotated[
        str | None, typer.Option(help="Search strategy, as in Tuner(strategy=...).", show_default="Tuner's")
    ] = None,
    isolation: Annotated[
        str | None,
        typer.Option(help="thread or process: candidates that hang or crash are killed.", show_default="thread"),
    ] = None,
    backward: Annotated[
        bool | None, typer.Option("--backward", help="Time forward and backward together.", show_default=False)
    ] = None,
    check: Annotated[
        bool | None,
        typer.Option("--check", help="Refuse candidates whose outputs differ from the default's.", show_default=False),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure existing records again.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """Find the fastest configs of kernels before there is traffic, and store them.

    Exits with 1 if a call has no config in the end. Ctrl-C keeps the measurements, and prints the command to continue.
    """
    from asel.selection.policy import tuning_switched_off

    if tuning_switched_off():
        raise InvalidRequestError("ASEL_AUTOTUNE is off in the environment, which forbids tuning: unset it")
    given = {
        "store": store,
        "budget": budget,
        "total": total,
        "strategy": strategy,
        "isolation": isolation,
        "backward": backward,
        "check": check,
    }
    set_stop_message(f"stopped. To go on: {_this_command()}")
    job = _job(target, shapes or [], given, again)
    _run(job, as_json)
    done = sum(row.item.outcome in ("tuned", "known") for row in job.rows)
    if job.interrupted:
        stored = ", and it is stored" if done else ""
        problem(f"stopped: {done} of {len(job.calls)} calls have their config{stored}. To go on: {_this_command()}")
        raise typer.Exit(INTERRUPTED)
    if job.unsaved:
        why = f": {job.outages.messages[-1]}" if job.outages.messages else ""
        problem(f"{len(job.unsaved)} of the configs could not be stored in {job.unsaved[0].store}{why}")
    if done < len(job.calls) or job.unsaved:
        raise typer.Exit(FOUND_A_PROBLEM)


def _this_command() -> str:
    """Return the command to continue, without the password of a store."""
    return redact(shlex.join(["asel", *(part for part in sys.argv[1:] if part != "--again")]))


def _job(target: str, shapes: list[str], given: dict[str, Any], again: bool) -> Job:
    from asel.cli.locations import cache_to_fill
    from asel.cli.tune.run import Job
    from asel.cli.tune.targets import target_calls

    found = target_calls(target, shapes)
    for line in found.skipped:
        problem(line)
    options = _options(
        {**(found.options or {}), **{name: value for name, value in given.items() if value is not None}}, again
    )
    for op in {call.kernel.op_id for call in found.calls} if options.store is None else {""}:
        _refuse_unwritable(cache_to_fill(options.store, op).path)  # before anything is tuned
    if options.store is not None and "://" not in options.store:
        options = replace(options, store=str(Path(options.store).expanduser().absolute()))
    return Job(found.calls, options)


def _refuse_unwritable(store: str) -> None:
    from asel.cli.locations import existing_folder, why_not_writable

    if "://" in store:
        return
    path = Path(store)
    if path.exists() and path.is_dir() == (path.suffix == ".json"):
        raise InvalidRequestError(
            f"{store} is neither a directory nor a *.json document: name one of them, or a new path"
        )
    reason = why_not_writable(existing_folder(path))
    if reason is not None:
        raise InvalidRequestError(
            f"no result could be stored in {store}: {reason}; "
            "give this user the right to write there, or name another --store"
        )


def _options(chosen: dict[str, Any], again: bool) -> Options:
    from asel.cli.tune.run import Options
    from asel.tuning.tuner import Tuner

    named = {_FIELDS.get(name, name): value for name, value in chosen.items()}
    options = Options(**named, again=again)
    for name, value in (("budget", options.budget_s), ("total", options.total_s)):
        if value is not None and not value > 0:
            raise InvalidRequestError(f"--{name} {value:g} must be seconds, above zero")
    if options.isolation not in ("thread", "process"):
        raise InvalidRequestError(f"--isolation {options.isolation}: use thread or process")
    if options.strategy is not None:
        try:
            Tuner(strategy=options.strategy)  # type: ignore[arg-type]
        except InvalidRequestError:
            raise InvalidRequestError(f"--strategy {options.strategy}: use auto, race, search or exhaustive") from None
    return options


def _run(job: Job, as_json: bool) -> None:
    from asel.cli.device import started_device
    from asel.cli.output import console, print_json
    from asel.cli.tune.run import tune_all
    from asel.cli.tune.view import facts, print_summary, progress

    started_device()
    with progress(job, console(stderr=as_json)):
        run_loop(tune_all, job)
    if as_json:
        print_json(facts(job))
    else:
        print_summary(job, console())
