"""Tunes a list of calls with one selector for each cache and objective; handles Ctrl-C."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from asel.cli.cache.record_lookup import entries_of
from asel.cli.locations import cache_to_fill
from asel.cli.progress import TuneWatch
from asel.cli.tune.targets import Call
from asel.errors import AselError, NoConfigError
from asel.events import Event, StoreFailed
from asel.kernels.call_text import call_text
from asel.runtime.jax_settings import current_settings
from asel.selection.cache import ConfigCache
from asel.selection.policy import AutotunePolicy
from asel.selection.selector import ConfigSelectorChain
from asel.serving.batch_run import BatchCall, run_batch
from asel.serving.batch_summary import BatchItem, BatchProgress
from asel.tuning.outcomes import Skipped
from asel.tuning.tuner import Tuner

if TYPE_CHECKING:
    from asel.kernels.keys import CacheKey
    from asel.tuning.state import TuneState
    from asel.web.entries import Entry

__all__ = ["Job", "Options", "Row", "tune_all"]

_READ_S = 5.0
_GRACE_S = 1.0


@dataclass(frozen=True, slots=True)
class Options:
    """The options of `asel tune`."""

    store: str | None = None
    budget_s: float = 60.0
    total_s: float | None = None
    strategy: str | None = None
    isolation: str = "thread"
    backward: bool = False
    check: bool = False
    again: bool = False


@dataclass(slots=True)
class Row:
    """The result for one call."""

    item: BatchItem
    store: str
    entry: Entry | None = None
    """Its record in the store."""


class StoreOutages:
    """A sink that keeps the messages of store errors."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def wants(self, kind: type[Event]) -> bool:
        return issubclass(kind, StoreFailed)

    def emit(self, event: Event) -> None:
        assert isinstance(event, StoreFailed)
        self.messages.append(event.message)


@dataclass(slots=True)
class Job:
    """A run of `asel tune`: its calls, its options and its progress."""

    calls: tuple[Call, ...]
    options: Options
    on_row: Callable[[BatchItem], object] = lambda item: None
    watch: TuneWatch = field(default_factory=TuneWatch)
    outages: StoreOutages = field(default_factory=lambda: StoreOutages())
    rows: list[Row] = field(default_factory=list)
    ended: list[BatchItem] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    interrupted: bool = False
    """Whether Ctrl-C was pressed: no more tunes begin."""
    cancelled: bool = False
    """Whether the running tune was cancelled, too."""
    scope: anyio.CancelScope | None = None
    selector: ConfigSelectorChain[Any, Any] | None = None

    @property
    def unsaved(self) -> list[Row]:
        """The calls that were tuned and have no record in the store."""
        return [row for row in self.rows if row.item.outcome == "tuned" and row.entry is None]

    @property
    def left_s(self) -> float | None:
        """The estimated time for the remaining calls, from the average so far."""
        done = len(self.ended)
        return (time.monotonic() - self.began) / done * (len(self.calls) - done) if done else None


async def tune_all(job: Job) -> None:
    """Tune every call. The first Ctrl-C ends the running tune with the best result so far, the second cancels it.

    Raises:
        StoreError: a store does not answer. Nothing has been tuned then.
    """
    for name, _ in _groups(job):
        async with cache_to_fill(job.options.store, name) as cache:
            await cache.get("", "", "")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_await_interrupt, job)
        for (name, backward), calls in _groups(job).items():
            with anyio.CancelScope() as job.scope:
                if job.cancelled:
                    job.scope.cancel()
                await _tune_group(job, name, backward, calls)
        tasks.cancel_scope.cancel()


def _groups(job: Job) -> dict[tuple[str, bool], list[Call]]:
    """Group calls by the name of their cache (empty if --store takes all) and by whether they are timed backward."""
    groups: dict[tuple[str, bool], list[Call]] = {}
    for call in job.calls:
        backward = job.options.backward if call.backward is None else call.backward
        groups.setdefault(("" if job.options.store is not None else call.kernel.op_id, backward), []).append(call)
    return groups


async def _tune_group(job: Job, name: str, backward: bool, calls: list[Call]) -> None:
    options, first = job.options, len(job.ended)
    total_left_s = None if options.total_s is None else max(0.0, options.total_s - (time.monotonic() - job.began))
    items: list[BatchItem] = []
    try:
        async with _selector(job, name, backward) as job.selector:
            if job.interrupted:
                job.selector.freeze()
            settings = current_settings()
            batch = [BatchCall(call.kernel, call.inv, call.seen, settings) for call in calls]
            summary = await run_batch(job.selector, batch, progress=partial(_note, job), budget_s=total_left_s)
            items = list(summary.items)
            entries = await _entries(options.store, name, items)
            for number, (call, item) in enumerate(zip(calls, items, strict=True)):
                if item.outcome == "known" and not job.interrupted and _is_to_do_again(options, entries.get(item.key)):
                    items[number] = await _retune(job.selector, call, item)
    finally:
        job.selector = None
        items = [_unless_stopped(job, item) for item in items or _interrupted(calls, job.ended[first:])]
        with anyio.CancelScope(shield=True), anyio.move_on_after(_READ_S):
            entries = await _entries(options.store, name, items)
        where = cache_to_fill(options.store, name).path
        job.rows += [Row(item, where, entries.get(item.key)) for item in items]


def _selector(job: Job, name: str, backward: bool) -> ConfigSelectorChain[Any, Any]:
    options = job.options
    # Without heuristics, so that a call whose candidates all failed is reported as failed.
    policy = AutotunePolicy(
        allow_heuristics=False,
        validate_backward=backward,
        tune_budget_s=options.budget_s,
        candidate_timeout_s=min(AutotunePolicy().candidate_timeout_s, options.budget_s),  # a candidate may hang
    )
    strategy = {} if options.strategy is None else {"strategy": options.strategy}
    tuner: Tuner[Any] = Tuner(isolation=options.isolation, check=options.check, **strategy)  # type: ignore[arg-type]
    persistent = cache_to_fill(options.store, name)
    return ConfigSelectorChain(
        ConfigCache(), policy, tuner, persistent=persistent, sinks=(job.watch, job.outages), close_grace_s=_GRACE_S
    )


def _note(job: Job, progress: BatchProgress) -> None:
    if progress.ended is not None:
        item = _unless_stopped(job, progress.ended)
        job.ended.append(item)
        if item.outcome != "left":
            job.on_row(item)


def _is_to_do_again(options: Options, entry: Entry | None) -> bool:
    """Return whether to measure a record again: on request, or if its tune had less time and skipped candidates."""
    if options.again:
        return True
    report = None if entry is None else entry.report
    if report is None or report.tune_budget_s is None or report.tune_budget_s >= options.budget_s:
        return False
    return any(isinstance(one, Skipped) and "budget" in one.reason for one in report.outcomes)


async def _retune(selector: ConfigSelectorChain[Any, Any], call: Call, item: BatchItem) -> BatchItem:
    start = anyio.current_time()
    try:
        cfg = await selector.retune(call.inv, call.kernel)
    except AselError as error:
        return replace(item, error=error, tier=None, seconds=anyio.current_time() - start)
    return replace(item, cfg=cfg, tier="autotune", seconds=anyio.current_time() - start)


def _unless_stopped(job: Job, item: BatchItem) -> BatchItem:
    """Return the item to show: a call that was not tuned because of Ctrl-C counts as left, not as failed."""
    if job.interrupted and isinstance(item.error, NoConfigError):
        return replace(item, error=None, tier=None, cfg=None)
    return item


def _interrupted(calls: Iterable[Call], ended: Iterable[BatchItem]) -> list[BatchItem]:
    """Return the items of a cancelled batch: those that have ended, and new ones for the remaining calls."""
    by_name = {(item.op_id, item.call): item for item in ended}
    names = [(call.kernel.op_id, call_text(call.inv, call.kernel)) for call in calls]
    return [by_name.get(name, BatchItem(*name)) for name in names]


async def _entries(store: str | None, name: str, items: Iterable[BatchItem]) -> dict[CacheKey | None, Entry]:
    """Return the newest record of each call's key."""
    keys = {item.key for item in items if item.key is not None}
    try:
        entries, _ = await entries_of(cache_to_fill(store, name), lambda record: record.key in keys)
    except AselError:  # the batch has the configs all the same
        return {}
    return {one.record.key: one for one in sorted(entries, key=lambda one: one.record.created)}


async def _await_interrupt(job: Job) -> None:
    with anyio.open_signal_receiver(signal.SIGINT) as signals:
        async for _ in signals:
            if job.interrupted or job.selector is None or not _end_early(job.selector):
                job.cancelled = True
                if job.scope is not None:
                    job.scope.cancel()
            job.interrupted = True


def _end_early(selector: ConfigSelectorChain[Any, Any]) -> bool:
    """End the running tunes with the best result so far; return False if none has measured two candidates yet."""
    selector.freeze()
    running = [tune.state for tune in selector._tunes.shared.in_flight if _can_compare(tune.state)]
    for state in running:
        state.budget.limit_s = max(1e-3, min(state.budget.limit_s, state.budget.spent_s))
    return bool(running)


def _can_compare(state: TuneState[Any]) -> bool:
    return state.board is not None and len(state.board.measured) > 1
