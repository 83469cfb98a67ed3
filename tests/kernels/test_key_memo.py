"""The memo of keys, candidates and checksums by signature: what it computes, and how much it keeps."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
from support.kernels import Blocks, Toy

from asel import AutotunePolicy, ConfigCache, ConfigSelectorChain, Invocation, Kernel, kernel
from asel.kernels import canonical as canonical_module
from asel.kernels.candidates import checksum
from asel.kernels.key_memo import KeyMemo

HEURISTICS_ONLY = AutotunePolicy(allow_autotune=False)


def inv(n: int, op_id: str = "toy") -> Invocation[Any, Any]:
    return Invocation(op_id, (np.zeros((n, 2), np.float32),), {})


class Counting(Kernel[Blocks, Any]):
    """Counts how often its candidates are listed."""

    op_id = "counting"
    asked = 0

    def run(self, x, *, cfg):
        return x

    def heuristic_cfg(self, inv):
        return Blocks(1)

    def candidate_cfgs(self, inv):
        type(self).asked += 1
        return [Blocks(m) for m in range(1, 5)]


@pytest.fixture(autouse=True)
def _no_candidates_asked_yet():
    Counting.asked = 0


def test_every_key_in_memory_stays_resolved() -> None:
    """The memo grows with the selector's memory, so hits stay cheap with any number of keys."""
    one, resolved = Counting(), []
    selector: ConfigSelectorChain[Blocks, Any] = ConfigSelectorChain(ConfigCache(), HEURISTICS_ONLY, sinks=())
    for n in range(1, 10_001):
        known = selector.resolve(inv(n), one)
        selector.cache.put(*known.key, Blocks(7))
        resolved.append(known)
    assert all(selector.resolve(inv(n), one) is known for n, known in enumerate(resolved, 1))


def test_signatures_that_memory_does_not_hold_are_bounded() -> None:
    """Shapes that only heuristics answer do not accumulate."""
    memo = KeyMemo(max_entries=8, keys_in_memory=lambda: 3)
    for n in range(100):
        memo.resolve(inv(n), Toy())
    assert len(memo._resolved) <= 16


@pytest.mark.anyio
@pytest.mark.parametrize("method", ["choose", "choose_nowait"])
async def test_a_heuristic_answer_lists_no_candidates(method: str) -> None:
    """Candidates and checksums are computed only if a tier needs them."""
    async with ConfigSelectorChain(ConfigCache(), HEURISTICS_ONLY, sinks=()) as selector:
        answer = getattr(selector, method)(inv(3, "counting"), Counting())
        assert (answer if method == "choose_nowait" else await answer) == Blocks(1)
        assert Counting.asked == 0
        found = await selector.select(inv(3, "counting"), Counting())
    assert found.checksum == checksum([Blocks(m) for m in range(1, 5)], version="0")


def test_equal_candidates_are_encoded_once(monkeypatch) -> None:
    """A new shape with the candidates of an earlier one does not encode them again."""

    class New(Counting):
        def candidate_cfgs(self, inv):
            return [Blocks(m) for m in range(7001, 7005)]  # which no other test has

    one, memo = New(), KeyMemo()

    def checksum_of(n: int) -> str:
        known = memo.resolve(inv(n), one)
        return known.checksum("forward", known.listing(inv(n), one))

    encoded, encode = [], canonical_module._dataclass
    monkeypatch.setattr(canonical_module, "_dataclass", lambda *args: encoded.append(args) or encode(*args))
    first, once = checksum_of(1), len(encoded)
    assert once == 4
    assert checksum_of(2) == first
    assert len(encoded) == once


@pytest.mark.parametrize("pair", [(1, True), (0, False), ("1", 1), (1, 1.0), (0.0, -0.0)])
def test_configs_that_python_calls_equal_keep_their_own_checksums(pair: tuple[Any, Any]) -> None:
    """1, True and 1.0 differ, also in the cache."""
    one, other = (checksum([Blocks(value)], version="0") for value in pair)
    assert one != other
    assert [one, other] == [checksum([Blocks(value)], version="0") for value in pair]


def test_kernels_made_per_call_are_recognised_by_class_and_state() -> None:
    """A kernel of the same class with the same attributes has the same answers."""
    memo = KeyMemo()
    first = memo.resolve(inv(1), Toy())
    assert memo.resolve(inv(1), Toy()) is first
    other = Toy()
    other.candidates = [Blocks(77)]
    assert memo.resolve(inv(1), other) is not first


def test_function_kernels_made_per_call_are_recognised_by_their_function() -> None:
    """Functions count by code and captured values."""

    def make(block: int) -> Any:
        @kernel(op_id="made", configs=[1, 2], heuristic=1)
        def made(x: Any, *, cfg: int) -> Any:
            return x * block

        return made

    memo = KeyMemo()
    assert memo.resolve(inv(1), make(1)) is memo.resolve(inv(1), make(1))
    assert memo.resolve(inv(1), make(1)) is not memo.resolve(inv(1), make(2))


@pytest.mark.parametrize("attribute", [1, object(), np.zeros(3)], ids=["canonical", "opaque", "array"])
def test_no_kernel_is_kept_alive(attribute: Any) -> None:
    """A kernel may hold large objects, which belong to the user."""
    memo, alive = KeyMemo(), weakref.WeakSet()
    for _ in range(20):
        one = Toy()
        one.held = attribute
        alive.add(one)
        memo.resolve(inv(1), one).listing(inv(1), one)
        del one
    gc.collect()
    assert not alive


def test_a_class_of_the_same_name_is_another_kernel() -> None:
    """As when a notebook cell is run again with other code."""

    def make(guess: int) -> Any:
        class Again(Kernel[int, Any]):
            op_id = "again"

            def heuristic_cfg(self, inv):
                return guess

        Again.__qualname__ = "Again"
        return Again()

    memo = KeyMemo()
    assert [memo.resolve(inv(1), make(guess)).heuristic for guess in (1, 2)] == [1, 2]
