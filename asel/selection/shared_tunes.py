"""The tunes of one selector: which task runs each of them, and how it ends.

The task group of an open selector owns its tunes, and callers only wait. Without a task group, a tune runs inside
its first caller; if that caller is cancelled, the next waiter continues it. In both cases the entry in the cache is
the tune. It is replaced by the answer before the waiters are woken, so a new caller finds one or the other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Generic

import anyio
from anyio.abc import TaskGroup

from asel.errors import SelectorClosedError, TuningError
from asel.events.context import tune_context
from asel.events.dispatcher import Dispatcher
from asel.kernels.kernel import Cfg
from asel.redaction import redact
from asel.runtime.loop import is_failure, raise_interrupts_at_awaits
from asel.runtime.shared_work import Shared
from asel.runtime.threads import AbandonedThread
from asel.selection.background_pace import BackgroundPace
from asel.selection.cache import ConfigCache
from asel.selection.cache_entries import Done, Match, Provenance
from asel.selection.call import Call
from asel.selection.overlays import without_overlays
from asel.selection.policy import AutotunePolicy
from asel.selection.tune_events import emit_failed, emit_finish, emit_start, error_type_of
from asel.selection.tune_rules import TuneHistory
from asel.selection.untuned_warnings import UntunedWarnings
from asel.stores.config_store import StoreQuery
from asel.stores.protocol import Claim
from asel.stores.resilient_store import ResilientStore
from asel.tuning.foreign_tuner import TunerProtocol
from asel.tuning.request import MAX_LESSONS, TuneRequest
from asel.tuning.state import TuneState

__all__ = ["SharedTunes", "Tune"]

_TUNE_AGAIN = (
    "Run the kernel with one of its candidates to see the whole error; after a fix, "
    "`await selector.retune(inv, kernel)` tunes it at once."
)
# Seconds. How much longer than its budget a tune in another process may take before this process begins its own.
CLAIM_GRACE_S = 5.0


class TunedElsewhere(TuningError):
    """Another process is tuning the key, and no caller here waits for it."""


class Tune(Shared[Done[Cfg]]):
    """A tune in flight."""

    def __init__(
        self,
        request: TuneRequest[Cfg],
        query: StoreQuery[Cfg],
        policy: AutotunePolicy,
        started: float,
        owner: SharedTunes[Cfg],
        *,
        on_purpose: bool,
        background: bool,
    ) -> None:
        super().__init__(request.id)
        self.request = request
        self.state = TuneState(request)
        self.query = query
        self.policy = policy
        self.started = started
        self.has_started = False
        self.owner = owner
        # Whether a task group runs it, so that its callers only wait.
        self.in_task_group = owner.is_open
        self.on_purpose = on_purpose
        # Whether no caller has waited for it yet.
        self.background = background
        # True iff another process is tuning the key, and this one has not begun to.
        self.elsewhere = False
        self.saving: anyio.CancelScope | None = None


class SharedTunes(Generic[Cfg]):
    """Begins, runs and ends tunes."""

    def __init__(
        self,
        cache: ConfigCache[Cfg],
        tuner: TunerProtocol[Cfg],
        store: ResilientStore[Cfg] | None,
        events: Dispatcher,
        history: TuneHistory,
        untuned: UntunedWarnings,
        pace: BackgroundPace,
    ) -> None:
        self._cache = cache
        self._tuner = tuner
        self.store = store
        self.learns: bool = getattr(tuner, "learn", False)
        self._events = events
        self._history = history
        self._untuned = untuned
        self._pace = pace
        self._tasks: TaskGroup | None = None
        self._running: dict[Tune[Cfg], None] = {}
        self._carried: set[Tune[Cfg]] = set()
        self._left_behind: list[AbandonedThread] = []

    # Beginning and waiting.

    def open(self, tasks: TaskGroup) -> None:
        raise_interrupts_at_awaits(self._run)
        self._tasks = tasks

    @property
    def is_open(self) -> bool:
        return self._tasks is not None

    def pending(self, call: Call) -> Tune[Cfg] | None:
        """Return the tune in flight for a call's key, even if another selector over this cache began it."""
        tune: Tune[Cfg] | None = self._cache.tune_of(call.key, call.checksum)  # type: ignore[assignment]
        if tune is not None and tune.is_orphaned:
            self._forget(tune)
            return None
        return tune

    def begin(self, call: Call, request: TuneRequest[Cfg], *, background: bool, on_purpose: bool) -> Tune[Cfg]:
        """Begin the tune of a key that has none in flight, or return the one that another thread began meanwhile."""
        tune: Tune[Cfg] = Tune(
            request,
            call.query(),
            call.policy,
            self._events.now(),
            self,
            on_purpose=on_purpose,
            background=background,
        )
        in_flight = self._cache.begin(call.key, call.checksum, tune)
        if in_flight is not tune:
            return in_flight  # type: ignore[return-value]
        self._running[tune] = None
        if self._tasks is not None:
            self._tasks.start_soon(self._run, tune, name=f"asel tune of {call.key.op_id}")
        if background:
            tune.state.pace = partial(self._pace.rest, tune)
        if self.store is None and not self._pace.may_delay(tune):
            emit_start(self._events, tune)
        return tune

    async def wait(self, tune: Tune[Cfg], leave: Callable[[], bool] = lambda: False) -> Done[Cfg] | None:
        """Return the result of a tune; None as soon as `leave` returns True.

        Raises:
            TuningError: nothing could be measured.
            SelectorClosedError: the selector that owns the tune was closed.
        """
        if tune.background:
            tune.background = False
            self._pace.notify()
        if tune.in_task_group:
            return await tune.wait(leave)
        return await tune.carry(partial(self._run, tune), partial(self._abandon, tune))

    async def settled(self) -> None:
        """Return once no tune of the task group is in flight."""
        while not self.is_idle:
            await next(tune for tune in self._running if tune.in_task_group).until_ended()

    @property
    def in_flight(self) -> list[Tune[Cfg]]:
        return list(self._running)

    @property
    def is_idle(self) -> bool:
        return not any(tune.in_task_group for tune in self._running)

    # Running.

    async def _run(self, tune: Tune[Cfg]) -> None:
        before = tune_context.get()
        tune_context.set(tune.id)
        if tune.in_task_group:
            self._carried.add(tune)
        try:
            with without_overlays():
                async with self._pace.slot(tune):
                    done = await (self._measure(tune) if self.store is None else self._find(tune, self.store))
        except TunedElsewhere as error:
            self._break_off(tune, "TunedElsewhere", str(error))
            tune.fail(error)
        except BaseException as error:
            if not is_failure(error):
                if tune.in_task_group:  # no caller will continue it
                    self._close(tune)
                raise
            self._fail(tune, error)
        else:
            self._succeed(tune, done)
        finally:
            tune_context.set(before)  # not by token: after a loop died, its tasks are closed in another context
            self._carried.discard(tune)
            self._left_behind = [thread for thread in (*self._left_behind, *tune.state.left_behind) if thread.alive]

    async def _measure(self, tune: Tune[Cfg]) -> Done[Cfg]:
        if not tune.has_started and self._pace.may_delay(tune):
            tune.started = self._events.now()
        emit_start(self._events, tune)
        if not tune.on_purpose:
            tune.state.add_lessons(self._history.reports_on(tune.request.key))
        report = await self._tuner.tune(tune.state)
        return Done(report.winner, Match(), Provenance("autotune", report))

    async def _find(self, tune: Tune[Cfg], store: ResilientStore[Cfg]) -> Done[Cfg]:
        """Return the result of another process that shares the store, or else measure and store one."""
        policy, query = tune.policy, tune.query
        wait_s = policy.tune_budget_s + CLAIM_GRACE_S if policy.wait_s is None else policy.wait_s
        may_leave = policy.on_pending == "heuristics" and not tune.in_task_group
        note = partial(self._note_elsewhere, tune)
        async with store.claim(query, 0.0 if may_leave else wait_s, note, anew=tune.on_purpose) as claim:
            if claim.failure:
                raise TuningError(f"the tune failed in another process: {claim.failure}", key=query.key)
            stored = store.found_by(claim, query) if claim.is_agreed or not tune.on_purpose else None
            if stored is not None:
                return Done(stored.cfg, Match(), Provenance("persistent", stored.report))
            if not tune.on_purpose:
                if may_leave and tune.elsewhere:
                    raise TunedElsewhere(f"another process is tuning {query.key.op_id!r}", key=query.key)
                tune.state.add_reports(await store.reports(query))
                if self.learns:
                    tune.state.add_lessons(await store.earlier_tunes(query, MAX_LESSONS))
            tune.elsewhere = False
            done = await self._measure(tune)
            return await self._keep(tune, store, done, claim)

    def _note_elsewhere(self, tune: Tune[Cfg]) -> None:
        tune.elsewhere = True
        tune.wake()

    async def _keep(self, tune: Tune[Cfg], store: ResilientStore[Cfg], done: Done[Cfg], claim: Claim) -> Done[Cfg]:
        """Store the result; if another writer was first, adopt its result."""
        report = done.provenance.report
        assert report is not None
        tune.saving = anyio.CancelScope()
        stored = await store.keep(report, replace=tune.on_purpose, claim=claim, scope=tune.saving)
        if stored is None and store.changes_together:
            raise TuningError(
                f"the ranks could not agree on the result of a tune of {report.key.op_id!r}", key=report.key
            )
        if stored is not None:
            await store.catch_up()
        if stored is None or not stored.adopted:
            return done
        return Done(stored.cfg, Match(), Provenance("autotune", report))

    # Ending. None of these functions awaits, so each is one step for other tasks.

    def _succeed(self, tune: Tune[Cfg], done: Done[Cfg]) -> None:
        if tune.ended:  # the selector was closed while the result was being stored
            return
        request = tune.request
        self._end(tune, done)
        if done.provenance.source == "autotune":
            self._history.note_tuned(request.key, request.checksum)
            if done.provenance.report is not None:
                self._history.note_report(done.provenance.report)
            emit_finish(self._events, tune, done)
        tune.succeed(done)

    def _fail(self, tune: Tune[Cfg], error: BaseException) -> None:
        if tune.ended:
            return
        request = tune.request
        if not isinstance(error, TuningError):
            wrapped = TuningError(
                f"tuning {request.key.op_id!r} failed: {type(error).__name__}: {redact(error)}",
                key=request.key,
                outcomes=tuple(tune.state.outcomes.values()),
            )
            wrapped.__cause__ = error
            error = wrapped
        retry_at = self._events.now() + tune.policy.retry_after_s
        self._history.note_failed(request.key, request.checksum, str(error), retry_at)
        self._end(tune, None)
        emit_failed(self._events, tune, error_type_of(error), str(error), retry_at)
        tune.fail(error)
        if tune.policy.allow_heuristics and not tune.on_purpose:  # else the error is raised
            outlook = f"its calls get the heuristic, and it is tuned again after {tune.policy.retry_after_s:g} s"
            self._untuned.warn(request.key, f"{redact(error).rstrip('.')}; {outlook}", _TUNE_AGAIN)

    def _close(self, tune: Tune[Cfg]) -> None:
        if not tune.ended:
            message = f"the selector was closed while {tune.request.key.op_id!r} was being tuned"
            self._break_off(tune, "SelectorClosedError", message)
            tune.fail(SelectorClosedError(message))

    def _abandon(self, tune: Tune[Cfg]) -> None:
        self._break_off(tune, "Cancelled", "the last caller to wait for it was cancelled")

    def _break_off(self, tune: Tune[Cfg], error_type: str, message: str) -> None:
        """End a tune without counting it as failed, so that the next caller may begin it again."""
        self._end(tune, None)
        emit_failed(self._events, tune, error_type, message)

    def _end(self, tune: Tune[Cfg], done: Done[Cfg] | None) -> None:
        request = tune.request
        self._cache.finish(request.key, request.checksum, tune, done, replace_put=tune.on_purpose)
        tune.owner._running.pop(tune, None)  # another selector over the same cache may own it

    def _forget(self, tune: Tune[Cfg]) -> None:
        """Drop a tune whose loop has ended: none of its waiters can be woken."""
        tune.ended = True
        self._end(tune, None)

    def forget_all(self) -> None:
        """Drop every tune, because their loop has ended."""
        self._tasks = None
        self._carried.clear()
        for tune in list(self._running):
            self._forget(tune)

    def close(self, grace_s: float) -> int:
        """End every tune and wake its waiters with SelectorClosedError; return the number of tunes."""
        self._tasks = None
        running = list(self._running)
        for tune in running:
            if tune.saving is not None:
                tune.saving.deadline = min(tune.saving.deadline, anyio.current_time() + grace_s)
            self._close(tune)
        return len(running)

    def stop_saving(self) -> None:
        """Stop waiting for the store to save results, because the program was interrupted again."""
        for tune in self._carried:
            if tune.saving is not None:
                tune.saving.cancel()

    def still_busy(self) -> tuple[str, ...]:
        """Return the names of the steps whose threads are still running."""
        return tuple(dict.fromkeys(thread.what for thread in self._left_behind if thread.alive))
