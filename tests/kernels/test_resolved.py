"""What a kernel and a signature resolve to: key, device, candidates, each worked out once."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.kernels import A100, H100, Blocks, Toy
from support.keys import CALL, resolve

from asel import CacheKey, Invocation, Kernel
from asel.kernels.devices import device_fingerprint
from asel.kernels.key_memo import KeyMemo
from asel.runtime.bounded_memo import BoundedMemo


def test_a_cache_key_is_a_plain_tuple():
    """A user may write the tuple instead of the key."""
    found = CacheKey("dev", "op@v1", "abc")
    assert found == ("dev", "op@v1", "abc")
    assert {found: 1}[("dev", "op@v1", "abc")] == 1
    assert (found.device, found.op_id, found.call_key) == found


def test_an_operation_carries_its_version():
    """Configs tuned for another version of the kernel do not apply."""
    newer = Toy()
    newer.version = "2"
    assert [resolve(CALL, toy).key.op_id for toy in (Toy(), newer, Kernel("toy"))] == ["toy@v1", "toy@v2", "toy@v0"]
    assert resolve(CALL, newer).key.call_key == resolve(CALL, Toy()).key.call_key


def test_a_key_belongs_to_the_device_the_arguments_live_on():
    """The key names the hardware that the call would run on, also for arrays inside pytrees."""
    on_h100, on_a100 = (resolve(Invocation("toy", ({"q": [dev.array((8,))]},), {}), Toy()) for dev in (H100, A100))
    assert on_h100.key.device == device_fingerprint(H100)
    assert on_a100.key.device == device_fingerprint(A100)
    assert on_h100.device is H100
    assert on_h100.platform == "gpu"
    assert on_h100.key.call_key == on_a100.key.call_key
    assert resolve(Invocation("toy", (np.zeros(3),), {}), Toy()).key.device == device_fingerprint()


class _Counting(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def heuristic_cfg(self, inv):
        self.asked.append("heuristic")
        return Blocks(1)

    def candidate_cfgs(self, inv):
        self.asked.append("candidates")
        return [Blocks(1), Blocks(2)]


def test_each_new_signature_is_resolved_once():
    """Candidates are a pure function of the signature, so equal calls share one resolution."""
    memo, kernel = KeyMemo(), _Counting()
    first = memo.resolve(Invocation("toy", (jnp.zeros(3), 1), {"a": {"b": 1}}), kernel)
    again = memo.resolve(Invocation("toy", (jnp.ones(3), 1), {"a": {"b": 1}}), kernel)
    assert again is first
    assert kernel.asked == ["heuristic"]
    other = memo.resolve(Invocation("toy", (jnp.zeros(4), 1), {"a": {"b": 1}}), kernel)
    assert other is not first
    assert kernel.asked == ["heuristic"] * 2


def test_arrays_with_equal_shardings_are_one_call():
    """JAX makes many sharding objects; equal ones count as the same."""
    fresh, doubled = jnp.zeros(2), jax.jit(lambda x: x * 2)(jnp.zeros(2))
    moved = jax.device_put(np.zeros(2, np.float32), jax.devices()[0])
    memo, kernel = KeyMemo(), _Counting()
    for args in itertools.product([fresh, doubled, moved], repeat=3):
        memo.resolve(Invocation("toy", (*args[:2], {"v": args[2]}), {}), kernel)
    assert kernel.asked == ["heuristic"]


def test_arrays_of_device_put_are_recognised_without_comparing_shardings(monkeypatch):
    """`device_put` makes a sharding for each array, and JAX needs more time to compare two than a hit may take."""
    memo, kernel = KeyMemo(), _Counting()
    put = [jax.device_put(np.zeros(2, np.float32), jax.devices()[0]) for _ in range(3)]
    memo.resolve(Invocation("toy", (put[0],), {}), kernel)
    with monkeypatch.context() as patch:
        patch.setattr(jax.sharding.SingleDeviceSharding, "__eq__", None)
        for array in put[1:]:
            memo.resolve(Invocation("toy", (array,), {}), kernel)
    assert kernel.asked == ["heuristic"]


def test_a_kernel_made_per_call_gets_its_own_candidates():
    """A new kernel at an old one's address never gets the old one's candidates."""
    memo = KeyMemo(max_entries=4)
    for n in range(2, 50):
        fresh = Toy()
        fresh.candidates = [Blocks(n), Blocks(n + 1)]
        assert memo.resolve(CALL, fresh).listing(CALL, fresh).candidates == (Blocks(n), Blocks(n + 1), Blocks(1))
        del fresh


def test_the_memo_is_bounded():
    """Only a bounded number of signatures is kept alive."""
    memo = KeyMemo(max_entries=8)
    for n in range(100):
        memo.resolve(Invocation("toy", (n,), {}), Toy())
    assert 1 <= len(memo._resolved) <= 8


@pytest.mark.parametrize("bound", [2, 3, 8])
def test_a_memo_keeps_recently_used_entries(bound):
    """An entry in use survives any number of new ones, and the memo stays within its bound."""
    memo: BoundedMemo[str] = BoundedMemo(bound)
    for n in range(10 * bound):
        memo.put(n, str(n))
        assert memo.get(n) == str(n)
        assert len(memo) <= bound
    kept: BoundedMemo[str] = BoundedMemo(8)
    kept.put("mine", "yes")
    for n in range(100):
        kept.put(n, str(n))
        assert kept.get("mine") == "yes"
    assert kept.get(0) is None
