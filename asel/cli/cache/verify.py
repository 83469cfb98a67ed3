"""`asel cache verify`: measures records again, to check whether their configs are still the fastest."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from asel.cli.cache.record_lookup import JsonOption, OpOption, read_entries
from asel.cli.errors import FOUND_A_PROBLEM, INTERRUPTED
from asel.cli.interrupts import run_loop
from asel.cli.locations import StoreOption
from asel.errors import AselError, InvalidRequestError
from asel.redaction import redact

if TYPE_CHECKING:
    from asel.cli.tune.run import Row
    from asel.cli.tune.targets import Call
    from asel.web.entries import Entry

__all__ = ["Verdict", "verdict", "verify"]

_SAMPLE = 5


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result for one record."""

    entry: Entry
    state: Literal["holds", "changed", "unknown"]
    why: str

    def facts(self) -> dict[str, Any]:
        entry = self.entry
        return {
            "key": entry.record.key.call_key,
            "call": entry.name,
            "config": entry.record.cfg,
            "state": self.state,
            "why": self.why,
            "cache": entry.cache,
        }


def verify(
    kernel: Annotated[
        list[str] | None,
        typer.Option("--kernel", "-k", help="A kernel of the records: package.module:name or a file. May be repeated."),
    ] = None,
    store: StoreOption = None,
    op: OpOption = None,
    sample: Annotated[int, typer.Option(min=1, help="Measure at most this many records, picked at random.")] = _SAMPLE,
    budget: Annotated[float, typer.Option(min=0.001, help="Time limit of each record, in seconds.")] = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Measure a sample of records again on this machine; exit with 1 if one no longer holds.

    A record has the call but not the module of its kernel: give that with --kernel.
    Records that cannot be verified, such as those of other devices, are listed with the reason.
    """
    from asel.cli.output import console, print_json, print_table

    entries, _ = read_entries(store, op)
    if not entries:
        raise InvalidRequestError("there are no such records: `asel cache ls` lists the existing records")
    candidates, verdicts = _rebuilt(entries, kernel or [])
    chosen = random.sample(candidates, min(sample, len(candidates)))
    measured, interrupted = _measured(chosen, budget)
    verdicts = measured + verdicts
    changed = sum(one.state == "changed" for one in verdicts)
    held = sum(one.state == "holds" for one in verdicts)
    if as_json:
        print_json([one.facts() for one in verdicts])
    else:
        out = console()
        rows = [[one.state, one.entry.short_key, one.entry.name, one.entry.config, one.why] for one in verdicts]
        if rows:
            print_table(out, ["state", "key", "call", "config", "why"], rows)
        left = len(candidates) - len(chosen)
        more = f"; {left} more were not picked: --sample {len(candidates)} measures all" if left else ""
        out.print(f"{held} hold, {changed} changed, {len(verdicts) - held - changed} could not be verified{more}")
        if changed:
            out.print("`asel tune ... --again` with the same store replaces those that changed")
    if interrupted:
        raise typer.Exit(INTERRUPTED)
    if changed or not held:
        raise typer.Exit(FOUND_A_PROBLEM)


def _rebuilt(entries: Sequence[Entry], paths: Sequence[str]) -> tuple[list[tuple[Entry, Call]], list[Verdict]]:
    """Return the records whose calls can be reconstructed, and verdicts with the reasons for the others."""
    from asel.cli.device import started_device
    from asel.cli.tune.targets import kernel_at
    from asel.kernels.key_memo import KeyMemo

    here = started_device().partition("|")[0]
    kernels = [kernel_at(path) for path in paths]
    keys = KeyMemo()
    ready: list[tuple[Entry, Call]] = []
    verdicts: list[Verdict] = []
    for entry in entries:
        try:
            ready.append((entry, _call_of(entry, kernels, keys, here)))
        except AselError as error:
            verdicts.append(Verdict(entry, "unknown", redact(error)))
    return ready, verdicts


def _call_of(entry: Entry, kernels: Sequence[Any], keys: Any, here: str) -> Call:
    from asel.cli.tune.targets import Call
    from asel.kernels.call_parsing import parse_call

    if entry.device != here:
        raise InvalidRequestError(f"it was measured on {entry.device}, and this is {here}")
    if entry.report is None:
        raise InvalidRequestError("a user put it: there is no measurement to compare with")
    name, _, version = entry.op.rpartition("@v")
    same_op = [kernel for kernel in kernels if kernel.op_id == name]
    if not same_op:
        raise InvalidRequestError(f"name the kernel of {entry.op} with --kernel package.module:name")
    found = [kernel for kernel in same_op if str(getattr(kernel, "version", "0")) == version]
    if not found:
        raise InvalidRequestError(
            f"it is of version {version}, and the kernel is of version {getattr(same_op[0], 'version', '0')}"
        )
    inv = parse_call(entry.record.call, found[0])
    if keys.resolve(inv, found[0]).key.call_key != entry.record.key.call_key:
        raise InvalidRequestError(
            "its call has shardings, weak types or JAX settings that its text does not show: tune it in your program"
        )
    return Call(found[0], inv, backward=entry.report.objective == "forward+backward")


def _measured(chosen: Sequence[tuple[Entry, Call]], budget_s: float) -> tuple[list[Verdict], bool]:
    """Tune the calls again, into a temporary store; return the verdicts, and whether Ctrl-C ended it early."""
    from asel.cli.output import console
    from asel.cli.tune.run import Job, Options, tune_all
    from asel.cli.tune.view import progress

    if not chosen:
        return [], False
    verdicts: list[Verdict] = []
    with tempfile.TemporaryDirectory(prefix="asel-verify-") as scratch:
        for entry, call in chosen:
            job = Job((call,), Options(scratch, budget_s))
            with progress(job, console(stderr=True)):
                run_loop(tune_all, job)
            if job.interrupted:
                left = chosen[len(verdicts) :]
                return verdicts + [Verdict(one, "unknown", "it was interrupted") for one, _ in left], True
            verdicts.append(verdict(entry, job.rows[0]))
    return verdicts, False


def verdict(entry: Entry, row: Row) -> Verdict:
    """Compare a record with a new tune of its call."""
    from asel.kernels.candidates import same_config
    from asel.tuning.outcomes import Failed, Measured

    now = row.entry
    if now is None or now.report is None or now.report.best is None:
        return Verdict(entry, "unknown", row.item.said() or "it could not be measured")
    if same_config(now.record.cfg, entry.record.cfg):
        return Verdict(entry, "holds", "it won again")
    outcome = next((one for one in now.outcomes if same_config(one.cfg, entry.record.cfg)), None)
    match outcome:
        case None:
            return Verdict(entry, "changed", f"the kernel does not list it any more; {now.config} wins now")
        case Failed():
            why = f"it failed in {outcome.stage}: {outcome.error_type}: {redact(outcome.message)}"
            return Verdict(entry, "changed", why)
        case Measured():
            slower = outcome.shown_s / now.report.best.shown_s - 1
            if slower <= now.report.noise:
                return Verdict(entry, "holds", f"it ties with {now.config}, {slower:.1%} apart")
            return Verdict(
                entry, "changed", f"{now.config} wins now; it takes {slower:.0%} longer (noise {now.report.noise:.0%})"
            )
    return Verdict(entry, "unknown", f"it was not measured: {redact(outcome.reason)}")
