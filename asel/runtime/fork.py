"""Locks renewed in the child of a fork."""

from __future__ import annotations

import os
import weakref
from typing import Any, Protocol

__all__ = ["renew_after_fork"]


class Renewable(Protocol):
    """An object that may be copied by a fork in the middle of a change."""

    def renew(self) -> None:
        """Make new locks, and drop work that only the parent's threads could finish."""


_owners: weakref.WeakSet[Any] = weakref.WeakSet()


def renew_after_fork(owner: Renewable) -> None:
    """Call `owner.renew()` in the child of every fork.

    A fork copies a held lock, but not the thread that would release it. The owner is held weakly.
    """
    _owners.add(owner)


def _renew_all() -> None:
    for owner in list(_owners):
        owner.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)
