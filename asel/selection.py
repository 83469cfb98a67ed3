"""`ConfigSelectorChain`: walks the tiers, owns the task group, tells what happened."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from types import TracebackType
from typing import Any, Generic, NoReturn, Self

import anyio
from anyio.abc import TaskGroup

from asel.adapters import as_tuner
from asel.answers import Explanation, Selection, TierSays
from asel.backlog import Backlog
from asel.cache import ConfigCache, Done, Hit, Lookup, Miss, Pending, overlaid
from asel.calls import Call
from asel.devices import current_settings
from asel.errors import InvalidRequestError, SelectorClosedError, StoreError, TuningError
from asel.events import (
    CacheHit,
    Closed,
    Event,
    EventStream,
    FanOut,
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
from asel.kernel import Cfg, Invocation, Kernel, Out, bind
from asel.keys import CacheKey, KeyMemo, Resolved
from asel.loop import LoopHandle
from asel.memo import Memo
from asel.persistent import as_persistence
from asel.policy import (
    AutotunePolicy,
    effective_policy,
    objective_of,
    tuning_switched_off,
)
from asel.reading import Reading
from asel.registry import record_invocation
from asel.scopes import any_scope_here
from asel.telemetry import default_sinks
from asel.tuner import TuneJob, Tuner
from asel.tuning import Tune, Tuning, inside_a_tune

__all__ = ["ConfigSelectorChain"]


class ConfigSelectorChain(Generic[Cfg, Out]):
    """Answers which config a call should run with.

    Use it as an async context manager: its task group then owns every tune, and tunes outlive the
    callers who began them. Without `async with` a tune runs inside its first caller.

    Leaving the context cancels tunes in flight. A thread that is compiling or measuring gets
    `close_grace_s` seconds to finish its step; what is left is named in the `closed` event.
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
        self.close_grace_s = close_grace_s
        self._policy = AutotunePolicy() if policy is None else policy
        self._keys = KeyMemo()
        self._events = FanOut(default_sinks() if sinks is None else sinks, on_event)
        self._streams: list[EventStream] = []
        self._store = as_persistence(persistent)
        self._reading = None if self._store is None else Reading(self.cache, self._store, self._events)
        kept_in = self._store if persist_autotune else None
        self._tuning: Tuning[Cfg] = Tuning(self.cache, as_tuner(self.tuner), kept_in, self._events, store_timeout_s)
        self._backlog = Backlog(self._catch_up)
        self._seen_outside: Memo[bool] = Memo(65_536)
        self._loop: LoopHandle | None = None
        self._tasks: TaskGroup | None = None
        self._closed = False
        self._frozen = False

    @property
    def policy(self) -> AutotunePolicy:
        """The policy in force in the current task."""
        return effective_policy(self._policy, self)

    @policy.setter
    def policy(self, policy: AutotunePolicy) -> None:
        self._policy = policy

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
        known = self._keys.resolve(inv, kernel)
        if self._lane_is_open(inv, known):
            return known.lane_cfg  # type: ignore[no-any-return]
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
        known = self._keys.resolve(inv, kernel)
        if self._lane_is_open(inv, known):
            return known.lane_cfg  # type: ignore[no-any-return]
        call = self._call(inv, kernel, known)
        return (
            self._override(call)
            or self._overlay(call)
            or self._memory(call)
            or self._later(call)
            or self._heuristics(call)
            or self._error(call)
        ).cfg

    def _lane_is_open(self, inv: Any, known: Resolved[Any]) -> bool:
        """Tell whether the memory tier's last answer to this signature still stands.

        The fast lane past the walk: no scope is open that could answer before memory or change the
        checksum, and neither the cache nor the policy has changed since the answer was given.
        """
        cache, events = self.cache, self._events
        if (
            known.lane_generation != cache.generation
            or known.lane_policy is not self._policy
            or inv.override_cfg is not None
            or any_scope_here()
            or self._closed
        ):
            return False
        if cache.max_entries is not None:
            cache.touch(known.key, known.checksum(objective_of(self._policy)))
        if events.routes and events.wants(CacheHit):
            now = self._events.now()
            self._events(CacheHit(key=known.key, start=now, end=now, level="memory", cfg=known.lane_cfg))
        return True

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
        if isinstance(found, Hit):
            if not any_scope_here():
                call.known.lane_cfg = found.cfg
                call.known.lane_policy = call.policy
                call.known.lane_generation = generation
            self._emit(CacheHit, call, level="memory", cfg=found.cfg)
            return call.answer("memory", found.cfg, found.provenance.report)
        if isinstance(found, Miss):
            for checksum, done in found.stale:
                self._emit(Stale, call, cfg=done.cfg, checksum=checksum, expected=call.checksum)
        self._tell_outside(call)
        return call.decline("memory", _why_memory_declines(found))

    async def _persistent(self, call: Call) -> Selection[Cfg] | None:
        if self._reading is None:
            return call.decline("persistent", "there is no store")
        if isinstance(self.cache.peek(call.key, call.checksum), Pending):
            return call.decline("persistent", "store missed, or a tune would not be pending")
        try:
            stored = await self._reading.load(call.key, call.checksum)
        except StoreError as error:
            return call.decline("persistent", f"store failed: {error}")
        if stored is None:
            return call.decline("persistent", "store missed")
        self._emit(CacheHit, call, level="persistent", cfg=stored.cfg)
        return call.answer("persistent", stored.cfg, stored.report)

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
            return call.decline("autotune", self._if_frozen(call, why))
        policy, background = call.policy, call.policy.cache_miss_fallback == "background"
        tune, begun = self._begin(call, background=background)
        if background:
            return call.decline("autotune", "tuning in the background")
        if not begun and policy.on_pending == "heuristics":
            return call.decline("autotune", 'a tune is pending, and on_pending="heuristics"')
        try:
            done = await self._wait(call, tune, begun, policy.wait_s)
        except TuningError as error:
            if not policy.allow_heuristics:
                raise
            return call.decline("autotune", f"the tune failed: {error}")
        except SelectorClosedError:
            if self._closed:
                raise
            # The tune was another chain's, over the same cache. Its closing is not ours.
            return await self._autotune(call)
        if done is None:
            return call.decline("autotune", f"no answer within wait_s={policy.wait_s:g}")
        return call.answer("autotune", done.cfg, done.provenance.report)

    def _heuristics(self, call: Call) -> Selection[Cfg] | None:
        if not call.policy.allow_heuristics:
            return call.decline("heuristics", "heuristics are off")
        if call.known.heuristic is None:
            return call.decline("heuristics", call.known.no_heuristic)
        self._emit(Heuristics, call, cfg=call.known.heuristic, declined=dict(call.declined))
        return call.answer("heuristics", call.known.heuristic)

    def _error(self, call: Call) -> NoReturn:
        self._emit(NoAnswer, call, reason="no_config", declined=dict(call.declined))
        raise call.no_config()

    # ---------------------------------------------------------------------------------------
    # Behind the autotune tier.

    def _why_not_tune(self, call: Call, *, on_purpose: bool = False) -> str | None:
        """Say why the autotune tier declines, or None where it may tune."""
        policy, known, address = call.policy, call.known, (call.key, call.checksum)
        if not policy.allow_autotune:
            return "autotuning is off"
        if tuning_switched_off():
            return "ASEL_AUTOTUNE is off in the environment"
        if policy.cache_miss_fallback == "heuristics" and not on_purpose:
            return 'skipped, since cache_miss_fallback="heuristics"'
        if self._frozen:
            return "the chain is frozen"
        if known.traced:
            return "the arguments are being traced, and nothing is measured with tracers"
        if known.no_candidates:
            return known.no_candidates
        if on_purpose:
            return None
        if policy.cache_miss_fallback == "background" and not self._tuning.owns_tunes:
            return "background tuning needs the chain's `async with`"
        if (failed := self._tuning.failure(*address)) is not None:
            return f"the last tune failed ({failed[1]}) and is tried again in {failed[0]:.0f} s"
        if self.forbid_reautotune and self.cache.was_cleared(*address) and self._tuning.has_tuned(*address):
            return "tuned before and then removed; use retune to tune it again, or forbid_reautotune=False"
        return None

    def _begin(self, call: Call, *, background: bool = False, on_purpose: bool = False) -> tuple[Tune[Cfg], bool]:
        make_job = partial(self._job, call)
        return self._tuning.begin(
            call.key, call.checksum, make_job, call.policy, background=background, on_purpose=on_purpose
        )

    def _job(self, call: Call) -> TuneJob[Cfg]:
        known, inv, policy = call.known, call.inv, call.policy
        return TuneJob(
            candidates=known.candidates,
            make_fn=partial(bind, call.kernel, inv, known.platform),
            args=tuple(inv.args),
            kwargs=dict(inv.kwargs),
            key=call.key,
            checksum=call.checksum,
            objective=call.objective,
            incumbent=known.incumbent,
            device=known.device,
            settings=call.settings or current_settings(),
            tune_budget_s=policy.tune_budget_s,
            candidate_timeout_s=policy.candidate_timeout_s,
            grace_s=lambda: self.close_grace_s if self._closed else 0.0,
            emit=self._events,
        )

    async def _wait(self, call: Call, tune: Tune[Cfg], begun: bool, wait_s: float | None) -> Done[Cfg] | None:
        """Return what the tune found, or None if that takes longer than `wait_s`."""
        if not begun:
            self._emit(PendingJoin, call, tune_id=tune.id, waiters=tune.waiters + 1)
        if wait_s is None:
            return await self._tuning.wait(tune)
        with anyio.move_on_after(wait_s):
            return await self._tuning.wait(tune)
        return None

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
            return self._if_frozen(call, why)
        if isinstance(self.cache.peek(call.key, call.checksum), Pending):
            return "a tune is pending, and this call cannot wait"
        if not self._tuning.owns_tunes or self._loop is None:
            return "this call cannot wait, and background tuning needs the chain's `async with`"
        self._backlog.add(call, self._loop)
        return "queued for the background, since this call cannot wait"

    async def _catch_up(self, call: Call) -> None:
        """Do for a queued call what the persistent and autotune tiers would have done."""
        try:
            if self._reading is not None and await self._reading.load(call.key, call.checksum) is not None:
                return
        except StoreError:
            pass  # told by an event already; the tune can do without
        if isinstance(self.cache.peek(call.key, call.checksum), Miss) and self._why_not_tune(call) is None:
            self._begin(call, background=True)

    # ---------------------------------------------------------------------------------------
    # What else can be asked.

    async def explain(self, inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out]) -> Explanation[Cfg]:
        """Tell what every tier would say to this call, changing nothing and emitting nothing."""
        call = self._call(inv, kernel)
        policy, known = call.policy, call.known
        found = self.cache.peek(call.key, call.checksum)
        guess, no_guess = (
            (known.heuristic, known.no_heuristic) if policy.allow_heuristics else (None, "heuristics are off")
        )
        says = (
            TierSays.of("override", inv.override_cfg, "the caller's own", "no override"),
            TierSays.of("overlay", overlaid(call.key), "an active overlay has the key", "no overlay has the key"),
            TierSays.of("memory", getattr(found, "cfg", None), "known", _why_memory_declines(found)),
            await self._explain_persistent(call),
            self._explain_autotune(call, found),
            TierSays.of("heuristics", guess, "the kernel's guess", no_guess),
        )
        return Explanation(call.key, call.checksum, says)

    async def _explain_persistent(self, call: Call) -> TierSays[Cfg]:
        if self._store is None:
            return TierSays("persistent", None, "there is no store", answers=False)
        try:
            stored = await self._store.load(call.key, call.checksum)
        except Exception as error:  # a store's failure makes its tier decline
            return TierSays("persistent", None, f"store failed: {type(error).__name__}: {error}", answers=False)
        return TierSays.of("persistent", stored and stored.cfg, "stored", "store missed")

    def _explain_autotune(self, call: Call, found: Lookup[Cfg]) -> TierSays[Cfg]:
        if (why := self._why_not_tune(call)) is not None:
            return TierSays("autotune", None, why, answers=False)
        background = call.policy.cache_miss_fallback == "background"
        would = f"would tune {len(call.known.candidates)} candidates" + (" in the background" if background else "")
        if isinstance(found, Pending):
            would = f"tune {found.tune.id} is in flight"
        return TierSays("autotune", None, would, answers=not background)

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
        tune, begun = self._begin(call, on_purpose=True)
        done = await self._wait(call, tune, begun, None)
        assert done is not None
        return done.cfg

    async def settled(self) -> None:
        """Return once every tune this chain has in flight or in its queue has ended."""
        await self._backlog.settled()
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
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tuning.open(self._tasks)
        self._tasks.start_soon(self._backlog.serve, self._tasks)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        tasks, self._tasks = self._tasks, None
        assert tasks is not None
        start = self._events.now()
        self._closed = True
        self._backlog.drop()
        cancelled = self._tuning.close()
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
            abandoned = self._tuning.still_busy()
            closed = Closed(key=None, start=start, end=self._events.now(), cancelled=cancelled, abandoned=abandoned)
            self._events(closed)
            for stream in list(self._streams):
                stream.end()

    def _bind_loop(self) -> None:
        self._loop = LoopHandle()
        self._events.bind(self._loop)

    # ---------------------------------------------------------------------------------------
    # Telling.

    def _emit(self, kind: type[Event], call: Call, **facts: Any) -> None:
        if self._events.wants(kind):
            self._events(kind(key=call.key, start=call.start, end=self._events.now(), **facts))

    def _if_frozen(self, call: Call, why: str) -> str:
        if self._frozen:
            self._emit(LateTune, call)
        return why

    def _tell_outside(self, call: Call) -> None:
        """Tell once for each key that its shape lies outside the kernel's declared buckets."""
        if call.known.outside and self._seen_outside.get(call.key) is None:
            self._seen_outside.put(call.key, True)
            for dimension, size, low, high in call.known.outside:
                self._emit(OutOfRange, call, dimension=dimension, size=size, low=low, high=high)


def _why_memory_declines(found: Lookup[Any]) -> str:
    if isinstance(found, Pending):
        return "a tune is pending"
    return "memory has it for other candidates" if isinstance(found, Miss) and found.stale else "memory missed"
