"""Events that advise on avoidable tunes: constants with many values, and shapes outside of the buckets."""

from __future__ import annotations

from asel.events import KeyChurn, OutOfRange
from asel.events.dispatcher import Dispatcher
from asel.runtime.bounded_memo import BoundedMemo
from asel.selection.call import Call, emit

__all__ = ["KeyAdvice"]

_MAX_REMEMBERED = 65_536


class KeyAdvice:
    """Emits `key_churn` and `out_of_range`, for one selector."""

    def __init__(self, events: Dispatcher) -> None:
        self._events = events
        self._seen_outside: BoundedMemo[bool] = BoundedMemo(_MAX_REMEMBERED)

    def emit_churn(self, call: Call) -> None:
        """Report an op with many keys that differ in one constant only, with advice."""
        churn, call.resolved.churn = call.resolved.churn, None
        if churn is None:
            return
        advice = (
            f"{churn.keys} keys of {call.key.op_id} differ only in {churn.argument}, a constant: each of its values is "
            "tuned and kept by itself. If no config depends on it, pass it as an array or a NumPy scalar, "
            "or give the kernel a key_builder that leaves it out."
        )
        emit(self._events, KeyChurn, call, argument=churn.argument, keys=churn.keys, advice=advice)

    def emit_out_of_range(self, call: Call) -> None:
        """Report once for each key that a shape lies outside the kernel's declared buckets."""
        if call.resolved.outside and self._seen_outside.get(call.key) is None:
            self._seen_outside.put(call.key, True)
            for dimension, size, low, high in call.resolved.outside:
                emit(self._events, OutOfRange, call, dimension=dimension, size=size, low=low, high=high)
