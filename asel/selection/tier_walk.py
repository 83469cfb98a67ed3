"""The walk: asks the tiers in their order, and returns the first answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic

from asel.errors import NoConfigError, SelectorClosedError, TuningError
from asel.events import Autotuned, CallerLeft, NoAnswer
from asel.events.context import asking, inside_a_tune
from asel.events.dispatcher import Dispatcher
from asel.kernels.kernel import Cfg
from asel.kernels.key_memo import KeyMemo
from asel.selection.cache import ConfigCache
from asel.selection.call import Call, emit
from asel.selection.results import Explanation, Selection
from asel.selection.store_access import StoreAccess
from asel.selection.tiers import (
    AutotuneTier,
    HeuristicsTier,
    MemoryTier,
    OverlayTier,
    OverrideTier,
    SelectionTier,
    StoreTier,
)
from asel.selection.tunes import Tunes

__all__ = ["TierWalk"]


class TierWalk(Generic[Cfg]):
    """Walks a call from tier to tier."""

    def __init__(
        self,
        events: Dispatcher,
        keys: KeyMemo,
        cache: ConfigCache[Cfg],
        store: StoreAccess[Cfg] | None,
        tunes: Tunes[Cfg],
    ) -> None:
        self._events = events
        self._tunes = tunes
        memory = MemoryTier[Cfg](events, cache)
        self._tiers: tuple[SelectionTier[Cfg], ...] = (
            OverrideTier(events),
            OverlayTier(events),
            memory,
            StoreTier(events, cache, store, tunes),
            AutotuneTier(events, cache, keys, tunes, None if store is None else memory),
            HeuristicsTier(events),
        )

    async def walk(self, call: Call) -> Selection[Cfg]:
        """Return the first answer; wait for the store and for a tune if the policy allows it.

        Raises:
            NoConfigError: every tier declined.
        """
        with self._asking(call):
            self._tunes.retune_if_due(call)
            for tier in self._tiers:
                answer = await tier.answer(call) if tier.waits else tier.answer_nowait(call)
                if answer is not None:
                    return answer
            raise self._no_config(call)

    def walk_nowait(self, call: Call) -> Selection[Cfg]:
        """Return the first answer that needs no wait; the event loop reads the store and tunes.

        Raises:
            NoConfigError: every tier declined.
        """
        self._tunes.queue_retune_if_due(call)
        for tier in self._tiers:
            if (answer := tier.answer_nowait(call)) is not None:
                return answer
        raise self._no_config(call)

    async def explain(self, call: Call) -> Explanation[Cfg]:
        """Return what every tier would answer, changing nothing and emitting nothing."""
        return Explanation(call.key, call.checksum, tuple([await tier.peek(call) for tier in self._tiers]))

    async def retune(self, call: Call) -> Cfg:
        """Tune without asking the tiers, and return the winner.

        Raises:
            NoConfigError: tuning is not allowed here.
        """
        why = self._tunes.rules.why_not(call, on_purpose=True)
        if why is None and inside_a_tune():
            why = "asked from inside a tune, which must not wait for another"
        if why is not None:
            call.declined["autotune"] = why
            raise call.no_config()
        with self._asking(call):
            done = await self._tunes.join(call, on_purpose=True)
            assert done is not None
            emit(self._events, Autotuned, call, "autotune", cfg=done.cfg)
        return done.cfg

    def _no_config(self, call: Call) -> NoConfigError:
        emit(self._events, NoAnswer, call, reason="no_config")
        return call.no_config()

    @contextmanager
    def _asking(self, call: Call) -> Iterator[None]:
        """Mark the block as part of this call for telemetry, and emit an event if the call ends without an answer."""
        before = asking.get()
        asking.set(call.asked())
        try:
            yield
        except NoConfigError:
            raise  # `_no_config` has emitted its event
        except TuningError:
            emit(self._events, NoAnswer, call, reason="tune_failed")
            raise
        except BaseException as error:
            emit(self._events, CallerLeft, call, reason=_why_left(error))
            raise
        finally:
            asking.set(before)  # not by token: a coroutine that is never awaited ends in another context


def _why_left(error: BaseException) -> str:
    if isinstance(error, SelectorClosedError):
        return "closed"
    return type(error).__name__ if isinstance(error, Exception) else "cancelled"
