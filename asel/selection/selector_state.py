"""The state of a selector: whether it is frozen or closed, and the settings that its owner may change."""

from __future__ import annotations

from dataclasses import dataclass

from asel.errors import SelectorClosedError
from asel.kernels.keys import CacheKey

__all__ = ["SelectorState"]


@dataclass(slots=True)
class SelectorState:
    """Shared by the parts of a selector, and written only by the selector and its `Lifetime`."""

    forbid_reautotune: bool
    close_grace_s: float
    closed: bool = False
    frozen: bool = False
    hurried: bool = False
    """The program was interrupted while closing: no thread is waited for."""

    def grace_s(self) -> float:
        """Return how long closing waits for the thread of a cancelled step, and for a result to be stored."""
        return self.close_grace_s if self.closed and not self.hurried else 0.0

    def refuse_if_closed(self, key: CacheKey) -> None:
        if self.closed:
            raise SelectorClosedError(f"cannot select a config for {key.op_id!r}: the selector is closed")
