"""A form of Python values that is equal exactly when the values are, in every process.

The result is made of tuples, strings, bytes and integers only, each behind a tag, so that 1, True
and 1.0 stay apart at any depth and `repr` of the whole is a faithful serialisation. What has no
such form (an object whose state we cannot see) is refused by name rather than hashed by `repr`.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import hashlib
import inspect
import pathlib
import sys
import types
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from asel.errors import UnstableKeyError

__all__ = ["Canon", "canonical", "digest"]

Canon = tuple[Any, ...]

# Values whose text is their identity.
_TEXTUAL = (
    decimal.Decimal,
    fractions.Fraction,
    uuid.UUID,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    datetime.timezone,
    pathlib.PurePath,
)


def digest(form: Canon) -> str:
    """Return 32 hexadecimal digits that stand for a canonical form."""
    return hashlib.sha256(repr(form).encode()).hexdigest()[:32]


def canonical(value: Any, path: str = "value", *, see_attributes: bool = False) -> Canon:
    """Return the canonical form of `value`.

    Arrays count by their contents here: what reaches this function is a constant to the kernel.
    With `see_attributes`, a plain object counts by its class and its `__dict__`: right for configs,
    which are data, and wrong for arguments, whose behaviour may hide elsewhere.

    Raises:
        UnstableKeyError: some part of `value`, named from `path` on, has no stable identity.
    """
    return _Canonicaliser(see_attributes).form(value, path)


class _Canonicaliser:
    def __init__(self, see_attributes: bool) -> None:
        self._see_attributes = see_attributes
        # What we are inside of, so that a function that closes over itself ends.
        self._open: list[int] = []

    def form(self, value: Any, path: str) -> Canon:
        kind = type(value)
        if (atom := _ATOMS.get(kind)) is not None:
            return atom(value)
        if id(value) in self._open:
            return ("cycle", len(self._open) - self._open.index(id(value)))
        with self._inside(value):
            for matches, form in _FORMS:
                if matches(value):
                    return form(self, value, path)
        return self._opaque(value, path)

    @contextmanager
    def _inside(self, value: Any) -> Iterator[None]:
        self._open.append(id(value))
        try:
            yield
        finally:
            self._open.pop()

    def each(self, values: Iterable[Any], path: str) -> Canon:
        return tuple(self.form(v, f"{path}[{i}]") for i, v in enumerate(values))

    def items(self, pairs: Iterable[tuple[Any, Any]], path: str) -> Iterator[Canon]:
        for key, value in pairs:
            yield (self.form(key, f"{path} key {key!r}"), self.form(value, f"{path}[{key!r}]"))

    def fields(self, value: Any, names: Iterable[str], path: str) -> Canon:
        return tuple((name, self.form(getattr(value, name), f"{path}.{name}")) for name in names)

    def _opaque(self, value: Any, path: str) -> Canon:
        state = getattr(value, "__dict__", None)
        if self._see_attributes and state is not None and not callable(value):
            with self._inside(value):
                return ("object", _name(type(value)), _in_order(self.items(state.items(), path)))
        raise UnstableKeyError(
            f"{path} is a {_name(type(value))}, which has no identity that another process would agree on. "
            "Pass a dataclass, a named function, a functools.partial or plain data instead, "
            "or give the kernel a key_builder that says what matters about it.",
            argument=path,
        )


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', None) or ''}:{getattr(value, '__qualname__', None) or value.__name__}"


def _in_order(forms: Iterable[Canon]) -> Canon:
    return tuple(sorted(forms, key=repr))


def _contents(array: Any) -> Canon:
    data = np.asarray(array)
    if data.dtype == object:
        raise UnstableKeyError("an array of Python objects has no stable identity", argument="array")
    return ("array", str(data.dtype), data.shape, hashlib.sha256(np.ascontiguousarray(data).tobytes()).hexdigest())


_ATOMS: dict[type, Callable[[Any], Canon]] = {
    type(None): lambda v: ("none",),
    bool: lambda v: ("bool", int(v)),
    int: lambda v: ("int", v),
    float: lambda v: ("float", v.hex()),
    complex: lambda v: ("complex", v.real.hex(), v.imag.hex()),
    str: lambda v: ("str", v),
    bytes: lambda v: ("bytes", v),
    bytearray: lambda v: ("bytearray", bytes(v)),
    type(...): lambda v: ("ellipsis",),
    range: lambda v: ("range", v.start, v.stop, v.step),
}


def _code(self: _Canonicaliser, code: types.CodeType, path: str) -> Canon:
    # Neither the file nor the line: the same function at another path is the same function.
    return (
        "code",
        code.co_code,
        code.co_names,
        code.co_varnames,
        code.co_freevars,
        code.co_flags,
        self.each(code.co_consts, path),
    )


def _function(self: _Canonicaliser, fn: types.FunctionType, path: str) -> Canon:
    cells = []
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            captured = cell.cell_contents
        except ValueError:  # not bound yet
            cells.append((name, ("unbound",)))
        else:
            cells.append((name, self.form(captured, f"{path} closing over {name!r}")))
    return (
        "function",
        _name(fn),
        _code(self, fn.__code__, path),
        self.form(fn.__defaults__, f"{path} defaults"),
        self.form(fn.__kwdefaults__, f"{path} defaults"),
        tuple(cells),
    )


def _builtin(self: _Canonicaliser, fn: Any, path: str) -> Canon:
    owner = getattr(fn, "__self__", None)
    if owner is None or isinstance(owner, types.ModuleType):
        return ("builtin", _name(fn))
    return ("bound builtin", fn.__name__, self.form(owner, f"{path}.__self__"))


def _mapping(self: _Canonicaliser, value: Mapping[Any, Any], path: str) -> Canon:
    items = self.items(value.items(), path)
    ordered = tuple(items) if isinstance(value, OrderedDict) else _in_order(items)
    return ("mapping", _name(type(value)), ordered)


def _sequence(self: _Canonicaliser, value: Any, path: str) -> Canon:
    return ("sequence", _name(type(value)), self.each(value, path))


def _is_model(value: Any) -> bool:
    return isinstance(getattr(type(value), "model_fields", None), dict)


def _from_jax(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] in ("jax", "jaxlib")


def _jax_value(self: _Canonicaliser, value: Any, path: str) -> Canon:
    """JAX's own values, told apart by what they are rather than by what they print."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

    if isinstance(value, jax.core.Tracer):
        return ("traced", *aval_form(value.aval))
    if isinstance(value, jax.Array):
        if jnp.issubdtype(value.dtype, jax.dtypes.extended):
            return ("key array", str(value.dtype), _contents(jax.random.key_data(value)))
        return _contents(value)
    if isinstance(value, jax.ShapeDtypeStruct):
        return ("shape", value.shape, str(value.dtype), self.form(value.sharding, f"{path}.sharding"))
    if isinstance(value, PartitionSpec):
        return ("spec", self.each(tuple(value), path))
    if isinstance(value, Mesh | AbstractMesh):
        return ("mesh", tuple(value.shape.items()), tuple(map(str, value.axis_types)), _arrangement(value))
    if isinstance(value, NamedSharding):
        return ("named sharding", self.form(value.mesh, path), self.form(value.spec, path), value.memory_kind)
    if isinstance(value, jax.sharding.SingleDeviceSharding):
        return ("single device", value.memory_kind)
    if isinstance(value, Sharding):
        assigned: Any = value._device_assignment
        devices = _ranks(d.id for d in assigned)
        return ("sharding", _name(type(value)), devices, str(getattr(value, "_hlo_sharding", "")))
    if isinstance(value, jax.Device):
        return ("device", value.platform, value.device_kind)
    # Functions that JAX has wrapped: jit, custom_vjp and their kin.
    parts = [part for part in ("__wrapped__", "fun", "fwd", "bwd", "jvp", "nondiff_argnums") if hasattr(value, part)]
    if callable(value) and parts:
        return ("jax function", _name(type(value)), self.fields(value, parts, path))
    if isinstance(value, np.generic | type):
        return ("type", _name(value))
    return self._opaque(value, path)


def aval_form(aval: Any) -> Canon:
    """Return what an abstract value says of an array: shape, dtype, weak type, explicit sharding."""
    sharding = getattr(aval, "sharding", None)
    spec: Canon = ()
    if sharding is not None and not sharding.mesh.empty and any(part is not None for part in sharding.spec):
        spec = canonical(sharding)
    return (tuple(aval.shape), str(aval.dtype), int(getattr(aval, "weak_type", False)), spec)


def _arrangement(mesh: Any) -> Canon:
    devices = getattr(mesh, "devices", None)
    return () if devices is None or not hasattr(devices, "flat") else _ranks(d.id for d in devices.flat)


def _ranks(ids: Iterable[int]) -> tuple[int, ...]:
    # Relative, so that a replica on devices 4-7 shares what one on devices 0-3 has learned.
    listed = list(ids)
    rank = {device: i for i, device in enumerate(sorted(set(listed)))}
    return tuple(rank[device] for device in listed)


def _registered_node(value: Any) -> bool:
    tree_util = sys.modules.get("jax.tree_util")  # nothing is registered with JAX before it is imported
    return tree_util is not None and tree_util.default_registry.flatten_one_level(value) is not None


def _node(self: _Canonicaliser, value: Any, path: str) -> Canon:
    children, aux = sys.modules["jax.tree_util"].default_registry.flatten_one_level(value)
    return ("node", _name(type(value)), self.form(aux, f"{path} (static fields)"), self.each(children, path))


_Matcher = Callable[[Any], bool]
_Former = Callable[[_Canonicaliser, Any, str], Canon]


def _is(*kinds: Any) -> _Matcher:
    return lambda value: isinstance(value, kinds)


# In order: the first that matches decides. Enums come before int and str, which some of them are.
_FORMS: list[tuple[_Matcher, _Former]] = [
    (_is(enum.Enum), lambda self, v, path: ("enum", _name(type(v)), v.name or str(v.value))),
    (_is(type), lambda self, v, path: ("type", _name(v))),
    (_is(types.GenericAlias), lambda self, v, path: ("alias", repr(v))),
    (_is(types.FunctionType), _function),
    (_is(types.MethodType), lambda self, v, p: ("method", self.form(v.__func__, p), self.form(v.__self__, p))),
    (_is(types.CodeType), _code),
    (
        _is(functools.partial),
        lambda self, v, path: (
            "partial",
            self.form(v.func, f"{path}.func"),
            self.each(v.args, f"{path}.args"),
            self.form(v.keywords, f"{path}.keywords"),
        ),
    ),
    (_is(functools._lru_cache_wrapper), lambda self, v, path: ("cached", self.form(v.__wrapped__, path))),
    (inspect.isbuiltin, _builtin),
    (_is(types.ModuleType), lambda self, v, path: ("module", v.__name__)),
    (_is(np.ufunc), lambda self, v, path: ("ufunc", v.__name__)),
    (_is(np.dtype), lambda self, v, path: ("dtype", v.name if v.names is None else repr(v))),
    (_is(np.ndarray), lambda self, v, path: _contents(v)),
    (_is(np.generic), lambda self, v, path: ("scalar", str(v.dtype), v.tobytes())),
    (_from_jax, _jax_value),
    (_is(slice), lambda self, v, path: ("slice", self.each((v.start, v.stop, v.step), path))),
    (_is(*_TEXTUAL), lambda self, v, path: ("text", _name(type(v)), str(v))),
    (
        lambda v: dataclasses.is_dataclass(v),
        lambda self, v, path: (
            "dataclass",
            _name(type(v)),
            self.fields(v, (f.name for f in dataclasses.fields(v) if f.compare), path),
        ),
    ),
    (_is_model, lambda self, v, path: ("model", _name(type(v)), self.fields(v, type(v).model_fields, path))),
    (
        lambda v: hasattr(type(v), "__attrs_attrs__"),
        lambda self, v, path: (
            "attrs",
            _name(type(v)),
            self.fields(v, (a.name for a in type(v).__attrs_attrs__ if a.eq), path),
        ),
    ),
    (
        _is(types.SimpleNamespace),
        lambda self, v, path: ("namespace", _in_order(self.items(vars(v).items(), path))),
    ),
    (_is(Mapping), _mapping),
    (_is(tuple, list), _sequence),
    (_is(set, frozenset), lambda self, v, path: ("set", _name(type(v)), _in_order(self.each(v, path)))),
    # Subclasses of the plain types that add a name and nothing else.
    (_is(int), lambda self, v, path: ("int", _name(type(v)), int(v))),
    (_is(float), lambda self, v, path: ("float", _name(type(v)), float(v).hex())),
    (_is(str), lambda self, v, path: ("str", _name(type(v)), str(v))),
    (_registered_node, _node),
]
