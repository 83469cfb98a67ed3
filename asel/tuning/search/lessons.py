"""What earlier tunes of a kernel teach about a new one: other shapes, other versions, other lists of candidates."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, log
from typing import Any

from asel.kernels.candidates import Objective
from asel.kernels.keys import CacheKey
from asel.tuning.outcomes import Failed, Measured, TuneReport
from asel.tuning.request import MAX_LESSONS
from asel.tuning.search.config_fields import ConfigFields, fields_of

__all__ = ["Lessons", "lessons_for", "lessons_in", "teaches"]

# The measurements that a model is fitted to, in the end: its cost is cubic in them.
_MAX_ROWS = 128
# Of these, one tune has this many at most, so that a long search does not hide what the size of a call changes.
_MAX_ROWS_EACH = _MAX_ROWS // 2
# A number of a call that is a size: the 32 of f32[...] is not.
_NUMBER = re.compile(r"[a-z]+\d+\w*(?=\[)|(?P<size>\d+)")


@dataclass(frozen=True, slots=True)
class Lessons:
    """The candidates of a tune and the configs of earlier ones, as one table of fields and sizes of the call."""

    fields: ConfigFields
    """The candidates come first, in their order."""
    log_times: tuple[float, ...]
    """Of each earlier config, in logarithms: how much slower than the best of its tune it was; inf if it failed."""
    calls: tuple[str, ...]
    """The calls that were tuned, each with its version of the kernel."""


def lessons_in(
    reports: Iterable[TuneReport[Any]], key: CacheKey, objective: Objective, environment: Mapping[str, str]
) -> tuple[TuneReport[Any], ...]:
    """Return the reports that something can be learned from: of the same kernel on the same device, made alike."""
    found: dict[tuple[CacheKey, str], TuneReport[Any]] = {}
    for report in reports:
        is_alike = report.environment == environment and report.objective == objective
        is_same_kernel = (report.key.device, report.key.kernel_name) == (key.device, key.kernel_name)
        if is_alike and is_same_kernel and report.key != key:
            found.setdefault((report.key, report.checksum), report)
    return tuple(found.values())[:MAX_LESSONS]


def lessons_for(configs: Sequence[Any], call: str, reports: Sequence[TuneReport[Any]]) -> Lessons | None:
    """Return what the reports teach about these configs; None if that is nothing, as for configs without fields."""
    shape = _sizes(call)
    near = sorted(reports, key=lambda report: _distance(_sizes(report.call), shape))
    rows: list[Any] = [(cfg, shape) for cfg in configs]
    log_times, calls = list[float](), list[str]()
    for report in near:
        found = _found(configs, report, shape)
        if found and len(log_times) + len(found) <= _MAX_ROWS:
            log_times += [slower for _, slower in found]
            rows += [(cfg, _sizes(report.call)) for cfg, _ in found]
            calls.append(f"{report.key.op_id}({report.call})")
    return Lessons(ConfigFields(rows), tuple(log_times), tuple(calls)) if calls else None


def teaches(configs: Sequence[Any], reports: Iterable[TuneReport[Any]]) -> bool:
    """Tell whether anything can be learned about these configs."""
    return any(len(_alike(configs, report)) > 1 for report in reports)


def _found(configs: Sequence[Any], report: TuneReport[Any], shape: Mapping[str, Any]) -> list[tuple[Any, float]]:
    """Return how much slower than the best each config of a report was; nothing if that compares no two of them.

    Running out of memory teaches nothing about a smaller call. Of many configs, these are the fastest ones, half of
    what is kept, and others in even steps down to the failures.
    """
    alike = _alike(configs, report)
    if len(alike) < 2:
        return []
    names, best_s = set(fields_of(configs[0])), min(one.shown_s for one in alike)
    found = [(one.cfg, log(one.shown_s / best_s)) for one in alike]
    is_smaller = _is_smaller(shape, _sizes(report.call))
    failed = [one for one in report.outcomes if isinstance(one, Failed) and not (is_smaller and one.is_out_of_memory)]
    found += [(one.cfg, inf) for one in failed if set(fields_of(one.cfg)) == names]
    if len(found) <= _MAX_ROWS_EACH:
        return found
    found.sort(key=lambda one: one[1])
    fastest, rest = found[: _MAX_ROWS_EACH // 2], found[_MAX_ROWS_EACH // 2 :]
    count = _MAX_ROWS_EACH - len(fastest)
    return fastest + [rest[(place + 1) * len(rest) // count - 1] for place in range(count)]


def _alike(configs: Sequence[Any], report: TuneReport[Any]) -> list[Measured[Any]]:
    """Return what a report measured of configs with the same fields as these, as its winner was."""
    if not (names := set(fields_of(configs[0]))):
        return []
    how = report.best.how if report.best is not None else report.objective
    measured = [one for one in report.outcomes if isinstance(one, Measured) and one.how == how and one.shown_s > 0]
    return [one for one in measured if set(fields_of(one.cfg)) == names]


def _sizes(call: str) -> dict[str, Any]:
    """Return the numbers of a call by their places, and what stands between them, dtypes included."""
    sizes, form, end = list[int](), "", 0
    for found in _NUMBER.finditer(call):
        form, end = form + call[end : found.start()], found.end()
        if found["size"] is None:
            form += found.group()
        else:
            form += "#"
            sizes.append(int(found["size"]))
    return {str(place): size for place, size in enumerate(sizes)} | {"form": form + call[end:]}


def _is_smaller(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Tell whether a call is smaller in any of its sizes than another one, of the same form or not."""
    return any(size < other.get(name, 0) for name, size in one.items() if name != "form")


def _distance(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Return how far apart two calls are, in doublings of their sizes."""
    if one.keys() != other.keys() or one["form"] != other["form"]:
        return 1e9
    numbers = [name for name in one if name != "form"]
    return sum(abs(log(1 + one[name]) - log(1 + other[name])) for name in numbers)
