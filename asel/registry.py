"""Calls worth tuning later: recorded while JAX traces, tuned in a batch."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from asel.errors import AselError
from asel.kernel import Invocation
from asel.keys import CacheKey, device_fingerprint
from asel.policy import policy_override

if TYPE_CHECKING:
    from asel.selection import ConfigSelectorChain

__all__ = ["BatchSummary", "autotune_recorded", "clear_invocations", "get_invocations", "record_invocation", "warm_up"]

Recorded = tuple[Any, tuple[Any, ...], dict[str, Any]]
_MAX_RECORDED = 10_000
_lock = threading.Lock()
_recorded: OrderedDict[CacheKey, Recorded] = OrderedDict()


def record_invocation(
    dev: str, op_id: str, call_key: str, kernel: Any, args: Iterable[Any], kwargs: Mapping[str, Any]
) -> None:
    """Remember a call. At most 10,000 are kept; the least recently recorded go first."""
    key = CacheKey(dev, op_id, call_key)
    with _lock:
        _recorded[key] = (kernel, tuple(args), dict(kwargs))
        _recorded.move_to_end(key)
        while len(_recorded) > _MAX_RECORDED:
            _recorded.popitem(last=False)


def get_invocations(dev: str) -> dict[str, dict[str, Recorded]]:
    """Return what was recorded for a device: op -> call key -> (kernel, args, kwargs), as copies."""
    found: dict[str, dict[str, Recorded]] = {}
    with _lock:
        for key, (kernel, args, kwargs) in _recorded.items():
            if key.device == dev:
                found.setdefault(key.op_id, {})[key.call_key] = (kernel, args, dict(kwargs))
    return found


def clear_invocations(dev: str | None = None) -> None:
    """Forget what was recorded, for one device or for all."""
    with _lock:
        for key in [key for key in _recorded if dev is None or key.device == dev]:
            del _recorded[key]


@dataclass(frozen=True, slots=True)
class BatchSummary:
    """What became of each call of a batch: its config, or why it has none."""

    chosen: dict[CacheKey, Any] = field(default_factory=dict)
    failed: list[tuple[str, AselError]] = field(default_factory=list)

    def as_overlay(self) -> dict[tuple[str, str, str], Any]:
        """Return the chosen configs as a mapping for `overlay_cache`."""
        return {(key.device, key.op_id, key.call_key): cfg for key, cfg in self.chosen.items()}


async def autotune_recorded(selector: ConfigSelectorChain[Any, Any], dev: str | None = None) -> BatchSummary:
    """Select a config for every recorded call of a device, tuning where there is none."""
    recorded = get_invocations(device_fingerprint() if dev is None else dev)
    calls = [call for by_key in recorded.values() for call in by_key.values()]
    return await _select_all(
        selector, [(kernel, Invocation(kernel.op_id, args, kwargs)) for kernel, args, kwargs in calls]
    )


async def warm_up(selector: ConfigSelectorChain[Any, Any], examples: Iterable[tuple[Any, Any]]) -> BatchSummary:
    """Select a config for each `(kernel, example)`: an invocation, or a tuple of arguments."""
    calls = []
    for kernel, example in examples:
        if isinstance(example, tuple):
            args, kwargs = kernel.prepare(*example) if hasattr(kernel, "prepare") else (example, {})
            example = Invocation(kernel.op_id, args, kwargs)
        calls.append((kernel, example))
    return await _select_all(selector, calls)


async def _select_all(selector: ConfigSelectorChain[Any, Any], calls: Iterable[tuple[Any, Any]]) -> BatchSummary:
    summary = BatchSummary()
    # A batch is there to wait for its tunes, however patient the selector's own callers are.
    with policy_override(selector, cache_miss_fallback="autotune", on_pending="wait", wait_s=None):
        for kernel, inv in calls:
            try:
                selection = await selector.select(inv, kernel)
            except AselError as error:
                summary.failed.append((kernel.op_id, error))
            else:
                summary.chosen[selection.key] = selection.cfg
    return summary
