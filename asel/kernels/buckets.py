"""Buckets: declared ranges of a dimension whose sizes share an answer."""

from __future__ import annotations

import bisect
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from asel.errors import InvalidRequestError

__all__ = ["Bucketing", "Outside", "powers_of_two"]

_DOUBLE_QUOTED = re.compile(r"\[\"([^\"']*)\"\]")
_SPEC = re.compile(r"(?P<root>args\[\d+\]|kwargs\['[^']*'\]|[A-Za-z_]\w*)(?P<inner>.*)\.shape\[(?P<axis>-?\d+)\]")


def powers_of_two(low: int, high: int) -> tuple[int, ...]:
    """Return the powers of two from `low` to `high`, both included, both powers of two."""
    for name, bound in (("low", low), ("high", high)):
        if not _is_size(bound) or bound < 1 or bound & (bound - 1):
            raise InvalidRequestError(f"powers_of_two: {name}={bound!r} is not a power of two")
    if low > high:
        raise InvalidRequestError(f"powers_of_two: low={low} is above high={high}")
    return tuple(1 << n for n in range(low.bit_length() - 1, high.bit_length()))


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class Outside(NamedTuple):
    """A dimension that no declared bucket covers."""

    dimension: str
    size: int
    low: int
    high: int


class Bucketing:
    """The buckets of one kernel, by the path of the array.

    A size is rounded up to the next bound, and a bucket is tuned at that bound. A size below the first bound or above
    the last is outside the declared range and counts exactly.
    """

    def __init__(self, declared: Mapping[str, Sequence[int]], parameters: inspect.Signature | None) -> None:
        self._axes: dict[str, list[tuple[int, str, tuple[int, ...]]]] = {}
        for spec, bounds in declared.items():
            match = _SPEC.fullmatch(_DOUBLE_QUOTED.sub(r"['\1']", spec))
            if match is None:
                raise InvalidRequestError(
                    f"bucket {spec!r} does not name a dimension: write a parameter of run and its axis, "
                    "as in 'q.shape[1]' or \"cache['k'].shape[0]\""
                )
            ordered = _checked_bounds(spec, bounds)
            for path in _paths(spec, match["root"], parameters):
                self._axes.setdefault(path + match["inner"], []).append((int(match["axis"]), spec, ordered))

    def apply(self, path: str, shape: tuple[int, ...]) -> tuple[tuple[Any, ...], list[Outside]]:
        """Return the shape with its bucketed dimensions coarsened, and the dimensions outside their declared range."""
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
                outside.append(Outside(spec, size, bounds[0], bounds[-1]))
        return tuple(dims), outside

    def upper_bounds(self, path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape at which this shape's bucket is tuned."""
        return tuple(dim[1] if isinstance(dim, tuple) else dim for dim in self.apply(path, shape)[0])


def _checked_bounds(spec: str, bounds: Any) -> tuple[int, ...]:
    ordered = tuple(bounds) if isinstance(bounds, Iterable) and not isinstance(bounds, str) else ()
    if not ordered or not all(map(_is_size, ordered)) or list(ordered) != sorted(set(ordered)):
        raise InvalidRequestError(f"bucket {spec!r} needs sizes in ascending order, not {bounds!r}")
    return ordered


def _paths(spec: str, root: str, parameters: inspect.Signature | None) -> list[str]:
    if root.startswith(("args[", "kwargs[")):
        return [root]
    named = {} if parameters is None else dict(parameters.parameters)
    positional = [p.name for p in named.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    open_ended = parameters is None or any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in named.values())
    if root not in named and not open_ended:
        raise InvalidRequestError(f"bucket {spec!r}: run has no parameter {root!r}, only {', '.join(named)}")
    by_name = f"kwargs[{root!r}]"  # a parameter may be passed either way
    return [f"args[{positional.index(root)}]", by_name] if root in positional else [by_name]
