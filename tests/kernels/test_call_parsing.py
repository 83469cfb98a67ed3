"""Invocations made from the readable form of a call."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from asel import Invocation, kernel
from asel.errors import InvalidRequestError
from asel.kernels.call_parsing import parse_call
from asel.kernels.call_text import call_text
from asel.kernels.key_memo import KeyMemo
from asel.kernels.keys import call_key

Q = jnp.zeros((8, 1024, 128), jnp.bfloat16)


@kernel(op_id="attention", configs=[1, 2], heuristic=1)
def attention(q: Any, k: Any = None, *, causal: Any = False, scale: Any = 1.0, cfg: int) -> Any:
    return q


@kernel(op_id="open", configs=[1], heuristic=1)
def open_ended(first: Any, *rest: Any, cfg: int, **more: Any) -> Any:
    return first


def value_of(text: str) -> Any:
    return parse_call(f"q={text}", attention).args[0]


def shape(dims: tuple[int, ...], dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(dims, dtype)


def test_arrays_become_shapes_and_literals_become_values() -> None:
    """A call is tuned and looked up by shapes and constants, so its text is enough to rebuild it."""
    made = parse_call("q=bf16[8,1024,128], k=f32[4], causal=True", attention)
    assert made == Invocation(
        "attention", (shape((8, 1024, 128), jnp.bfloat16), shape((4,), jnp.float32)), {"causal": True}
    )


CALLS = [
    Invocation("attention", (Q, Q), {"causal": True}),
    Invocation("attention", (), {"q": Q, "k": Q}),
    Invocation("attention", (Q,), {"scale": 0.1}),
    Invocation("attention", (np.zeros(3, np.int32), jnp.zeros((), jnp.bool_)), {}),
    Invocation("attention", (np.int8(3), np.zeros((0, 2), np.uint16)), {}),
    Invocation("attention", (jax.random.key(0), jnp.zeros(2, jnp.complex64)), {}),
    Invocation("attention", ({"w": Q, "b": [1, None]}, (Q,)), {"scale": ()}),
    Invocation("attention", ([(Q, {"a": 1, "b": None})], ((), {}, (1,), (1, 2))), {"causal": -5}),
    Invocation("attention", ("it's, (a) [list]={}", b"\x00'"), {"scale": 'say "x"\n'}),
    Invocation("attention", (1e-30, -2.5), {"scale": complex(math.inf, -0.0), "causal": -2j}),
    Invocation("attention", (math.inf, -math.inf), {"scale": (1 + 2j,)}),
    Invocation("attention", (jnp.dtype("bfloat16"), np.dtype("int8")), {"scale": jnp.dtype("float8_e4m3fn")}),
]


@pytest.mark.parametrize("inv", CALLS, ids=lambda inv: call_text(inv, attention))
def test_a_parsed_call_has_the_key_and_the_text_of_the_original(inv: Invocation[Any, Any]) -> None:
    """`parse_call` is the inverse of `call_text`."""
    text = call_text(inv, attention)
    again = parse_call(text, attention)
    assert call_text(again, attention) == text
    assert call_key(again, attention) == call_key(inv, attention)


@pytest.mark.parametrize(
    ("one", "inv"),
    [
        (open_ended, Invocation("open", (1, 2, Q), {"a": 3, "b": Q})),
        (kernel(op_id="o", configs=[1], heuristic=1)(lambda a, /, *, cfg, **more: a), Invocation("o", (1,), {"a": 2})),
    ],
    ids=["variadic", "positional-only"],
)
def test_variadic_and_positional_only_parameters_round_trip(one: Any, inv: Invocation[Any, Any]) -> None:
    """Arguments beyond the named ones stay positional, and a keyword may share a positional-only name."""
    again = parse_call(call_text(inv, one), one)
    assert call_key(again, one) == call_key(inv, one)
    assert len(again.args) == len(inv.args)


def test_a_bucketed_dimension_has_the_size_of_its_bound() -> None:
    """A bucket is tuned at its upper bound, so its text means a call of that size."""

    @kernel(op_id="b", configs=[1], heuristic=1, buckets={"q.shape[0]": [8, 64]})
    def bucketed(q: Any, *, cfg: int) -> Any:
        return q

    resolved = KeyMemo().resolve(Invocation("b", (jnp.zeros((9, 3)),), {}), bucketed)
    again = parse_call(resolved.call, bucketed)
    assert again.args == (shape((64, 3), jnp.float32),)
    assert KeyMemo().resolve(again, bucketed).key == resolved.key


@pytest.mark.parametrize("short", ["bf16", "f32", "f16", "i32", "u8", "i4", "bool", "c64"])
def test_dtypes_have_short_and_long_names(short: str) -> None:
    """People write both, alone and as an array's."""
    long = {"bf": "bfloat", "f": "float", "i": "int", "u": "uint", "c": "complex"}
    letters = short.rstrip("0123456789")
    name = long.get(letters, letters) + short[len(letters) :]
    assert value_of(short) == value_of(name) == jnp.dtype(name)
    assert value_of(f"{short}[2]") == value_of(f"{name}[2]") == shape((2,), jnp.dtype(name))


def test_a_scalar_type_is_its_dtype() -> None:
    """`call_text` shows the function `jnp.bfloat16` by its name; it has the key of the dtype."""
    inv = Invocation("attention", (jnp.bfloat16,), {})
    assert call_key(parse_call(call_text(inv, attention), attention), attention) == call_key(inv, attention)


def test_positional_arguments_need_no_names() -> None:
    """As in Python, they fill the parameters in order."""
    assert parse_call(" f32[2] , 3,causal = False ", attention).args == (shape((2,), jnp.float32), 3)
    assert parse_call("k=2, q=1", attention) == Invocation("attention", (1,), {"k": 2})
    assert math.isnan(value_of("nan"))
    assert value_of("{1: 2, 'a b': 0x10, c: [1,],}") == {1: 2, "a b": 16, "c": [1]}


@pytest.mark.parametrize(
    ("text", "position", "problem"),
    [
        ("q=1, window=3", 6, "'attention' has no parameter 'window'; its parameters are q, k, causal, scale"),
        ("q=1, cfg=3", 6, "cfg is not an argument"),
        ("q=bf17[8]", 3, "'bf17' is not a dtype; write one of bool, bf16, f16, f32"),
        (f"q=f32[{10**9}, {10**9}]", 3, "has more elements than any memory"),
        ("q=relu", 3, "'relu' is not a value. Write text in quotes ('relu')"),
        ("q=int", 3, "'int' is not a value"),
        (r"q='\N{x}'", 3, r"'\N{x}' is not a Python literal"),
        ("q=list(...)", 3, "'list' is not a value"),
        ("q=Params(w=f32[2])", 3, "'Params' is not a value"),
        ("q=[1, ... 3 more]", 7, "the text was shortened"),
        ("q=1, ... 3 more", 6, "the text was shortened"),
        ("q='abc", 3, "expected a value, found"),
        ("q=f32[8,n]", 9, "expected the size of a dimension, found 'n]'"),
        ("q=f32[8", 8, "expected a comma or ']', found the end"),
        ("q=1 k=2", 5, "expected a comma, found 'k=2'"),
        ("q=", 3, "expected a value, found the end"),
        ("q=01", 3, "01 is not a Python literal"),
        ("q={1}", 5, "expected ':' after the key 1"),
        ("q={[]: 1}", 4, "[] cannot be the key"),
        ("q=1, q=2", 6, "'q' is given twice"),
        ("q=1, causal=1, 2", 16, "an argument without a name follows a keyword"),
        ("1, 2, 3", 1, "too many positional arguments for 'attention'; its parameters are"),
        ("k=1", 4, "q of 'attention' is missing; add q=..."),
    ],
)
def test_an_error_names_the_position_and_the_fix(text: str, position: int, problem: str) -> None:
    """People type this text, so each refusal has the position and the fix."""
    with pytest.raises(InvalidRequestError) as caught:
        parse_call(text, attention)
    assert f"at character {position}, " in str(caught.value)
    assert problem in str(caught.value)
