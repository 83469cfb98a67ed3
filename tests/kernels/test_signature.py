"""Signature and key tell the same calls apart."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import support.key_examples as ex
from hypothesis import given, settings
from hypothesis import strategies as st
from support.keys import key, sig, signature_of


class _Sample:
    """An array whose `repr` has its name."""

    def __init__(self, name: str, array: Any) -> None:
        self.name, self.array = name, array

    def __repr__(self) -> str:
        return self.name


ARRAYS = [
    _Sample("f32[2]", jnp.zeros(2)),
    _Sample("f32[2]", jax.device_put(np.ones(2, np.float32))),
    _Sample("f32[2,1]", jnp.zeros((2, 1))),
    _Sample("bf16[2]", jnp.zeros(2, jnp.bfloat16)),
    _Sample("f32[]", jnp.zeros(())),
    _Sample("weak f32[]", jnp.asarray(0.0)),
]

atoms = st.one_of(
    st.sampled_from(ARRAYS),
    st.sampled_from([0, 1, True, False, 0.0, -0.0, 1.0, float("nan"), None, "", "a", "ab", "1", b"", b"a", ...]),
    st.sampled_from([1j, "|", "'", "(", "int", "END", "dict", "none"]),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
)
names = st.sampled_from(["a", "b", "", 1, True, 1.0, None, (1,), ("a", True)])
structures = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(names, inner, max_size=3),
        st.builds(ex.Pair, inner, inner),
        st.builds(ex.Node, inner, inner),
    ),
    max_leaves=6,
)
calls = st.tuples(
    st.lists(structures, max_size=3).map(tuple),
    st.dictionaries(st.sampled_from(["a", "b", "q"]), structures, max_size=2),
)


def _rebuilt(value: Any, leaf: Any, in_order: bool) -> Any:
    """Return a copy of the structure with `leaf` applied, optionally with sorted dicts."""
    again = functools.partial(_rebuilt, leaf=leaf, in_order=in_order)
    if type(value) is dict:
        items = sorted(value.items(), key=lambda item: repr(item[0])) if in_order else value.items()
        return {name: again(item) for name, item in items}
    if type(value) in (list, tuple):
        return type(value)(map(again, value))
    if type(value) is ex.Pair:
        return ex.Pair(*map(again, value))
    if type(value) is ex.Node:
        return ex.Node(again(value.left), again(value.right))
    return leaf(value)


def _arrays(value: Any, in_order: bool = False) -> Any:
    return _rebuilt(value, lambda leaf: leaf.array if type(leaf) is _Sample else leaf, in_order)


def _faithful(value: Any) -> str:
    """Return text that is equal exactly for structures that are the same call: the model to compare with."""
    if type(value) is dict:
        return "{" + ", ".join(sorted(f"{name!r}: {_faithful(item)}" for name, item in value.items())) + "}"
    if type(value) in (list, tuple, ex.Pair):
        return f"{type(value).__name__}<{', '.join(map(_faithful, value))}>"
    if type(value) is ex.Node:
        return f"Node<{_faithful(value.left)}, {_faithful(value.right)}>"
    return repr(value)


CONFUSABLE = [[1, True, 1.0, 1j, "1"], [0, False, 0.0, -0.0], ["", b"", None, ()], ["a", b"a", "ab"], ARRAYS]


@st.composite
def pairs(draw):
    """Two calls: unrelated, or the second with some leaves replaced by similar ones."""
    one = draw(calls)
    if draw(st.booleans()):
        return one, draw(calls)
    random = draw(st.randoms(use_true_random=False))

    def twin(leaf: Any) -> Any:
        groups = [group for group in CONFUSABLE if any(leaf is member for member in group)]
        return random.choice(groups[0]) if groups and random.random() < 0.3 else leaf

    return one, tuple(_rebuilt(part, twin, random.random() < 0.5) for part in one)


@settings(deadline=None, max_examples=250, database=None)
@given(pairs())
def test_signatures_and_keys_distinguish_the_same_calls(pair):
    """Equal signatures have equal keys, equal keys equal signatures up to dict order, and neither merges two calls."""
    one, other = pair

    def both(call: Any, in_order: bool) -> tuple[Any, str]:
        args, kwargs = (_arrays(part, in_order) for part in call)
        return sig(*args, **kwargs), key(*args, **kwargs)

    (one_sig, one_key), (other_sig, other_key) = both(one, False), both(other, False)
    assert one_sig != other_sig or one_key == other_key
    assert (one_key == other_key) == (_faithful(one) == _faithful(other))
    (one_sig, one_key2), (other_sig, other_key2) = both(one, True), both(other, True)
    assert (one_key, other_key) == (one_key2, other_key2)
    assert (one_key == other_key) == (one_sig == other_sig)


@settings(deadline=None, max_examples=100, database=None)
@given(calls, st.randoms(use_true_random=False))
def test_a_call_made_again_has_the_same_key_in_any_dict_order(call, random):
    """A key depends on the call's values, not on the objects that hold them."""

    def shuffled(value: Any) -> Any:
        if type(value) is dict:
            items = list(value.items())
            random.shuffle(items)
            return {name: shuffled(item) for name, item in items}
        if type(value) in (list, tuple):
            return type(value)(map(shuffled, value))
        return value

    args, kwargs = map(_arrays, call)
    again_args, again_kwargs = (shuffled(_arrays(part)) for part in call)
    assert key(*args, **kwargs) == key(*again_args, **again_kwargs)
    assert sig(*args, **kwargs) == sig(*map(_arrays, call[0]), **_arrays(call[1]))


def test_every_signature_is_hashable():
    """Signatures are dict keys, so every call with a key has a hashable one."""
    signatures = [signature_of(make(), ex.KERNEL) for make in ex.EXAMPLES.values()]
    assert len(set(signatures)) == len(ex.EXAMPLES)
