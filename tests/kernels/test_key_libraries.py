"""Arguments that `jax.jit` takes and that are not plain data: objects of flax and equinox, wrappers, values."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.keys import signature_of
from support.library_objects import LIBRARY_OBJECTS

from asel import AutotunePolicy, ConfigSelectorChain, Executor, Invocation, Kernel, UnstableKeyError, kernel
from asel.kernels.key_memo import KeyMemo
from asel.kernels.keys import call_key

KERNEL: Kernel[Any, Any] = Kernel("k")


def key(*args: Any) -> str:
    inv = Invocation("k", args, {})
    known = KeyMemo().resolve(inv, KERNEL)
    assert known.key.call_key == call_key(inv, KERNEL)
    return known.key.call_key


@pytest.mark.parametrize("name", LIBRARY_OBJECTS)
def test_objects_of_libraries_have_keys(name: str) -> None:
    """Objects made from the same parts have the same key, from other parts another."""
    make = LIBRARY_OBJECTS[name]
    assert key(make()) == key(make())
    assert key(make()) != key(make(7))


def test_keys_do_not_advance_random_streams() -> None:
    """Inspecting flax's `Rngs` draws nothing from them."""
    rngs = nnx.Rngs(0, dropout=1)
    rngs.dropout()
    before = int(rngs.dropout.count[...])
    assert key(rngs) == key(rngs)
    assert int(rngs.dropout.count[...]) == before == 1


# ---------------------------------------------------------------------------------------------
# What they are made of.


def test_structures_of_trees_are_values() -> None:
    """A PyTreeDef counts by its nodes, their static parts, and the positions of its leaves."""
    trees = [(1, 2), [1, 2], (1, None), ({"a": 1}, 2), ({"b": 1}, 2), ((1,), 2), 1]
    structures = [jax.tree_util.tree_structure(tree) for tree in trees]
    assert len({key(structure) for structure in structures}) == len(trees)
    assert key(jax.tree_util.tree_structure((3, 4))) == key(structures[0])


def test_signatures_are_values_without_their_annotations() -> None:
    """Names, kinds and defaults decide how a function is called."""

    def plain(x, n=1): ...
    def annotated(x: np.ndarray[Any, Any], n: threading.Lock = 1) -> object: ...  # type: ignore[assignment,valid-type]
    def other(x, n=2): ...
    def keyword(x, *, n=1): ...

    forms = [key(inspect.signature(fn)) for fn in (plain, annotated, other, keyword)]
    assert forms[0] == forms[1]
    assert len(set(forms)) == 3


class Wrapped:
    """A callable object around a function, as many decorators make."""

    def __init__(self, fn: Any, **options: Any) -> None:
        functools.update_wrapper(self, fn)
        self.options = options

    def __call__(self, *args: Any) -> Any:
        return self.__wrapped__(*args)  # type: ignore[attr-defined]


def test_wrapped_functions_count_by_the_function_and_its_attributes() -> None:
    """As set by `functools.update_wrapper`."""

    def make(n: int, **options: Any) -> Wrapped:
        return Wrapped(lambda x: x + n, **options)

    assert key(make(1)) == key(make(1))
    assert len({key(make(1)), key(make(2)), key(make(1, donate=True))}) == 3
    with pytest.raises(UnstableKeyError, match=r"args\[0\].options\['lock'\] is a _thread:lock"):
        key(make(1, lock=threading.Lock()))


class Value:
    """Defines its own equality."""

    def __init__(self, **parts: Any) -> None:
        self.parts = parts

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Value) and self.parts == other.parts

    def __hash__(self) -> int:
        return hash(tuple(sorted(self.parts)))


@pytest.mark.parametrize("value", [Value(window=3), object(), jax.tree_util.register_static(type("S", (), {}))()])
def test_objects_with_hidden_state_are_refused(value: Any) -> None:
    """`jax.jit` accepts any hashable object, but equality by custom code has no form for other processes."""
    with pytest.raises(UnstableKeyError, match="give the kernel a key_builder"):
        key(value)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["x"], meta_fields=["marker"])
@dataclasses.dataclass
class Marked:
    """Marks related parts with a bare object, as equinox's `StateIndex` does."""

    x: Any
    marker: Any


def test_bare_objects_in_static_fields_are_numbered_within_a_call() -> None:
    """Another process makes others, so only their pattern of identity counts."""
    x, one, other = np.zeros(3, np.float32), object(), object()
    same = key(Marked(x, one), Marked(x, one))
    assert same == key(Marked(x, other), Marked(x, other))
    assert same != key(Marked(x, one), Marked(x, other))


def test_bare_objects_are_another_signature_in_this_process() -> None:
    """A program returns the markers that it was traced with."""
    x, one = np.zeros(3, np.float32), object()
    token = signature_of(Invocation("k", (Marked(x, one),), {}), KERNEL)
    assert signature_of(Invocation("k", (Marked(x, one),), {}), KERNEL) == token
    assert signature_of(Invocation("k", (Marked(x, object()),), {}), KERNEL) != token


@pytest.mark.anyio
async def test_an_executor_returns_the_callers_own_markers() -> None:
    """Two calls with one key and different markers are two programs."""

    @kernel(op_id="marking", configs=[1], heuristic=1)
    def marking(tree: Any, *, cfg: int) -> Any:
        return Marked(tree.x + cfg, tree.marker)

    async with ConfigSelectorChain(policy=AutotunePolicy(allow_autotune=False), sinks=()) as selector:
        execute: Executor[Any, Any] = Executor(selector)
        for _ in range(3):
            marker = object()
            for _ in range(3):
                assert (await execute(marking, Marked(jnp.ones(2), marker))).marker is marker
