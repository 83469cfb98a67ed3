"""The order in which candidates are tried: by group, then by priority, as the kernel ranks them."""

from __future__ import annotations

from typing import Any

from asel.tuning.state import TuneState

__all__ = ["groups_of", "is_tried"]


def is_tried(state: TuneState[Any], index: int) -> bool:
    """Return whether a candidate may be tried: it is not settled, and the kernel gives it no negative rank."""
    ranks = state.request.groups
    allowed = ranks is None or min(ranks[index]) >= 0 or index == state.request.incumbent
    return allowed and index not in state.outcomes


def groups_of(state: TuneState[Any]) -> list[list[int]]:
    """Return the indices of candidates by group, the highest first; the incumbent precedes all others.

    Candidates with a negative rank are skipped, and those with reused timings are left out.
    """
    request, count = state.request, len(state.request.candidates)
    ranks, incumbent = request.groups, request.incumbent
    if ranks is None:
        others = [i for i in range(count) if i not in state.recorded and i != incumbent]
        return [others if incumbent is None else [incumbent, *others]]
    by_group: dict[int, list[int]] = {}
    for index, (group, priority) in enumerate(ranks):
        if index == incumbent:
            continue
        if group < 0 or priority < 0:
            if index not in state.outcomes:
                state.skip(index, "the kernel gives it a negative priority")
        elif index not in state.recorded:
            by_group.setdefault(group, []).append(index)
    groups = [sorted(by_group[group], key=lambda i: -ranks[i][1]) for group in sorted(by_group, reverse=True)] or [[]]
    if incumbent is not None:
        groups[0].insert(0, incumbent)
    return groups
