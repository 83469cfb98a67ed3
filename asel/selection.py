"""`ConfigSelectorChain`: walks the tiers, owns the task group, tells what happened."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Generic, NoReturn, Self

import anyio
from anyio.abc import TaskGroup

from asel.adapters import as_tuner
from asel.answers import Explanation, Selection, Statistics, Tier
from asel.backlog import Backlog
from asel.cache import ConfigCache, Done, Hit, Miss, Pending, overlaid
from asel.calls import Call, asking
from asel.devices import current_settings, environment
from asel.errors import InvalidRequestError, NoConfigError, SelectorClosedError, StoreError, TuningError
from asel.events import (
    Answer,
    Autotuned,
    CacheHit,
    CallerLeft,
    Closed,
    Event,
    EventStream,
    Heuristics,
    LateTune,
    NoAnswer,
    OutOfRange,
    OverlayHit,
    Override,
    PendingJoin,
    Sink,
    Stale,
)
from asel.explaining import explain, why_memory_declines
from asel.fanout import FanOut
from asel.jobs import TuneJob, timings_in
from asel.keeper import Keeper
from asel.kernel import Cfg, Invocation, Kernel, Out, bind, example_inputs_of
from asel.keys import CacheKey, KeyMemo, Resolved
from asel.loop import LoopHandle
from asel.memo import Memo
from asel.outcomes import Measured
from asel.persistence import Sought, as_persistence
from asel.policy import (
    AutotunePolicy,
    effective_policy,
    objective_of,
    tuning_switched_off,
)
from asel.reading import Reading
from asel.registry import record_invocation
from asel.scopes import any_scope_here
from asel.telemetry import default_sinks, gathered
from asel.telemetry.aside import Aside
from asel.threads import run_in_thread
from asel.tuner import Tuner
from asel.tuning import Tune, Tuning, inside_a_tune
from asel.withdrawal import Fault, Withdrawal, barred

__all__ = ["ConfigSelectorChain"]

_FROZEN = "the chain is frozen"


class ConfigSelectorChain(Generic[Cfg, Out]):
    """Answers which config a call should run with.

    Use it as an async context manager: its task group then owns every tune, and tunes outlive the
    callers who began them. Without `async with` a tune runs inside its first caller.

    Leaving the context cancels tunes in flight. A thread that is compiling or measuring gets
    `close_grace_s` seconds to finish its step; what is left is named in the `closed` event. Telemetry
    that is still queued then gets as long, and so do sinks that are called from threads.
    """

    def __init__(
        self,
        cache: ConfigCache[Cfg] | None = None,
        policy: AutotunePolicy | None = None,
        tuner: Any = None,
        persistent: Any = None,
        persist_autotune: bool = True,
        on_event: Callable[[Event], object] | None = None,
        forbid_reautotune: bool = True,
        *,
        sinks: Iterable[Sink] | None = None,
        close_grace_s: float = 5.0,
        store_timeout_s: float = 5.0,
    ) -> None:
        self.cache: ConfigCache[Cfg] = ConfigCache() if cache is None else cache
        self.tuner = Tuner() if tuner is None else tuner
        self.persistent = persistent
        self.persist_autotune = persist_autotune
        self.forbid_reautotune = forbid_reautotune
        self.close_grace_s = _checked_seconds("close_grace_s", close_grace_s)
        self._policy = _checked_policy(AutotunePolicy() if policy is None else policy)
        self._keys = KeyMemo()
        given = gathered(default_sinks() if sinks is None else sinks)
        self._events = FanOut(given, on_event, self.statistics, Aside)
        self._streams: list[EventStream] = []
        self._store = as_persistence(persistent)
        _checked_seconds("store_timeout_s", store_timeout_s)
        self._keeper: Keeper[Cfg] | None = None
        self._reading: Reading[Cfg] | None = None
        if self._store is not None:
            self._keeper = Keeper(self._store, self.cache, self._events, store_timeout_s)
            self._reading = Reading(self.cache, self._keeper, self._events)
        keeper = self._keeper if persist_autotune else None
        self._tuning: Tuning[Cfg] = Tuning(self.cache, as_tuner(self.tuner), keeper, self._events)
        self._withdrawal = Withdrawal(self.cache, self._keeper, self._events, stores=persist_autotune)
        self._backlog = Backlog(self._catch_up)
        self._seen_outside: Memo[bool] = Memo(65_536)
        self._loop: LoopHandle | None = None
        self._tasks: TaskGroup | None = None
        self._helpers = AsyncExitStack()
        self._closed = False
        self._frozen = False
        self._cut_short = 0

    @property
    def policy(self) -> AutotunePolicy:
        """The policy in force in the current task."""
        return effective_policy(self._policy, self)

    @policy.setter
    def policy(self, policy: AutotunePolicy) -> None:
        self._policy = _checked_policy(policy)

    # ---------------------------------------------------------------------------------------
    # Asking.

    async def choose(self, inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out]) -> Cfg:
        """Return the config `inv` should run with.

        Callers with equal keys share one tune. Cancelling a caller ends its wait; the tune goes on
        for the others and for the store.

        Raises:
            NoConfigError: every tier declined.
            TuningError: a tune was waited for, failed, and heuristics are not allowed.
            UnstableKeyError: an argument has no stable identity.
            SelectorClosedError: the chain closed before there was an answer.
        """
        start = self._events.now() if self._events.listening else 0.0
        known = self._keys.resolve(inv, kernel)
        if (lane := self._lane(inv, known, start)) is not None:
            return lane[2]  # type: ignore[no-any-return]
        return (await self._walk(self._call(inv, kernel, known))).cfg

    async def select(self, inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out]) -> Selection[Cfg]:
        """Return the config with the tier it came from and why the earlier ones declined.

        Raises what `choose` raises.
        """
        return await self._walk(self._call(inv, kernel))

    async def _walk(self, call: Call) -> Selection[Cfg]:
        if self._tasks is None:  # not bound to a loop, so each caller may bring another
            self._bind_loop()
            call.start = self._events.now()
        with self._asking(call):
            return (
                self._override(call)
                or self._overlay(call)
                or self._memory(call)
                or await self._persistent(call)
                or await self._autotune(call)
                or self._heuristics(call)
                or self._error(call)
            )

    def choose_nowait(self, inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out]) -> Cfg:
        """Return the config `inv` should run with, from what is known at this moment.

        Never awaits and never measures, so it is safe while JAX traces and from any thread. In an
        open chain a key without an answer is tuned in the background, where the policy allows it.

        Raises:
            NoConfigError: neither override, overlay, memory nor heuristics had an answer.
        """
        start = self._events.now() if self._events.listening else 0.0
        known = self._keys.resolve(inv, kernel)
        if (lane := self._lane(inv, known, start)) is not None:
            return lane[2]  # type: ignore[no-any-return]
        call = self._call(inv, kernel, known)
        return (
            self._override(call)
            or self._overlay(call)
            or self._memory(call)
            or self._later(call)
            or self._heuristics(call)
            or self._error(call)
        ).cfg

    def _lane(self, inv: Any, known: Resolved[Any], start: float) -> tuple[int, Any, Any] | None:
        """Return the memory tier's last answer to this signature if it still stands.

        The fast lane past the walk: no scope is open that could answer before memory or change the
        checksum, and neither the cache nor the policy has changed since the answer was given.
        """
        lane, cache, events = known.lane, self.cache, self._events
        if (
            lane is None
            or lane[0] != cache.generation
            or lane[1] is not self._policy
            or inv.override_cfg is not None
            or any_scope_here()
            or self._closed
        ):
            return None
        if cache.max_entries is not None:
            cache.touch(known.key, known.checksum(objective_of(self._policy)))
        if events.listening:
            events.hit(known.key, lane[2], start)
        return lane

    def _call(self, inv: Any, kernel: Any, known: Resolved[Any] | None = None) -> Call:
        known = known or self._keys.resolve(inv, kernel)
        self._refuse_if_closed(known.key)
        return Call(inv, kernel, known, effective_policy(self._policy, self), self._events.now())

    def _refuse_if_closed(self, key: CacheKey) -> None:
        if self._closed:
            raise SelectorClosedError(f"the chain is closed, so nobody is there to answer for {key.op_id!r}")

    # ---------------------------------------------------------------------------------------
    # The tiers.

    def _override(self, call: Call) -> Selection[Cfg] | None:
        if call.inv.override_cfg is None:
            return call.decline("override", "no override")
        self._emit(Override, call, cfg=call.inv.override_cfg)
        return call.answer("override", call.inv.override_cfg)

    def _overlay(self, call: Call) -> Selection[Cfg] | None:
        cfg = overlaid(call.key)
        if cfg is None:
            return call.decline("overlay", "no overlay has the key")
        self._emit(OverlayHit, call, cfg=cfg)
        return call.answer("overlay", cfg)

    def _memory(self, call: Call) -> Selection[Cfg] | None:
        generation = self.cache.generation  # read first: a change after it closes the lane again
        found = self.cache.lookup(call.key, call.checksum)
        if isinstance(found, Hit) and found.provenance.foreign and call.policy.match_environment == "exact":
            return call.decline("memory", "memory has what was measured with other software")
        if isinstance(found, Hit):
            if not any_scope_here():
                call.known.lane = (generation, call.policy, found.cfg)
            for asked_before in ("memory", "persistent"):  # as after a store read, when memory is asked again
                call.declined.pop(asked_before, None)
            self._emit(CacheHit, call, level="memory", cfg=found.cfg)
            return call.answer("memory", found.cfg, found.provenance.report)
        if isinstance(found, Miss):
            for checksum, done in found.stale:
                self._emit(Stale, call, cfg=done.cfg, checksum=checksum, expected=call.checksum)
        self._tell_outside(call)
        return call.decline("memory", why_memory_declines(found))

    async def _persistent(self, call: Call) -> Selection[Cfg] | None:
        if self._reading is None:
            return call.decline("persistent", "there is no store")
        if isinstance(self.cache.peek(call.key, call.checksum), Pending):
            return call.decline("persistent", "store missed, or a tune would not be pending")
        try:
            with self._patience(call):
                stored = await self._reading.load(self._sought(call))
                if stored is None:
                    return call.decline("persistent", "store missed")
                self._emit(CacheHit, call, level="persistent", cfg=stored.cfg)
                return call.answer("persistent", stored.cfg, stored.report)
        except StoreError as error:
            return call.decline("persistent", f"store failed: {error}")
        self._read_later(call)
        return call.decline("persistent", f"no answer within wait_s={call.policy.wait_s:g}")

    async def _autotune(self, call: Call) -> Selection[Cfg] | None:
        if self._reading is not None:
            # The store was awaited since memory was asked: a tune may have ended, or the chain.
            if (answer := self._memory(call)) is not None:
                return answer
            self._refuse_if_closed(call.key)
        if call.known.traced or inside_a_tune():
            # Nothing is measured with tracers; and a tune that waits for a tune may wait for itself.
            return self._later(call)
        if (why := self._why_not_tune(call)) is not None:
            return call.decline("autotune", self._flag_if_late(call, why))
        policy, background = call.policy, call.policy.cache_miss_fallback == "background"
        try:
            with self._patience(call):
                done = await self._tune(call, background=background)
                if done is not None:
                    return self._found(call, done)
                why = "tuning in the background" if background else 'a tune is pending, and on_pending="heuristics"'
                return call.decline("autotune", why)
        except TuningError as error:
            if not policy.allow_heuristics:
                raise
            return call.decline("autotune", f"the tune failed: {error}")
        return call.decline("autotune", f"no answer within wait_s={policy.wait_s:g}")

    def _found(self, call: Call, done: Done[Cfg]) -> Selection[Cfg]:
        """Answer with what a tune found, or with the record of another process's."""
        if done.provenance.source == "autotune":
            self._emit(Autotuned, call, cfg=done.cfg)
            return call.answer("autotune", done.cfg, done.provenance.report)
        call.declined.pop("persistent", None)
        self._emit(CacheHit, call, level="persistent", cfg=done.cfg)
        return call.answer("persistent", done.cfg, done.provenance.report)

    def _heuristics(self, call: Call) -> Selection[Cfg] | None:
        if not call.policy.allow_heuristics:
            return call.decline("heuristics", "heuristics are off")
        if call.known.heuristic is None:
            return call.decline("heuristics", call.known.no_heuristic)
        self._emit(Heuristics, call, cfg=call.known.heuristic)
        return call.answer("heuristics", call.known.heuristic)

    def _error(self, call: Call) -> NoReturn:
        self._emit(NoAnswer, call, reason="no_config")
        raise call.no_config()

    # ---------------------------------------------------------------------------------------
    # Behind the autotune tier.

    def _why_not_tune(self, call: Call, *, on_purpose: bool = False) -> str | None:
        """Say why the autotune tier declines, or None where it may join a tune or begin one."""
        policy = call.policy
        if not policy.allow_autotune:
            return "autotuning is off"
        if tuning_switched_off():
            return "ASEL_AUTOTUNE is off in the environment"
        if policy.cache_miss_fallback == "heuristics" and not on_purpose:
            return 'skipped, since cache_miss_fallback="heuristics"'
        if call.known.traced:
            return "the arguments are being traced, and nothing is measured with tracers"
        if isinstance(self.cache.peek(call.key, call.checksum), Pending):
            return None
        return self._why_not_begin(call, on_purpose)

    def _why_not_begin(self, call: Call, on_purpose: bool) -> str | None:
        """Say why a tune that is not in flight must not begin."""
        key, checksum = call.key, call.checksum
        if call.known.no_candidates:
            return call.known.no_candidates
        if not on_purpose:
            if call.policy.cache_miss_fallback == "background" and not self._tuning.owns_tunes:
                return "background tuning needs the chain's `async with`"
            if (failed := self._tuning.failure(key, checksum)) is not None:
                return f"the last tune failed ({failed[1]}) and is tried again in {failed[0]:.0f} s"
            if self.forbid_reautotune and self.cache.was_cleared(key) and self._tuning.has_tuned(key, checksum):
                return "tuned before and then removed; use retune to tune it again, or forbid_reautotune=False"
        return _FROZEN if self._frozen else None

    def _flag_if_late(self, call: Call, why: str) -> str:
        if why is _FROZEN:  # nothing else stood in the way
            self._emit(LateTune, call)
        return why

    async def _tune(self, call: Call, *, background: bool = False, on_purpose: bool = False) -> Done[Cfg] | None:
        """Return what a tune of this call's key found; None where the caller need not wait for it."""
        while True:
            tune, begun = self._begin(call, background=background, on_purpose=on_purpose)
            call.meet(tune.id, begun)
            if background or (not begun and not on_purpose and call.policy.on_pending == "heuristics"):
                return None
            if not begun:
                self._emit(PendingJoin, call, tune_id=tune.id, waiters=tune.waiters + 1)
            if call.waiting_since is None:
                call.waiting_since = self._events.now()
            leaves = not on_purpose and call.policy.on_pending == "heuristics"
            try:
                return await self._tuning.wait(tune, lambda: leaves and tune.elsewhere)  # noqa: B023
            except SelectorClosedError:
                if self._closed or self._tuning.is_ours(tune):
                    raise
                # It was another chain's, over the same cache. Its closing is not ours: begin anew.

    @contextmanager
    def _patience(self, call: Call) -> Iterator[None]:
        """Wait inside the block no longer than the caller allows, over all that it waits for."""
        if call.policy.wait_s is None:
            yield
            return
        left = call.start + call.policy.wait_s - self._events.now()
        with anyio.move_on_after(max(0.0, left)):
            yield

    def _begin(self, call: Call, *, background: bool = False, on_purpose: bool = False) -> tuple[Tune[Cfg], bool]:
        make_job = partial(self._job, call, on_purpose)
        return self._tuning.begin(
            self._sought(call), make_job, call.policy, background=background, on_purpose=on_purpose
        )

    def _sought(self, call: Call) -> Sought[Cfg]:
        known, exact = call.known, call.policy.match_environment == "exact"
        return Sought(call.key, call.checksum, environment(known.device), exact, known.candidates)

    def _timings(self, call: Call) -> dict[int, Measured[Cfg]]:
        software = environment(call.known.device)
        return timings_in(self.cache.reports(call.key), call.known.candidates, call.objective, software)

    def _job(self, call: Call, on_purpose: bool) -> TuneJob[Cfg]:
        known, inv, policy = call.known, call.inv, call.policy
        return TuneJob(
            candidates=known.candidates,
            make_fn=partial(bind, call.kernel, inv, known.platform),
            args=tuple(inv.args),
            kwargs=dict(inv.kwargs),
            example=example_inputs_of(call.kernel, inv),
            key=call.key,
            checksum=call.checksum,
            objective=call.objective,
            incumbent=known.incumbent,
            groups=known.groups,
            known={} if on_purpose else self._timings(call),
            outcomes=dict(barred(known, self.cache)),
            device=known.device,
            settings=call.settings or current_settings(),
            tune_budget_s=policy.tune_budget_s,
            candidate_timeout_s=policy.candidate_timeout_s,
            grace_s=lambda: self.close_grace_s if self._closed else 0.0,
            emit=self._events,
        )

    def _later(self, call: Call) -> Selection[Cfg] | None:
        """Decline for the tiers that would have to wait, and have the loop catch up on them."""
        call.declined.setdefault("persistent", "not asked, since this call cannot wait")
        if call.known.traced:
            untraced = call.without_tracers(self._keys)
            if not untraced.known.traced:  # a closure may still hold a tracer, which must not outlive its trace
                record_invocation(*call.key, call.kernel, untraced.inv.args, untraced.inv.kwargs)
            return call.decline("autotune", self._queue(untraced))
        return call.decline("autotune", self._queue(call))

    def _queue(self, call: Call) -> str:
        """Have the loop tune this key, and say so; or say why not."""
        if (why := self._why_not_tune(call)) is not None:
            self._read_later(call)
            return self._flag_if_late(call, why)
        if isinstance(self.cache.peek(call.key, call.checksum), Pending):
            return "a tune is pending, and this call cannot wait"
        if not self._backlog.add(call):
            return "this call cannot wait, and background tuning needs the chain's `async with`"
        return "queued for the background, since this call cannot wait"

    def _read_later(self, call: Call) -> None:
        """Have the loop read the store for the next call, where this one could not wait for it."""
        if (
            self._reading is not None
            and not call.known.traced
            and not self._reading.has_just_missed(self._sought(call))
        ):
            self._backlog.add(call)

    async def _catch_up(self, call: Call) -> None:
        """Do for a queued call what the persistent and autotune tiers would have done."""
        asking.set(None)  # the call has its answer; what is done here is done for the next one
        try:
            if self._reading is not None and await self._reading.load(self._sought(call)) is not None:
                return
        except StoreError:
            pass  # told by an event already; the tune can do without
        except SelectorClosedError:
            return
        if isinstance(self.cache.peek(call.key, call.checksum), Miss) and self._why_not_tune(call) is None:
            self._begin(call, background=True)

    # ---------------------------------------------------------------------------------------
    # What else can be asked.

    async def explain(self, inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out]) -> Explanation[Cfg]:
        """Tell what every tier would say to this call, changing nothing and emitting nothing."""
        call = self._call(inv, kernel)
        return await explain(call, self._sought(call), self.cache, self._keeper, self._why_not_tune(call))

    async def retune(self, inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out]) -> Cfg:
        """Measure again, on purpose, and replace what is known; until then the old config answers.

        Raises:
            NoConfigError: tuning is not allowed here.
            TuningError: nothing could be measured; what was known still is.
        """
        call = self._call(inv, kernel)
        if self._tasks is None:
            self._bind_loop()
        why = self._why_not_tune(call, on_purpose=True)
        if why is None and inside_a_tune():
            why = "asked from inside a tune, which must not wait for another"
        if why is not None:
            call.decline("autotune", why)
            raise call.no_config()
        with self._asking(call):
            done = await self._tune(call, on_purpose=True)
            assert done is not None
            self._emit(Autotuned, call, cfg=done.cfg)
        return done.cfg

    async def withdraw(
        self, inv: Any, kernel: Any, cfg: Cfg, error: Exception, *, tier: Tier = "memory", instead: Cfg | None = None
    ) -> bool:
        """Say that a chosen config failed in a real call; False where it is not (any more) what the chain answers with.

        `instead` answers from here on, by default the next best of its tune; where nothing else was measured the key
        is as new, and `cfg` no candidate. Only for a config at fault: see first that another runs with the
        same arguments, as an `Executor` does.
        """
        if self._tasks is None:
            self._bind_loop()
        call = Call(inv, kernel, self.resolve(inv, kernel), self.policy, self._events.now())
        fault = Fault(self._sought(call), cfg, error, tier, instead, call.start)
        return await self._withdrawal.withdraw(fault, self._tasks)

    def resolve(self, inv: Any, kernel: Any) -> Resolved[Cfg]:
        """Return what follows from a kernel and a call's signature alone."""
        return self._keys.resolve(inv, kernel)

    def statistics(self) -> Statistics:
        """Return what this chain is doing at the moment; may be called from any thread."""
        return Statistics.of(
            ((tune.job.key.op_id, tune.waiters) for tune in self._tuning.in_flight), self._backlog.size
        )

    async def settled(self) -> None:
        """Return once every tune this chain has in flight or in its queue has ended."""
        while not (self._backlog.is_empty and self._tuning.is_idle):
            await self._backlog.until_empty()
            await self._tuning.settled()

    def freeze(self) -> None:
        """Begin no tune from here on; a call that would have begun one emits `late_tune`."""
        self._frozen = True

    @asynccontextmanager
    async def events(self, buffer: int = 4096) -> AsyncIterator[EventStream]:
        """Give the events as they happen, to one reader, until the chain closes or the block ends."""
        if self._loop is None:
            self._bind_loop()
        stream = EventStream(buffer, self._end_stream)
        self._events.add(stream)
        self._streams.append(stream)
        try:
            yield stream
        finally:
            self._end_stream(stream)

    def _end_stream(self, stream: EventStream) -> None:
        stream.end()
        self._events.remove(stream)
        if stream in self._streams:
            self._streams.remove(stream)

    # ---------------------------------------------------------------------------------------
    # From open to closed.

    async def __aenter__(self) -> Self:
        if self._tasks is not None:
            raise InvalidRequestError("this chain is open already; share the object instead of entering it again")
        self._bind_loop()
        self._closed = False
        async with AsyncExitStack() as stack:
            for helper in (self.tuner, self.persistent):
                if hasattr(helper, "__aenter__"):
                    await stack.enter_async_context(helper)
            self._helpers = stack.pop_all()
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tuning.open(self._tasks)
        assert self._loop is not None
        self._backlog.open(self._loop)
        self._cut_short = 0
        self._tasks.start_soon(self._serve_backlog, self._tasks)
        if self._keeper is not None:
            self._tasks.start_soon(self._keeper.serve)
        return self

    async def _serve_backlog(self, tasks: TaskGroup) -> None:
        try:
            await self._backlog.serve(tasks)
        finally:
            # Cancelled, by `__aexit__` or from outside while the body is still shielded: either way the
            # task group takes no more tunes.
            self._stop()

    def _stop(self) -> None:
        """Refuse new calls, and end every wait with SelectorClosedError."""
        self._closed = True
        self._backlog.close()
        if self._reading is not None:
            self._reading.close()
        self._cut_short += self._tuning.close(self.close_grace_s)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        tasks, self._tasks = self._tasks, None
        assert tasks is not None
        start = self._events.now()
        self._stop()
        tasks.cancel_scope.cancel()
        try:
            # The body's error passes us by and comes out as itself. Only cancellation is the task
            # group's business: it has to tell its own from the one that came from outside.
            if isinstance(error, anyio.get_cancelled_exc_class()):
                return await tasks.__aexit__(kind, error, traceback)
            await tasks.__aexit__(None, None, None)
            return None
        except BaseExceptionGroup as group:
            if len(group.exceptions) == 1:
                raise group.exceptions[0] from None
            raise
        finally:
            if self._keeper is not None:
                await self._keeper.close(start + self.close_grace_s)
            await self._helpers.aclose()
            self._events(
                Closed(
                    key=None,
                    start=start,
                    end=self._events.now(),
                    cancelled=self._cut_short,
                    abandoned=self._tuning.still_busy(),
                    unsaved=0 if self._keeper is None else self._keeper.unsaved,
                )
            )
            for stream in list(self._streams):
                stream.end()
            if not self._events.is_over:
                # Bounded by itself, and cancelled by nobody: an answer was given, and its telemetry is owed.
                with anyio.CancelScope(shield=True):
                    await run_in_thread("flushing telemetry", partial(self._events.close, self.close_grace_s))

    def _bind_loop(self) -> None:
        loop = LoopHandle()
        if self._loop is not None and self._loop.native is not loop.native:
            self._tuning.shift_clock(loop.now() - self._loop.now())  # trio's clocks start anywhere
        self._loop = loop
        self._events.bind(loop)

    # ---------------------------------------------------------------------------------------
    # Telling.

    def _emit(self, kind: type[Event], call: Call, **facts: Any) -> None:
        if self._events.wants(kind):
            now = self._events.now()
            if issubclass(kind, Answer):
                facts |= call.account(now)
            self._events(kind(key=call.key, start=call.start, end=now, **facts))

    @contextmanager
    def _asking(self, call: Call) -> Iterator[None]:
        """Let telemetry know whose call it is, and tell of one that ends without an answer."""
        before = asking.get()
        asking.set(call.asked())
        try:
            yield
        except NoConfigError:
            raise  # told by the error tier
        except TuningError:
            self._emit(NoAnswer, call, reason="tune_failed")
            raise
        except BaseException as error:
            self._emit(CallerLeft, call, reason=_why_left(error))
            raise
        finally:
            asking.set(before)  # not by token: a coroutine that nobody awaits ends in another context

    def _tell_outside(self, call: Call) -> None:
        """Tell once for each key that its shape lies outside the kernel's declared buckets."""
        if call.known.outside and self._seen_outside.get(call.key) is None:
            self._seen_outside.put(call.key, True)
            for dimension, size, low, high in call.known.outside:
                self._emit(OutOfRange, call, dimension=dimension, size=size, low=low, high=high)


def _why_left(error: BaseException) -> str:
    if isinstance(error, SelectorClosedError):
        return "closed"
    return type(error).__name__ if isinstance(error, Exception) else "cancelled"


def _checked_policy(policy: Any) -> AutotunePolicy:
    if not isinstance(policy, AutotunePolicy):
        raise InvalidRequestError(f"policy={policy!r} is not an AutotunePolicy")
    return policy


def _checked_seconds(name: str, seconds: Any) -> float:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds >= 0:
        raise InvalidRequestError(f"ConfigSelectorChain: {name}={seconds!r} must be seconds, zero or more")
    return seconds
