"""The signature of a call: a tuple that differs if the answer may, valid in this process only.

Made on every call, so it is built for speed; `call_encoding` makes the form that is equal in every process.
Both treat arguments alike: arrays count by shape, dtype, weak type and sharding; everything else is a constant
and counts by type and value. A NumPy scalar is an array of shape (), as it is to `jax.jit`: `np.int32(step)` has one
key for all steps. Python's own numbers are constants.
"""

from __future__ import annotations

import enum
import itertools
from typing import Any

from asel.errors import UnstableKeyError
from asel.kernels.arguments import children_of, is_duck_array, is_numeric
from asel.kernels.call_settings import DEFAULT_PRNG, call_form, jax_state
from asel.kernels.canonical import Canon, Canonicaliser, canonical
from asel.kernels.kernel_numbers import kernel_numbers

__all__ = ["refuse_if_endless", "signature"]


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
    MESH = enum.auto()
    ENTERED_MESH = enum.auto()
    CALL = enum.auto()
    RANDOM = enum.auto()
    # Enum members hash through a Python method; identity is what we mean.
    __hash__ = object.__hash__


_TUPLE, _LIST, _DICT, _END = _Mark.TUPLE, _Mark.LIST, _Mark.DICT, _Mark.END
_ATOMS = frozenset({int, bool, str, bytes, type(None)})


class _Shardings:
    """A number for each distinct sharding or mesh; equal ones have the same.

    JAX hashes and compares shardings in Python, and every compiled function hands out objects of its
    own: this would cost more than the rest of a signature. An object seen before is recognised by its id,
    which cannot be reused while the entry holds the object. No number is used twice. `jax.device_put` makes a
    sharding for each array, so those of one device go by what they consist of, which takes a third of the time.
    """

    def __init__(self, max_entries: int = 4096) -> None:
        self._max_entries = max_entries
        self._unused = itertools.count()
        self._numbers: dict[Any, int] = {}
        self.seen: dict[int, tuple[int, Any]] = {}

    def learn(self, sharding: Any) -> int:
        # A forgotten sharding gets a new number, so its calls are resolved once more.
        value = sharding
        if type(sharding) is _jax.single_device:
            value = (sharding._device, sharding.memory_kind)
        number = self._numbers.get(value)
        if number is None:
            if len(self._numbers) >= self._max_entries:
                self._numbers.clear()
            number = self._numbers.setdefault(value, next(self._unused))
        if len(self.seen) >= self._max_entries:
            self.seen.clear()
        self.seen[id(sharding)] = (number, sharding)
        return number


_shardings = _Shardings()
# Bound once: these run for every array and every kernel of every call.
_seen = _shardings.seen.get
_kernel_seen = kernel_numbers.seen.get
_jax = jax_state


# ---------------------------------------------------------------------------------------------
# The signature: one flat tuple. Every value is a run of tokens whose first says what follows, so
# no two different calls give the same run.


def signature(kernel: Any, args: Any, kwargs: Any, inv: Any = None, for_program: bool = False) -> tuple[Any, ...]:
    """Return a hashable tuple that differs if the answer may.

    `inv` is the invocation of these arguments; without it, the call has nothing else. With `for_program`, the tuple
    also says which arrays are committed to their devices: that changes no answer, but makes `jax.jit` compile again.

    Raises:
        UnstableKeyError: an argument has no stable identity.
    """
    jax = _jax
    if not jax.known:
        jax.learn()
    array, sharding_of = jax.array, jax.sharding_of
    number = known[0] if (known := _kernel_seen(id(kernel))) else kernel_numbers.learn(kernel)
    tokens: list[Any] = [number, jax.x64.value, jax.matmul_precision.value, jax.default_device.value]
    if jax.prng_impl.value != DEFAULT_PRNG or not jax.threefry_partitionable.value:
        tokens += (_Mark.RANDOM, jax.prng_impl.value, jax.threefry_partitionable.value)
    for value in args:
        if type(value) is array:
            sharding = sharding_of(value)
            tokens.append(value.aval)
            tokens.append(seen[0] if (seen := _seen(id(sharding))) else _shardings.learn(sharding))
            if for_program:
                tokens.append(jax.is_committed(value))
        else:
            _append(value, tokens, for_program)
    if kwargs:
        tokens.append(_DICT)
        for name, value in kwargs.items():
            if (kind := type(value)) in _ATOMS:
                tokens += (name, kind, value)
            else:
                tokens.append(name)
                _append(value, tokens, for_program)
    if (mesh := jax.mesh.value) is not jax.no_mesh:
        _append_mesh(mesh, tokens)
    if meshes := jax.entered_meshes.value:
        tokens += (_Mark.ENTERED_MESH, seen[0] if (seen := _seen(id(meshes[-1]))) else _shardings.learn(meshes[-1]))
    if inv is not None and (
        inv.method is not None
        or inv.mesh is not None
        or inv.in_specs is not None
        or inv.out_specs is not None
        or inv.batch_axes is not None
        or inv.check_vma
    ):
        tokens += (_Mark.CALL, call_form(inv))
    return tuple(tokens)


def _append_mesh(mesh: Any, tokens: list[Any]) -> None:
    """Append the number of the mesh that is set, if there is one."""
    if mesh is None or mesh.empty:
        _jax.no_mesh = mesh  # JAX has one such object, so the next call finds it by identity
    else:
        tokens += (_Mark.MESH, seen[0] if (seen := _seen(id(mesh))) else _shardings.learn(mesh))


def _append(value: Any, tokens: list[Any], for_program: bool = False) -> None:
    """Append the tokens of one value."""
    kind = type(value)
    if kind is _jax.array:
        sharding = _jax.sharding_of(value)
        tokens.append(value.aval)
        tokens.append(seen[0] if (seen := _seen(id(sharding))) else _shardings.learn(sharding))
        if for_program:
            tokens.append(_jax.is_committed(value))
    elif kind in _ATOMS:
        tokens += (kind, value)
    elif kind is dict:
        tokens.append(_DICT)
        for key, item in value.items():
            tokens.append(key if type(key) is str else canonical(key))
            _append(item, tokens, for_program)
        tokens.append(_END)
    elif kind is tuple or kind is list:
        tokens.append(_TUPLE if kind is tuple else _LIST)
        for item in value:
            _append(item, tokens, for_program)
        tokens.append(_END)
    elif kind is float:
        # 0.0 and -0.0 differ and nan is itself, so these go by their text.
        tokens += (float, value if value and value == value else value.hex())
    else:
        _append_other(value, tokens, for_program)


def _append_other(value: Any, tokens: list[Any], for_program: bool) -> None:
    import jax
    import jax.numpy as jnp

    if isinstance(value, jax.core.Tracer):
        tokens += (_Mark.TRACED, value.aval)
    elif isinstance(value, jax.Array):
        if _jax.array is None and not jnp.issubdtype(value.dtype, jax.dtypes.extended):
            _jax.learn_array(type(value))
        tokens += (value.aval, _shardings.learn(value.sharding))
        if for_program:
            tokens.append(value.committed)
    elif isinstance(value, jax.ShapeDtypeStruct):
        tokens += (_Mark.SHAPE, value.shape, value.dtype, value.weak_type, value.sharding)
    elif is_numeric(value):
        tokens += (_Mark.NUMPY, value.shape, value.dtype)
    elif is_duck_array(value):
        tokens += (_Mark.DUCK, tuple(value.shape), str(value.dtype), frozenset(value.devices()))
    elif (node := children_of(value)) is not None:
        steps, aux = node
        tokens += (_Mark.NODE, type(value), _ByIdentity().form(aux, "value"), len(steps))
        for _, child in steps:
            _append(child, tokens, for_program)
    else:
        tokens.append(canonical(value))


class _ByIdentity(Canonicaliser):
    """Tells bare `object()`s apart by identity, as `jit` does: equinox marks related leaves with them."""

    def marker(self, value: object) -> Canon:
        return ("marker", value)


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
