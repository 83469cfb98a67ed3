"""Shapes that share an answer: declared ranges of a dimension."""

from __future__ import annotations

import bisect
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from asel.errors import InvalidRequestError

__all__ = ["Bucketing", "OutOfRange", "powers_of_two"]

_SPEC = re.compile(r"(?P<root>args\[\d+\]|kwargs\['[^']*'\]|[A-Za-z_]\w*)(?P<inner>.*)\.shape\[(?P<axis>-?\d+)\]")


def powers_of_two(low: int, high: int) -> tuple[int, ...]:
    """Return the powers of two from `low` to `high`, both included, both powers of two."""
    for name, bound in (("low", low), ("high", high)):
        if bound < 1 or bound & (bound - 1):
            raise InvalidRequestError(f"powers_of_two: {name}={bound} is not a power of two")
    if low > high:
        raise InvalidRequestError(f"powers_of_two: low={low} is above high={high}")
    return tuple(1 << n for n in range(low.bit_length() - 1, high.bit_length()))


class OutOfRange(NamedTuple):
    """A dimension that no declared bucket covers."""

    dimension: str
    size: int
    low: int
    high: int


class Bucketing:
    """The buckets of one kernel, by the path of the array they are about.

    A size counts as the smallest bound that is not below it. A size below the first bound or above
    the last is outside the declared range and stands for itself.
    """

    def __init__(self, declared: Mapping[str, Sequence[int]], run: Callable[..., Any]) -> None:
        self._axes: dict[str, list[tuple[int, str, tuple[int, ...]]]] = {}
        parameters = _positions(run)
        for spec, bounds in declared.items():
            match = _SPEC.fullmatch(spec)
            if match is None:
                raise InvalidRequestError(
                    f"bucket {spec!r} does not name a dimension: write a parameter of run and its axis, "
                    "as in 'q.shape[1]' or \"cache['k'].shape[0]\""
                )
            ordered = tuple(bounds)
            if not ordered or list(ordered) != sorted(set(ordered)):
                raise InvalidRequestError(f"bucket {spec!r} needs ascending bounds, not {ordered!r}")
            root, inner, axis = match["root"], match["inner"], int(match["axis"])
            for path in _paths(root, parameters):
                self._axes.setdefault(path + inner, []).append((axis, spec, ordered))

    def apply(self, path: str, shape: tuple[int, ...]) -> tuple[tuple[Any, ...], list[OutOfRange]]:
        """Return the shape with its bucketed dimensions coarsened, and what fell outside."""
        rules = self._axes.get(path)
        if rules is None:
            return shape, []
        dims: list[Any] = list(shape)
        outside = []
        for axis, spec, bounds in rules:
            if not -len(shape) <= axis < len(shape):
                raise InvalidRequestError(f"bucket {spec!r}: {path} has only {len(shape)} dimensions, shape {shape}")
            size = shape[axis]
            if bounds[0] <= size <= bounds[-1]:
                dims[axis] = ("up to", bounds[bisect.bisect_left(bounds, size)])
            else:
                outside.append(OutOfRange(spec, size, bounds[0], bounds[-1]))
        return tuple(dims), outside


def _positions(run: Callable[..., Any]) -> dict[str, int]:
    try:
        signature = inspect.signature(run)
    except (TypeError, ValueError):
        return {}
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return {p.name: i for i, p in enumerate(signature.parameters.values()) if p.kind in positional}


def _paths(root: str, parameters: Mapping[str, int]) -> list[str]:
    if root.startswith(("args[", "kwargs[")):
        return [root]
    by_name = f"kwargs[{root!r}]"  # a parameter may be passed either way
    return [f"args[{parameters[root]}]", by_name] if root in parameters else [by_name]
