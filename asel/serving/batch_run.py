"""Runs a batch: its calls one after the other, and the calls that other processes are tuning last."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import anyio

from asel.errors import InvalidRequestError, NoConfigError
from asel.kernels.call_text import call_text
from asel.runtime.threads import run_in_thread
from asel.selection.policy import policy_override
from asel.selection.shared_tunes import TunedElsewhere
from asel.serving.batch_summary import BatchItem, BatchProgress, BatchSummary
from asel.tuning.device_lock import core_count
from asel.tuning.request import tunes_compiling

if TYPE_CHECKING:
    from asel.runtime.jax_settings import Settings
    from asel.selection.selector import ConfigSelectorChain

__all__ = ["BatchCall", "Progress", "run_batch"]

Progress = Callable[[BatchProgress], object] | Literal["bar"] | None


@dataclass(frozen=True, slots=True)
class BatchCall:
    """A call to be tuned. If its arguments are not prepared yet, `prepare` makes its invocation."""

    kernel: Any
    inv: Any
    seen: int = 1
    settings: Settings | None = None
    prepare: Callable[[], Awaitable[Any]] | None = None


async def run_batch(
    selector: ConfigSelectorChain[Any, Any],
    calls: Sequence[BatchCall],
    *,
    progress: Progress = None,
    budget_s: float | None = None,
) -> BatchSummary:
    """Select a config for each call, tuning the calls that have none.

    Raises:
        InvalidRequestError: `progress` or `budget_s` is invalid, or the selector is open in another event loop.
    """
    selector.check_loop()  # else each call would fail with it
    if budget_s is not None and not (isinstance(budget_s, int | float) and budget_s >= 0):
        raise InvalidRequestError(f"budget_s={budget_s!r} must be seconds, zero or more, or None")
    if progress is None or callable(progress):
        return await _Batch(selector, calls, progress, budget_s).run()
    if progress != "bar":
        raise InvalidRequestError(f'progress={progress!r} must be "bar" or a function of a BatchProgress')
    progress_bar = await run_in_thread("importing rich", _imported_bar)
    with progress_bar() as bar:
        return await _Batch(selector, calls, bar, budget_s).run()


def _imported_bar() -> Callable[[], AbstractContextManager[Callable[[BatchProgress], None]]]:
    from asel.serving.progress_bar import progress_bar  # rich takes long to import

    return progress_bar


class _Batch:
    def __init__(
        self,
        selector: ConfigSelectorChain[Any, Any],
        calls: Sequence[BatchCall],
        report: Callable[[BatchProgress], object] | None,
        budget_s: float | None,
    ) -> None:
        self._selector = selector
        self._report_progress = report
        self._start = anyio.current_time()
        self._ends_at = None if budget_s is None else self._start + budget_s
        # Other processes may run the same batch. Each shuffles calls seen equally often, so that they rarely meet.
        self._is_shared = selector.persistent is not None and selector.persist_autotune
        shuffled = list(enumerate(calls))
        if self._is_shared:
            random.Random().shuffle(shuffled)
        self._order = sorted(shuffled, key=lambda call: -call[1].seen)
        self._items: dict[int, BatchItem] = {}
        self._done = self._failed = 0

    async def run(self) -> BatchSummary:
        with tunes_compiling(core_count()):  # all cores, since there is no traffic yet
            return await self._run()

    async def _run(self) -> BatchSummary:
        postponed: list[tuple[int, BatchCall, BatchItem]] = []
        # A batch waits for its own tunes, even if the policy lets callers leave early. But it does not wait for another
        # process while it has other calls: `on_pending` decides that for a claimed key.
        on_pending: Literal["wait", "heuristics"] = "heuristics" if self._is_shared else "wait"
        with policy_override(self._selector, cache_miss_fallback="autotune", on_pending=on_pending, wait_s=None):
            for number, call in self._order:
                item = await self._select(call)
                if self._is_shared and _may_be_tuned_elsewhere(item):
                    postponed.append((number, call, item))
                else:
                    self._note(number, item)
        with policy_override(self._selector, cache_miss_fallback="autotune", on_pending="wait", wait_s=None):
            for number, call, first in postponed:
                item = await self._select(call)
                self._note(number, replace(item, seconds=item.seconds + first.seconds))
        items = tuple(self._items[number] for number in sorted(self._items))
        return BatchSummary(items, anyio.current_time() - self._start)

    async def _select(self, call: BatchCall) -> BatchItem:
        start = anyio.current_time()
        inv = call.inv
        item = BatchItem(call.kernel.op_id, call_text(inv, call.kernel), call.seen)
        if self._ends_at is not None and start >= self._ends_at:
            return item
        self._report(begun=f"{item.op_id}({item.call})")
        try:
            if call.prepare is not None:
                inv = await call.prepare()
                item = replace(item, call=call_text(inv, call.kernel))
            request = self._selector.call_elsewhere(inv, call.kernel, call.settings)
            item = replace(item, key=request.key)
            selection = await self._selector.answer(request)
        except Exception as error:
            return replace(item, error=error, seconds=anyio.current_time() - start)
        return replace(
            item,
            call=selection.key.call or item.call,
            cfg=selection.cfg,
            tier=selection.tier,
            seconds=anyio.current_time() - start,
        )

    def _note(self, number: int, item: BatchItem) -> None:
        self._items[number] = item
        self._done += item.outcome != "left"
        self._failed += item.outcome == "failed"
        self._report(ended=item)

    def _report(self, *, begun: str = "", ended: BatchItem | None = None) -> None:
        if self._report_progress is not None:
            elapsed_s = anyio.current_time() - self._start
            self._report_progress(BatchProgress(len(self._order), self._done, self._failed, elapsed_s, begun, ended))


def _may_be_tuned_elsewhere(item: BatchItem) -> bool:
    return item.outcome == "heuristic" or isinstance(item.error, NoConfigError | TunedElsewhere)
