"""Checks of a selector's parameters: an invalid one is refused with its value in the message."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from asel.errors import InvalidRequestError
from asel.events import Event, Sink
from asel.events.deferred_sinks import DeferredSinks
from asel.selection.cache import ConfigCache
from asel.selection.policy import AutotunePolicy

__all__ = ["checked_bool", "checked_cache", "checked_on_event", "checked_policy", "checked_seconds", "checked_sinks"]


def checked_cache(cache: Any) -> ConfigCache[Any]:
    if not isinstance(cache, ConfigCache):
        raise InvalidRequestError(f"ConfigSelectorChain: cache={cache!r} is not an asel.ConfigCache")
    return cache


def checked_policy(policy: Any) -> AutotunePolicy:
    if not isinstance(policy, AutotunePolicy):
        raise InvalidRequestError(f"policy={policy!r} is not an AutotunePolicy")
    return policy


def checked_bool(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequestError(f"ConfigSelectorChain: {name}={value!r} must be True or False")
    return value


def checked_seconds(name: str, seconds: Any) -> float:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds >= 0:
        raise InvalidRequestError(f"ConfigSelectorChain: {name}={seconds!r} must be seconds, zero or more")
    return seconds


def checked_on_event(on_event: Any) -> Callable[[Event], object] | None:
    if on_event is not None and not callable(on_event):
        raise InvalidRequestError(f"ConfigSelectorChain: on_event={on_event!r} is not a function of an event")
    return on_event  # type: ignore[no-any-return]


def checked_sinks(sinks: Any) -> tuple[Sink | DeferredSinks, ...]:
    if not isinstance(sinks, Iterable):
        raise InvalidRequestError(f"ConfigSelectorChain: sinks={sinks!r} is not a list; write sinks=[...]")
    checked = tuple(sinks)
    for sink in checked:
        if isinstance(sink, type):
            raise InvalidRequestError(
                f"ConfigSelectorChain: {sink!r} among the sinks is a class; write {sink.__name__}()"
            )
        if not isinstance(sink, DeferredSinks) and not callable(getattr(sink, "emit", None)):
            raise InvalidRequestError(f"ConfigSelectorChain: {sink!r} among the sinks has no emit(event)")
    return checked
