"""What has no key is refused by name, with the way out."""

from __future__ import annotations

import collections
import dataclasses
import functools
import threading
import types
import weakref
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import support.key_examples as ex
from support.key_examples import captured
from support.keys import KERNEL, key, resolve, sharing

from asel import InvalidRequestError, Invocation, UnstableKeyError
from asel.kernels.keys import call_key

UNSTABLE = {
    "object": object,
    "opaque callable": ex.Opaque,
    "method of an opaque object": lambda: ex.Opaque().method,
    "closure over an opaque object": lambda: captured(ex.Opaque()),
    "partial of an opaque callable": lambda: functools.partial(ex.Opaque()),
    "opaque default": lambda: types.FunctionType(ex.causal.__code__, {}, "f", (ex.Opaque(), 0)),
    "generator": lambda: (i for i in range(3)),
    "iterator": lambda: iter([1]),
    "lock": threading.Lock,
    "weak reference": lambda: weakref.ref(ex.Opaque),
    "random generator": np.random.default_rng,
    "method of a random generator": lambda: np.random.default_rng().normal,
    "object array": lambda: np.array([object()], dtype=object),
    "closure over an object array": lambda: captured(np.array([object()], dtype=object)),
    "structured array of objects": lambda: captured(np.array([(ex.Opaque(),)], dtype=[("a", object)])),
    "set of opaque objects": lambda: {ex.Opaque()},
    "opaque dict key": lambda: {ex.Opaque(): 1},
    "model with an opaque field": lambda: ex.Settings(value=ex.Opaque()),
    "opaque static field": lambda: ex.Node(1, 2, ex.Opaque()),
}


@pytest.mark.parametrize("make", UNSTABLE.values(), ids=UNSTABLE)
def test_an_object_without_a_stable_identity_is_refused_by_name(make):
    """The error names the argument and the fix."""
    with pytest.raises(UnstableKeyError, match=r"kwargs\['mask_fn'\]") as caught:
        resolve(Invocation("k", (jnp.zeros(2),), {"mask_fn": make()}))
    assert caught.value.argument.startswith("kwargs['mask_fn']")
    assert "key_builder" in str(caught.value)
    assert "dataclass" in str(caught.value)


@pytest.mark.parametrize(
    ("args", "kwargs", "path"),
    [
        ((ex.Opaque(),), {}, "args[0]"),
        ((1, [0, ex.Opaque()]), {}, "args[1][1]"),
        (({"k": [0, ex.Opaque()]},), {}, "args[0]['k'][1]"),
        (({1: ex.Opaque()},), {}, "args[0][1]"),
        ((), {"mask_fn": ex.Opaque()}, "kwargs['mask_fn']"),
        ((), {"masks": {"left": (0, ex.Opaque())}}, "kwargs['masks']['left'][1]"),
        ((ex.Window(ex.Opaque()),), {}, "args[0].size"),
        (([ex.Window({"a": ex.Opaque()})],), {}, "args[0][0].size['a']"),
        ((ex.Pair(0, ex.Opaque()),), {}, "args[0].right"),
        ((collections.OrderedDict(k=ex.Opaque()),), {}, "args[0]['k']"),
        ((collections.defaultdict(int, k=ex.Opaque()),), {}, "args[0]['k']"),
        ((ex.Layer(ex.Opaque()),), {}, "args[0].weights"),
        ((ex.Node(0, ex.Opaque()),), {}, "args[0][1]"),
        ((functools.partial(abs, ex.Opaque()),), {}, "args[0].args[0]"),
        ((functools.partial(abs, x=ex.Opaque()),), {}, "args[0].keywords['x']"),
        ((captured([ex.Opaque()]),), {}, "args[0] closing over 'value'[0]"),
        ((np.array([None], dtype=object),), {}, "args[0]"),
    ],
)
def test_a_refusal_carries_the_whole_path_of_the_argument(args, kwargs, path):
    """The error names the object, at any depth, in Python syntax."""
    with pytest.raises(UnstableKeyError) as caught:
        resolve(Invocation("k", args, kwargs))
    assert caught.value.argument == path
    assert path in str(caught.value)


@pytest.mark.parametrize("field", ["mesh", "in_specs", "out_specs", "batch_axes"])
def test_a_refusal_names_the_field_of_the_call(field):
    """Options of the call are named as such."""
    with pytest.raises(UnstableKeyError) as caught:
        resolve(Invocation("k", (), {}, method="shard_map", **{field: ex.Opaque()}))
    assert caught.value.argument == field


def _endless_list() -> list[Any]:
    endless: list[Any] = [1]
    endless.append(endless)
    return endless


def _endless_dict() -> dict[str, Any]:
    endless: dict[str, Any] = {}
    endless["self"] = [endless]
    return endless


def _deep_list() -> list[Any]:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    return deep


@pytest.mark.parametrize("make", [_endless_list, _endless_dict, _deep_list])
def test_an_infinite_structure_is_refused(make):
    """JAX does not accept a list that contains itself: a clear error, and not a stack overflow."""
    for ask in (resolve, call_key):
        with pytest.raises(InvalidRequestError, match=r"args\[0\]"):
            ask(Invocation("k", (make(),), {}), KERNEL)


def test_a_cycle_through_a_constant_ends():
    """A dataclass may point back at itself; its key is finite and its state still counts."""

    def ring(value):
        first = ex.Slotted([value])
        first.value.append(first)
        return first

    assert key(ring(1)) == key(ring(1))
    assert key(ring(1)) != key(ring(2))


def test_a_dataclass_field_that_was_never_set_is_refused_or_counted():
    """An incomplete dataclass does not raise AttributeError."""

    @dataclasses.dataclass
    class Half:
        x: int = dataclasses.field(init=False)

    half, whole = Half(), Half()
    whole.x = 1
    assert sharing(half, whole) == 0


def test_a_mapping_with_keys_that_cannot_be_sorted_has_a_key():
    """JAX sorts the keys of a defaultdict; if that fails there is still a key, or a clear refusal."""
    one = collections.defaultdict(int, {1: 1, "a": 2})
    other = collections.defaultdict(int, {1: 1, "a": 3})
    assert sharing(one, other) == 0
