"""The withdrawal of a winner that failed in a real call, from memory and store, and the configs to run instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic

import anyio
from anyio.abc import TaskGroup

from asel.events import WinnerFailed
from asel.events.dispatcher import Dispatcher
from asel.kernels.candidates import same_config
from asel.kernels.kernel import Cfg
from asel.kernels.key_memo import Resolved
from asel.kernels.keys import CacheKey
from asel.selection.cache import ConfigCache
from asel.selection.cache_entries import Done, Hit, Match, Provenance
from asel.selection.results import Selection, Tier
from asel.selection.store_access import StoreAccess
from asel.stores.config_store import StoreQuery
from asel.tuning.outcomes import Skipped, TuneReport, text_of

__all__ = ["Fault", "Withdrawal", "barred_outcomes", "fallbacks"]


@dataclass(frozen=True, slots=True)
class Fault(Generic[Cfg]):
    """A config that failed in a real call, with the evidence."""

    query: StoreQuery[Cfg]
    cfg: Cfg
    error: Exception
    tier: Tier
    instead: Cfg | None
    """The config that worked with the same arguments; None: the next best of the tune takes its place."""
    start: float
    evidence: str
    retry_after_s: float


def fallbacks(
    selection: Selection[Cfg], resolved: Resolved[Any], cache: ConfigCache[Cfg], *, allow_heuristics: bool
) -> list[Cfg]:
    """Return the configs to run in place of a winner: the others of its tune, best first, then the heuristic."""
    failed = (selection.cfg, *cache.quarantine.configs(selection.key))
    found = [] if selection.report is None else selection.report.runners_up(failed)
    heuristic = resolved.heuristic
    if allow_heuristics and heuristic is not None and not any(same_config(heuristic, cfg) for cfg in (*failed, *found)):
        found.append(heuristic)
    return found


def barred_outcomes(key: CacheKey, candidates: Sequence[Cfg], cache: ConfigCache[Cfg]) -> dict[int, Skipped[Cfg]]:
    """Return the candidates that failed in real calls, which a tune does not try, as outcomes by index."""
    failed = cache.quarantine.configs(key)
    return {
        index: Skipped(cfg, "it failed in a real call")
        for index, cfg in enumerate(candidates if failed else ())
        if any(same_config(cfg, other) for other in failed)
    }


class Withdrawal(Generic[Cfg]):
    """Withdraws configs for one selector."""

    def __init__(self, cache: ConfigCache[Cfg], store: StoreAccess[Cfg] | None, events: Dispatcher) -> None:
        self._cache = cache
        self._store = store
        self._events = events

    async def withdraw(self, fault: Fault[Cfg], tasks: TaskGroup | None) -> bool:
        """Remove a config from memory and store, with an event; return False if neither answers with it (any more).

        Memory and the event come first, without an await, so concurrent failures cause one withdrawal. If the selector
        is open, the store's part runs in its `tasks` and is finished even if the caller is cancelled.
        """
        key, checksum = fault.query.key, fault.query.checksum
        held, successor = self._cache.withdraw(
            key, checksum, fault.cfg, partial(self._successor, fault), fault.retry_after_s
        )
        if held:
            self._try_again_later(fault, tasks)
            self._emit(fault, None if successor is None else successor.cfg)
            await self._withdraw_from_store(fault, None if successor is None else successor.provenance.report, tasks)
            return True
        if self._cache.quarantine.is_barred(key, fault.cfg) or isinstance(self._cache.peek(key, checksum), Hit):
            return False
        # Memory has no answer, for instance after an eviction, so the config may have come from the store.
        if not await self._withdraw_from_store(fault, None, tasks):
            return False
        if not self._cache.quarantine.bar(key, fault.cfg, fault.retry_after_s):
            return False
        self._emit(fault, None)
        return True

    def _try_again_later(self, fault: Fault[Cfg], tasks: TaskGroup | None) -> None:
        """Have the key tuned again once its config is no longer barred: the machine may have been at fault.

        Only in an open selector, since this is a background tune.
        """
        if tasks is not None:
            key = fault.query.key
            tasks.start_soon(self._try_again, key, self._cache.quarantine.seconds(key, fault.cfg))

    async def _try_again(self, key: CacheKey, after_s: float) -> None:
        await anyio.sleep(after_s)
        self._cache.try_again(key)

    def _successor(self, fault: Fault[Cfg], done: Done[Cfg]) -> Done[Cfg] | None:
        """Return the answer that replaces a failed one; None if there is no report of a tune.

        Without a report, even a config that worked is not used: most likely it is the heuristic's, and would hide the
        next tune.
        """
        report, instead = done.provenance.report, fault.instead
        if report is None:
            return None
        if instead is None:
            failed = (fault.cfg, *self._cache.quarantine.configs(fault.query.key))
            instead = next(iter(report.runners_up(failed)), None)
        if instead is None:
            return None
        corrected = report.without(fault.cfg, instead, fault.error)
        return Done(instead, Match(), Provenance(done.provenance.source, corrected, done.provenance.foreign))

    async def _withdraw_from_store(
        self, fault: Fault[Cfg], instead: TuneReport[Cfg] | None, tasks: TaskGroup | None
    ) -> bool:
        """Withdraw the config from the store; return whether the store had it."""
        store = self._store
        if store is None:
            return False
        instead = instead if store.for_tunes is not None else None  # the replacement counts as a tune's result
        found, over = False, anyio.Event()

        async def work() -> None:
            nonlocal found
            try:
                found = await store.resilient.withdraw(fault.query, fault.cfg, instead)
            finally:
                over.set()

        if tasks is None:
            await work()
        else:
            tasks.start_soon(work, name=f"asel withdrawal of {fault.query.key.op_id}")
            await over.wait()
        return found

    def _emit(self, fault: Fault[Cfg], instead: Cfg | None) -> None:
        self._events(
            WinnerFailed(
                key=fault.query.key,
                start=fault.start,
                end=self._events.now(),
                cfg=fault.cfg,
                tier=fault.tier,
                instead=instead,
                error_type=type(fault.error).__name__,
                message=text_of(fault.error),
                evidence=fault.evidence,
                retry_after_s=self._cache.quarantine.seconds(fault.query.key, fault.cfg),
            )
        )
