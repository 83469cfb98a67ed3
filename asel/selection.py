"""`ConfigSelectorChain`: walks the tiers, owns the tunes, tells what happened."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from contextvars import Context, copy_context
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Generic, NoReturn, Self

import anyio
from anyio.abc import TaskGroup

from asel.answers import Explanation, Selection, Tier, TierSays
from asel.cache import ConfigCache, Done, Hit, Miss, Pending, Provenance, overlaid, overlays_here
from asel.devices import Settings, current_settings
from asel.errors import InvalidRequestError, NoConfigError, SelectorClosedError, StoreError, TuningError
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
from asel.keys import CacheKey, KeyMemo, Memo, Resolved
from asel.loop import LoopHandle, clock_of
from asel.pending import Pending as PendingLoad
from asel.persistent import Stored, as_persistence
from asel.policy import (
    AutotunePolicy,
    effective_policy,
    forward_only_here,
    objective_of,
    overrides_here,
    tuning_switched_off,
)
from asel.registry import record_invocation
from asel.telemetry import default_sinks
from asel.tuner import TuneJob, Tuner, as_tuner
from asel.tuning import Tune, Tuning, inside_a_tune, store_failed

__all__ = ["ConfigSelectorChain"]


class _Call:
    """One call on its way through the tiers."""

    __slots__ = ("checksum", "declined", "inv", "kernel", "key", "known", "objective", "policy", "settings", "start")

    def __init__(self, inv: Any, kernel: Any, known: Resolved[Any], policy: AutotunePolicy, start: float) -> None:
        self.inv = inv
        self.kernel = kernel
        self.known = known
        self.key = known.key
        self.policy = policy
        self.objective = objective_of(policy)
        self.checksum = known.checksum(self.objective)
        self.start = start
        self.settings: Settings | None = None
        self.declined: dict[str, str] = {}

    def decline(self, tier: Tier, why: str) -> Selection[Any] | None:
        """Note why a tier has no answer; returns the None that sends the walk to the next."""
        self.declined[tier] = why
        return None

    def answer(self, tier: Tier, cfg: Any, report: Any = None) -> Selection[Any]:
        return Selection(cfg, tier, self.key, self.checksum, report, self.declined)


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
        self._store = as_persistence(persistent)
        self._events = FanOut(default_sinks() if sinks is None else sinks, on_event)
        self._keys = KeyMemo()
        self._loop: LoopHandle | None = None
        self._tasks: TaskGroup | None = None
        self._closed = False
        self._frozen = False
        self._tuning: Tuning[Cfg] = Tuning(
            self.cache,
            as_tuner(self.tuner),
            self._store if persist_autotune else None,
            self._hand_on,
            lambda: clock_of(self._loop)(),
            store_timeout_s,
        )
        self._loads: dict[tuple[CacheKey, str], PendingLoad[Stored[Cfg] | None]] = {}
        self._streams: list[EventStream] = []
        self._seen_outside: Memo[bool] = Memo(65_536)
        # Calls that `choose_nowait` left for the loop, each key once.
        self._inbox: deque[tuple[Context, _Call]] = deque()
        self._mail = anyio.Event()
        self._queued: set[tuple[CacheKey, str]] = set()
        self._caught_up = anyio.Event()

    @property
    def policy(self) -> AutotunePolicy:
        """The policy in force in the current task."""
        return effective_policy(self._policy, self)

    @policy.setter
    def policy(self, policy: AutotunePolicy) -> None:
        self._policy = policy

    # ---------------------------------------------------------------------------------------
    # The tiers.

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
        return await self._walk(self._call(inv, kernel, self._keys.resolve(inv, kernel)))

    async def _walk(self, call: _Call) -> Selection[Cfg]:
        if self._tasks is None:  # not bound to a loop, so each caller may bring another
            self._loop = LoopHandle()
            call.start = self._loop.now()
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
        if (
            known.lane_generation != self.cache.generation
            or known.lane_policy is not self._policy
            or inv.override_cfg is not None
            or overlays_here()
            or overrides_here()
            or forward_only_here()
            or self._closed
        ):
            return False
        if self.cache.max_entries is not None:
            self.cache.touch(known.key, known.checksum(objective_of(self._policy)))
        if self._events.wants(CacheHit):
            now = clock_of(self._loop)()
            self._hand_on(CacheHit(key=known.key, start=now, end=now, level="memory", cfg=known.lane_cfg))
        return True

    def _override(self, call: _Call) -> Selection[Cfg] | None:
        if call.inv.override_cfg is None:
            return call.decline("override", "no override")
        self._emit(Override, call, cfg=call.inv.override_cfg)
        return call.answer("override", call.inv.override_cfg)

    def _overlay(self, call: _Call) -> Selection[Cfg] | None:
        cfg = overlaid(call.key)
        if cfg is None:
            return call.decline("overlay", "no overlay has the key")
        self._emit(OverlayHit, call, cfg=cfg)
        return call.answer("overlay", cfg)

    def _memory(self, call: _Call) -> Selection[Cfg] | None:
        generation = self.cache.generation  # read first: a change after it closes the lane again
        found = self.cache.lookup(call.key, call.checksum)
        if isinstance(found, Hit):
            if call.policy is self._policy and not forward_only_here():
                call.known.lane_cfg = found.cfg
                call.known.lane_policy = call.policy
                call.known.lane_generation = generation
            self._emit(CacheHit, call, level="memory", cfg=found.cfg)
            return call.answer("memory", found.cfg, found.provenance.report)
        if isinstance(found, Miss):
            for checksum, done in found.stale:
                self._emit(Stale, call, cfg=done.cfg, checksum=checksum, expected=call.checksum)
        return call.decline("memory", _why_memory_declines(found))

    async def _persistent(self, call: _Call) -> Selection[Cfg] | None:
        if self._store is None:
            return call.decline("persistent", "there is no store")
        if isinstance(self.cache.peek(call.key, call.checksum), Pending):
            return call.decline("persistent", "store missed, or a tune would not be pending")
        try:
            stored = await self._load(call)
        except StoreError as error:
            return call.decline("persistent", f"store failed: {error}")
        if stored is None:
            return call.decline("persistent", "store missed")
        self._emit(CacheHit, call, level="persistent", cfg=stored.cfg)
        return call.answer("persistent", stored.cfg, stored.report)

    async def _autotune(self, call: _Call) -> Selection[Cfg] | None:
        # The store was awaited since memory was asked; a tune may have ended in between.
        if self._store is not None:
            if (answer := self._memory(call)) is not None:
                return answer
            self._refuse_if_closed(call.key)
        if call.known.traced or inside_a_tune():
            # Nothing is measured with tracers; and a tune that waits for a tune may wait for itself.
            return self._later(call)
        if (why := self._why_not_tune(call)) is not None:
            return call.decline("autotune", self._if_frozen(call, why))
        policy = call.policy
        tune, begun = self._begin(call, background=policy.cache_miss_fallback == "background")
        if policy.cache_miss_fallback == "background":
            return call.decline("autotune", "tuning in the background")
        if not begun:
            if policy.on_pending == "heuristics":
                return call.decline("autotune", 'a tune is pending, and on_pending="heuristics"')
            self._emit(PendingJoin, call, tune_id=tune.id, waiters=tune.waiters + 1)
        try:
            done = await self._wait(tune, policy.wait_s)
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

    def _heuristics(self, call: _Call) -> Selection[Cfg] | None:
        if not call.policy.allow_heuristics:
            return call.decline("heuristics", "heuristics are off")
        if call.known.heuristic is None:
            return call.decline("heuristics", call.known.no_heuristic)
        self._emit(Heuristics, call, cfg=call.known.heuristic, declined=dict(call.declined))
        return call.answer("heuristics", call.known.heuristic)

    def _error(self, call: _Call) -> NoReturn:
        self._emit(NoAnswer, call, reason="no_config", declined=dict(call.declined))
        raise _no_config(call)

    # ---------------------------------------------------------------------------------------
    # What else can be asked.

    async def explain(self, inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out]) -> Explanation[Cfg]:
        """Tell what every tier would say to this call, changing nothing and emitting nothing."""
        call = self._call(inv, kernel, self._keys.resolve(inv, kernel), quiet=True)
        says = [
            _says("override", inv.override_cfg, "the caller's own", "no override"),
            _says("overlay", overlaid(call.key), "an active overlay has the key", "no overlay has the key"),
        ]
        found = self.cache.peek(call.key, call.checksum)
        hit = found.cfg if isinstance(found, Hit) else None
        says.append(_says("memory", hit, "known", _why_memory_declines(found)))
        says.append(await self._explain_persistent(call))
        why_not = self._why_not_tune(call)
        behind = call.policy.cache_miss_fallback == "background"
        would = f"would tune {len(call.known.candidates)} candidates" + (" in the background" if behind else "")
        if isinstance(found, Pending):
            would = f"tune {found.tune.id} is in flight"
        says.append(TierSays("autotune", None, would if why_not is None else why_not))
        guess = call.known.heuristic if call.policy.allow_heuristics else None
        why = call.known.no_heuristic if call.policy.allow_heuristics else "heuristics are off"
        says.append(_says("heuristics", guess, "the kernel's guess", why))

        answers = [said.tier for said in says if said.cfg is not None or (said.tier == "autotune" and not why_not)]
        if behind and "autotune" in answers:
            answers.remove("autotune")
        return Explanation(call.key, call.checksum, answers[0] if answers else None, tuple(says))

    async def _explain_persistent(self, call: _Call) -> TierSays[Cfg]:
        if self._store is None:
            return TierSays("persistent", None, "there is no store")
        try:
            stored = await self._store.load(call.key, call.checksum)
        except Exception as error:  # a store's failure makes its tier decline
            return TierSays("persistent", None, f"store failed: {type(error).__name__}: {error}")
        return _says("persistent", stored and stored.cfg, "stored", "store missed")

    async def retune(self, inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out]) -> Cfg:
        """Measure again, on purpose, and replace what is known; until then the old config answers.

        Raises:
            NoConfigError: tuning is not allowed here.
            TuningError: nothing could be measured; what was known still is.
        """
        call = self._call(inv, kernel, self._keys.resolve(inv, kernel))
        why = self._why_not_tune(call, on_purpose=True)
        if why is None and inside_a_tune():
            why = "asked from inside a tune, which must not wait for another"
        if why is not None:
            call.decline("autotune", why)
            raise _no_config(call)
        tune, begun = self._begin(call, on_purpose=True)
        if not begun:
            self._emit(PendingJoin, call, tune_id=tune.id, waiters=tune.waiters + 1)
        return (await self._tuning.wait(tune)).cfg

    async def settled(self) -> None:
        """Return once every tune this chain has in flight or in its queue has ended."""
        while self._queued:
            await self._caught_up.wait()
        await self._tuning.settled()

    def freeze(self) -> None:
        """Begin no tune from here on; a call that would have begun one emits `late_tune`."""
        self._frozen = True

    @asynccontextmanager
    async def events(self, buffer: int = 4096) -> AsyncIterator[EventStream]:
        """Give the events as they happen, to one reader, until the chain closes or the block ends."""
        if self._loop is None:
            self._loop = LoopHandle()
        stream = EventStream(buffer, self._end_stream)
        self._events.add(stream)
        self._streams.append(stream)
        try:
            yield stream
        finally:
            stream.end()
            self._end_stream(stream)

    def _end_stream(self, stream: EventStream) -> None:
        self._events.remove(stream)
        if stream in self._streams:
            self._streams.remove(stream)

    # ---------------------------------------------------------------------------------------
    # From open to closed.

    async def __aenter__(self) -> Self:
        if self._tasks is not None:
            raise InvalidRequestError("this chain is open already; share the object instead of entering it again")
        self._loop = LoopHandle()
        self._closed = False
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tuning.open(self._tasks)
        self._tasks.start_soon(self._serve_inbox, self._tasks)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        tasks, self._tasks = self._tasks, None
        assert tasks is not None
        start = clock_of(self._loop)()
        self._closed = True
        self._inbox.clear()
        self._queued.clear()
        self._caught_up.set()
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
            now = clock_of(self._loop)()
            abandoned = self._tuning.still_busy()
            self._hand_on(Closed(key=None, start=start, end=now, cancelled=cancelled, abandoned=abandoned))
            for stream in list(self._streams):
                stream.end()

    def _call(self, inv: Any, kernel: Any, known: Resolved[Any], *, quiet: bool = False) -> _Call:
        self._refuse_if_closed(known.key)
        policy = effective_policy(self._policy, self) if overrides_here() else self._policy
        call = _Call(inv, kernel, known, policy, clock_of(self._loop)())
        if known.outside and not quiet and self._seen_outside.get(known.key) is None:
            self._seen_outside.put(known.key, True)
            for dimension, size, low, high in known.outside:
                self._emit(OutOfRange, call, dimension=dimension, size=size, low=low, high=high)
        return call

    def _refuse_if_closed(self, key: CacheKey) -> None:
        if self._closed:
            raise SelectorClosedError(f"the chain is closed, so nobody is there to answer for {key.op_id!r}")

    # ---------------------------------------------------------------------------------------
    # Behind the tiers.

    async def _load(self, call: _Call) -> Stored[Cfg] | None:
        """Return the store's record; callers of one key share one read.

        Raises:
            StoreError: the store failed.
        """
        address = (call.key, call.checksum)
        load = self._loads.get(address)
        if load is None:
            load = self._loads[address] = PendingLoad()
        return await load.carry(partial(self._read, call, load), partial(self._loads.pop, address, None))

    async def _read(self, call: _Call, load: PendingLoad[Stored[Cfg] | None]) -> None:
        assert self._store is not None
        start = clock_of(self._loop)()
        try:
            stored = await self._store.load(call.key, call.checksum)
        except Exception as error:  # a store's failure makes its tier decline
            self._hand_on(store_failed(call.key, "get", start, clock_of(self._loop)(), error))
            failure = StoreError(f"{type(error).__name__}: {error}")
            failure.__cause__ = error
            self._loads.pop((call.key, call.checksum), None)
            load.fail(failure)
            return
        if stored is not None:
            self.cache.remember(call.key, call.checksum, stored.cfg, Provenance("persistent", stored.report))
        self._loads.pop((call.key, call.checksum), None)
        load.succeed(stored)

    def _why_not_tune(self, call: _Call, *, on_purpose: bool = False) -> str | None:
        """Say why the autotune tier declines, or None where it may tune."""
        policy, known = call.policy, call.known
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
        if (failed := self._tuning.failure(call.key, call.checksum)) is not None:
            return f"the last tune failed ({failed[1]}) and is tried again in {failed[0]:.0f} s"
        if (
            self.forbid_reautotune
            and self.cache.was_cleared(call.key, call.checksum)
            and self._tuning.has_tuned(call.key, call.checksum)
        ):
            return "tuned before and then removed; use retune to tune it again, or forbid_reautotune=False"
        return None

    def _begin(self, call: _Call, *, background: bool = False, on_purpose: bool = False) -> tuple[Tune[Cfg], bool]:
        known, inv, policy = call.known, call.inv, call.policy
        job: TuneJob[Cfg] = TuneJob(
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
            emit=self._hand_on,
        )
        return self._tuning.begin(job, policy, background=background, on_purpose=on_purpose)

    async def _wait(self, tune: Tune[Cfg], wait_s: float | None) -> Done[Cfg] | None:
        """Return what the tune found, or None if that takes longer than `wait_s`."""
        if wait_s is None:
            return await self._tuning.wait(tune)
        with anyio.move_on_after(wait_s):
            return await self._tuning.wait(tune)
        return None

    # ---------------------------------------------------------------------------------------
    # What `choose_nowait` leaves for the loop.

    def _later(self, call: _Call) -> Selection[Cfg] | None:
        """Decline for the tiers that would have to wait, and have the loop catch up on them."""
        call.declined.setdefault("persistent", "not asked, since this call cannot wait")
        return call.decline("autotune", self._queue(self._untraced(call) if call.known.traced else call))

    def _queue(self, call: _Call) -> str:
        """Have the loop tune this key, and say so; or say why not."""
        if (why := self._why_not_tune(call)) is not None:
            return self._if_frozen(call, why)
        if isinstance(self.cache.peek(call.key, call.checksum), Pending):
            return "a tune is pending, and this call cannot wait"
        if not self._tuning.owns_tunes or self._loop is None:
            return "this call cannot wait, and background tuning needs the chain's `async with`"
        address = (call.key, call.checksum)
        if address not in self._queued:
            call.settings = current_settings()  # of this thread, which need not be the loop's
            self._queued.add(address)
            self._inbox.append((copy_context(), call))
            self._loop.post(lambda: self._mail.set())
        return "queued for the background, since this call cannot wait"

    def _untraced(self, call: _Call) -> _Call:
        """Return the call with shapes in the place of tracers, which must not outlive their trace."""
        import jax

        from asel.benchmark import abstract

        args, kwargs = jax.tree_util.tree_map(abstract, (tuple(call.inv.args), dict(call.inv.kwargs)))
        inv = replace(call.inv, args=args, kwargs=kwargs)
        record_invocation(*call.key, call.kernel, args, kwargs)
        return _Call(inv, call.kernel, self._keys.resolve(inv, call.kernel), call.policy, call.start)

    async def _serve_inbox(self, tasks: TaskGroup) -> None:
        while True:
            while self._inbox:
                context, call = self._inbox.popleft()
                context.run(tasks.start_soon, self._catch_up, call)  # in the caller's telemetry context
            self._mail = anyio.Event()
            await self._mail.wait()

    async def _catch_up(self, call: _Call) -> None:
        try:
            if self._store is not None and await self._load(call) is not None:
                return
        except StoreError:
            pass  # told by an event already; the tune can do without
        finally:
            self._queued.discard((call.key, call.checksum))
            woken, self._caught_up = self._caught_up, anyio.Event()
            woken.set()
        if isinstance(self.cache.peek(call.key, call.checksum), Miss) and self._why_not_tune(call) is None:
            self._begin(call, background=True)

    # ---------------------------------------------------------------------------------------
    # Telling.

    def _emit(self, kind: type[Event], call: _Call, **facts: Any) -> None:
        if self._events.wants(kind):
            self._hand_on(kind(key=call.key, start=call.start, end=clock_of(self._loop)(), **facts))

    def _hand_on(self, event: Event) -> None:
        """Give an event to the sinks, on the loop if there is one: sinks need no locks."""
        if self._loop is None or self._loop.is_current() or not self._loop.post(partial(self._events, event)):
            self._events(event)

    def _if_frozen(self, call: _Call, why: str) -> str:
        if self._frozen:
            self._emit(LateTune, call)
        return why


def _why_memory_declines(found: Any) -> str:
    if isinstance(found, Pending):
        return "a tune is pending"
    return "memory has it for other candidates" if isinstance(found, Miss) and found.stale else "memory missed"


def _says(tier: Tier, cfg: Any, says: str, why_not: str) -> TierSays[Any]:
    return TierSays(tier, cfg, why_not if cfg is None else says)


def _no_config(call: _Call) -> NoConfigError:
    key, policy = call.key, call.policy
    hints = []
    if call.known.heuristic is None:
        hints.append("give the kernel a heuristic_cfg")
    elif not policy.allow_heuristics:
        hints.append("allow heuristics with AutotunePolicy(allow_heuristics=True)")
    if not policy.allow_autotune:
        hints.append("allow autotuning with AutotunePolicy(allow_autotune=True)")
    said = ", ".join(why for tier, why in call.declined.items() if tier not in ("override", "overlay"))
    advice = ", or ".join(hints) or "pass a config as the invocation's override_cfg"
    return NoConfigError(
        f"no config for {key.op_id!r} on {key.device!r} (key {key.call_key[:8]}): {said}. "
        f"{advice[0].upper()}{advice[1:]}.",
        key=key,
        declined=call.declined,
    )
