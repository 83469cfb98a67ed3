"""The six tiers that may answer a call, with their events and their reasons to decline."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Generic

import anyio

from asel.errors import StoreError, TuningError
from asel.events import Autotuned, CacheHit, Event, Heuristics, OverlayHit, Override, Stale
from asel.events.context import inside_a_tune
from asel.events.dispatcher import Dispatcher
from asel.kernels.call_registry import record_invocation
from asel.kernels.kernel import Cfg
from asel.kernels.key_memo import KeyMemo
from asel.redaction import redact
from asel.runtime.scopes import open_scopes
from asel.runtime.shared_work import OtherLoopError
from asel.selection.cache import ConfigCache
from asel.selection.cache_entries import Done, Hit, Lookup, Miss, Pending
from asel.selection.call import Call, emit
from asel.selection.key_advice import KeyAdvice
from asel.selection.memory_answer import MemoryAnswer
from asel.selection.overlays import overlaid
from asel.selection.results import Selection, Tier, TierAnswer
from asel.selection.store_access import StoreAccess
from asel.selection.tunes import Tunes
from asel.stores.config_store import Stored

__all__ = ["AutotuneTier", "HeuristicsTier", "MemoryTier", "OverlayTier", "OverrideTier", "SelectionTier", "StoreTier"]

_MISS: Miss[Any] = Miss()
_NO_STORE = "there is no store"


class SelectionTier(Generic[Cfg]):
    """One tier. `look` changes nothing; `answer` also emits the event, or records the reason for declining."""

    name: ClassVar[Tier]
    event: ClassVar[type[Event]]
    says: ClassVar[str]
    waits: ClassVar[bool] = False
    """Whether `answer` may wait; if not, it is the same as `answer_nowait`."""

    def __init__(self, events: Dispatcher) -> None:
        self._events = events

    def look(self, call: Call) -> tuple[Cfg | None, str]:
        """Return the tier's config, or None and the reason."""
        raise NotImplementedError

    async def peek(self, call: Call) -> TierAnswer[Cfg]:
        """Return what the tier would answer, changing nothing."""
        return self._explained(*self.look(call))

    def _explained(self, cfg: Cfg | None, why_not: str) -> TierAnswer[Cfg]:
        return TierAnswer(self.name, cfg, why_not if cfg is None else self.says, cfg is not None)

    async def answer(self, call: Call) -> Selection[Cfg] | None:
        """Return the answer, or record the reason for declining."""
        return self.answer_nowait(call)

    def answer_nowait(self, call: Call) -> Selection[Cfg] | None:
        """Do the same without waiting."""
        return self._give(call, *self.look(call))

    def _give(
        self, call: Call, cfg: Cfg | None, why_not: str, report: Any = None, **facts: Any
    ) -> Selection[Cfg] | None:
        if cfg is None:
            return self._decline(call, why_not)
        emit(self._events, self.event, call, self.name, cfg=cfg, **facts)
        return call.answer(self.name, cfg, report)

    def _decline(self, call: Call, why: str) -> Selection[Cfg] | None:
        call.declined[self.name] = why
        return None


class OverrideTier(SelectionTier[Cfg]):
    name = "override"
    event = Override
    says = "the caller's own"

    def look(self, call: Call) -> tuple[Cfg | None, str]:
        return call.inv.override_cfg, "no override"


class OverlayTier(SelectionTier[Cfg]):
    name = "overlay"
    event = OverlayHit
    says = "an active overlay has the key"

    def look(self, call: Call) -> tuple[Cfg | None, str]:
        return overlaid(call.key), "no overlay has the key"


class MemoryTier(SelectionTier[Cfg]):
    name = "memory"
    event = CacheHit
    says = "in memory"

    def __init__(self, events: Dispatcher, cache: ConfigCache[Cfg]) -> None:
        super().__init__(events)
        self._cache = cache
        self._advice = KeyAdvice(events)

    def look(self, call: Call) -> tuple[Cfg | None, str]:
        return self._usable(call, self._cache.peek(call.key, call.checksum, call.listing.candidates))

    def _usable(self, call: Call, found: Lookup[Cfg]) -> tuple[Cfg | None, str]:
        if isinstance(found, Hit):
            is_refused = found.provenance.foreign and call.policy.match_environment == "exact"
            return None if is_refused else found.cfg, "memory has a config measured with other software"
        if isinstance(found, Pending):
            return None, "a tune is pending"
        if isinstance(found, Miss) and found.stale:
            return None, "memory has a config for other candidates"
        return None, "memory missed"

    def answer_nowait(self, call: Call) -> Selection[Cfg] | None:
        self._advice.emit_churn(call)
        generation = self._cache.generation  # before the look-up: if it changes meanwhile, the answer is not current
        found = self._lookup(call)
        cfg, why_not = self._usable(call, found)
        if isinstance(found, Hit) and cfg is not None:
            if not open_scopes():
                call.resolved.memory_answer = MemoryAnswer(cfg, call.checksum, call.policy, self._cache, generation)
            return self._give(call, cfg, why_not, found.provenance.report, level="memory")
        if isinstance(found, Miss):
            for checksum, stale in found.stale:
                emit(self._events, Stale, call, cfg=stale, checksum=checksum, expected=call.checksum)
        self._advice.emit_out_of_range(call)
        return self._decline(call, why_not)

    def _lookup(self, call: Call) -> Lookup[Cfg]:
        # Without an entry no checksum is needed, so the kernel need not list its candidates.
        if not self._cache.holds(call.key):
            return _MISS
        return self._cache.lookup(call.key, call.checksum, call.listing.candidates)


class StoreTier(SelectionTier[Cfg]):
    name = "persistent"
    event = CacheHit
    says = "stored"
    waits = True

    def __init__(
        self, events: Dispatcher, cache: ConfigCache[Cfg], store: StoreAccess[Cfg] | None, tunes: Tunes[Cfg]
    ) -> None:
        super().__init__(events)
        self._cache = cache
        self._store = store
        self._tunes = tunes

    async def peek(self, call: Call) -> TierAnswer[Cfg]:
        if self._store is None:
            return self._explained(None, _NO_STORE)
        try:
            return self._explained(*_usable(await self._store.peek(call.query())))
        except StoreError as error:
            return self._explained(None, _failure(error))

    async def answer(self, call: Call) -> Selection[Cfg] | None:
        if self._store is None:
            return self._decline(call, _NO_STORE)
        if isinstance(self._cache.peek(call.key, call.checksum), Pending):
            return self._decline(call, "not read, since a tune is pending")
        try:
            with within_wait_s(call, self._events):
                stored = await self._store.load(call.query())
                report = None if stored is None else stored.report
                return self._give(call, *_usable(stored), report, level="persistent")
        except StoreError as error:
            return self._decline(call, _failure(error))
        self._tunes.read_later(call)
        return self._decline(call, _too_late(call))

    def answer_nowait(self, call: Call) -> Selection[Cfg] | None:
        return self._decline(call, "not asked, since this call cannot wait")


def _usable(stored: Stored[Cfg] | None) -> tuple[Cfg | None, str]:
    return None if stored is None else stored.cfg, "store missed"


def _too_late(call: Call) -> str:
    return f"no answer within wait_s={call.policy.wait_s:g}"


def _failure(error: StoreError) -> str:
    return f"store failed: {redact(error)}"


class AutotuneTier(SelectionTier[Cfg]):
    name = "autotune"
    event = Autotuned
    says = "tuned"
    waits = True

    def __init__(
        self,
        events: Dispatcher,
        cache: ConfigCache[Cfg],
        keys: KeyMemo,
        tunes: Tunes[Cfg],
        memory: MemoryTier[Cfg] | None,
    ) -> None:
        super().__init__(events)
        self._cache = cache
        self._keys = keys
        self._tunes = tunes
        # With a store, memory is asked again: a tune may have ended while the store was read.
        self._memory = memory

    async def peek(self, call: Call) -> TierAnswer[Cfg]:
        """Return what the tier would do; if it would tune, the answer has no config."""
        if (why := self._tunes.rules.why_not(call)) is not None:
            return TierAnswer(self.name, None, why, answers=False)
        background = call.policy.cache_miss_fallback == "background"
        would = f"would tune {len(call.listing.candidates)} candidates" + (" in the background" if background else "")
        waits = not background and not inside_a_tune()
        pending = self._cache.peek(call.key, call.checksum)
        if isinstance(pending, Pending):
            would = f"tune {pending.tune.id} is in flight"
            waits = waits and call.policy.on_pending == "wait"
        elif lessons := await self._tunes.lessons(call):
            would += f", learning from {lessons} earlier tune{'s' * (lessons > 1)} of the kernel"
        return TierAnswer(self.name, None, would, answers=waits)

    async def answer(self, call: Call) -> Selection[Cfg] | None:
        if self._memory is not None:
            if (answer := self._memory.answer_nowait(call)) is not None:
                return answer
            self._tunes.refuse_if_closed(call)
        if call.resolved.traced or inside_a_tune():
            # Tracers cannot be measured, and a tune that waits for a tune may wait for itself.
            return self.answer_nowait(call)
        if (why := self._tunes.rules.why_not(call)) is not None:
            return self._decline(call, self._tunes.rules.flag(call, why))
        background = call.policy.cache_miss_fallback == "background"
        try:
            with within_wait_s(call, self._events):
                done = await self._tunes.join(call, background=background)
                if done is not None:
                    return self._found(call, done)
                why = "tuning in the background" if background else 'a tune is pending, and on_pending="heuristics"'
                return self._decline(call, why)
        except OtherLoopError as error:
            if not call.policy.allow_heuristics:
                raise
            return self._decline(call, redact(error))
        except TuningError as error:
            if not call.policy.allow_heuristics:
                raise
            return self._decline(call, f"the tune failed: {redact(error)}")
        return self._decline(call, _too_late(call))

    def answer_nowait(self, call: Call) -> Selection[Cfg] | None:
        """Have the event loop tune the key for later calls."""
        if not call.resolved.traced:
            return self._decline(call, self._tunes.queue(call))
        untraced = call.without_tracers(self._keys)
        if not untraced.resolved.traced:  # a closure may still hold a tracer, which must not outlive its trace
            record_invocation(*call.key, call.kernel, untraced.inv.args, untraced.inv.kwargs)
        return self._decline(call, self._tunes.queue(untraced))

    def _found(self, call: Call, done: Done[Cfg]) -> Selection[Cfg]:
        """Answer with the result of a tune: this process's, or the record of another process's."""
        report = done.provenance.report
        if done.provenance.source == "autotune":
            emit(self._events, Autotuned, call, self.name, cfg=done.cfg)
            return call.answer(self.name, done.cfg, report)
        emit(self._events, CacheHit, call, "persistent", cfg=done.cfg, level="persistent")
        return call.answer("persistent", done.cfg, report)


class HeuristicsTier(SelectionTier[Cfg]):
    name = "heuristics"
    event = Heuristics
    says = "the kernel's guess"

    def look(self, call: Call) -> tuple[Cfg | None, str]:
        if not call.policy.allow_heuristics:
            return None, "heuristics are off"
        return call.resolved.heuristic, call.resolved.no_heuristic


@contextmanager
def within_wait_s(call: Call, events: Dispatcher) -> Iterator[None]:
    """End the block once the call has waited for `wait_s` in total."""
    if call.policy.wait_s is None:
        yield
        return
    left = call.start + call.policy.wait_s - events.now()
    with anyio.move_on_after(max(0.0, left)):
        yield
