"""Candidates as a product of values, less those that a condition rules out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import product
from typing import Any

from asel.errors import InvalidRequestError

__all__ = ["Space"]


class Space:
    """The configs made of one value for each field, `where` a condition holds: `Space(m=[64, 128], n=[64, 128])`.

    A config is a dict, or with `Space(Blocks, m=..., n=...)` what `Blocks(m=..., n=...)` is. The condition sees the
    values as attributes and as items, `c.m` and `c["m"]`. Iterating gives the configs anew each time, in the order of a
    nested loop; a kernel's `candidate_cfgs` may return a space as it is.
    """

    def __init__(
        self,
        cfg_type: Callable[..., Any] = dict,
        /,
        *,
        where: Callable[[Any], Any] | None = None,
        **fields: Iterable[Any],
    ) -> None:
        self._cfg_type = cfg_type
        self._where = where
        self._fields: dict[str, tuple[Any, ...]] = {}
        for name, values in fields.items():
            if isinstance(values, str) or not isinstance(values, Iterable):
                raise InvalidRequestError(f"Space: {name}={values!r} must be the values that it may have, in a list")
            self._fields[name] = tuple(values)
            if not self._fields[name]:
                raise InvalidRequestError(f"Space: {name} has no values")

    def __iter__(self) -> Iterator[Any]:
        for values in product(*self._fields.values()):
            chosen = _Choice(zip(self._fields, values, strict=True))
            if self._where is None or self._where(chosen):
                yield self._cfg_type(**chosen)

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={list(values)}" for name, values in self._fields.items())
        return f"Space({fields}{', where=...' if self._where else ''})"


class _Choice(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the space has no field {name!r}") from None
