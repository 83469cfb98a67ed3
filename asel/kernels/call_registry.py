"""Calls recorded while JAX traced, to be tuned later."""

from __future__ import annotations

import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from asel.kernels.kernel import Invocation
from asel.kernels.keys import CacheKey
from asel.runtime.jax_settings import Settings, current_settings

__all__ = ["Recorded", "RecordedCall", "clear_invocations", "get_invocations", "record_invocation", "recorded_calls"]

Recorded = tuple[Any, tuple[Any, ...], dict[str, Any]]
_MAX_RECORDED = 10_000
_lock = threading.Lock()
_recorded: OrderedDict[CacheKey, RecordedCall] = OrderedDict()


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A recorded call and how often it was seen."""

    key: CacheKey
    kernel: Any
    invocation: Any
    seen: int = 1
    settings: Settings | None = None
    """JAX's settings at the call, which are part of its key; None if JAX was not imported yet."""


def _after_fork() -> None:
    # A thread of the parent may have held the lock; the child does not have that thread.
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def record_invocation(
    dev: str,
    op_id: str,
    call_key: str,
    kernel: Any,
    args: Iterable[Any],
    kwargs: Mapping[str, Any],
    *,
    invocation: Any = None,
    seen: int = 1,
) -> None:
    """Record a call. At most 10,000 calls are kept; the least recently recorded are dropped first.

    Pass `invocation` for a call under `shard_map`: it has the mesh and the specs.
    """
    key = CacheKey(dev, op_id, call_key)
    if invocation is None:
        invocation = Invocation(getattr(kernel, "op_id", op_id), (), {})
    invocation = replace(invocation, args=tuple(args), kwargs=dict(kwargs))
    settings = None if "jax" not in sys.modules else current_settings()
    with _lock:
        before = _recorded.get(key)
        times = seen + (0 if before is None else before.seen)
        _recorded[key] = RecordedCall(key, kernel, invocation, times, settings)
        _recorded.move_to_end(key)
        while len(_recorded) > _MAX_RECORDED:
            _recorded.popitem(last=False)


def recorded_calls(dev: str | None = None) -> list[RecordedCall]:
    """Return the calls recorded for one device or for all, the most frequent first."""
    with _lock:
        found = [call for key, call in _recorded.items() if dev is None or key.device == dev]
    return sorted(found, key=lambda call: -call.seen)


def get_invocations(dev: str) -> dict[str, dict[str, Recorded]]:
    """Return copies of the calls recorded for a device: op -> call key -> (kernel, args, kwargs)."""
    found: dict[str, dict[str, Recorded]] = {}
    with _lock:
        for key, call in _recorded.items():
            if key.device == dev:
                recorded = (call.kernel, call.invocation.args, dict(call.invocation.kwargs))
                found.setdefault(key.op_id, {})[key.call_key] = recorded
    return found


def clear_invocations(dev: str | None = None) -> None:
    """Forget the calls recorded for one device or for all."""
    with _lock:
        for key in [key for key in _recorded if dev is None or key.device == dev]:
            del _recorded[key]
