"""`ConfigSelectorChain`: what can be asked of it, the fast lane to its last answers, its life from open to closed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from types import TracebackType
from typing import Any, Generic, Self

import anyio
from anyio.abc import TaskGroup

from asel.adapters import as_tuner
from asel.answers import Explanation, Selection, Statistics, Tier
from asel.cache import ConfigCache
from asel.calls import Call
from asel.errors import InvalidRequestError
from asel.events import Closed, Event, EventStream, Sink
from asel.explaining import explain
from asel.fanout import FanOut
from asel.keeper import Keeper
from asel.kernel import Cfg, Invocation, Kernel, Out
from asel.keys import KeyMemo, Resolved
from asel.loop import LoopHandle
from asel.misses import Misses, Standing
from asel.persistence import as_persistence
from asel.policy import AutotunePolicy, effective_policy, objective_of
from asel.reading import Reading
from asel.scopes import any_scope_here
from asel.telemetry import default_sinks, gathered
from asel.telemetry.aside import Aside
from asel.threads import run_in_thread
from asel.tiers import Tiers
from asel.tuner import Tuner
from asel.tuning import Tuning
from asel.withdrawal import Fault, Withdrawal

__all__ = ["ConfigSelectorChain"]


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
        self._standing = Standing(forbid_reautotune, _checked_seconds("close_grace_s", close_grace_s))
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
        self._misses = Misses(self._standing, self.cache, self._tuning, self._reading, self._events)
        self._tiers = Tiers(self._standing, self._keys, self.cache, self._reading, self._misses, self._events)
        self._loop: LoopHandle | None = None
        self._tasks: TaskGroup | None = None
        self._helpers = AsyncExitStack()
        self._cut_short = 0

    @property
    def policy(self) -> AutotunePolicy:
        """The policy in force in the current task."""
        return effective_policy(self._policy, self)

    @policy.setter
    def policy(self, policy: AutotunePolicy) -> None:
        self._policy = _checked_policy(policy)

    @property
    def forbid_reautotune(self) -> bool:
        """Whether a key that was tuned and then removed is tuned again only by `retune`."""
        return self._standing.forbid_reautotune

    @forbid_reautotune.setter
    def forbid_reautotune(self, forbid: bool) -> None:
        self._standing.forbid_reautotune = forbid

    @property
    def close_grace_s(self) -> float:
        """How long a step, a save or a sink has to end once the chain closes."""
        return self._standing.close_grace_s

    @close_grace_s.setter
    def close_grace_s(self, seconds: float) -> None:
        self._standing.close_grace_s = _checked_seconds("close_grace_s", seconds)

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
        return await self._tiers.walk(call)

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
        return self._tiers.walk_nowait(self._call(inv, kernel, known)).cfg

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
            or self._standing.closed
        ):
            return None
        if cache.max_entries is not None:
            cache.touch(known.key, known.checksum(objective_of(self._policy)))
        if events.listening:
            events.hit(known.key, lane[2], start)
        return lane

    def _call(self, inv: Any, kernel: Any, known: Resolved[Any] | None = None) -> Call:
        known = known or self._keys.resolve(inv, kernel)
        self._standing.refuse_if_closed(known.key)
        return Call(inv, kernel, known, effective_policy(self._policy, self), self._events.now())

    # ---------------------------------------------------------------------------------------
    # What else can be asked.

    async def explain(self, inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out]) -> Explanation[Cfg]:
        """Tell what every tier would say to this call, changing nothing and emitting nothing."""
        call = self._call(inv, kernel)
        return await explain(call, self._misses.sought(call), self.cache, self._keeper, self._misses.why_not_tune(call))

    async def retune(self, inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out]) -> Cfg:
        """Measure again, on purpose, and replace what is known; until then the old config answers.

        Raises:
            NoConfigError: tuning is not allowed here.
            TuningError: nothing could be measured; what was known still is.
        """
        call = self._call(inv, kernel)
        if self._tasks is None:
            self._bind_loop()
        return await self._tiers.retune(call)

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
        fault = Fault(self._misses.sought(call), cfg, error, tier, instead, call.start)
        return await self._withdrawal.withdraw(fault, self._tasks)

    def resolve(self, inv: Any, kernel: Any) -> Resolved[Cfg]:
        """Return what follows from a kernel and a call's signature alone."""
        return self._keys.resolve(inv, kernel)

    def statistics(self) -> Statistics:
        """Return what this chain is doing at the moment; may be called from any thread."""
        return Statistics.of(
            ((tune.job.key.op_id, tune.waiters) for tune in self._tuning.in_flight), self._misses.backlog.size
        )

    async def settled(self) -> None:
        """Return once every tune this chain has in flight or in its queue has ended."""
        while not (self._misses.backlog.is_empty and self._tuning.is_idle):
            await self._misses.backlog.until_empty()
            await self._tuning.settled()

    def freeze(self) -> None:
        """Begin no tune from here on; a call that would have begun one emits `late_tune`."""
        self._standing.frozen = True

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
        self._standing.closed = False
        async with AsyncExitStack() as stack:
            for helper in (self.tuner, self.persistent):
                if hasattr(helper, "__aenter__"):
                    await stack.enter_async_context(helper)
            self._helpers = stack.pop_all()
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tuning.open(self._tasks)
        assert self._loop is not None
        self._misses.backlog.open(self._loop)
        self._cut_short = 0
        self._tasks.start_soon(self._serve_backlog, self._tasks)
        if self._keeper is not None:
            self._tasks.start_soon(self._keeper.serve)
        return self

    async def _serve_backlog(self, tasks: TaskGroup) -> None:
        try:
            await self._misses.backlog.serve(tasks)
        finally:
            # Cancelled, by `__aexit__` or from outside while the body is still shielded: either way the
            # task group takes no more tunes.
            self._stop()

    def _stop(self) -> None:
        """Refuse new calls, and end every wait with SelectorClosedError."""
        self._standing.closed = True
        self._misses.backlog.close()
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


def _checked_policy(policy: Any) -> AutotunePolicy:
    if not isinstance(policy, AutotunePolicy):
        raise InvalidRequestError(f"policy={policy!r} is not an AutotunePolicy")
    return policy


def _checked_seconds(name: str, seconds: Any) -> float:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds >= 0:
        raise InvalidRequestError(f"ConfigSelectorChain: {name}={seconds!r} must be seconds, zero or more")
    return seconds
