"""The canonical forms of functions and classes: name, code and captured values."""

from __future__ import annotations

import abc
import dataclasses
import enum
import functools
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pydantic
import pytest
import support.key_examples as ex
from support.key_examples import captured

from asel import UnstableKeyError
from asel.kernels.canonical import canonical

T = TypeVar("T")


def form_or_refusal(value: Any) -> Any:
    try:
        return canonical(value)
    except UnstableKeyError:
        return ("refused", id(value))


def sharing(*values: Any) -> int:
    """Return the number of values that share their form with an earlier one; refused values share none."""
    return len(values) - len({form_or_refusal(value) for value in values})


def test_closures_from_one_line_differ_by_their_captured_values():
    """Two closures of one source line are two functions (ejKernel's defect 11)."""
    masks = [captured(value) for value in (1, 2, True, "1", [1], {"a": 1}, ex.causal, ex.decorated)]
    assert len({canonical(mask) for mask in masks}) == len(masks)
    assert canonical(captured(1)) == canonical(captured(1))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("lambda a, b: a", "lambda a, b: b"),
        ("lambda a, b: a", "lambda a, *, b: a"),
        ("lambda a, b: a", "lambda a, b, /: a"),
        ("lambda a, b: a", "lambda a, *b: a"),
        ("lambda a, b=1: a", "lambda a, b=1.0: a"),
        ("lambda a, *, b=1: a", "lambda a, *, b=2: a"),
        ("lambda a: a.x", "lambda a: a.y"),
        ("lambda a: 1", "lambda a: True"),
        ("lambda a: 0.0", "lambda a: -0.0"),
        ("lambda a: (1, (2,))", "lambda a: (1, (2.0,))"),
        ("lambda a: (lambda: a + 1)", "lambda a: (lambda: a + 2)"),
        ("lambda a: a in {1, 2}", "lambda a: a in {1, 3}"),
        ("lambda a: [x for x in a]", "lambda a: [y + 1 for y in a]"),
    ],
)
def test_functions_with_different_code_differ(one, other):
    """A function counts by its code: constants, names, parameters and their kinds, nested functions."""
    assert canonical(eval(one)) == canonical(eval(one))
    assert canonical(eval(one)) != canonical(eval(other))


def test_a_function_keeps_its_key_while_python_specialises_it():
    """The interpreter's changes to a hot function's bytecode do not count."""
    mask = ex.window(4)
    before = canonical(mask)
    for i in range(1000):
        mask(i, 1)
    assert canonical(mask) == before


def test_functions_that_close_over_themselves_have_keys():
    """Recursion through a closure ends, and other captured values still count."""
    assert canonical(ex.countdown()) == canonical(ex.countdown())
    assert canonical(ex.ping_pong(1)) == canonical(ex.ping_pong(1))
    assert canonical(ex.ping_pong(1)) != canonical(ex.ping_pong(2))


def test_decorated_functions_differ_by_the_wrapped_function():
    """functools.wraps hides the wrapper's name; the wrapped function is in its closure."""
    assert sharing(ex.logged(ex.causal), ex.logged(ex.decorated), ex.causal, ex.logged(ex.logged(ex.causal))) == 0


@pytest.mark.parametrize(
    "wrap",
    [jax.jit, jax.grad, jax.value_and_grad, jax.checkpoint, jax.vmap, jax.custom_jvp, jax.custom_vjp, jax.jacfwd],
    ids=lambda wrap: wrap.__name__,
)
def test_functions_wrapped_by_jax_differ_by_the_function_inside(wrap):
    """A transformed function has a key, and its closure counts."""
    assert canonical(wrap(ex.window(1))) == canonical(wrap(ex.window(1)))
    assert canonical(wrap(ex.window(1))) != canonical(wrap(ex.window(2)))
    assert canonical(wrap(ex.window(1))) != canonical(ex.window(1))


def test_vmaps_over_different_axes_differ():
    """The mapped axes change the result."""
    assert sharing(jax.vmap(ex.causal), jax.vmap(ex.causal, in_axes=1), jax.vmap(ex.causal, in_axes=(0, None))) == 0


def test_custom_derivatives_count():
    """Functions with equal bodies and different gradients take different times in a backward pass."""

    def with_vjp(scale, slope):
        fn = jax.custom_vjp(lambda x: x * scale)
        fn.defvjp(lambda x: (x * scale, None), lambda _, g: (g * slope,))
        return fn

    def with_jvp(slope):
        fn = jax.custom_jvp(lambda x: x)
        fn.defjvp(lambda primals, tangents: (primals[0], tangents[0] * slope))
        return fn

    def with_vmap(slope):
        fn = jax.custom_batching.custom_vmap(lambda x: x)
        fn.def_vmap(lambda size, batched, x: (x * slope, True))
        return fn

    assert canonical(with_vjp(1, 1)) == canonical(with_vjp(1, 1))
    assert sharing(with_vjp(1, 1), with_vjp(1, 2), with_vjp(2, 1)) == 0
    assert sharing(with_jvp(1), with_jvp(2)) == 0
    assert sharing(with_vmap(1), with_vmap(2)) == 0


NAMED = [
    len,
    abs,
    np.add,
    np.subtract,
    np.dot,
    np.sum,
    jnp.add,
    jnp.subtract,
    jnp.sum,
    jnp.exp,
    jax.nn.relu,
    jax.nn.silu,
]


@pytest.mark.parametrize("fn", NAMED, ids=lambda fn: f"{type(fn).__name__}-{fn.__name__}")
def test_library_functions_have_keys(fn):
    """A function that can be imported by name is the same in every process."""
    assert canonical(fn) == canonical(fn)


def test_different_library_functions_have_different_forms():
    """Builtins, ufuncs, and functions of NumPy and JAX."""
    assert sharing(*NAMED) == 0
    assert sharing([1].count, [2].count, [1].index) == 0


def test_ufuncs_made_of_functions_do_not_share_a_form():
    """NumPy gives every ufunc made from a lambda the same name; they are still different functions."""
    assert sharing(np.frompyfunc(lambda x: x, 1, 1), np.frompyfunc(lambda x: -x, 1, 1)) == 0


def test_dataclass_callables_differ_by_state():
    """A callable dataclass is a constant like any other (ejKernel's defect 11)."""
    assert canonical(ex.Window(3)) == canonical(ex.Window(3))
    assert sharing(ex.Window(3), ex.Window(4), ex.Window(3.0), ex.Window(3, frozenset())) == 0
    assert sharing(ex.Window(3).reach, ex.Window(4).reach, ex.Window(3).__call__) == 0


def _local_mask(size):
    @dataclasses.dataclass(frozen=True)
    class Mask:
        scale: int = 1

        def __call__(self, i, j):
            return abs(i - j) < size

    return Mask


def _local_items(size):
    @dataclasses.dataclass(frozen=True)
    class Items:
        def __getitem__(self, i):
            return i * size

    return Items()


@pytest.mark.parametrize(
    "pair",
    [
        lambda: (_local_mask(1)(), _local_mask(2)()),
        lambda: (_local_mask(1)().__call__, _local_mask(2)().__call__),
        lambda: (ex.block_class(1), ex.block_class(2)),
        lambda: (_local_items(1), _local_items(2)),
        lambda: (captured(ex.block_class(1)), captured(ex.block_class(2))),
    ],
    ids=["callable dataclasses", "their methods", "the classes", "special methods", "closures over the classes"],
)
def test_classes_made_by_a_function_do_not_share_a_form(pair):
    """Classes made by one function have one name, but may differ by captured values."""
    assert sharing(*pair()) == 0


def _local_kinds() -> dict[str, Any]:
    """Return an instance of a local class of each kind."""

    class Tuple(NamedTuple):
        m: int = 1

    class Choice(enum.Enum):
        A = 1

    class Model(pydantic.BaseModel):
        m: int = 1

    class Abstract(abc.ABC):
        @abc.abstractmethod
        def run(self): ...

    @dataclasses.dataclass(frozen=True)
    class Concrete(Abstract):
        m: int = 1

        def run(self):
            return self.m

    @attrs.frozen
    class Attrs:
        m: int = 1

    @dataclasses.dataclass(frozen=True, slots=True)
    class Slotted:
        m: int = 1

    @dataclasses.dataclass(frozen=True)
    class Rich(Generic[T]):
        limit: ClassVar[dict[str, int]] = {"m": 1}
        m: list[int] = dataclasses.field(default_factory=list)

        @property
        def half(self):
            return super().__eq__

        @functools.cached_property
        def double(self):
            return 2

        @staticmethod
        def static():
            return 3

        @classmethod
        def made(cls):
            return cls()

    class Plain(list):
        pass

    kinds = [Tuple(), Choice.A, Model(), Concrete(), Attrs(), Slotted(), Rich(), Plain()]
    return {type(value).__name__: value for value in kinds}


@pytest.mark.parametrize("kind", list(_local_kinds()))
def test_local_classes_have_forms(kind):
    """Notebooks and tests define configs locally; a class that is made again has the same form."""
    one, other = _local_kinds()[kind], _local_kinds()[kind]
    assert type(one) is not type(other)
    assert canonical(one) == canonical(other)
    assert canonical(type(one)) == canonical(type(other))
