"""Arrays that a function, a partial or a dataclass holds: hashed once, or at each call if they may change."""

from __future__ import annotations

import functools
import gc
import hashlib
import weakref
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from asel import Invocation, Kernel, UnstableKeyError
from asel.kernels import canonical as canonical_module
from asel.kernels import canonical_arrays
from asel.kernels.canonical import canonical
from asel.kernels.canonical_arrays import MAX_MUTABLE_BYTES, hashed_once
from asel.kernels.key_memo import KeyMemo

KERNEL: Kernel[Any, Any] = Kernel("k")
LARGE = MAX_MUTABLE_BYTES // 4 + 1


@dataclass
class Holder:
    table: Any


def closure(array: Any) -> Any:
    return lambda x: x + array


HOLDERS = {"closure": closure, "partial": lambda array: functools.partial(jnp.add, array), "dataclass": Holder}


def read_only(array: Any) -> Any:
    array.flags.writeable = False
    return array


CONSTANTS = {
    "jax": lambda n: jnp.arange(n, dtype=jnp.float32),
    "random keys": lambda n: jax.random.split(jax.random.key(n), 3),
    "read-only": lambda n: read_only(np.arange(n, dtype=np.float32)),
    "a read-only view of one": lambda n: read_only(np.arange(n, dtype=np.float32))[:-1],
    "bytes": lambda n: np.frombuffer(bytes(4 * n), np.float32),
}


@pytest.fixture
def hashed(monkeypatch) -> list[int]:
    """The sizes of the hashed contents."""
    sizes: list[int] = []

    class Counting:
        sha256 = staticmethod(lambda data: sizes.append(len(data)) or hashlib.sha256(data))

    for module in (canonical_module, canonical_arrays):
        monkeypatch.setattr(module, "hashlib", Counting)
    return sizes


def resolve(memo: KeyMemo, value: Any) -> Any:
    return memo.resolve(Invocation("k", (value,), {}), KERNEL)


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
@pytest.mark.parametrize("make", CONSTANTS.values(), ids=CONSTANTS)
def test_an_array_that_cannot_change_is_hashed_once(hold: Any, make: Any, hashed: list[int]) -> None:
    """However often it occurs in a call's arguments, and however large it is."""
    array, memo = make(LARGE), KeyMemo()
    first = resolve(memo, hold(array))
    assert len(hashed) >= 2  # the contents, and the key
    del hashed[:]
    assert all(resolve(memo, hold(array)) is first for _ in range(5))
    assert hashed == []


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_a_changed_numpy_array_is_another_constant(hold: Any) -> None:
    """It is hashed in each call, since it may be changed directly or through its base."""
    memo, array = KeyMemo(), np.arange(6, dtype=np.float32)
    view = array[1:]
    view.flags.writeable = False
    first = [resolve(memo, hold(value)) for value in (array, view)]
    array[2] = 7
    second = [resolve(memo, hold(value)) for value in (array, view)]
    assert first[0].key != second[0].key
    assert first[1].key != second[1].key


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_a_large_mutable_numpy_array_is_refused_with_the_fix(hold: Any) -> None:
    """Hashing it at each call would block the event loop."""
    array = np.zeros(LARGE, np.float32)
    with pytest.raises(UnstableKeyError, match=r"NumPy array of 1 MB.*as an argument.*jax\.Array.*read-only") as caught:
        resolve(KeyMemo(), hold(array))
    assert str(caught.value.argument).startswith("args[0]")
    assert resolve(KeyMemo(), hold(array[:-1])).key == resolve(KeyMemo(), hold(jnp.asarray(array[:-1]))).key
    resolve(KeyMemo(), array)  # as an argument it is an array like any other


def test_a_read_only_view_of_a_writeable_array_counts_as_mutable() -> None:
    """Its own flag says nothing about its base."""
    view = np.zeros(LARGE, np.float32)[:]
    view.flags.writeable = False
    with pytest.raises(UnstableKeyError, match="may have changed"):
        resolve(KeyMemo(), Holder(view))


@pytest.mark.parametrize("make", CONSTANTS.values(), ids=CONSTANTS)
def test_no_array_is_kept_alive(make: Any) -> None:
    """Its digest is dropped with it, so a later array at the same address is hashed again."""
    known = len(hashed_once)
    array = make(5)
    gone = weakref.ref(array)
    canonical(Holder(array))
    assert len(hashed_once) > known
    del array
    gc.collect()
    assert gone() is None
    assert len(hashed_once) <= known


def test_arrays_at_the_same_address_have_different_forms() -> None:
    """Freed memory is reused at once, often for an array of the same shape."""
    forms = [canonical(Holder(jnp.full(4, n))) for n in range(200)]
    assert len(set(forms)) == 200
