"""The rules for whether a call may begin or join a tune, with the reason if it may not."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from asel.events import LateTune
from asel.events.dispatcher import Dispatcher
from asel.kernels.keys import CacheKey
from asel.runtime.bounded_memo import BoundedMemo
from asel.selection.cache import ConfigCache
from asel.selection.cache_entries import Pending
from asel.selection.call import Call, emit
from asel.selection.policy import tuning_switched_off
from asel.selection.selector_state import SelectorState
from asel.selection.untuned_warnings import UntunedWarnings
from asel.tuning.outcomes import TuneReport
from asel.tuning.request import MAX_LESSONS

__all__ = ["TuneHistory", "TuneRules"]

_MAX_REMEMBERED = 65_536
_MAX_KERNELS = 256
_FROZEN = "the chain is frozen"
_NOT_OPEN = "background tuning needs the chain's `async with`"
_OPEN_IT = (
    "Open it with `async with selector:`, or tune ahead of time with `warm_up` or `autotune_recorded`. To run on "
    'heuristics, say so with AutotunePolicy(cache_miss_fallback="heuristics").'
)
_ASKED_AGAIN = "The kernel is asked for its candidates again at the next call; its key is tuned once it returns them."


class TuneHistory:
    """The tunes of one selector by key and checksum, and the keys that must wait after a failed tune."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._tuned: BoundedMemo[bool] = BoundedMemo(_MAX_REMEMBERED)
        self._failures: BoundedMemo[tuple[float, str]] = BoundedMemo(_MAX_REMEMBERED)
        # The newest reports of each kernel and device, over all versions, for new calls to learn from.
        self._reports: BoundedMemo[deque[TuneReport[Any]]] = BoundedMemo(_MAX_KERNELS)

    def note_tuned(self, key: CacheKey, checksum: str) -> None:
        self._tuned.put((key, checksum), True)

    def note_failed(self, key: CacheKey, checksum: str, message: str, retry_at: float) -> None:
        self._failures.put((key, checksum), (retry_at, message))

    def note_report(self, report: TuneReport[Any]) -> None:
        kernel = _kernel_of(report.key)
        if (reports := self._reports.get(kernel)) is None:
            self._reports.put(kernel, reports := deque(maxlen=MAX_LESSONS))
        reports.appendleft(report)

    def reports_on(self, key: CacheKey) -> tuple[TuneReport[Any], ...]:
        """Return the reports of this selector's tunes of a key's kernel, over all calls, newest first."""
        return tuple(self._reports.get(_kernel_of(key)) or ())

    def has_tuned(self, key: CacheKey, checksum: str) -> bool:
        return self._tuned.get((key, checksum)) is not None

    def failure(self, key: CacheKey, checksum: str) -> tuple[float, str] | None:
        """Return how many more seconds a failed key must wait, and why it failed; None if it may be tuned."""
        failed = self._failures.get((key, checksum))
        if failed is None or failed[0] <= self._now():
            return None
        return failed[0] - self._now(), failed[1]

    def shift_clock(self, by_s: float) -> None:
        """Move the remembered times to a clock that is ahead by `by_s` seconds."""
        self._failures.replace_all(lambda failed: (failed[0] + by_s, failed[1]))


def _kernel_of(key: CacheKey) -> tuple[str, str]:
    return key.device, key.kernel_name


class TuneRules:
    """The rules of one selector. `is_open` returns whether it has a task group, which background tunes need."""

    def __init__(
        self,
        state: SelectorState,
        cache: ConfigCache[Any],
        history: TuneHistory,
        events: Dispatcher,
        untuned: UntunedWarnings,
        is_open: Callable[[], bool],
    ) -> None:
        self._state = state
        self._cache = cache
        self._history = history
        self._events = events
        self._untuned = untuned
        self._is_open = is_open

    def why_not(self, call: Call, *, on_purpose: bool = False) -> str | None:
        """Return why the autotune tier declines; None if the call may join or begin a tune."""
        policy = call.policy
        if not policy.allow_autotune:
            return "autotuning is off"
        if tuning_switched_off():
            return "ASEL_AUTOTUNE is off in the environment"
        if policy.cache_miss_fallback == "heuristics" and not on_purpose:
            return 'skipped, since cache_miss_fallback="heuristics"'
        if call.resolved.traced:
            return "the arguments are being traced, and nothing is measured with tracers"
        if isinstance(self._cache.peek(call.key, call.checksum), Pending):
            return None
        return self._why_not_begin(call, on_purpose)

    def _why_not_begin(self, call: Call, on_purpose: bool) -> str | None:
        """Return why no tune may begin; None if one may."""
        key, checksum = call.key, call.checksum
        if call.listing.no_candidates:
            return call.listing.no_candidates
        if not on_purpose:
            if call.policy.cache_miss_fallback == "background" and not self._is_open():
                return _NOT_OPEN
            if (failed := self._history.failure(key, checksum)) is not None:
                return f"the last tune failed ({failed[1]}) and is tried again in {failed[0]:.0f} s"
            was_removed = self._cache.was_cleared(key) and self._history.has_tuned(key, checksum)
            if self._state.forbid_reautotune and was_removed:
                return "tuned before and then removed; use retune to tune it again, or forbid_reautotune=False"
        return _FROZEN if self._state.frozen else None

    def flag(self, call: Call, why: str) -> str:
        """Emit an event or a warning for a reason that the user may not expect, and return the reason."""
        if why is _FROZEN:
            emit(self._events, LateTune, call)
        elif why is _NOT_OPEN:
            background = 'cache_miss_fallback="background" needs an open selector, and this one is not open'
            self._untuned.warn(call.key, background, _OPEN_IT)
        elif call.candidates_raised and why == call.listing.no_candidates and call.policy.allow_heuristics:
            self._untuned.warn(call.key, f"{why}, so its calls get the heuristic", _ASKED_AGAIN)
        return why

    def flag_not_queued(self, call: Call) -> str:
        """Warn that the key of a call that cannot wait is not tuned, and return the reason."""
        why = "this call cannot wait, and the selector is not open, so nothing tunes it in the background"
        self._untuned.warn(call.key, why, _OPEN_IT)
        return f"this call cannot wait, and {_NOT_OPEN}"
