"""Heuristics, candidates and the checksum of what a tune chooses among."""

from __future__ import annotations

import threading
import types
from typing import Any

import pytest
import support.key_examples as ex
from support.kernels import Blocks, Toy
from support.keys import CALL, resolve

from asel import Kernel, UnstableKeyError
from asel.kernels.candidates import checksum


class _Plain:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class _SlotBase:
    __slots__ = ("m",)

    def __init__(self, m: int) -> None:
        self.m = m


class _SlotDerived(_SlotBase):
    """Has a `__dict__`, but keeps its state elsewhere."""


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["ab", "c"], ["a", "bc"]),
        (["ab"], ["a", "b"]),
        ([Blocks(1), Blocks(2)], [Blocks(2), Blocks(1)]),
        ([Blocks(1)], [Blocks(1), Blocks(1)]),
        ([Blocks(1)], [Blocks(True)]),
        ([Blocks(1)], [{"m": 1, "n": 1}]),
        ([{"m": 1}], [{"m": 1.0}]),
        ([{"m": 1}], [{"n": 1}]),
        ([{"m": {"k": [1]}}], [{"m": {"k": (1,)}}]),
        ([_Plain(m=1)], [_Plain(m=2)]),
        ([_Plain(m=1)], [_Plain(n=1)]),
        ([_Plain(m=_Plain(k=1))], [_Plain(m=_Plain(k=2))]),
        ([1, 2], [(1, 2)]),
        ([], [None]),
        ([10**5000], [10**5000 + 1]),
    ],
)
def test_other_candidates_have_another_checksum(one, other):
    """Candidates count in order, by type and value."""
    assert checksum(one, version="1") == checksum(list(one), version="1")
    assert checksum(one, version="1") != checksum(other, version="1")


def test_state_in_slots_counts_in_a_checksum():
    """In a config with both slots and a dict, both count, or it is refused."""

    def of(m: int) -> str:
        try:
            return checksum([_SlotDerived(m)], version="1")
        except UnstableKeyError:
            return f"refused {m}"

    assert of(1) != of(2)


@pytest.mark.parametrize("make", [lambda: Blocks(1), lambda: {"b": 1, "a": {"x", "y"}}, lambda: _Plain(b=1, a=[2])])
def test_equal_candidates_have_equal_checksums(make):
    """Dataclasses, dicts and plain objects made again are the same candidates."""
    assert checksum([make()], version="1") == checksum(iter([make()]), version="1")


def test_the_order_of_a_plain_objects_attributes_does_not_matter():
    """The order of assignment is not part of the value."""
    assert checksum([_Plain(a=1, b=2)], version="1") == checksum([_Plain(b=2, a=1)], version="1")


def test_version_and_objective_are_in_the_checksum():
    """A change of candidates, version or objective makes an answer stale."""
    sums = [
        checksum([Blocks(1)], version="1"),
        checksum([Blocks(1)], version="2"),
        checksum([Blocks(1)], version="1", objective="forward+backward"),
        checksum([], version="1"),
        checksum(["1"], version=""),
        checksum([], version="('1',)"),
    ]
    assert len(set(sums)) == len(sums)
    assert checksum([Blocks(1)], version="1", objective="forward") == sums[0]


@pytest.mark.parametrize(
    "candidate", [ex.Opaque(), _Plain(fn=ex.Opaque()), {"f": [ex.Opaque()]}, _Plain(l=threading.Lock())]
)
def test_an_opaque_callable_in_a_candidate_is_refused(candidate):
    """A config is data: an opaque callable has no checksum, and the error names the candidate."""
    with pytest.raises(UnstableKeyError) as caught:
        checksum([Blocks(1), candidate], version="1")
    assert caught.value.argument.startswith("candidates[1]")


def _kernel(**methods: Any) -> Any:
    return type("Made", (Toy,), methods)()


def _raises(error: Exception) -> Any:
    def method(self, inv):
        raise error

    return method


@pytest.mark.parametrize(
    ("heuristic", "said"),
    [
        (_raises(NotImplementedError("no")), "kernel has no heuristic"),
        (Kernel.heuristic_cfg, "kernel has no heuristic"),
        (None, "kernel has no heuristic"),
        (_raises(ZeroDivisionError("by zero")), "heuristic_cfg raised ZeroDivisionError: by zero"),
        (lambda self, inv: None, "heuristic_cfg returned None"),
    ],
    ids=["NotImplementedError", "base stub", "None", "raises", "returns None"],
)
def test_a_kernel_without_a_heuristic_has_a_reason(heuristic, said):
    """A missing or failing heuristic makes its tier decline, and does not affect the candidates."""
    found = resolve(CALL, _kernel(heuristic_cfg=heuristic))
    assert (found.heuristic, found.no_heuristic, found.incumbent) == (None, said, None)
    assert found.candidates == (Blocks(1), Blocks(2), Blocks(3))


@pytest.mark.parametrize(
    ("candidates", "said"),
    [
        (_raises(NotImplementedError("no")), "kernel has no candidates"),
        (_raises(KeyError("x")), "candidate_cfgs raised KeyError: 'x'"),
        (lambda self, inv: [], "candidate_cfgs returned no candidates"),
        (lambda self, inv: None, "candidate_cfgs raised TypeError: 'NoneType' object is not iterable"),
    ],
    ids=["NotImplementedError", "raises", "empty", "returns None"],
)
def test_a_kernel_without_candidates_has_a_reason(candidates, said):
    """Missing or failing candidates mean no tune; the heuristic still answers."""
    found = resolve(CALL, _kernel(candidate_cfgs=candidates))
    assert (found.candidates, found.no_candidates, found.incumbent) == ((), said, None)
    assert found.heuristic == Blocks(1)


def test_a_kernel_with_neither_has_neither():
    """A kernel that only runs is still a kernel; both tiers have a reason to decline."""
    found = resolve(CALL, types.SimpleNamespace(op_id="bare", run=lambda x, cfg: x))
    assert (found.heuristic, found.candidates) == (None, ())
    assert "no heuristic" in found.no_heuristic
    assert "no candidate" in found.no_candidates


def test_the_default_candidate_is_the_heuristic():
    """Without `candidate_cfgs`, the heuristic is the only candidate."""
    found = resolve(CALL, _kernel(candidate_cfgs=Kernel.candidate_cfgs))
    assert (found.candidates, found.incumbent) == ((Blocks(1),), 0)


@pytest.mark.parametrize(
    ("listed", "guess", "expected", "incumbent"),
    [
        ([Blocks(1), Blocks(2)], Blocks(2), [Blocks(1), Blocks(2)], 1),
        ([Blocks(1), Blocks(2)], Blocks(3), [Blocks(1), Blocks(2), Blocks(3)], 2),
        ([Blocks(1), Blocks(1), Blocks(2), Blocks(1)], Blocks(2), [Blocks(1), Blocks(2)], 1),
        ([{"m": 1}, {"m": 1.0}, {"m": True}, {"m": 1}], {"m": True}, [{"m": 1}, {"m": 1.0}, {"m": True}], 2),
        ([{"a": 1, "b": 2}, {"b": 2, "a": 1}], {"b": 2, "a": 1}, [{"a": 1, "b": 2}], 0),
        ([0, 1], 0, [0, 1], 0),
        (["", "x"], "", ["", "x"], 0),
        ([float("nan")], float("nan"), [float("nan")], 0),
    ],
)
def test_candidates_are_distinct_and_hold_the_incumbent(listed, guess, expected, incumbent):
    """Duplicates are removed, the default always competes, and the kernel's order is kept."""
    found = resolve(CALL, _kernel(candidate_cfgs=lambda self, inv: iter(listed), heuristic_cfg=lambda self, inv: guess))
    assert list(map(repr, found.candidates)) == list(map(repr, expected))
    assert found.incumbent == incumbent


def test_duplicates_do_not_change_the_checksum():
    """A tune chooses among the distinct candidates."""
    once = resolve(CALL, _kernel(candidate_cfgs=lambda self, inv: [Blocks(1), Blocks(2)]))
    twice = resolve(CALL, _kernel(candidate_cfgs=lambda self, inv: [Blocks(1), Blocks(1), Blocks(2)]))
    assert once.checksum("forward") == twice.checksum("forward") == checksum([Blocks(1), Blocks(2)], version="1")
    assert once.checksum("forward") != once.checksum("forward+backward")


def test_an_opaque_candidate_is_refused_with_its_position():
    """The error names the candidate, since no store could hold the answer."""
    with pytest.raises(UnstableKeyError) as caught:
        resolve(CALL, _kernel(candidate_cfgs=lambda self, inv: [Blocks(1), ex.Opaque()]))
    assert caught.value.argument == "candidates[1]"
