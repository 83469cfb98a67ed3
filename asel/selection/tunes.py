"""Begins or joins the tune of a call without an answer, or queues its key for the background."""

from __future__ import annotations

from contextvars import copy_context
from functools import partial
from typing import Generic

from anyio.abc import TaskGroup

from asel.errors import SelectorClosedError, StoreError
from asel.events import PendingJoin
from asel.events.context import asking, inside_a_tune
from asel.events.dispatcher import Dispatcher
from asel.kernels.devices import environment
from asel.kernels.kernel import Cfg
from asel.runtime.loop import LoopHandle
from asel.selection.background_pace import BackgroundPace
from asel.selection.background_queue import BackgroundQueue
from asel.selection.cache import ConfigCache
from asel.selection.cache_entries import Done, Miss, Pending
from asel.selection.call import Call, emit
from asel.selection.selector_state import SelectorState
from asel.selection.shared_tunes import SharedTunes, Tune
from asel.selection.store_access import StoreAccess
from asel.selection.tune_requests import TuneRequests
from asel.selection.tune_rules import TuneHistory, TuneRules
from asel.selection.untuned_warnings import UntunedWarnings
from asel.selection.withdrawal import Withdrawal
from asel.tuning.foreign_tuner import TunerProtocol
from asel.tuning.request import MAX_LESSONS
from asel.tuning.runnable import after_run

__all__ = ["Tunes"]


class Tunes(Generic[Cfg]):
    """The tunes of one selector, as calls see them."""

    def __init__(
        self,
        state: SelectorState,
        cache: ConfigCache[Cfg],
        tuner: TunerProtocol[Cfg],
        store: StoreAccess[Cfg] | None,
        events: Dispatcher,
        pace: BackgroundPace,
    ) -> None:
        self._state = state
        self._cache = cache
        self._store = store
        self._events = events
        self._history = TuneHistory(lambda: events.now())
        untuned = UntunedWarnings()
        tune_store = None if store is None else store.for_tunes
        self.shared: SharedTunes[Cfg] = SharedTunes(cache, tuner, tune_store, events, self._history, untuned, pace)
        self.rules = TuneRules(state, cache, self._history, events, untuned, lambda: self.shared.is_open)
        self.requests = TuneRequests(state, cache, events)
        self.withdrawal = Withdrawal(cache, store, events)
        self.background_queue = BackgroundQueue(self._load_or_tune)
        self.in_lockstep = False
        """Whether ranks of a cluster change configs together: nothing is read or tuned in the background."""

    async def lessons(self, call: Call) -> int:
        """Return the number of earlier tunes of the kernel that a tune of this call can learn from."""
        if not self.shared.learns:
            return 0
        reports = list(self._history.reports_on(call.key))
        if (store := self.shared.store) is not None:
            reports += await store.earlier_tunes(call.query(), MAX_LESSONS)
        from asel.tuning.search.lessons import lessons_in, teaches  # numpy

        relevant = lessons_in(reports, call.key, call.objective, environment(call.resolved.device))
        return sum(teaches(call.listing.candidates, [report]) for report in relevant)

    # For callers that can wait.

    async def join(self, call: Call, *, background: bool = False, on_purpose: bool = False) -> Done[Cfg] | None:
        """Join the tune of this call's key, or begin one, and return its result; None if the caller does not wait."""
        if background and (later := after_run.get()) is not None:
            later.append(partial(copy_context().run, self._begin_in_background, call))
            return None
        may_leave = not on_purpose and call.policy.on_pending == "heuristics"
        while True:
            tune = self.shared.pending(call)
            if is_new := tune is None:
                tune = self._begin(call, background=background, on_purpose=on_purpose)
            tune.on_purpose |= on_purpose
            call.note_tune(tune.id, is_new)
            if background or (may_leave and not is_new):
                return None
            if not is_new:
                emit(self._events, PendingJoin, call, tune_id=tune.id, waiters=tune.waiters + 1)
            if call.waiting_since is None:
                call.waiting_since = self._events.now()
            try:
                return await self.shared.wait(tune, partial(_is_elsewhere, tune) if may_leave else lambda: False)
            except SelectorClosedError:
                if self._state.closed or tune.owner is self.shared:
                    raise
                # The tune belonged to another selector over the same cache, which was closed: begin a new one.

    def refuse_if_closed(self, call: Call) -> None:
        self._state.refuse_if_closed(call.key)

    def _begin(self, call: Call, *, background: bool, on_purpose: bool) -> Tune[Cfg]:
        request = self.requests.make(call, on_purpose=on_purpose)
        return self.shared.begin(call, request, background=background, on_purpose=on_purpose)

    def _begin_in_background(self, call: Call) -> None:
        """Begin a postponed tune, unless the selector is closed or the key has an answer or a tune by now."""
        after_run.set(None)
        is_missing = isinstance(self._cache.peek(call.key, call.checksum), Miss)
        if is_missing and self.shared.is_open and self.rules.why_not(call) is None:
            self._begin(call, background=True, on_purpose=False)

    # For callers that cannot wait.

    def queue(self, call: Call) -> str:
        """Have the event loop tune this key; return the reason why this call gets no config."""
        if (why := self.rules.why_not(call)) is not None:
            self.read_later(call)
            return self.rules.flag(call, why)
        if isinstance(self._cache.peek(call.key, call.checksum), Pending):
            return "a tune is pending, and this call cannot wait"
        if self.in_lockstep:
            return "this call cannot wait, and all ranks change configs together: await choose on each of them"
        if self.background_queue.add(call):
            return "queued for the background, since this call cannot wait"
        if inside_a_tune():  # a call from outside the tune will tune this key
            return "this call cannot wait, since it was asked from inside a tune"
        return self.rules.flag_not_queued(call)

    def read_later(self, call: Call) -> None:
        """Have the event loop read the store for later calls, since this one cannot wait for it."""
        if self.in_lockstep:
            return
        if self._store is not None and not call.resolved.traced and not self._store.has_just_missed(call.query()):
            self.background_queue.add(call)

    def retune_if_due(self, call: Call) -> None:
        """Begin a background tune if the key's withdrawn config may be tried again; memory answers meanwhile."""
        quarantine = self._cache.quarantine
        if not quarantine.is_due(call.key) or not self.shared.is_open or inside_a_tune():
            return
        if self.rules.why_not(call, on_purpose=True) is None and quarantine.take_due(call.key):
            if (tune := self.shared.pending(call)) is None:
                self._begin(call, background=True, on_purpose=True)
            else:
                tune.on_purpose = True

    def queue_retune_if_due(self, call: Call) -> None:
        """Have the event loop do the same; may be called from any thread."""
        if self._cache.quarantine.is_due(call.key) and not call.resolved.traced:
            self.background_queue.add(call)

    async def _load_or_tune(self, call: Call) -> None:
        """Do for a queued call what the persistent and autotune tiers would have done."""
        asking.set(None)  # the call has its answer; this work is for later ones
        self.retune_if_due(call)
        try:
            if self._store is not None and await self._store.load(call.query()) is not None:
                return
        except StoreError:
            pass  # an event reported it, and the tune does not need the store
        except SelectorClosedError:
            return
        self._begin_in_background(call)

    # Opening and closing.

    def open(self, tasks: TaskGroup, loop: LoopHandle) -> None:
        self.shared.open(tasks)
        self.background_queue.open(loop)

    def shift_clock(self, by_s: float) -> None:
        """Continue with a clock that is ahead by `by_s` seconds."""
        self._history.shift_clock(by_s)

    async def settled(self) -> None:
        """Return once no tune is in flight or in the queue."""
        while not (self.background_queue.is_empty and self.shared.is_idle):
            await self.background_queue.until_empty()
            await self.shared.settled()

    def close(self) -> int:
        """End every tune and wake its waiters with SelectorClosedError; return the number of tunes."""
        self.background_queue.close()
        return self.shared.close(self._state.grace_s())

    def forget_all(self) -> None:
        """Drop every tune, because their loop has ended."""
        self.shared.forget_all()
        self.background_queue.renew()


def _is_elsewhere(tune: Tune[Cfg]) -> bool:
    return tune.elsewhere
