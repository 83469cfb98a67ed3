"""A key_builder returns the facts that the answer depends on."""

from __future__ import annotations

import functools
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support.key_examples as ex
from jax.sharding import Mesh, NamedSharding
from support.kernels import A100, H100, Blocks, Toy
from support.key_examples import P
from support.keys import CALL, abstract_mesh, during_trace, resolve

from asel import InvalidRequestError, Invocation, UnstableKeyError, kernel
from asel.kernels.devices import device_fingerprint
from asel.kernels.key_memo import KeyMemo
from asel.kernels.keys import call_key


def _by_rank(inv):
    return ("rank", len(inv.args[0].shape))


class _AsFunction(Toy):
    key_builder = _by_rank


class _AsLambda(Toy):
    key_builder = lambda inv: ("rank", len(inv.args[0].shape))  # noqa: E731  # the spelling under test


class _AsMethod(Toy):
    def key_builder(self, inv):
        assert isinstance(self, _AsMethod)
        return _by_rank(inv)


class _AsStaticMethod(Toy):
    @staticmethod
    def key_builder(inv):
        return _by_rank(inv)


class _AsClassMethod(Toy):
    @classmethod
    def key_builder(cls, inv):
        assert cls is _AsClassMethod
        return _by_rank(inv)


class _AsBody(Toy):
    def key_builder(inv):  # noqa: N805  # takes the invocation and nothing else
        return _by_rank(inv)


def _as_attribute() -> Toy:
    toy = Toy()
    toy.key_builder = _by_rank
    return toy


def _as_partial() -> Toy:
    toy = Toy()
    toy.key_builder = functools.partial(lambda prefix, inv: _by_rank(inv), "rank")
    return toy


@kernel(op_id="toy", configs=[Blocks(1)], key_builder=_by_rank)
def _as_option(x, *, cfg):
    return x


BUILDERS = [_AsFunction, _AsLambda, _AsMethod, _AsStaticMethod, _AsClassMethod, _AsBody, _as_attribute, _as_partial]


@pytest.mark.parametrize("make", [*BUILDERS, lambda: _as_option], ids=lambda make: make.__name__.strip("_<>"))
def test_a_key_builder_may_be_an_attribute_a_function_or_a_method(make):
    """In every form, it replaces the signature."""
    memo, toy = KeyMemo(), make()

    def named(*shape: int) -> Any:
        return memo.resolve(Invocation("toy", (H100.array(shape),), {"mask": ex.Opaque()}), toy)

    assert named(8) is named(16)
    assert named(8).key != named(8, 8).key
    assert named(8).key.call_key == call_key(Invocation("toy", (H100.array((4,)),), {}), toy)
    assert named(8).key.device == device_fingerprint(H100)


def _building(result: Any) -> Toy:
    toy = Toy()
    toy.key_builder = lambda inv: result
    return toy


def test_text_from_a_key_builder_is_the_key_itself():
    """A user who names calls finds these names in the store."""
    assert call_key(CALL, _building("decode/8k")) == "decode/8k"
    assert resolve(CALL, _building("decode/8k")).key.call_key == "decode/8k"


def test_structured_values_from_a_key_builder_are_digested():
    """Any value with a stable identity is accepted, and counts by type and value."""
    built = [1, True, 1.0, (1,), [1], {"a": 1}, ex.Window(1), jnp.float32, {"x", "y"}, 0, False, ""]
    assert len({call_key(CALL, _building(value)) for value in built}) == len(built)
    assert call_key(CALL, _building({"a": 1, "b": 2})) == call_key(CALL, _building({"b": 2, "a": 1}))


def test_a_key_builder_that_forgets_to_return_is_a_clear_error():
    """With None, every call of the kernel would share one answer."""
    for ask in (resolve, call_key):
        with pytest.raises(InvalidRequestError, match="key_builder returned None for 'toy'"):
            ask(CALL, _building(None))


def test_an_opaque_value_from_a_key_builder_is_refused():
    """A key builder's result must have a stable identity."""
    with pytest.raises(UnstableKeyError) as caught:
        resolve(CALL, _building([1, ex.Opaque()]))
    assert caught.value.argument == "key_builder(...)[1]"


@pytest.mark.parametrize(
    "argument",
    [
        object(),
        ex.Opaque(),
        threading.Lock(),
        np.array([object()], dtype=object),
        {1: 0, "a": object()},
        {ex.Opaque(): 1},
    ],
    ids=["object", "callable", "lock", "object array", "keys of several types", "opaque key"],
)
def test_with_a_key_builder_any_argument_is_accepted(argument):
    """Arguments that the builder ignores are not inspected."""
    toy = _building("constant")
    assert resolve(Invocation("toy", (argument,), {"again": [argument]}), toy).key.call_key == "constant"


def test_with_a_key_builder_a_shape_on_an_abstract_mesh_is_accepted():
    """A shape without devices belongs to the default device."""
    shape = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(abstract_mesh(), P("x")))
    assert resolve(Invocation("toy", (shape,), {}), _building("constant")).key == (
        device_fingerprint(),
        "toy@v1",
        "constant",
    )


def test_with_a_key_builder_tracers_and_devices_are_still_noticed():
    """The builder decides the key, but not whether and where a call can be measured."""
    memo, toy = KeyMemo(), _building("constant")
    on_h100 = memo.resolve(Invocation("toy", ([H100.array((8,))],), {}), toy)
    on_a100 = memo.resolve(Invocation("toy", (), {"q": A100.array((8,))}), toy)
    assert (on_h100.device, on_a100.device) == (H100, A100)
    traced = during_trace(lambda x: memo.resolve(Invocation("toy", ({"q": x},), {}), toy), jnp.zeros(3))
    assert (on_h100.traced, traced.traced) == (False, True)


def test_with_a_key_builder_mapped_calls_keep_their_own_candidates():
    """A kernel may list other candidates under shard_map; a plain call of the same key does not affect them."""

    class Mapped(Toy):
        def key_builder(self, inv):
            return "constant"

        def candidate_cfgs_shard_map(self, inv):
            return [Blocks(1), Blocks(9)]

    memo, toy, mesh = KeyMemo(), Mapped(), Mesh(np.array(jax.devices()[:1]), ("x",))
    plain = Invocation("toy", (1,), {})
    mapped = Invocation("toy", (1,), {}, method="shard_map", mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    assert memo.resolve(plain, toy).listing(plain, toy).candidates == (Blocks(1), Blocks(2), Blocks(3))
    assert memo.resolve(mapped, toy).listing(mapped, toy).candidates == (Blocks(1), Blocks(9))
