"""What a call looks like to this process: a tuple that differs wherever the answer may.

Made on every call, so it only has to be fast and faithful; `encoding` has the form that every process
agrees on. Both see the arguments alike: arrays count by shape, dtype, weak type and sharding;
everything else is a constant and counts by type and value.
"""

from __future__ import annotations

import enum
import itertools
import operator
from collections import OrderedDict, defaultdict
from typing import Any

import numpy as np

from asel.canonical import Canon, canonical, flatten_node
from asel.errors import UnstableKeyError

__all__ = [
    "call_form",
    "children_of",
    "default_device_setting",
    "is_duck_array",
    "is_numeric",
    "refuse_if_endless",
    "settings_form",
    "signature",
]


class _Mark(enum.Enum):
    TUPLE = enum.auto()
    LIST = enum.auto()
    DICT = enum.auto()
    NODE = enum.auto()
    END = enum.auto()
    TRACED = enum.auto()
    NUMPY = enum.auto()
    SHAPE = enum.auto()
    DUCK = enum.auto()
    CALL = enum.auto()
    # Enum members hash through a Python method; identity is what we mean.
    __hash__ = object.__hash__


_TUPLE, _LIST, _DICT, _END = _Mark.TUPLE, _Mark.LIST, _Mark.DICT, _Mark.END
_ATOMS = frozenset({int, bool, str, bytes, type(None)})
_ORDERED = (OrderedDict, defaultdict)


class _Shardings:
    """A number for each distinct sharding; equal ones have the same.

    JAX hashes and compares shardings in Python, and every compiled function hands out objects of its
    own: this would cost more than the rest of a signature. An object seen before is known by its id,
    which stays its own for as long as the entry holds the object. No number is used twice.
    """

    def __init__(self, max_entries: int = 4096) -> None:
        self._max_entries = max_entries
        self._unused = itertools.count()
        self._numbers: dict[Any, int] = {}
        self.seen: dict[int, tuple[int, Any]] = {}

    def learn(self, sharding: Any) -> int:
        # To forget one costs a call that is resolved again, and nothing else.
        for table in (self._numbers, self.seen):
            if len(table) >= self._max_entries:
                table.clear()
        number = self._numbers.setdefault(sharding, next(self._unused))
        self.seen[id(sharding)] = (number, sharding)
        return number


_shardings = _Shardings()
_seen = _shardings.seen.get


class _Jax:
    """JAX's types and settings, learnt at the first call: importing asel does not import JAX."""

    # Slots of one object: Python 3.11 reads those several times faster than attributes of a class.
    __slots__ = ("array", "default_device", "known", "matmul_precision", "sharding_of", "x64")

    def __init__(self) -> None:
        self.known = False
        self.array: Any = None
        self.sharding_of: Any = None
        self.x64: Any = None
        self.matmul_precision: Any = None
        self.default_device: Any = None

    def learn(self) -> None:
        import jax

        # The settings are context managers that know their value; to ask jax.config costs three times as much.
        self.x64, self.matmul_precision = jax.enable_x64, jax.default_matmul_precision
        self.default_device = jax.default_device
        self.known = True

    def learn_array(self, kind: type) -> None:
        """Take note of the type that JAX's arrays have, from the first one that comes: to make one could block."""
        self.array = kind
        # The property is Python around a private one in C++; where JAX no longer has that, the property will do.
        private = getattr(kind, "_sharding", None)
        self.sharding_of = getattr(private, "fget", None) or operator.attrgetter("sharding")


_jax = _Jax()


# ---------------------------------------------------------------------------------------------
# The signature: one flat tuple. Every value is a run of tokens whose first tells what follows, so
# no two different calls give the same run.


def signature(inv: Any, kernel: Any) -> tuple[Any, ...]:
    """Return a hashable tuple that differs wherever the answer may.

    Raises:
        UnstableKeyError: an argument has no stable identity.
    """
    if not _jax.known:
        _jax.learn()
    array, sharding_of = _jax.array, _jax.sharding_of
    tokens: list[Any] = [id(kernel)]
    placed = False  # whether some array lives on a device
    for value in inv.args:
        if type(value) is array:
            tokens.append(value.aval)
            sharding = sharding_of(value)
            tokens.append(seen[0] if (seen := _seen(id(sharding))) else _shardings.learn(sharding))
            placed = True
        elif _append(value, tokens):
            placed = True
    if inv.kwargs:
        tokens.append(_DICT)
        for name, value in inv.kwargs.items():
            if (kind := type(value)) in _ATOMS:
                tokens += (name, kind, value)
                continue
            tokens.append(name)
            if _append(value, tokens):
                placed = True
    tokens.append(_jax.x64.value)
    tokens.append(_jax.matmul_precision.value)
    if not placed:
        tokens.append(_jax.default_device.value)
    if (
        inv.method is not None
        or inv.mesh is not None
        or inv.in_specs is not None
        or inv.out_specs is not None
        or inv.batch_axes is not None
        or inv.check_vma
    ):
        tokens.append(_Mark.CALL)
        tokens.append(call_form(inv))
    return tuple(tokens)


def _append(value: Any, tokens: list[Any]) -> bool:
    """Append the tokens of one value; tell whether it holds an array that lives on a device."""
    kind = type(value)
    if kind is _jax.array:
        tokens.append(value.aval)
        sharding = _jax.sharding_of(value)
        tokens.append(seen[0] if (seen := _seen(id(sharding))) else _shardings.learn(sharding))
        return True
    if kind in _ATOMS:
        tokens.append(kind)
        tokens.append(value)
        return False
    placed = False
    if kind is dict:
        tokens.append(_DICT)
        for key, item in value.items():
            tokens.append(key if type(key) is str else canonical(key))
            placed |= _append(item, tokens)
        tokens.append(_END)
        return placed
    if kind is tuple or kind is list:
        tokens.append(_TUPLE if kind is tuple else _LIST)
        for item in value:
            placed |= _append(item, tokens)
        tokens.append(_END)
        return placed
    if kind is float:
        # 0.0 and -0.0 differ and nan is itself, so these go by their text.
        tokens += (float, value if value and value == value else value.hex())
        return False
    return _append_other(value, tokens)


def _append_other(value: Any, tokens: list[Any]) -> bool:
    import jax
    import jax.numpy as jnp

    if isinstance(value, jax.core.Tracer):
        tokens += (_Mark.TRACED, value.aval)
        return False
    if isinstance(value, jax.Array):
        if _jax.array is None and not jnp.issubdtype(value.dtype, jax.dtypes.extended):
            _jax.learn_array(type(value))
        tokens += (value.aval, _shardings.learn(value.sharding))
        return True
    if isinstance(value, jax.ShapeDtypeStruct):
        tokens += (_Mark.SHAPE, value.shape, value.dtype, value.weak_type, value.sharding)
        return value.sharding is not None
    if is_numeric(value):
        tokens += (_Mark.NUMPY, value.shape, value.dtype)
        return False
    if is_duck_array(value):
        devices = frozenset(value.devices())
        tokens += (_Mark.DUCK, tuple(value.shape), str(value.dtype), devices)
        return True
    if (node := children_of(value)) is not None:
        steps, aux = node
        tokens += (_Mark.NODE, type(value), canonical(aux), len(steps))
        placed = False
        for _, child in steps:
            placed |= _append(child, tokens)
        return placed
    tokens.append(canonical(value))
    return False


def is_numeric(value: Any) -> bool:
    """Tell whether a NumPy array is one JAX could take; arrays of objects, text or records are constants."""
    if type(value) not in (np.ndarray, np.memmap):
        return False
    return value.dtype.kind in "biufc" or (value.dtype.kind == "V" and value.dtype.names is None)


def is_duck_array(value: Any) -> bool:
    if isinstance(value, type):
        return False
    return hasattr(value, "shape") and hasattr(value, "dtype") and callable(getattr(value, "devices", None))


def children_of(value: Any) -> tuple[list[tuple[str, Any]], Any] | None:
    """Return a container's children with the steps that lead to them, and its static part; None for a leaf."""
    if type(value) in _ORDERED:  # JAX wants their keys to compare; we do not
        if isinstance(value, defaultdict):  # a dict's order is how it was made
            items = sorted(value.items(), key=lambda item: repr(canonical(item[0])))
        else:
            items = list(value.items())
        aux = ([key for key, _ in items], getattr(value, "default_factory", None))
        return [(f"[{key!r}]", item) for key, item in items], aux
    return flatten_node(value)


def call_form(inv: Any) -> Canon:
    return (
        "call",
        inv.method,
        canonical(inv.mesh, "mesh"),
        canonical(inv.in_specs, "in_specs"),
        canonical(inv.out_specs, "out_specs"),
        int(inv.check_vma),
        canonical(inv.batch_axes, "batch_axes"),
    )


def settings_form() -> Canon:
    """Return the calling thread's settings that enter every key: x64 and default matmul precision."""
    if not _jax.known:
        _jax.learn()
    return (int(_jax.x64.value), _jax.matmul_precision.value)


def default_device_setting() -> Any:
    """Return what the calling thread has set as its default device."""
    if not _jax.known:
        _jax.learn()
    return _jax.default_device.value


def refuse_if_endless(inv: Any) -> UnstableKeyError:
    """Return the error that names the argument whose structure is too deep to follow."""
    named = [(f"args[{i}]", v) for i, v in enumerate(inv.args)] + [(f"kwargs[{k!r}]", v) for k, v in inv.kwargs.items()]
    path = next((path for path, value in named if _is_endless(value)), "an argument")
    return UnstableKeyError(f"{path} contains itself, or is nested too deeply to have a key", argument=path)


def _is_endless(value: Any) -> bool:
    try:
        _append(value, [])
    except RecursionError:
        return True
    except UnstableKeyError:
        return False
    return False
