"""The fields of configs, as columns of numbers that a model can compare."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["ConfigFields", "fields_of"]

Numbers = npt.NDArray[np.float64]
Codes = npt.NDArray[np.int64]

# A field whose values span this factor is a size: 64 and 128 are as far apart as 128 and 256.
_LOGARITHMIC_SPAN = 4.0
# Deeper parts of a config, which may refer to itself, are labels.
_MAX_DEPTH = 8
# Differences of larger numbers are not floats.
_MAX_NUMBER = 1e300
_SCALARS = (bool, int, float, str, bytes, type(None))


class ConfigFields:
    """A list of configs as columns.

    `numbers` has one column for each ordered field, scaled to 0..1, and after those one for the alignment of each
    field in which that is a different order. `codes` has one column for each field: equal values have equal codes. A
    field in which all configs agree has no column, and configs without fields have none at all.
    """

    def __init__(self, configs: Sequence[Any]) -> None:
        columns = _columns(configs)
        self.names = [name for name, values in columns.items() if _differ(values)]
        codes, sizes, alignments, self.ordered = list[Codes](), list[Numbers](), list[Numbers](), list[bool]()
        for name in self.names:
            levels, code = _levels(columns[name])
            codes.append(code)
            self.ordered.append(len(levels) > 1 and all(map(_is_on_a_scale, levels)))
            if self.ordered[-1]:
                sizes.append(_scaled(_size(np.array([float(level) for level in levels])))[code])
                if (twos := _alignment(levels)) is not None:
                    alignments.append(_scaled(twos)[code])
        count, numbers = len(configs), [*sizes, *alignments]
        self.codes: Codes = np.stack(codes, axis=1) if codes else np.zeros((count, 0), np.int64)
        self.numbers: Numbers = np.stack(numbers, axis=1) if numbers else np.zeros((count, 0))

    def __len__(self) -> int:
        return len(self.codes)

    def dominates(self, index: int) -> npt.NDArray[np.bool_]:
        """Return which configs are at least as large as this one in every ordered field, and like it in all others."""
        ordered = np.array(self.ordered, dtype=bool)
        larger = self.codes[:, ordered] >= self.codes[index, ordered]
        alike = self.codes[:, ~ordered] == self.codes[index, ~ordered]
        found: npt.NDArray[np.bool_] = larger.all(axis=1) & alike.all(axis=1)
        return found


def fields_of(cfg: Any) -> dict[str, Any]:
    """Return a config's fields by name, those of nested values with dotted names; {} for an opaque one."""
    found: dict[str, Any] = {}
    _collect(cfg, "", found, 0)
    return {} if list(found) == [""] and not _is_number(cfg) else found


def _collect(value: Any, name: str, found: dict[str, Any], depth: int) -> None:
    parts = _parts(value) if depth < _MAX_DEPTH else None
    if parts is None:
        found[name] = value if isinstance(value, _SCALARS) else _label(value)
        return
    for part, inner in parts:
        _collect(inner, f"{name}.{part}" if name else str(part), found, depth + 1)


def _parts(value: Any) -> Iterable[tuple[Any, Any]] | None:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f.name, getattr(value, f.name, None)) for f in dataclasses.fields(value) if f.compare]
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, tuple | list):
        return zip(getattr(value, "_fields", range(len(value))), value, strict=True)
    if (attributes := getattr(type(value), "__attrs_attrs__", None)) is not None:
        return [(one.name, getattr(value, one.name, None)) for one in attributes if one.eq]
    if isinstance(names := getattr(type(value), "model_fields", None), Mapping):  # pydantic's
        return [(name, getattr(value, name)) for name in names]
    return None


def _label(value: Any) -> str:
    if isinstance(value, Enum):
        return str(value)
    if isinstance(value, np.generic):  # dtypes and numpy's own scalars have a text that is theirs alone
        return str(value)
    name = getattr(value, "__qualname__", None)
    if name:
        return f"{getattr(value, '__module__', '')}.{name}"
    try:
        return f"{type(value).__qualname__} {value!s:.200}"
    except Exception:  # a user's `__str__`
        return type(value).__qualname__


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_on_a_scale(value: Any) -> bool:
    """Tell whether a value is a number that has a distance to others: NaN and infinity have none."""
    return _is_number(value) and abs(value) <= _MAX_NUMBER


def _columns(configs: Sequence[Any]) -> dict[str, Sequence[Any]]:
    """Return the values of each field, config by config."""
    if (flat := _flat_columns(configs)) is not None:
        return flat
    rows = [fields_of(cfg) for cfg in configs]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _flat_columns(configs: Sequence[Any]) -> dict[str, Sequence[Any]] | None:
    """Return the columns of dataclasses of one class with plain values, as most lists are: 30 times faster."""
    kinds = set(map(type, configs))
    cls = kinds.pop() if len(kinds) == 1 else None
    if cls is None or not dataclasses.is_dataclass(cls):
        return None
    names = [f.name for f in dataclasses.fields(cls) if f.compare]
    if len(names) < 2:
        return None
    try:
        rows = list(map(attrgetter(*names), configs))
    except AttributeError:  # a field that was never set
        return None
    columns: dict[str, Sequence[Any]] = dict(zip(names, zip(*rows, strict=True), strict=True))
    plain = all(set(map(type, values)) <= set(_SCALARS) for values in columns.values())
    return columns if plain else None


def _differ(values: Sequence[Any]) -> bool:
    first = values[0]
    return any(type(value) is not type(first) or value != first for value in values)


def _levels(values: Sequence[Any]) -> tuple[list[Any], Codes]:
    """Return a field's distinct values, ordered if they can be, and each config's position among them."""
    distinct = list(dict.fromkeys((type(value).__name__, value) for value in values))
    if all(_is_number(value) and value == value for _, value in distinct):
        distinct.sort(key=lambda one: one[1])
    places = {one: place for place, one in enumerate(distinct)}
    codes = np.fromiter((places[type(value).__name__, value] for value in values), np.int64, len(values))
    return [value for _, value in distinct], codes


def _size(values: Numbers) -> Numbers:
    """Return the scale on which a field's values are compared: logarithms for sizes, else the values."""
    low, high = np.min(values), np.max(values)
    if low > 0 and high >= _LOGARITHMIC_SPAN * low:
        return np.log2(values)
    if low == 0 and high >= 2 * _LOGARITHMIC_SPAN:
        return np.log2(values + 1)
    return values


def _alignment(levels: Sequence[Any]) -> Numbers | None:
    """Return how often 2 divides each value, unless that is another name for their order.

    Blocks of 96 and 128 are close in size, and differ in how they fit vectors, tiles and banks.
    """
    if len(levels) < 4 or not all(isinstance(level, int) and level > 0 for level in levels):
        return None
    twos = np.array([float((level & -level).bit_length() - 1) for level in levels])
    return twos if (np.diff(twos) < 0).any() else None


def _scaled(values: Numbers) -> Numbers:
    low, high = np.min(values), np.max(values)
    scaled: Numbers = (values - low) / (high - low) if high > low else np.zeros_like(values)
    return scaled
