"""Configs that answer some keys for the current task and the tasks it starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asel.runtime.scopes import Scope, Stack, open_scopes

__all__ = ["overlaid", "overlay_cache", "without_overlays"]


_overlays: Stack[Mapping[tuple[str, str, str], Any]] = Stack()
without_overlays = _overlays.cleared


class overlay_cache(Scope[Mapping[tuple[str, str, str], Any]]):
    """Answer some keys with given configs, for the current task and those it starts.

    Overlays nest: the innermost one that has a key wins. Nothing is written to memory or a store. A value of
    None counts as absent.
    """

    _stack = _overlays

    def __init__(self, mapping: Mapping[tuple[str, str, str], Any]) -> None:
        self._mapping = dict(mapping)

    def _value(self) -> Mapping[tuple[str, str, str], Any]:
        return self._mapping


def overlaid(key: tuple[str, str, str]) -> Any:
    """Return the config the innermost active overlay has for `key`, or None."""
    if open_scopes():
        for mapping in reversed(_overlays.values()):
            if (cfg := mapping.get(key)) is not None:
                return cfg
    return None
