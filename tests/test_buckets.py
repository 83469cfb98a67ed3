"""Shapes that share an answer: which dimensions are meant, and which sizes are alike."""

from __future__ import annotations

import collections
import dataclasses
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import key_examples as ex
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asel import InvalidRequestError, Invocation, Kernel, kernel
from asel.buckets import Bucketing, Outside, powers_of_two
from asel.keys import KeyMemo, call_key


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


def alike(of: Any, make: Any, one: int = 5, other: int = 7) -> bool:
    """Tell whether the calls that `make` makes of two sizes in one bucket share a key."""
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
    """The bounds that were named are bounds."""
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
def test_sizes_are_alike_exactly_when_no_bound_lies_between_them(bounds, one, other):
    """A size counts as the smallest bound that is not below it; outside the range it stands for itself."""
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
    """A key says whether an answer was meant for a range: changing the buckets does not mix old answers with new."""
    call = Invocation("attention", (shaped(8),), {})
    assert call_key(call, bucketed("q.shape[0]")) != call_key(call, Attention())


def test_only_the_named_dimension_is_coarsened():
    """The other axes and the other arguments count exactly."""
    of = bucketed("q.shape[1]")
    assert alike(of, lambda n: ((shaped(2, n),), {}))
    assert not alike(of, lambda n: ((shaped(n, 2),), {}))
    assert not alike(of, lambda n: ((shaped(2, 2), shaped(2, n)), {}))
    assert not alike(of, lambda n: ((shaped(2, 2),), {"cache": shaped(2, n)}))


def test_several_dimensions_may_be_bucketed():
    """Each axis of each argument has its own bounds, and reports its own sizes."""
    of = Attention(declared={"q.shape[0]": (8, 16), "q.shape[1]": (100,), "k.shape[-1]": (4, 8)})
    known = KeyMemo().resolve(Invocation("attention", (shaped(9, 7), shaped(3, 9)), {}), of)
    assert known.outside == [("q.shape[1]", 7, 100, 100), ("k.shape[-1]", 9, 4, 8)]
    assert alike(of, lambda n: ((shaped(8 + n, 100), shaped(2, n)), {}))
    assert not alike(of, lambda n: ((shaped(8, 100), shaped(n, 8)), {}))


def test_a_call_inside_its_buckets_reports_nothing():
    """Being in range is not an event."""
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
def test_a_bucket_names_its_dimension_as_python_would(spec, make):
    """Parameters, positions, keywords, items and fields, with positive and negative axes."""
    assert alike(bucketed(spec), make)
    assert not alike(bucketed(spec, (6, 64)), make)
    assert not alike(Attention(), make)


NODES = {
    "q['k'].shape[0] of an OrderedDict": ("q['k'].shape[0]", lambda x: collections.OrderedDict(k=x)),
    "q['k'].shape[0] of a defaultdict": ("q['k'].shape[0]", lambda x: collections.defaultdict(int, k=x)),
    "q.k.shape[0] of a registered dataclass": ("q.k.shape[0]", Cache),
    "q[0].shape[0] of a custom node": ("q[0].shape[0]", lambda x: ex.Node(x, 0)),
}


@pytest.mark.parametrize(("spec", "node"), NODES.values(), ids=NODES)
def test_a_bucket_reaches_into_any_pytree(spec, node):
    """Mappings go by key and registered dataclasses by field, as the user would write them."""
    assert alike(bucketed(spec), lambda n: ((node(shaped(n)),), {}))


def test_a_parameter_is_bucketed_however_it_is_passed():
    """By position or by name, it is the same parameter."""
    of = bucketed("k.shape[0]")
    assert alike(of, lambda n: ((0, shaped(n)), {}))
    assert alike(of, lambda n: ((0,), {"k": shaped(n)}))


@pytest.mark.parametrize("as_keyword", [False, True], ids=["position", "name"])
def test_a_decorated_function_is_bucketed_by_its_own_parameters(as_keyword):
    """The decorator's kernel takes what the function takes."""

    @kernel(op_id="attention", configs=[1], buckets={"q.shape[0]": (1, 8, 64)})
    def attention(q, *, cfg):
        return q

    assert alike(attention, lambda n: ((), {"q": shaped(n)}) if as_keyword else ((shaped(n),), {}))


def test_a_static_run_method_is_bucketed_by_its_parameters():
    """`self` is no argument of the call, with or without one."""

    class Static(Attention):
        @staticmethod
        def run(q, k=None, *, cfg):
            return q

    assert alike(Static(declared={"k.shape[0]": (8, 64)}), lambda n: ((0, shaped(n + 8)), {}))


def test_buckets_may_be_declared_on_the_class():
    """They belong to the kernel, like its version."""

    class Declared(Attention):
        buckets = {"q.shape[0]": powers_of_two(8, 64)}

        def __init__(self):
            self.op_id = "declared"

    assert alike(Declared(), lambda n: ((shaped(n + 4),), {}), 5, 12)


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
    """A misspelt parameter would otherwise coarsen nothing, in silence."""
    with pytest.raises(InvalidRequestError, match=r"qq\.shape\[0\]"):
        call_key(Invocation("attention", (shaped(2),), {}), bucketed("qq.shape[0]"))


@pytest.mark.parametrize(
    "bounds",
    [(), (8, 4), (4, 4), [8, 16, 12], 128, None, "128", ("a", "b"), (1, "b"), (1.5, 2.5), (float("nan"),), (None,)],
    ids=repr,
)
def test_bounds_that_do_not_ascend_are_an_error(bounds):
    """Bounds are ascending whole numbers; whatever else was given is shown."""
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


def test_a_bucket_of_an_argument_that_was_not_passed_is_no_error():
    """Optional arguments have buckets too."""
    assert call_key(Invocation("attention", (shaped(2),), {}), bucketed("cache.shape[0]"))
    assert call_key(Invocation("attention", (shaped(2), None), {}), bucketed("k.shape[0]"))
