"""Compares a candidate's outputs with the incumbent's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from asel.errors import InvalidRequestError
from asel.runtime.lazy_module import LazyModule

if TYPE_CHECKING:
    import numpy as np
else:
    np = LazyModule("numpy", globals(), "np")

__all__ = ["Check", "ExpectedOutputs", "OutputCheck", "OutputMismatch", "Outputs", "as_check"]

Check = Callable[[Sequence[Any], Sequence[Any]], str | None]
"""Takes the incumbent's outputs and a candidate's; returns a description of the difference, or None."""


class OutputMismatch(Exception):
    """A candidate's outputs differ from the incumbent's."""


class Outputs(list[Any]):
    """The outputs of a run as arrays on the host, with their structure and their JAX types.

    A type is None if the output was not a jax.Array.
    """

    def __init__(self, arrays: Sequence[Any], structure: str, types: Sequence[str | None] = ()) -> None:
        super().__init__(arrays)
        self.structure = structure
        self.types = types


class ExpectedOutputs:
    """The outputs that a tune's candidates must have: those of the incumbent, or else of the first that runs."""

    def __init__(self) -> None:
        self._outputs: list[Any] | None = None
        self._nan: dict[str, frozenset[int]] = {}

    @property
    def are_known(self) -> bool:
        return self._outputs is not None

    def compare(self, outputs: list[Any], check: Check) -> None:
        """Store the first outputs as expected, and compare all others with them.

        Raises:
            OutputMismatch: they differ.
        """
        if self._outputs is None:
            self._outputs = outputs
        elif (wrong := check(self._outputs, outputs)) is not None:
            raise OutputMismatch(wrong)

    def refuse_new_nan(self, found: frozenset[int], how: str, *, is_incumbent: bool) -> None:
        """Compare a candidate's outputs with NaN to those of the incumbent, or else of the first, in the same mode.

        Raises:
            OutputMismatch: it has NaN in an output that should have none.
        """
        if is_incumbent:
            self._nan[how] = found
        elif new := found - self._nan.setdefault(how, found):
            raise OutputMismatch(f"output {min(new)} has nan, and the incumbent's has none")


@dataclass(frozen=True, slots=True)
class OutputCheck:
    """Compares structure, shapes, types and values, and names the largest difference.

    Integers and booleans must be equal. Other numbers may differ by `atol` plus `rtol` times the expected value. The
    default of `rtol` is 1e-7 for 64 bits; 1e-3 for 32 bits, because devices may use fewer in matrix products; and four
    units in the last place for fewer bits, 0.25 at most. The default of `atol` is that number times the output's root
    mean square, since a sum that cancels out is only as precise as its terms; for an output of zeros, it is squared.

    If all expected outputs are entirely NaN, nothing can be compared, and no candidate passes.
    """

    rtol: float | None = None
    atol: float | None = None

    def __call__(self, expected: Sequence[Any], actual: Sequence[Any]) -> str | None:
        if len(expected) != len(actual):
            return f"{len(actual)} outputs in the place of {len(expected)}"
        structures = [getattr(outputs, "structure", None) for outputs in (expected, actual)]
        if None not in structures and structures[0] != structures[1]:
            return f"the outputs are {structures[1]} in the place of {structures[0]}"
        for number, (wanted, got) in enumerate(zip(expected, actual, strict=True)):
            for what in ("shape", "dtype"):
                if getattr(wanted, what) != getattr(got, what):
                    return f"output {number} has {what} {getattr(got, what)} in the place of {getattr(wanted, what)}"
        types = [getattr(outputs, "types", ()) for outputs in (expected, actual)]
        for number, (wanted, got) in enumerate(zip(*types, strict=False)):
            if None not in (wanted, got) and wanted != got:
                return f"output {number} is of type {got} in the place of {wanted}"
        if expected and all(_is_all_nan(wanted) for wanted in expected):
            return "all outputs are nan, so nothing can be compared; give the kernel example_inputs that have a result"
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
        """Return whether only one side is nan somewhere, and the largest difference; None if they are close."""
        tolerance = _tolerance(wanted.dtype)
        if tolerance is None:
            if np.array_equal(wanted, got):
                return None
            return False, float(max(abs(int(a) - int(b)) for a, b in _unequal(wanted, got)))
        wide = np.complex128 if np.iscomplexobj(wanted) else np.float64
        wanted, got = wanted.astype(wide), got.astype(wide)
        rtol = tolerance if self.rtol is None else self.rtol
        atol = tolerance * (_root_mean_square(wanted) or tolerance) if self.atol is None else self.atol
        if np.allclose(got, wanted, rtol, atol, equal_nan=True):
            return None
        with np.errstate(invalid="ignore"):
            difference = np.abs(wanted - got)
        is_nan = not np.array_equal(np.isnan(wanted), np.isnan(got))
        return is_nan, float(np.nanmax(difference, initial=0.0))


def _tolerance(dtype: Any) -> float | None:
    """Return the relative rounding error to tolerate for a dtype; None if values must be equal."""
    import jax.numpy as jnp  # to NumPy alone, bfloat16 is not a number

    if not jnp.issubdtype(dtype, jnp.inexact):
        return None
    eps = float(jnp.finfo(dtype).eps)  # type: ignore[no-untyped-call]
    # With 0.25 for `rtol` and `atol`, neither twice the largest number nor zero in its place passes.
    return 1e-7 if eps < 1e-10 else 1e-3 if eps < 1e-5 else min(4 * eps, 0.25)


def _is_all_nan(array: Any) -> bool:
    return bool(array.size) and _tolerance(array.dtype) is not None and bool(np.isnan(array).all())


def _unequal(wanted: Any, got: Any) -> list[tuple[Any, Any]]:
    """Return the first pairs that differ, whose difference is computed in Python: NumPy's integers may overflow."""
    wanted, got = wanted.ravel(), got.ravel()
    places = np.flatnonzero(wanted != got)[:10_000]
    return list(zip(wanted[places], got[places], strict=True))


def _root_mean_square(values: Any) -> float:
    finite = np.abs(values[np.isfinite(values)])
    largest = float(np.max(finite, initial=0.0))
    # Scaled, so that no square overflows.
    return largest * float(np.sqrt(np.mean((finite / largest) ** 2))) if largest else 0.0


def as_check(check: Any) -> Check | None:
    """Return the check for a user's argument: True for the default, or a function that returns a verdict."""
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
