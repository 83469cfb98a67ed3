"""The seven tiers, in the order in which they are asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Generic, NoReturn

import anyio

from asel.answers import Selection
from asel.cache import ConfigCache, Done, Hit, Miss, Pending, overlaid
from asel.calls import Call, asking, tell
from asel.errors import NoConfigError, SelectorClosedError, StoreError, TuningError
from asel.events import (
    Autotuned,
    CacheHit,
    CallerLeft,
    Event,
    Heuristics,
    NoAnswer,
    OutOfRange,
    OverlayHit,
    Override,
    Stale,
)
from asel.explaining import why_memory_declines
from asel.fanout import FanOut
from asel.kernel import Cfg
from asel.keys import KeyMemo
from asel.memo import Memo
from asel.misses import Misses, Standing
from asel.reading import Reading
from asel.redaction import redact
from asel.registry import record_invocation
from asel.scopes import any_scope_here
from asel.tuning import inside_a_tune

__all__ = ["Tiers"]


class Tiers(Generic[Cfg]):
    """Walks a call from tier to tier until one has an answer, and tells which had it.

    A tier answers with a `Selection`, or notes why it has none.
    """

    def __init__(
        self,
        standing: Standing,
        keys: KeyMemo,
        cache: ConfigCache[Cfg],
        reading: Reading[Cfg] | None,
        misses: Misses[Cfg],
        events: FanOut,
    ) -> None:
        self._standing = standing
        self._keys = keys
        self._cache = cache
        self._reading = reading
        self._misses = misses
        self._events = events
        self._seen_outside: Memo[bool] = Memo(65_536)

    async def walk(self, call: Call) -> Selection[Cfg]:
        """Return the first answer, waiting for the store and a tune where the call may."""
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

    def walk_nowait(self, call: Call) -> Selection[Cfg]:
        """Return the first answer that is there; what would have to be waited for is left to the loop."""
        return (
            self._override(call)
            or self._overlay(call)
            or self._memory(call)
            or self._later(call)
            or self._heuristics(call)
            or self._error(call)
        )

    async def retune(self, call: Call) -> Cfg:
        """Return what a tune that was asked for on purpose finds, past all tiers."""
        why = self._misses.why_not_tune(call, on_purpose=True)
        if why is None and inside_a_tune():
            why = "asked from inside a tune, which must not wait for another"
        if why is not None:
            call.decline("autotune", why)
            raise call.no_config()
        with self._asking(call):
            done = await self._misses.tune(call, on_purpose=True)
            assert done is not None
            self._tell(Autotuned, call, cfg=done.cfg)
        return done.cfg

    def _override(self, call: Call) -> Selection[Cfg] | None:
        if call.inv.override_cfg is None:
            return call.decline("override", "no override")
        self._tell(Override, call, cfg=call.inv.override_cfg)
        return call.answer("override", call.inv.override_cfg)

    def _overlay(self, call: Call) -> Selection[Cfg] | None:
        cfg = overlaid(call.key)
        if cfg is None:
            return call.decline("overlay", "no overlay has the key")
        self._tell(OverlayHit, call, cfg=cfg)
        return call.answer("overlay", cfg)

    def _memory(self, call: Call) -> Selection[Cfg] | None:
        generation = self._cache.generation  # read first: a change after it closes the lane again
        found = self._cache.lookup(call.key, call.checksum)
        if isinstance(found, Hit) and found.provenance.foreign and call.policy.match_environment == "exact":
            return call.decline("memory", "memory has what was measured with other software")
        if isinstance(found, Hit):
            if not any_scope_here():
                call.known.lane = (generation, call.policy, found.cfg)
            for asked_before in ("memory", "persistent"):  # as after a store read, when memory is asked again
                call.declined.pop(asked_before, None)
            self._tell(CacheHit, call, level="memory", cfg=found.cfg)
            return call.answer("memory", found.cfg, found.provenance.report)
        if isinstance(found, Miss):
            for checksum, done in found.stale:
                self._tell(Stale, call, cfg=done.cfg, checksum=checksum, expected=call.checksum)
        self._tell_outside(call)
        return call.decline("memory", why_memory_declines(found))

    async def _persistent(self, call: Call) -> Selection[Cfg] | None:
        if self._reading is None:
            return call.decline("persistent", "there is no store")
        if isinstance(self._cache.peek(call.key, call.checksum), Pending):
            return call.decline("persistent", "store missed, or a tune would not be pending")
        try:
            with self._patience(call):
                stored = await self._reading.load(self._misses.sought(call))
                if stored is None:
                    return call.decline("persistent", "store missed")
                self._tell(CacheHit, call, level="persistent", cfg=stored.cfg)
                return call.answer("persistent", stored.cfg, stored.report)
        except StoreError as error:
            return call.decline("persistent", f"store failed: {redact(error)}")
        self._misses.read_later(call)
        return call.decline("persistent", f"no answer within wait_s={call.policy.wait_s:g}")

    async def _autotune(self, call: Call) -> Selection[Cfg] | None:
        if self._reading is not None:
            # The store was awaited since memory was asked: a tune may have ended, or the chain.
            if (answer := self._memory(call)) is not None:
                return answer
            self._standing.refuse_if_closed(call.key)
        if call.known.traced or inside_a_tune():
            # Nothing is measured with tracers; and a tune that waits for a tune may wait for itself.
            return self._later(call)
        if (why := self._misses.why_not_tune(call)) is not None:
            return call.decline("autotune", self._misses.flag_if_late(call, why))
        policy, background = call.policy, call.policy.cache_miss_fallback == "background"
        try:
            with self._patience(call):
                done = await self._misses.tune(call, background=background)
                if done is not None:
                    return self._found(call, done)
                why = "tuning in the background" if background else 'a tune is pending, and on_pending="heuristics"'
                return call.decline("autotune", why)
        except TuningError as error:
            if not policy.allow_heuristics:
                raise
            return call.decline("autotune", f"the tune failed: {redact(error)}")
        return call.decline("autotune", f"no answer within wait_s={policy.wait_s:g}")

    def _found(self, call: Call, done: Done[Cfg]) -> Selection[Cfg]:
        """Answer with what a tune found, or with the record of another process's."""
        if done.provenance.source == "autotune":
            self._tell(Autotuned, call, cfg=done.cfg)
            return call.answer("autotune", done.cfg, done.provenance.report)
        call.declined.pop("persistent", None)
        self._tell(CacheHit, call, level="persistent", cfg=done.cfg)
        return call.answer("persistent", done.cfg, done.provenance.report)

    def _heuristics(self, call: Call) -> Selection[Cfg] | None:
        if not call.policy.allow_heuristics:
            return call.decline("heuristics", "heuristics are off")
        if call.known.heuristic is None:
            return call.decline("heuristics", call.known.no_heuristic)
        self._tell(Heuristics, call, cfg=call.known.heuristic)
        return call.answer("heuristics", call.known.heuristic)

    def _error(self, call: Call) -> NoReturn:
        self._tell(NoAnswer, call, reason="no_config")
        raise call.no_config()

    def _later(self, call: Call) -> Selection[Cfg] | None:
        """Decline for the tiers that would have to wait, and have the loop catch up on them."""
        call.declined.setdefault("persistent", "not asked, since this call cannot wait")
        if call.known.traced:
            untraced = call.without_tracers(self._keys)
            if not untraced.known.traced:  # a closure may still hold a tracer, which must not outlive its trace
                record_invocation(*call.key, call.kernel, untraced.inv.args, untraced.inv.kwargs)
            return call.decline("autotune", self._misses.queue(untraced))
        return call.decline("autotune", self._misses.queue(call))

    @contextmanager
    def _patience(self, call: Call) -> Iterator[None]:
        """Wait inside the block no longer than the caller allows, over all that it waits for."""
        if call.policy.wait_s is None:
            yield
            return
        left = call.start + call.policy.wait_s - self._events.now()
        with anyio.move_on_after(max(0.0, left)):
            yield

    def _tell(self, kind: type[Event], call: Call, **facts: Any) -> None:
        tell(self._events, kind, call, **facts)

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
            self._tell(NoAnswer, call, reason="tune_failed")
            raise
        except BaseException as error:
            self._tell(CallerLeft, call, reason=_why_left(error))
            raise
        finally:
            asking.set(before)  # not by token: a coroutine that nobody awaits ends in another context

    def _tell_outside(self, call: Call) -> None:
        """Tell once for each key that its shape lies outside the kernel's declared buckets."""
        if call.known.outside and self._seen_outside.get(call.key) is None:
            self._seen_outside.put(call.key, True)
            for dimension, size, low, high in call.known.outside:
                self._tell(OutOfRange, call, dimension=dimension, size=size, low=low, high=high)


def _why_left(error: BaseException) -> str:
    if isinstance(error, SelectorClosedError):
        return "closed"
    return type(error).__name__ if isinstance(error, Exception) else "cancelled"
