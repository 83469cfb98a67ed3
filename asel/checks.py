"""Whether a candidate computes what the incumbent does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from asel.errors import InvalidRequestError

__all__ = ["OutputCheck", "OutputMismatch", "as_check"]

Check = Callable[[Sequence[Any], Sequence[Any]], str | None]
"""Takes the incumbent's outputs and a candidate's; returns what is wrong, or None."""


class OutputMismatch(Exception):
    """A candidate's outputs differ from the incumbent's."""


@dataclass(frozen=True, slots=True)
class OutputCheck:
    """Compares outputs as numpy.allclose does, and names the largest difference."""

    rtol: float = 1e-3
    atol: float = 1e-5

    def __call__(self, expected: Sequence[Any], actual: Sequence[Any]) -> str | None:
        if len(expected) != len(actual):
            return f"{len(actual)} outputs in the place of {len(expected)}"
        for number, (wanted, got) in enumerate(zip(expected, actual, strict=True)):
            if wanted.shape != got.shape:
                return f"output {number} has shape {got.shape} in the place of {wanted.shape}"
        pairs = zip(expected, actual, strict=True)
        differing = [(*found, number) for number, pair in enumerate(pairs) if (found := self._difference(*pair))]
        if not differing:
            return None
        is_nan, largest, number = max(differing)
        if not is_nan:
            return f"output {number} differs by up to {largest:.3g}"
        elsewhere = f", and differs by up to {largest:.3g} elsewhere" if largest else ""
        return f"output {number} is nan where the other is not{elsewhere}"

    def _difference(self, wanted: Any, got: Any) -> tuple[bool, float] | None:
        """Return whether one side alone is nan somewhere, and the largest difference; None where they are close."""
        wide = np.complex128 if np.iscomplexobj(wanted) or np.iscomplexobj(got) else np.float64
        wanted, got = wanted.astype(wide), got.astype(wide)
        if np.allclose(got, wanted, self.rtol, self.atol, equal_nan=True):
            return None
        with np.errstate(invalid="ignore"):
            difference = np.abs(wanted - got)
        is_nan = not np.array_equal(np.isnan(wanted), np.isnan(got))
        return is_nan, float(np.nanmax(difference, initial=0.0))


def as_check(check: Any) -> Check | None:
    """Return a check from what a user gave: True for the default one, or a function that says yes or no."""
    if check is None or check is False:
        return None
    if check is True:
        return OutputCheck()
    if not callable(check):
        raise InvalidRequestError(
            f"Tuner: check={check!r} is neither True, an OutputCheck nor a function of two outputs"
        )

    def checked(expected: Sequence[Any], actual: Sequence[Any]) -> str | None:
        verdict = check(expected, actual)
        if isinstance(verdict, str):
            return verdict
        return None if verdict is None or bool(verdict) else f"{check!r} says they differ"

    return checked
