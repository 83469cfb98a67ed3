"""Buckets: which dimensions they name, and which sizes share a key."""

from __future__ import annotations

import collections
import dataclasses
import inspect
from typing import Any

import anyio
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support.key_examples as ex
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import H100, Bench, Toy
from support.keys import during_trace

from asel import ConfigSelectorChain, InvalidRequestError, Invocation, Kernel, Tuner, kernel
from asel.kernels.buckets import Bucketing, Outside, powers_of_two
from asel.kernels.key_memo import KeyMemo
from asel.kernels.keys import at_tuned_size, call_key
from asel.testing import FakeDevice


class Attention(Kernel[int, Any]):
    op_id = "attention"

    def __init__(self, **buckets: Any) -> None:
        super().__init__()
        self.buckets = buckets.pop("declared", buckets) or None

    def run(self, q, k=None, *, cfg, cache=None):
        return q

    def candidate_cfgs(self, inv):
        return [1]


def shaped(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def same_config(of: Any, make: Any, one: int = 5, other: int = 7) -> bool:
    """Return whether `make`'s calls of two sizes in one bucket share a key."""
    first, second = (call_key(Invocation("attention", *make(size)), of) for size in (one, other))
    return first == second


def bucketed(spec: str, bounds: Any = (1, 8, 64)) -> Attention:
    return Attention(declared={spec: bounds})


# --- powers of two -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(1, 1, (1,)), (1, 8, (1, 2, 4, 8)), (128, 512, (128, 256, 512)), (64, 64, (64,)), (2**40, 2**41, (2**40, 2**41))],
)
def test_powers_of_two_include_both_ends(low, high, expected):
    """Both given bounds are included."""
    assert powers_of_two(low, high) == expected


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (0, 8, "low=0 is not a power of two"),
        (-4, 8, "low=-4 is not a power of two"),
        (3, 8, "low=3 is not a power of two"),
        (8, 100, "high=100 is not a power of two"),
        (16, 8, "low=16 is above high=8"),
        (1.0, 8, "low=1.0"),
        ("1", 8, "low='1'"),
    ],
)
def test_bounds_that_are_not_powers_of_two_are_named(low, high, said):
    """The error shows the offending value."""
    with pytest.raises(InvalidRequestError, match=said):
        powers_of_two(low, high)


# --- sizes -------------------------------------------------------------------------------------


def run(q, k=None, *, cfg, cache=None):
    return q


@settings(deadline=None, max_examples=200, database=None)
@given(st.sets(st.integers(1, 200), min_size=1, max_size=6), st.integers(0, 250), st.integers(0, 250))
def test_sizes_share_a_bucket_exactly_when_no_bound_lies_between_them(bounds, one, other):
    """A size is rounded up to the next bound; outside the range it counts exactly."""
    ordered = sorted(bounds)
    bucketing = Bucketing({"q.shape[0]": ordered}, inspect.signature(run))
    (one_dims, one_out), (other_dims, other_out) = (bucketing.apply("args[0]", (n,)) for n in (one, other))

    def inside(size: int) -> bool:
        return ordered[0] <= size <= ordered[-1]

    def bucket(size: int) -> Any:
        return min(b for b in ordered if b >= size) if inside(size) else ("alone", size)

    assert (one_dims == other_dims) == (bucket(one) == bucket(other))
    assert (one_out == []) == inside(one)
    assert other_out == ([] if inside(other) else [Outside("q.shape[0]", other, ordered[0], ordered[-1])])


def test_a_size_in_a_bucket_differs_from_the_same_size_without_one():
    """A key shows whether its answer is for a range, so changed buckets do not mix old answers with new ones."""
    call = Invocation("attention", (shaped(8),), {})
    assert call_key(call, bucketed("q.shape[0]")) != call_key(call, Attention())


def test_only_the_named_dimension_is_coarsened():
    """The other axes and the other arguments count exactly."""
    of = bucketed("q.shape[1]")
    assert same_config(of, lambda n: ((shaped(2, n),), {}))
    assert not same_config(of, lambda n: ((shaped(n, 2),), {}))
    assert not same_config(of, lambda n: ((shaped(2, 2), shaped(2, n)), {}))
    assert not same_config(of, lambda n: ((shaped(2, 2),), {"cache": shaped(2, n)}))


def test_several_dimensions_may_be_bucketed():
    """Each axis of each argument has its own bounds, and reports its own sizes."""
    of = Attention(declared={"q.shape[0]": (8, 16), "q.shape[1]": (100,), "k.shape[-1]": (4, 8)})
    known = KeyMemo().resolve(Invocation("attention", (shaped(9, 7), shaped(3, 9)), {}), of)
    assert known.outside == [("q.shape[1]", 7, 100, 100), ("k.shape[-1]", 9, 4, 8)]
    assert same_config(of, lambda n: ((shaped(8 + n, 100), shaped(2, n)), {}))
    assert not same_config(of, lambda n: ((shaped(8, 100), shaped(n, 8)), {}))


def test_a_call_inside_its_buckets_reports_nothing():
    """A size in range emits no event."""
    assert KeyMemo().resolve(Invocation("attention", (shaped(8),), {}), bucketed("q.shape[0]")).outside == []


# --- paths -------------------------------------------------------------------------------------


@dataclasses.dataclass
class Cache:
    k: Any
    v: Any = None


jax.tree_util.register_dataclass(Cache, data_fields=["k", "v"], meta_fields=[])


PATHS = {
    "q.shape[0]": lambda n: ((shaped(n, 2),), {}),
    "k.shape[0]": lambda n: ((shaped(2), shaped(n)), {}),
    "q.shape[-1]": lambda n: ((shaped(2, n),), {}),
    "q.shape[-2]": lambda n: ((shaped(n, 2),), {}),
    "args[0].shape[0]": lambda n: ((shaped(n),), {}),
    "args[1].shape[0]": lambda n: ((0, shaped(n)), {}),
    "cache.shape[0]": lambda n: ((0,), {"cache": shaped(n)}),
    "kwargs['cache'].shape[0]": lambda n: ((0,), {"cache": shaped(n)}),
    "cache['k'].shape[0]": lambda n: ((0,), {"cache": {"k": shaped(n)}}),
    'cache["k"].shape[0]': lambda n: ((0,), {"cache": {"k": shaped(n)}}),
    'kwargs["cache"].shape[0]': lambda n: ((0,), {"cache": shaped(n)}),
    "cache[1].shape[0]": lambda n: ((0,), {"cache": [0, shaped(n)]}),
    "cache['layers'][1]['k'].shape[2]": lambda n: ((0,), {"cache": {"layers": (0, {"k": shaped(1, 2, n)})}}),
    "q[0].shape[0]": lambda n: (((shaped(n),),), {}),
    "q.left.shape[0]": lambda n: ((ex.Pair(shaped(n), 0),), {}),
    "q['a'].left.shape[0]": lambda n: (({"a": ex.Pair(shaped(n), 0)},), {}),
}


@pytest.mark.parametrize(("spec", "make"), PATHS.items(), ids=PATHS)
def test_a_bucket_names_its_dimension_in_python_syntax(spec, make):
    """Parameters, positions, keywords, items and fields, with positive and negative axes."""
    assert same_config(bucketed(spec), make)
    assert not same_config(bucketed(spec, (6, 64)), make)
    assert not same_config(Attention(), make)


NODES = {
    "q['k'].shape[0] of an OrderedDict": ("q['k'].shape[0]", lambda x: collections.OrderedDict(k=x)),
    "q['k'].shape[0] of a defaultdict": ("q['k'].shape[0]", lambda x: collections.defaultdict(int, k=x)),
    "q.k.shape[0] of a registered dataclass": ("q.k.shape[0]", Cache),
    "q[0].shape[0] of a custom node": ("q[0].shape[0]", lambda x: ex.Node(x, 0)),
}


@pytest.mark.parametrize(("spec", "node"), NODES.values(), ids=NODES)
def test_a_bucket_reaches_into_any_pytree(spec, node):
    """Mappings by key and registered dataclasses by field, in Python syntax."""
    assert same_config(bucketed(spec), lambda n: ((node(shaped(n)),), {}))


def test_a_parameter_is_bucketed_however_it_is_passed():
    """By position or by name: it is the same parameter."""
    of = bucketed("k.shape[0]")
    assert same_config(of, lambda n: ((0, shaped(n)), {}))
    assert same_config(of, lambda n: ((0,), {"k": shaped(n)}))


@pytest.mark.parametrize("as_keyword", [False, True], ids=["position", "name"])
def test_a_decorated_function_is_bucketed_by_its_own_parameters(as_keyword):
    """The decorated kernel has the function's parameters."""

    @kernel(op_id="attention", configs=[1], buckets={"q.shape[0]": (1, 8, 64)})
    def attention(q, *, cfg):
        return q

    assert same_config(attention, lambda n: ((), {"q": shaped(n)}) if as_keyword else ((shaped(n),), {}))


def test_a_static_run_method_is_bucketed_by_its_parameters():
    """`self` is not an argument of the call, with or without one."""

    class Static(Attention):
        @staticmethod
        def run(q, k=None, *, cfg):
            return q

    assert same_config(Static(declared={"k.shape[0]": (8, 64)}), lambda n: ((0, shaped(n + 8)), {}))


def test_buckets_may_be_declared_on_the_class():
    """Buckets belong to the kernel, like its version."""

    class Declared(Attention):
        buckets = {"q.shape[0]": powers_of_two(8, 64)}

        def __init__(self):
            self.op_id = "declared"

    assert same_config(Declared(), lambda n: ((shaped(n + 4),), {}), 5, 12)


# --- mistakes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "q",
        "q.shape",
        "q.shape[]",
        "q.shape[a]",
        "q.shape[0:1]",
        "q.dtype[0]",
        "shape[0]",
        "q.shape[0] ",
        "1.shape[0]",
    ],
)
def test_a_bucket_that_names_no_dimension_is_an_error(spec):
    """The message shows what was written and how to write it."""
    with pytest.raises(InvalidRequestError, match="does not name a dimension") as caught:
        call_key(Invocation("attention", (shaped(2),), {}), bucketed(spec))
    assert repr(spec) in str(caught.value)
    assert "q.shape[1]" in str(caught.value)


def test_a_bucket_of_an_unknown_parameter_is_an_error():
    """Otherwise a misspelt parameter would silently have no effect."""
    with pytest.raises(InvalidRequestError, match=r"qq\.shape\[0\]"):
        call_key(Invocation("attention", (shaped(2),), {}), bucketed("qq.shape[0]"))


@pytest.mark.parametrize(
    "bounds",
    [(), (8, 4), (4, 4), [8, 16, 12], 128, None, "128", ("a", "b"), (1, "b"), (1.5, 2.5), (float("nan"),), (None,)],
    ids=repr,
)
def test_bounds_that_do_not_ascend_are_an_error(bounds):
    """Bounds are ascending integers; the error shows the offending value."""
    with pytest.raises(InvalidRequestError, match="ascending") as caught:
        call_key(Invocation("attention", (shaped(2),), {}), bucketed("q.shape[0]", bounds))
    assert "q.shape[0]" in str(caught.value)


@pytest.mark.parametrize("axis", [1, 2, -2])
def test_an_axis_the_array_does_not_have_is_an_error(axis):
    """The message names the bucket, the argument and its shape."""
    with pytest.raises(InvalidRequestError, match="has only 1 dimension") as caught:
        call_key(Invocation("attention", (shaped(2),), {}), bucketed(f"q.shape[{axis}]"))
    assert f"q.shape[{axis}]" in str(caught.value)
    assert "(2,)" in str(caught.value)


def test_a_bucket_of_a_missing_argument_is_ignored():
    """The argument may be optional."""
    assert call_key(Invocation("attention", (shaped(2),), {}), bucketed("cache.shape[0]"))
    assert call_key(Invocation("attention", (shaped(2), None), {}), bucketed("k.shape[0]"))


# --- at which size a bucket is tuned -----------------------------------------------------------


class Divided(Kernel[int, Any]):
    """A kernel whose candidates depend on the length, as block sizes do."""

    op_id = "divided"
    buckets = {"x.shape[0]": powers_of_two(8, 64), "y.shape[0]": powers_of_two(8, 64)}

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[int, ...]] = []
        self.ran: set[tuple[int, int]] = set()

    def run(self, x, y, *, scale=1.0, cfg):
        self.ran.add((x.shape[0], y.shape[0]))
        return x * y * scale

    def heuristic_cfg(self, inv):
        return inv.args[0].shape[0]

    def candidate_cfgs(self, inv):
        self.asked.append(tuple(x.shape[0] for x in inv.args))
        return [inv.args[0].shape[0] // divisor for divisor in (1, 2, 4)]


def divided(x: Any, y: Any) -> Invocation[int, Any]:
    return Invocation("divided", (x, y), {"scale": 2.0})


@pytest.mark.anyio
async def test_a_bucket_is_tuned_once_although_its_candidates_depend_on_the_shape():
    """Candidates are listed for its upper bound, so all its shapes have the same list."""
    bench, of = Bench(costs=lambda cfg: 0.001 * cfg), Divided()
    async with bench.chain as chain:
        chosen = [await chain.choose(divided(jnp.ones(n), jnp.ones(n)), of) for n in (20, 17, 31, 32)]
        assert chosen == [8, 8, 8, 8]
        assert bench.tunes == 1
        assert await chain.choose(divided(jnp.ones(33), jnp.ones(33)), of) == 16
    assert bench.tunes == 2
    assert {size for sizes in of.asked for size in sizes} == {32, 64}


@pytest.mark.anyio
async def test_a_size_outside_the_buckets_is_tuned_exactly():
    """It has its own key, and the candidates are listed for it."""
    bench, of = Bench(costs=lambda cfg: 0.001 * cfg), Divided()
    async with bench.chain as chain:
        assert await chain.choose(divided(jnp.ones(100), jnp.ones(100)), of) == 25
    assert of.asked == [(100, 100)]


@pytest.mark.parametrize("make", [jnp.ones, np.ones, lambda n: jax.ShapeDtypeStruct((n,), jnp.float32)])
def test_a_bucket_is_measured_at_its_upper_bound(real_backend, make):
    """Whichever size comes first, arrays of the bound's size replace smaller ones."""

    async def main():
        of = Divided()
        async with ConfigSelectorChain(tuner=Tuner(1, 1), sinks=()) as chain:
            selection = await chain.select(divided(make(20), make(20)), of)
        return selection, of.ran

    selection, ran = anyio.run(main, backend=real_backend)
    assert selection.tier == "autotune"
    assert ran == {(32, 32)}


def test_arguments_as_large_as_their_bucket_are_measured_themselves():
    """The caller's own arrays are used if they have the right size."""
    x, y = jnp.ones(32), jnp.ones(20)
    call = divided(x, y)
    assert at_tuned_size(divided(x, x), Divided()).args == (x, x)
    larger = at_tuned_size(call, Divided())
    assert larger.args[0] is x
    assert (larger.args[1].shape, larger.args[1].dtype, larger.kwargs) == ((32,), y.dtype, call.kwargs)


def test_a_call_is_enlarged_wherever_its_arrays_are():
    """By keyword, in a container, and on a device of another process."""
    of = Attention(declared={"cache['k'].shape[0]": (8, 64), "k.shape[-1]": (8, 64)})
    arrays = {"cache": {"k": jnp.ones((9, 3)), "v": jnp.ones((9, 3))}, "k": FakeDevice("H100").array((2, 9))}
    kwargs = at_tuned_size(Invocation("attention", (jnp.ones(9),), arrays), of).kwargs
    assert (kwargs["cache"]["k"].shape, kwargs["cache"]["v"].shape, kwargs["k"].shape) == ((64, 3), (9, 3), (2, 64))


# --- buckets in keys ---------------------------------------------------------------------------


class _Bucketed(Toy):
    buckets = {"x.shape[0]": powers_of_two(8, 64)}


def _shaped(rows: int, columns: int = 4) -> Invocation[Any, Any]:
    return Invocation("toy", (jax.ShapeDtypeStruct((rows, columns), jnp.float32),), {})


def test_calls_in_one_bucket_share_a_key_and_those_in_two_do_not():
    """A declared range of sizes has one answer; the other dimensions still count."""
    toy = _Bucketed()
    keys = {rows: call_key(_shaped(rows), toy) for rows in range(8, 65)}
    assert keys[9] == keys[16]
    assert keys[16] != keys[17]
    assert keys[17] == keys[32]
    assert len(set(keys.values())) == 4
    assert call_key(_shaped(9, 5), toy) != keys[9]
    assert call_key(_shaped(16), Toy()) != keys[16]


def test_each_size_outside_the_buckets_has_its_own_key():
    """Outside the declared range each size counts exactly, and the call reports it."""
    memo, toy = KeyMemo(), _Bucketed()
    found = {rows: memo.resolve(_shaped(rows), toy) for rows in (1, 7, 8, 64, 65, 66)}
    assert len({known.key.call_key for known in found.values()}) == len(found)
    assert [known.outside for known in found.values()] == [
        [("x.shape[0]", 1, 8, 64)],
        [("x.shape[0]", 7, 8, 64)],
        [],
        [],
        [("x.shape[0]", 65, 8, 64)],
        [("x.shape[0]", 66, 8, 64)],
    ]


def test_a_bucket_applies_to_tracers_numpy_arrays_and_fakes():
    """The size of every kind of array is coarsened."""
    toy = _Bucketed()

    def named(x: Any) -> str:
        return call_key(Invocation("toy", (x,), {}), toy)

    expected = named(jnp.zeros((16, 4)))
    assert named(np.zeros((12, 4), np.float32)) == expected
    assert during_trace(named, jnp.zeros((11, 4))) == expected
    assert named(H100.array((10, 4))) == named(H100.array((16, 4)))
