"""Canonical forms are equal exactly when the values are; other values are refused."""

from __future__ import annotations

import collections
import dataclasses
import decimal
import fractions
import functools
import pathlib
import subprocess
import sys
import threading
import types
import uuid
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import pydantic
import pytest
import support.key_examples as ex
from hypothesis import given, settings
from hypothesis import strategies as st
from support.key_examples import P, captured

from asel import UnstableKeyError
from asel.kernels.canonical import canonical, digest
from asel.kernels.canonical_jax import aval_form

T = TypeVar("T")


def form_or_refusal(value: Any) -> Any:
    try:
        return canonical(value)
    except UnstableKeyError:
        return ("refused", id(value))


def sharing(*values: Any) -> int:
    """Return the number of values that share their form with an earlier one; refused values share none."""
    return len(values) - len({form_or_refusal(value) for value in values})


# --- plain values --------------------------------------------------------------------------------

VALUES = {
    "none": [None],
    "bool": [True, False],
    "int": [0, 1, -1, 2**63, 10**100],
    "float": [0.0, -0.0, 1.0, 1.5, float("inf"), float("-inf"), float("nan"), 5e-324],
    "complex": [0j, 1j, complex(0, -0.0), complex(-0.0, 0)],
    "text": ["", "a", "A", "é", "e\u0301", "\ud800", "\n", "'", '"', "|", "\\", "\\n"],
    "bytes": [b"", b"a", bytearray(b""), bytearray(b"a")],
    "ellipsis": [...],
    "range": [range(0), range(1), range(1, 3), range(1, 3, 2)],
    "slice": [slice(None), slice(1), slice(1, None), slice(None, None, 1)],
    "tuple": [(), (1,), (1, 2), ((1,), 2), (1, (2,)), ((1, 2),)],
    "list": [[], [1], [1, 2], [[1], 2]],
    "dict": [{}, {"a": 1}, {"a": 2}, {"b": 1}, {"a": 1, "b": 2}, {"a": {"b": 1}}, {("a", 1): None}],
    "set": [set(), {1}, {1, 2}, frozenset(), frozenset({1}), {frozenset({1})}, {(1,)}],
    "decimal": [decimal.Decimal("1"), decimal.Decimal("1.0"), decimal.Decimal("-0"), decimal.Decimal("NaN")],
    "fraction": [fractions.Fraction(1), fractions.Fraction(1, 3)],
    "path": [pathlib.PurePosixPath("a"), pathlib.PureWindowsPath("a"), pathlib.PurePosixPath("a/b")],
    "uuid": [uuid.UUID(int=1), uuid.UUID(int=2)],
    "enum": [ex.Colour.RED, ex.Colour.BLUE, ex.Level.LOW, ex.Access.READ, ex.Access(3), ex.Access(0)],
    "type": [int, bool, ex.Window, type, list[int], list[str], dict[str, int]],
    "numpy scalar": [np.int8(1), np.uint8(1), np.float32(0.0), np.float32(-0.0), np.str_("a"), np.bool_(True)],
    "dtype": [np.dtype("f4"), np.dtype("f8"), np.dtype("M8[s]"), np.dtype("M8[ms]")],
    "jax scalar type": [jnp.bfloat16, jnp.float8_e4m3fn, jnp.int4],
    "array": [np.zeros(2), np.ones(2), np.zeros((2, 1)), np.zeros(2, "f4"), np.zeros(0), np.zeros((0, 2))],
    "text array": [np.array(["a"]), np.array(["b"]), np.array([b"a"])],
    "dataclass": [ex.Window(1), ex.Window(2), ex.Window((1,)), ex.Slotted(1)],
    "attrs": [ex.Attributes(1), ex.Attributes(1.0)],
    "pydantic": [ex.Settings(value=1), ex.Settings(value=1.0), ex.Settings(value=1, names=set())],
    "namedtuple": [ex.Pair(1, 2), ex.Pair(2, 1)],
    "mapping": [collections.OrderedDict(a=1), types.MappingProxyType({"a": 1}), collections.Counter(a=1)],
    "module": [np, jnp],
    "node": [ex.Node(1, 2), ex.Node(2, 1), ex.Node(1, 2, 3)],
}
EVERY = [value for values in VALUES.values() for value in values]


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_different_values_have_different_forms(values):
    """No two of these values have equal forms."""
    forms = {digest(canonical(value)) for value in values}
    assert len(forms) == len(values)
    others = {digest(canonical(value)) for value in EVERY if not any(value is mine for mine in values)}
    assert not forms & others


def _parts(tree: Any) -> Any:
    yield tree
    if isinstance(tree, tuple):
        for part in tree:
            yield from _parts(part)


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_a_form_is_made_of_plain_values_behind_tags(values):
    """Only tuples, text, bytes and integers, so that `repr` of the whole is a faithful serialisation."""
    for value in values:
        made = canonical(value)
        assert isinstance(made[0], str)
        assert {type(part) for part in _parts(made)} <= {tuple, str, bytes, int}
        assert {made: 1}[canonical(value)] == 1


def test_a_digest_is_thirty_two_hexadecimal_digits():
    """Short enough for a log line, long enough not to collide by accident."""
    made = digest(canonical({"a": 1}))
    assert len(made) == 32
    assert int(made, 16) > 0
    assert made == digest(canonical({"a": 1}))
    assert made != digest(canonical({"a": 2}))


def test_only_ordered_containers_count_by_order():
    """Sets and dicts have no order; lists, tuples and ordered dicts have one."""
    assert canonical({"a": 1, "b": 2}) == canonical({"b": 2, "a": 1})
    assert canonical(dict.fromkeys([3, 1, 2])) == canonical(dict.fromkeys([1, 2, 3]))
    assert canonical({10, 2, 33}) == canonical({33, 10, 2})
    assert sharing([1, 2], [2, 1], (1, 2), (2, 1)) == 0
    assert sharing(collections.OrderedDict(a=1, b=2), collections.OrderedDict(b=2, a=1)) == 0


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.binary(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2) | st.integers(0, 1) | st.booleans(), inner, max_size=3)
    ),
    max_leaves=8,
)


def _print(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(sorted(f"{name!r}:{_print(item)}" for name, item in value.items())) + "}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}<{','.join(map(_print, value))}>"
    return repr(value)


@settings(deadline=None, max_examples=200, database=None)
@given(plain, plain)
def test_forms_are_equal_exactly_when_the_values_are(one, other):
    """For plain data, forms are equal exactly if `repr` with sorted dicts is."""
    assert (canonical(one) == canonical(other)) == (_print(one) == _print(other))
    assert (digest(canonical(one)) == digest(canonical(other))) == (_print(one) == _print(other))


def test_an_object_met_twice_is_not_a_cycle():
    """A shared part has its ordinary form."""
    part = ex.Slotted([1])
    assert canonical((part, [part])) == canonical((ex.Slotted([1]), [ex.Slotted([1])]))


def test_a_value_that_contains_itself_has_a_finite_form():
    """A cycle is encoded by its length, so cycles of other lengths or contents differ."""

    def ring(*values: Any) -> list[Any]:
        first: list[Any] = [values[0]]
        last = first
        for value in values[1:]:
            last.append([value])
            last = last[-1]
        last.append(first)
        return first

    assert canonical(ring(1)) == canonical(ring(1))
    assert len({canonical(ring(*values)) for values in [(1,), (2,), (1, 1), (1, 2), (2, 1)]}) == 5


# --- attributes of configs -----------------------------------------------------------------------


class _Plain:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class _OtherPlain(_Plain):
    pass


def test_a_plain_object_counts_by_its_attributes_on_request():
    """Configs are data and count by attributes; arguments may hide behaviour and are refused."""

    def seen(value: Any) -> Any:
        return canonical(value, see_attributes=True)

    assert seen(_Plain(a=1, b=2)) == seen(_Plain(b=2, a=1))
    assert len({seen(v) for v in (_Plain(a=1), _Plain(a=True), _Plain(b=1), _OtherPlain(a=1), _Plain())}) == 5
    assert seen([_Plain(a=_Plain(b=1))]) != seen([_Plain(a=_Plain(b=2))])
    with pytest.raises(UnstableKeyError):
        canonical(_Plain(a=1))


def test_a_plain_object_that_points_at_itself_has_a_form():
    """A config with a parent pointer is still data."""

    def looped(value: int) -> _Plain:
        made = _Plain(value=value)
        made.me = made
        return made

    assert canonical(looped(1), see_attributes=True) == canonical(looped(1), see_attributes=True)
    assert canonical(looped(1), see_attributes=True) != canonical(looped(2), see_attributes=True)


@pytest.mark.parametrize("value", [ex.Opaque(), _Plain(f=ex.Opaque()), _Plain(guard=threading.Lock()), object()])
def test_an_opaque_attribute_is_refused(value):
    """The state of a callable or a lock is not in its attributes."""
    with pytest.raises(UnstableKeyError) as caught:
        canonical([value], "cfg", see_attributes=True)
    assert caught.value.argument.startswith("cfg[0]")


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (object(), "x"),
        ([0, object()], "x[1]"),
        ({"a": object()}, "x['a']"),
        (ex.Window(object()), "x.size"),
        (ex.Attributes(object()), "x.value"),
        (ex.Settings(value=object()), "x.value"),
        (functools.partial(len, object()), "x.args[0]"),
        (functools.partial(object().__init__), "x.func"),
        (captured(object()), "x closing over 'value'"),
        (slice(object()), "x[1]"),
        (np.array([object()], dtype=object), "x"),
        ([{"k": np.array([object()], dtype=object)}], "x[0]['k']"),
    ],
)
def test_a_refusal_names_the_part_by_its_path(value, path):
    """The path begins with the caller's, and continues in Python syntax."""
    with pytest.raises(UnstableKeyError) as caught:
        canonical(value, "x")
    assert caught.value.argument == path
    assert str(caught.value).startswith(path)


# --- JAX -----------------------------------------------------------------------------------------


def test_an_aval_counts_by_shape_dtype_and_weak_type():
    """The facts in an abstract value, as plain values."""
    assert aval_form(jnp.zeros((2, 3), jnp.bfloat16).aval) == ((2, 3), "bfloat16", 0, ())
    assert aval_form(jnp.asarray(1.0).aval) == ((), "float32", 1, ())
    assert aval_form(jax.random.key(0).aval) == ((), "key<fry>", 0, ())


def test_jax_and_numpy_arrays_of_equal_contents_share_a_form():
    """A captured array is a constant, and its library does not matter."""
    assert canonical(jnp.arange(3, dtype=jnp.int32)) == canonical(np.arange(3, dtype=np.int32))
    assert canonical(jnp.zeros(2, jnp.bfloat16)) != canonical(jnp.zeros(2, jnp.float16))


def test_every_property_of_a_shape_struct_counts():
    """Shape, dtype, weak type and sharding each count."""
    shapes = [
        jax.ShapeDtypeStruct((2,), jnp.float32),
        jax.ShapeDtypeStruct((2, 1), jnp.float32),
        jax.ShapeDtypeStruct((2,), jnp.bfloat16),
        jax.ShapeDtypeStruct((2,), jnp.float32, weak_type=True),
        jax.ShapeDtypeStruct((2,), jnp.float32, sharding=jax.sharding.NamedSharding(ex.mesh_of(1), P("x"))),
    ]
    assert sharing(*shapes) == 0


@pytest.mark.timeout(60)  # another process starts
def test_plain_values_need_no_jax():
    """Forms of plain data do not import JAX, so command line tools start quickly."""
    script = "import sys; from asel.kernels.canonical import canonical as c; c([{1, 'a'}, (2.5,), len])"
    script += "; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# --- values that hide part of themselves ---------------------------------------------------------


class _List(list):
    pass


class _Dict(dict):
    pass


class _Tuple(tuple):
    pass


class _Text(str):
    pass


class _Float(float):
    pass


class _Discreet(str):
    def __str__(self):
        return "***"


class _Rounded(int):
    def __int__(self):
        return 0


@dataclasses.dataclass
class _Base:
    x: int = 0


class _Derived(_Base):
    """Not itself a dataclass: the attribute it adds is not a field."""


class _Loose(pydantic.BaseModel, extra="allow"):
    a: int = 1


class _Private(pydantic.BaseModel):
    a: int = 1
    _hidden: int = pydantic.PrivateAttr(0)


def _with_state(value: Any, state: int) -> Any:
    value.state = state
    return value


def _hidden(state: int) -> _Private:
    model = _Private()
    model._hidden = state
    return model


HIDING = {
    "list": lambda state: _with_state(_List(), state),
    "dict": lambda state: _with_state(_Dict(), state),
    "tuple": lambda state: _with_state(_Tuple(), state),
    "str": lambda state: _with_state(_Text("a"), state),
    "float": lambda state: _with_state(_Float(1), state),
    "undecorated subclass of a dataclass": lambda state: _with_state(_Derived(), state),
    "extra fields of a model": lambda state: _Loose(a=1, b=state),
    "private fields of a model": _hidden,
    "registered static object": ex.Static,
    "defaultdict's factory": lambda state: captured(collections.defaultdict(ex.window(state))),
    "mask of a masked array": lambda state: captured(np.ma.array([1, 2], mask=[state == 1, False])),
    "text that prints otherwise": lambda state: _Discreet(state),
    "integer that converts otherwise": lambda state: _Rounded(state),
    "alias of a class made by a function": lambda state: list[ex.block_class(state)],
    "byte order": lambda state: np.dtype(">f4" if state == 1 else "<f4"),
    "shape of a dtype": lambda state: np.dtype(("f4", (2,)) if state == 1 else ("i4", (2,))),
    "reduced axes of a spec": lambda state: P("x", unreduced={"y" if state == 1 else "z"}),
}


@pytest.mark.parametrize("make", HIDING.values(), ids=HIDING)
def test_additional_state_of_a_value_is_counted_or_refused(make):
    """State beside a value's items counts, or the value is refused."""
    assert sharing(make(1), make(2)) == 0


class _CachingDict(dict):
    @functools.cached_property
    def total(self):
        return sum(self.values())


class _CachingWindow(ex.Window):
    """Not itself a dataclass, with a cached property."""

    @functools.cached_property
    def double(self):
        return self.size * 2


@pytest.mark.parametrize(
    ("value", "attribute"), [(_CachingDict(a=1), "total"), (_CachingWindow(2), "double")], ids=["dict", "dataclass"]
)
def test_reading_a_cached_property_does_not_change_the_form(value, attribute):
    """A cached value is computed from the state, and is not part of it."""
    before = canonical(value)
    assert getattr(value, attribute) in (1, 4)
    assert canonical(value) == before
