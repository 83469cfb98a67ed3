"""The state of a selector that its owner sets: frozen, closed, its grace on closing."""

from __future__ import annotations

from dataclasses import dataclass

from asel.errors import SelectorClosedError
from asel.kernels.keys import CacheKey

__all__ = ["SelectorState"]


@dataclass(slots=True)
class SelectorState:
    """Settings that may change while a selector is in use. Shared by its parts, written by the selector alone."""

    forbid_reautotune: bool
    close_grace_s: float
    closed: bool = False
    frozen: bool = False
    hurried: bool = False
    """The program was interrupted again while it was closing: no thread is waited for."""

    def grace_s(self) -> float:
        """Return how long a cancelled step is given to come back from its thread, and a result to be stored."""
        return self.close_grace_s if self.closed and not self.hurried else 0.0

    def refuse_if_closed(self, key: CacheKey) -> None:
        if self.closed:
            raise SelectorClosedError(f"cannot select a config for {key.op_id!r}: the selector is closed")
