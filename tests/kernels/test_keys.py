"""What shares a key and what must not: constants, arrays, tracers."""

from __future__ import annotations

import collections
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support.key_examples as ex
from support.kernels import H100
from support.key_examples import captured
from support.keys import KERNEL, during_trace, key, resolve, sharing, sig

from asel import Invocation
from asel.kernels.devices import device_fingerprint
from asel.kernels.key_memo import KeyMemo
from asel.testing import FakeArray, FakeDevice

ALIKE = {
    "1": 1,
    "True": True,
    "1.0": 1.0,
    "0": 0,
    "False": False,
    "0.0": 0.0,
    "-0.0": -0.0,
    "nan": float("nan"),
    "None": None,
    "'1'": "1",
    "b'1'": b"1",
    "1+0j": 1 + 0j,
    "1-0j": complex(1, -0.0),
    "numpy text 1": np.str_("1"),
    "level 1": ex.Level.LOW,
    "(1,)": (1,),
    "[1]": [1],
    "()": (),
    "[]": [],
    "{}": {},
    "set()": set(),
    "frozenset()": frozenset(),
}

PLACES = {
    "argument": lambda v: ((v,), {}),
    "keyword": lambda v: ((), {"scale": v}),
    "tuple": lambda v: (((v,),), {}),
    "list": lambda v: (([0, v],), {}),
    "dict value": lambda v: (({"k": v},), {}),
    "deep": lambda v: (({"a": [({"b": (v,)},)]},), {}),
    "OrderedDict": lambda v: ((collections.OrderedDict(k=v),), {}),
    "defaultdict": lambda v: ((collections.defaultdict(int, k=v),), {}),
    "mapping proxy": lambda v: ((types.MappingProxyType({"k": v}),), {}),
    "namedtuple": lambda v: ((ex.Pair(v, 0),), {}),
    "slice": lambda v: ((slice(v),), {}),
    "dataclass": lambda v: ((ex.Window(v),), {}),
    "slotted dataclass": lambda v: ((ex.Slotted(v),), {}),
    "attrs": lambda v: ((ex.Attributes(v),), {}),
    "pydantic model": lambda v: ((ex.Settings(value=v),), {}),
    "node child": lambda v: ((ex.Node(v, 0),), {}),
    "node's static field": lambda v: ((ex.Node(0, 0, v),), {}),
    "registered dataclass": lambda v: ((ex.Layer(v),), {}),
    "registered dataclass's static field": lambda v: ((ex.Layer(0, v),), {}),
    "closure": lambda v: ((ex.window(v),), {}),
    "closure's list": lambda v: ((ex.window([v]),), {}),
    "default": lambda v: ((types.FunctionType(ex.causal.__code__, {}, "f", (v, 0)),), {}),
    "partial": lambda v: ((functools.partial(ex.causal, v),), {}),
    "partial keyword": lambda v: ((functools.partial(ex.causal, j=v),), {}),
    "jax partial": lambda v: ((jax.tree_util.Partial(ex.causal, v),), {}),
    "method's object": lambda v: ((ex.Window(v).reach,), {}),
    "bound builtin's object": lambda v: (([v].count,), {}),
    "jitted closure": lambda v: ((jax.jit(ex.window(v)),), {}),
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_constants_that_compare_equal_differ_by_type_at_any_depth(place):
    """A constant counts by type and value, at any depth: 1, True and 1.0 are three calls."""
    calls = [place(value) for value in ALIKE.values()]
    assert len({key(*args, **kwargs) for args, kwargs in calls}) == len(ALIKE)
    assert len({sig(*args, **kwargs) for args, kwargs in calls}) == len(ALIKE)


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_equal_constants_share_a_key_at_any_depth(place):
    """The same value made twice is one call, NaN included."""

    def made(nan: str) -> Any:
        return place((float(nan), "a", 1, {"x": -0.0}, None))

    (args, kwargs), (args2, kwargs2) = made("nan"), made("nan")
    assert key(*args, **kwargs) == key(*args2, **kwargs2)
    assert sig(*args, **kwargs) == sig(*args2, **kwargs2)


@pytest.mark.parametrize(
    "wrap",
    [lambda k: {k: 0}, lambda k: {(k,): 0}, lambda k: frozenset({k}), lambda k: {k}, lambda k: {"d": {k: 0}}],
    ids=["dict key", "tuple in a dict key", "frozenset", "set", "nested dict key"],
)
def test_hashable_constants_differ_by_type_as_keys_and_members(wrap):
    """A dict key or a member of a set counts by type and value too, though Python's own dict merges them."""
    hashable = [value for value in ALIKE.values() if not isinstance(value, list | dict | set)]
    assert len({key(wrap(value)) for value in hashable}) == len(hashable)
    assert len({sig(wrap(value)) for value in hashable}) == len(hashable)


def test_positional_and_keyword_arguments_are_different_calls():
    """The position of an argument is part of the call."""
    calls = [((1, 2), {}), ((1,), {"b": 2}), ((), {"a": 1, "b": 2}), (((1, 2),), {}), (({"a": 1, "b": 2},), {})]
    assert len({key(*args, **kwargs) for args, kwargs in calls}) == len(calls)
    assert len({sig(*args, **kwargs) for args, kwargs in calls}) == len(calls)


def test_the_order_of_keywords_and_of_dict_entries_does_not_matter():
    """Insertion order is not part of a dict's value."""
    assert key(a=1, b={"x": 1, "y": 2}) == key(b={"y": 2, "x": 1}, a=1)
    one, other = (collections.defaultdict(int, items) for items in ({"a": 1, "b": 2}, {"b": 2, "a": 1}))
    assert key(one) == key(other)
    assert key(captured(one)) == key(captured(other))
    assert key(types.MappingProxyType(one)) == key(types.MappingProxyType(other))


def test_the_order_of_an_ordered_dict_matters():
    """An OrderedDict in another order is another value, and another pytree."""
    assert sharing(collections.OrderedDict(a=1, b=2), collections.OrderedDict(b=2, a=1)) == 0


def test_text_with_separators_stays_in_its_field():
    """Separators and quotes inside a field are escaped."""
    calls = [("a|b", "c"), ("a", "b|c"), ("a|b|c",), ("a", "b", "c"), ("a', 'b", "c"), ("a,b", "c"), ("a\x00b", "c")]
    assert len({key(*args) for args in calls}) == len(calls)
    assert key({"a|b": "c"}) != key({"a": "b|c"})
    assert key(**{"a|b": "c"}) != key(a="b|c")


@pytest.mark.parametrize("size", [2**63, 10**4299, 10**5000, -(10**5000)], ids=["2**63", "10**4299", "big", "-big"])
def test_an_integer_of_any_length_has_a_key(size):
    """Python refuses to print very long integers; they are still plain constants."""
    assert key(size) == key(size + 0)
    assert key(size) != key(size + 1)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"dtype": jnp.float32}, {"dtype": jnp.bfloat16}),
        ({"dtype": jnp.dtype("float32")}, {"dtype": jnp.dtype("bfloat16")}),
        ({"dtype": np.float32}, {"dtype": np.float16}),
        ({"dtype": "float32"}, {"dtype": "bfloat16"}),
        ({"dtype": jnp.float8_e4m3fn}, {"dtype": jnp.float8_e5m2}),
        ({"dtype": jnp.dtype(jnp.int4)}, {"dtype": jnp.dtype(jnp.uint4)}),
        ({"precision": jax.lax.Precision.HIGH}, {"precision": jax.lax.Precision.HIGHEST}),
        ({"out": jax.Array}, {"out": np.ndarray}),
        ({"out": FakeArray}, {"out": FakeDevice}),
    ],
)
def test_dtypes_and_other_types_as_keywords_count_by_name(one, other):
    """A dtype argument is part of the call (ejKernel's defect 11)."""
    assert key(**one) == key(**one)
    assert key(**one) != key(**other)


@pytest.mark.parametrize("array_type", [jax.Array, np.ndarray, FakeArray])
def test_an_array_type_is_a_constant_and_not_an_array(array_type):
    """An array class has the attributes of an array, but is a constant."""
    assert key(array_type) == key(array_type)
    assert resolve(Invocation("k", (array_type,), {})).key.device == device_fingerprint()


DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16, jnp.int32, jnp.uint8, jnp.bool_, jnp.complex64]
SMALL = [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int4]


@pytest.mark.parametrize("dtype", [*DTYPES, *SMALL], ids=lambda dtype: jnp.dtype(dtype).name)
@pytest.mark.parametrize("shape", [(), (8, 128)], ids=str)
def test_all_kinds_of_arrays_count_by_their_aval(dtype, shape):
    """A JAX array, a numpy array, a ShapeDtypeStruct and a tracer of one aval are one call."""
    x = jnp.zeros(shape, dtype)
    expected = key(x)
    assert key(np.ones(shape, dtype)) == expected
    assert key(jax.ShapeDtypeStruct(shape, dtype)) == expected
    assert during_trace(key, x) == expected
    assert during_trace(lambda y: key({"q": [y]}), x) == key({"q": [x]})


def test_arrays_count_the_same_inside_any_pytree():
    """In lists, tuples, dicts, namedtuples, registered nodes and dataclasses."""
    x = jnp.zeros(3)
    trees = [
        lambda v: [v],
        lambda v: (v,),
        lambda v: {"k": v},
        lambda v: collections.OrderedDict(k=v),
        lambda v: collections.defaultdict(int, k=v),
        lambda v: ex.Pair(v, None),
        lambda v: ex.Node(v, None),
        lambda v: ex.Layer(v),
        lambda v: jax.tree_util.Partial(ex.causal, v),
    ]
    for tree in trees:
        assert key(tree(x)) == key(tree(x + 1)) == key(tree(np.ones(3, np.float32)))
        assert key(tree(x)) == during_trace(lambda y, tree=tree: key(tree(y)), x)
        assert key(tree(x)) != key(tree(jnp.zeros(4)))
    assert len({key(tree(x)) for tree in trees}) == len(trees)


def test_shapes_dtypes_and_weak_types_differ():
    """Each part of an aval changes the signature and the key."""
    arrays = [jnp.zeros(shape) for shape in ((), (1,), (8,), (1, 8), (8, 1), (0,), (0, 8))]
    arrays += [jnp.zeros(8, dtype) for dtype in [*DTYPES, *SMALL] if dtype is not jnp.float32]
    arrays += [jnp.asarray(1.0), jnp.asarray(1), jnp.asarray(1, jnp.int32), jnp.full((8,), 2.0)]
    avals = {str(x.aval) for x in arrays}
    assert len(avals) == len({key(x) for x in arrays}) == len({sig(x) for x in arrays})


def test_weak_types_differ_in_shapes_and_tracers_too():
    """A weakly typed argument compiles to another program."""
    weak, strong = jnp.asarray(1.0), jnp.asarray(1.0, jnp.float32)
    assert key(jax.ShapeDtypeStruct((), jnp.float32, weak_type=True)) == key(weak) == during_trace(key, weak)
    assert key(jax.ShapeDtypeStruct((), jnp.float32)) == key(strong) == during_trace(key, strong)
    assert key(weak) != key(strong)


def test_a_shape_of_numpy_integers_is_the_same_shape():
    """A size computed with NumPy is an ordinary size."""
    assert key(jax.ShapeDtypeStruct((np.int64(8), 2), jnp.float32)) == key(jnp.zeros((8, 2)))
    assert key(H100.array((np.int64(8), 2))) == key(H100.array((8, 2)))


def test_numpy_arrays_count_by_the_dtype_jax_will_give_them():
    """float64 becomes float32 unless x64 is on, in the program as in the key."""
    wide, narrow = np.zeros(3, np.float64), np.zeros(3, np.float32)
    assert key(wide) == key(narrow) == key(jax.ShapeDtypeStruct((3,), np.float64))
    with jax.enable_x64(True):
        assert key(wide) != key(narrow)
        assert key(wide) == key(jnp.zeros(3, jnp.float64))


def test_contents_count_for_captured_arrays_only():
    """An array argument is data; a captured array is part of the function."""
    assert key(jnp.zeros(3)) == key(jnp.ones(3))
    assert key(captured(jnp.zeros(3))) == key(captured(np.zeros(3, np.float32)))
    assert (
        sharing(captured(np.zeros(3)), captured(np.ones(3)), captured(np.zeros((3, 1))), captured(np.zeros(3, "i4")))
        == 0
    )
    assert sharing(captured(jnp.zeros(2, jnp.bfloat16)), captured(jnp.zeros(2, jnp.float16))) == 0


def test_a_captured_array_counts_by_its_items_and_not_by_its_strides():
    """A transposed view and its copy hold the same items."""
    x = np.arange(6).reshape(2, 3).T
    assert key(captured(x)) == key(captured(x.copy()))
    assert key(captured(x)) != key(captured(x.T))


def test_random_keys_are_arrays():
    """A typed PRNG key counts by implementation and shape, not by its seed; a captured one by its seed too."""
    one, two = jax.random.key(0), jax.random.key(1)
    assert key(one) == key(two) == during_trace(key, one) == key(jax.ShapeDtypeStruct((), one.dtype))
    assert sharing(one, jax.random.key(0, impl="rbg"), jax.random.PRNGKey(0), jax.random.split(one)) == 0
    assert key(captured(one)) != key(captured(two))


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(2, [("a", "f4")]),
        np.zeros(2, "V8"),
        np.zeros(2, "U3"),
        np.zeros(2, "M8[s]"),
        np.zeros(2, jax.dtypes.float0),
        np.zeros(2, ">f4"),
        np.zeros(2, np.longdouble),
    ],
    ids=lambda array: str(array.dtype),
)
def test_unusual_numpy_arrays_have_keys(array):
    """Arrays that JAX does not accept are constants, and do not raise TypeError."""
    assert key(array) == key(array.copy())
    assert key(array) != key(np.zeros(3, array.dtype))
    assert key(array) != key(np.zeros(2, np.float32))


def test_a_custom_node_may_have_a_fields_attribute_of_its_own():
    """Only namedtuples name their children in `_fields`; elsewhere it is a private attribute."""

    class Table:
        _fields = ("id", "name", "age")

        def __init__(self, *rows):
            self.rows = rows

    jax.tree_util.register_pytree_node(Table, lambda t: (t.rows, None), lambda _, rows: Table(*rows))
    assert key(Table(jnp.zeros(2))) == key(Table(jnp.ones(2)))
    assert key(Table(jnp.zeros(2))) != key(Table(jnp.zeros(2), jnp.zeros(2)))


def test_settings_that_change_the_program_change_the_key():
    """x64 and the default matmul precision compile to other programs."""

    def seen() -> tuple[str, Any]:
        return key(jnp.zeros(2, jnp.float32)), sig(np.zeros(2, np.float32))

    answers = [seen()]
    with jax.enable_x64(True):
        answers.append(seen())
    for precision in ("bfloat16", "float32"):
        with jax.default_matmul_precision(precision):
            answers.append(seen())
    keys, signatures = zip(*answers, strict=True)
    assert len(set(keys)) == len(set(signatures)) == len(answers)
    assert seen() == answers[0]


@pytest.mark.parametrize(
    "hide",
    [
        lambda x: x,
        lambda x: {"q": [x]},
        lambda x: ex.Layer(x),
        lambda x: functools.partial(ex.causal, x),
        lambda x: captured(x),
        lambda x: ex.Window(x),
        lambda x: captured(ex.Window([x])),
    ],
    ids=["argument", "pytree", "registered dataclass", "partial", "closure", "dataclass", "closure over a dataclass"],
)
def test_a_call_that_holds_a_tracer_is_traced(hide):
    """Nothing is measured with tracers, so they are found at any depth."""
    assert during_trace(lambda x: resolve(Invocation("k", (hide(x),), {})).traced, jnp.zeros(3)) is True


def test_a_call_without_tracers_is_not_traced_even_while_jax_traces():
    """Constants and concrete arrays can be measured even then."""
    x = jnp.zeros(3)
    assert during_trace(lambda _: resolve(Invocation("k", (x, 1), {})).traced, x) is False


def test_traced_and_eager_calls_share_a_key_but_not_their_resolution():
    """They share an answer, but only the eager call can be measured."""
    memo, x = KeyMemo(), jnp.zeros(3)
    eager = memo.resolve(Invocation("k", (x,), {}), KERNEL)
    traced = during_trace(lambda y: memo.resolve(Invocation("k", (y,), {}), KERNEL), x)
    assert (eager.traced, traced.traced) == (False, True)
    assert eager.key == traced.key
