"""`ConfigSelectorChain`: the selector's public methods."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Generic, Self

from asel.errors import InvalidRequestError
from asel.events import Event, EventStream, Sink
from asel.events.context import Statistics, inside_a_tune
from asel.events.dispatcher import Dispatcher
from asel.kernels.candidates import same_config
from asel.kernels.kernel import Cfg, Invocation, Kernel, Out, check_request
from asel.kernels.key_memo import KeyMemo, Resolved
from asel.runtime.jax_settings import Settings, current_settings, with_settings
from asel.runtime.loop import raise_interrupts_at_awaits
from asel.runtime.scopes import open_scopes
from asel.selection.background_pace import BackgroundLimits, BackgroundPace
from asel.selection.cache import ConfigCache
from asel.selection.call import Call
from asel.selection.lifetime import Lifetime, is_second_interrupt
from asel.selection.memory_answer import MemoryAnswer
from asel.selection.options import (
    checked_bool,
    checked_cache,
    checked_on_event,
    checked_policy,
    checked_seconds,
    checked_sinks,
)
from asel.selection.policy import AutotunePolicy, effective_policy, lockstep_policy
from asel.selection.results import Explanation, Selection, Tier
from asel.selection.selector_state import SelectorState
from asel.selection.store_access import StoreAccess
from asel.selection.tier_walk import TierWalk
from asel.selection.tunes import Tunes
from asel.selection.withdrawal import Fault
from asel.stores.config_store import as_config_store
from asel.telemetry import default_sinks
from asel.tuning.foreign_tuner import as_tuner
from asel.tuning.outcomes import TuneReport
from asel.tuning.runnable import Programs
from asel.tuning.tuner import Tuner

__all__ = ["ConfigSelectorChain"]


class ConfigSelectorChain(Generic[Cfg, Out]):
    """Chooses the config that a call should run with.

    Use it as an async context manager: its task group then owns every tune, and tunes outlive the
    callers that began them. Without `async with`, a tune runs inside its first caller.

    Leaving the context cancels tunes in flight. A thread that is compiling or measuring gets
    `close_grace_s` seconds to finish its step; the `closed` event names the steps that did not. Then queued
    telemetry, and sinks that are called from threads, get `close_grace_s` seconds as well.
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
        preload: bool = True,
        max_background_tunes: int | None = None,
        background_duty_cycle: float = 1.0,
        background_idle_s: float | None = None,
    ) -> None:
        self.cache: ConfigCache[Cfg] = ConfigCache() if cache is None else checked_cache(cache)
        self.tuner = Tuner() if tuner is None else tuner
        self.persistent = persistent
        self.persist_autotune = checked_bool("persist_autotune", persist_autotune)
        self.preload = checked_bool("preload", preload)
        self._state = SelectorState(
            checked_bool("forbid_reautotune", forbid_reautotune), checked_seconds("close_grace_s", close_grace_s)
        )
        self._keys = KeyMemo(keys_in_memory=self.cache.key_count)
        self._events = Dispatcher(
            default_sinks() if sinks is None else checked_sinks(sinks), checked_on_event(on_event), self.statistics
        )
        self._calls = 0
        limits = BackgroundLimits(max_background_tunes, background_duty_cycle, background_idle_s)
        timeout_s = checked_seconds("store_timeout_s", store_timeout_s)
        store = as_config_store(persistent)
        self.changes_together = store is not None and store.changes_together
        if self.changes_together and not persist_autotune:
            raise InvalidRequestError("persist_autotune=False: over jax://, ranks agree on a config by storing it")
        self.policy = AutotunePolicy() if policy is None else policy
        self._store: StoreAccess[Cfg] | None = None
        if store is not None:
            self._store = StoreAccess(
                store, self.cache, self._events, timeout_s=timeout_s, keeps_tunes=persist_autotune
            )
        if limits.idle_s is not None:  # only then are calls counted, since counting makes a hit 3% slower
            self.answer_from_memory = self._count_and_answer  # type: ignore[method-assign]
        pace = BackgroundPace(limits, lambda: self._calls)
        self._tunes: Tunes[Cfg] = Tunes(self._state, self.cache, as_tuner(self.tuner), self._store, self._events, pace)
        self._tunes.in_lockstep = self.changes_together
        self._tiers: TierWalk[Cfg] = TierWalk(self._events, self._keys, self.cache, self._store, self._tunes)
        self._lifetime = Lifetime(self._state, self._events, self._store, self._tunes)

    @property
    def policy(self) -> AutotunePolicy:
        """The policy of the current task, with its overrides."""
        policy = effective_policy(self._policy, self)
        return lockstep_policy(policy) if self.changes_together else policy

    @policy.setter
    def policy(self, policy: AutotunePolicy) -> None:
        checked = checked_policy(policy)
        self._policy = lockstep_policy(checked) if self.changes_together else checked

    @property
    def forbid_reautotune(self) -> bool:
        """Whether a key that was tuned and then removed is tuned again only by `retune`."""
        return self._state.forbid_reautotune

    @forbid_reautotune.setter
    def forbid_reautotune(self, forbid: bool) -> None:
        self._state.forbid_reautotune = forbid

    @property
    def close_grace_s(self) -> float:
        """How many seconds a step, a save or a sink may take to end once the chain closes."""
        return self._state.close_grace_s

    @close_grace_s.setter
    def close_grace_s(self, seconds: float) -> None:
        self._state.close_grace_s = checked_seconds("close_grace_s", seconds)

    # ---------------------------------------------------------------------------------------
    # Choosing.

    async def choose(self, inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out]) -> Cfg:
        """Return the config `inv` should run with.

        Callers with equal keys share one tune. Cancelling a caller ends its wait; the tune continues
        for the others and for the store.

        Raises:
            NoConfigError: every tier declined.
            TuningError: the tune failed, and heuristics are not allowed.
            InvalidRequestError: `inv` is not an invocation, or not one of `kernel`.
            UnstableKeyError: an argument has no stable identity.
            SelectorClosedError: the chain closed before there was an answer.
        """
        start = self._events.now() if self._events.listening else 0.0
        resolved = self._keys.resolve(inv, kernel)
        if (
            inv.override_cfg is None
            and inv.op_id == kernel.op_id
            and (cfg := self.answer_from_memory(resolved, start)) is not None
        ):
            return cfg
        return (await self._walk(self._call(inv, kernel, resolved))).cfg

    async def select(self, inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out]) -> Selection[Cfg]:
        """Return the config, the tier that it came from, and why the earlier tiers declined.

        Raises what `choose` raises.
        """
        return await self.answer(self._call(inv, kernel))

    def call_elsewhere(self, inv: Any, kernel: Any, settings: Settings | None = None) -> Call:
        """Return a call that may be passed to `answer` in another thread, with shapes in the place of tracers.

        It carries this thread's JAX settings, or else `settings`. `explain`, `retune` and `withdraw` accept it in the
        place of an invocation.
        """
        if settings is not None and settings != current_settings():
            return with_settings(settings, partial(self.call_elsewhere, inv, kernel))
        call = self._call(inv, kernel)
        if call.resolved.traced:
            call = call.without_tracers(self._keys)
        call.settings = current_settings()
        return call

    async def answer(self, call: Call) -> Selection[Cfg]:
        """Do the same as `select`, for a call made by `call_elsewhere`."""
        selection = await self._walk(call)
        return selection if selection.checksum else replace(selection, checksum=call.checksum)

    async def _walk(self, call: Call) -> Selection[Cfg]:
        if self._lifetime.use_loop():  # the selector is not open, so each caller may have its own loop
            call.start = self._events.now()
        return await self._tiers.walk(call)

    def choose_nowait(self, inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out]) -> Cfg:
        """Return the config `inv` should run with, without waiting.

        Never awaits and never measures, so it is safe while JAX traces and from any thread. In an
        open chain, a key without an answer is tuned in the background, if the policy allows it.

        Raises:
            NoConfigError: neither override, overlay, memory nor heuristics had an answer.
        """
        start = self._events.now() if self._events.listening else 0.0
        resolved = self._keys.resolve(inv, kernel)
        if (
            inv.override_cfg is None
            and inv.op_id == kernel.op_id
            and (cfg := self.answer_from_memory(resolved, start)) is not None
        ):
            return cfg
        return self._tiers.walk_nowait(self._call(inv, kernel, resolved)).cfg

    def answer_from_memory(self, resolved: Resolved[Cfg], start: float | None = None) -> Cfg | None:
        """Return the memory tier's last answer to a call without an override, if it is current.

        A walk would give the same answer: no overlay or policy override is active, and neither the cache nor the
        policy has changed since.
        """
        last: MemoryAnswer[Cfg] | None = resolved.memory_answer
        if last is None or not last.is_current(self._policy) or open_scopes() or self._state.closed:
            return None
        if self.cache.max_entries is not None:
            self.cache.touch(resolved.key, last.checksum)
        if self._events.listening:
            self._events.hit(resolved.key, last.cfg, self._events.now() if start is None else start)
        return last.cfg

    def _count_and_answer(self, resolved: Resolved[Cfg], start: float | None = None) -> Cfg | None:
        self._calls += 1
        return type(self).answer_from_memory(self, resolved, start)

    def _call(self, inv: Any, kernel: Any, resolved: Resolved[Any] | None = None) -> Call:
        if isinstance(inv, Call):  # made by `call_elsewhere`
            return inv
        resolved = resolved or self._keys.resolve(inv, kernel)
        check_request(inv, kernel)
        self._state.refuse_if_closed(resolved.key)
        self._calls += 1
        return Call(inv, kernel, resolved, self.policy, self._events.now())

    # ---------------------------------------------------------------------------------------
    # Other requests.

    async def explain(self, inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out]) -> Explanation[Cfg]:
        """Return what every tier would answer to this call, changing nothing and emitting nothing.

        Raises:
            InvalidRequestError: the chain is open in another event loop, or the request is invalid.
        """
        self._lifetime.check_loop()
        return await self._tiers.explain(self._call(inv, kernel))

    async def retune(self, inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out]) -> Cfg:
        """Measure again, replace the config, and return the new one; until then the old config answers.

        Raises:
            NoConfigError: tuning is not allowed here.
            TuningError: nothing could be measured; the old config stays in force.
        """
        call = self._call(inv, kernel)
        self._lifetime.use_loop()
        return await self._tiers.retune(call)

    async def withdraw(
        self,
        inv: Any,
        kernel: Any,
        cfg: Cfg,
        error: Exception,
        *,
        tier: Tier = "memory",
        instead: Cfg | None = None,
        evidence: str = "reported by a caller of withdraw",
    ) -> bool:
        """Withdraw a config that failed in a real call; return False if the chain does not answer with it (any more).

        `instead` takes its place, by default the next best of its tune. If nothing else was measured, the key is tuned
        again without `cfg`. Withdraw only a config at fault: make sure first that another one runs with the same
        arguments and that this one fails again, as an `Executor` does. `evidence` is part of the `winner_failed` event.

        After the policy's `retry_after_s`, and twice as long each time it fails again, the config is a candidate again:
        the next call of the key has an open chain tune it in the background.
        """
        if self.changes_together:  # the other ranks keep the config
            return False
        self._lifetime.use_loop()
        call = self._call_that_was_answered(inv, kernel)
        fault = Fault(call.query(), cfg, error, tier, instead, call.start, evidence, call.policy.retry_after_s)
        return await self._tunes.withdrawal.withdraw(fault, self._lifetime.tasks)

    async def find_report(self, inv: Any, kernel: Any, cfg: Cfg) -> TuneReport[Cfg] | None:
        """Return the report of the tune that chose `cfg`, from memory or else from the store; None if there is none."""
        self._lifetime.use_loop()
        call = self._call_that_was_answered(inv, kernel)
        for report in self.cache.reports(call.key):
            if report.checksum == call.checksum and same_config(report.winner, cfg):
                return report
        return None if self._store is None else await self._store.load_report(call.query(), cfg)

    def _call_that_was_answered(self, inv: Any, kernel: Any) -> Call:
        if isinstance(inv, Call):
            return inv
        resolved = self.resolve(inv, kernel)
        check_request(inv, kernel)
        return Call(inv, kernel, resolved, self.policy, self._events.now())

    def resolve(self, inv: Any, kernel: Any) -> Resolved[Cfg]:
        """Return the key and everything else that depends on a kernel and a call's signature alone."""
        return self._keys.resolve(inv, kernel)

    def check_loop(self) -> None:
        """Check that the chain may be awaited here.

        Raises:
            InvalidRequestError: the chain is open in another event loop.
        """
        self._lifetime.check_loop()

    def keep_programs(self) -> Programs:
        """Have tunes keep the compiled programs of their winners, and return the collection."""
        return self._tunes.requests.keep_programs()

    def statistics(self) -> Statistics:
        """Return the numbers of tunes, waiters and queued keys at the moment; may be called from any thread."""
        tunes = ((tune.request.key.op_id, tune.waiters) for tune in self._tunes.shared.in_flight)
        return Statistics.of(tunes, self._tunes.background_queue.size)

    async def settled(self) -> None:
        """Return once every tune in flight or in the queue has ended.

        Raises:
            InvalidRequestError: the chain is open in another event loop.
        """
        self._lifetime.check_loop()
        await self._tunes.settled()

    def freeze(self) -> None:
        """Begin no more tunes; a call that would have begun one emits `late_tune`."""
        self._state.frozen = True

    def events(self, buffer: int = 4096) -> AbstractAsyncContextManager[EventStream]:
        """Yield a stream of the events, for one reader, until the chain closes or the block ends.

        Raises:
            InvalidRequestError: the chain is open in another event loop.
        """
        return self._lifetime.stream(buffer)

    # ---------------------------------------------------------------------------------------
    # Opening and closing.

    async def __aenter__(self) -> Self:
        await self.aopen()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._lifetime.close(hurried=is_second_interrupt(error))

    async def aopen(self) -> None:
        """Open the chain until `aclose`, as its `async with` block does; any task may call this.

        Raises:
            InvalidRequestError: it is open already.
        """
        helpers = [helper for helper in (self.tuner, self.persistent) if hasattr(helper, "__aenter__")]
        raise_interrupts_at_awaits(self.__aexit__, self.aclose)
        # The ranks of a cluster open at different moments, so they might load different records.
        await self._lifetime.open(helpers, preload=self.preload and not self.changes_together)

    async def aclose(self) -> None:
        """Close the chain, as the end of its `async with` block does; any task of its loop may call this.

        Closing a closed chain does nothing. While another task is closing it, this waits for that task.

        Raises:
            InvalidRequestError: the chain is open in another event loop, or the caller is one of its own tunes.
        """
        self._lifetime.check_loop()
        if inside_a_tune() in {tune.id for tune in self._tunes.shared.in_flight}:
            raise InvalidRequestError(
                "aclose: called inside a tune of this chain, for which closing waits; call it in another task"
            )
        await self._lifetime.close()
