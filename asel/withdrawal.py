"""A winner that failed in a real call: what can be run instead, and how it leaves memory and the store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic

import anyio
from anyio.abc import TaskGroup

from asel.answers import Selection, Tier
from asel.cache import ConfigCache, Done, Hit, Match, Provenance
from asel.events import WinnerFailed
from asel.fanout import FanOut
from asel.keeper import Keeper
from asel.kernel import Cfg
from asel.keys import Resolved, alike
from asel.outcomes import Skipped, TuneReport, text_of
from asel.persistence import Sought

__all__ = ["Fault", "Withdrawal", "barred", "fallbacks"]


@dataclass(frozen=True, slots=True)
class Fault(Generic[Cfg]):
    """A config that failed in a real call, and what is known of it."""

    sought: Sought[Cfg]
    cfg: Cfg
    error: Exception
    tier: Tier
    instead: Cfg | None
    """What has worked with the same arguments; None: the next best is to be believed."""
    start: float


def fallbacks(
    selection: Selection[Cfg], known: Resolved[Any], cache: ConfigCache[Cfg], *, allow_heuristics: bool
) -> list[Cfg]:
    """Return what can be run in the place of a winner, best first: the others of its tune, then the heuristic."""
    failed = (selection.cfg, *cache.withdrawn(selection.key))
    found = [] if selection.report is None else selection.report.runners_up(failed)
    guess = known.heuristic
    if allow_heuristics and guess is not None and not any(alike(guess, cfg) for cfg in (*failed, *found)):
        found.append(guess)
    return found


def barred(known: Resolved[Any], cache: ConfigCache[Cfg]) -> dict[int, Skipped[Cfg]]:
    """Return the candidates that a tune need not try, as outcomes by index: they failed in real calls."""
    failed = cache.withdrawn(known.key)
    return {
        index: Skipped(cfg, "it failed in a real call")
        for index, cfg in enumerate(known.candidates if failed else ())
        if any(alike(cfg, other) for other in failed)
    }


class Withdrawal(Generic[Cfg]):
    """Withdraws configs for one chain. `stores`: what takes their place may reach the store, too."""

    def __init__(self, cache: ConfigCache[Cfg], keeper: Keeper[Cfg] | None, events: FanOut, *, stores: bool) -> None:
        self._cache = cache
        self._keeper = keeper
        self._events = events
        self._stores = stores

    async def withdraw(self, fault: Fault[Cfg], tasks: TaskGroup | None) -> bool:
        """Take a config out wherever it answers, and tell of it; False where it answers nowhere (any more).

        Memory and the event come first, in one step: of all who saw it fail one gets past it. The store's part
        belongs to the chain's `tasks`, where it has some, and is done also for a caller who does not wait.
        """
        key, checksum = fault.sought.key, fault.sought.checksum
        held, successor = self._cache.withdraw(key, checksum, fault.cfg, lambda done: self._successor(fault, done))
        if held:
            self._tell(fault, None if successor is None else successor.cfg)
            await self._from_store(fault, None if successor is None else successor.provenance.report, tasks)
            return True
        if self._cache.is_barred(key, fault.cfg) or isinstance(self._cache.peek(key, checksum), Hit):
            return False
        # Memory has no answer, having made room for others: then it was the store's.
        if not await self._from_store(fault, None, tasks) or not self._cache.bar(key, fault.cfg):
            return False
        self._tell(fault, None)
        return True

    def _successor(self, fault: Fault[Cfg], done: Done[Cfg]) -> Done[Cfg] | None:
        """Return the answer that comes after one that failed; None where no tune is known that measured others.

        What has worked does not count then: most likely it is the heuristic's, and would hide the tune to come.
        """
        report, instead = done.provenance.report, fault.instead
        if report is None:
            return None
        if instead is None:
            failed = (fault.cfg, *self._cache.withdrawn(fault.sought.key))
            instead = next(iter(report.runners_up(failed)), None)
        if instead is None:
            return None
        corrected = report.without(fault.cfg, instead, fault.error)
        return Done(instead, Match(), Provenance(done.provenance.source, corrected, done.provenance.foreign))

    async def _from_store(self, fault: Fault[Cfg], instead: TuneReport[Cfg] | None, tasks: TaskGroup | None) -> bool:
        """Tell whether the store answered with the config, having withdrawn it there."""
        keeper = self._keeper
        if keeper is None:
            return False
        found, over = False, anyio.Event()

        async def work() -> None:
            nonlocal found
            try:
                found = await keeper.withdraw(fault.sought, fault.cfg, instead if self._stores else None)
            finally:
                over.set()

        if tasks is None:
            await work()
        else:
            tasks.start_soon(work, name=f"asel withdrawal of {fault.sought.key.op_id}")
            await over.wait()
        return found

    def _tell(self, fault: Fault[Cfg], instead: Cfg | None) -> None:
        self._events(
            WinnerFailed(
                key=fault.sought.key,
                start=fault.start,
                end=self._events.now(),
                cfg=fault.cfg,
                tier=fault.tier,
                instead=instead,
                error_type=type(fault.error).__name__,
                message=text_of(fault.error),
            )
        )
