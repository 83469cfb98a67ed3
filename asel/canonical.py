"""A form of Python values that is equal exactly when the values are, in every process.

The result is made of tuples, strings, bytes and integers only, each behind a tag, so that 1, True
and 1.0 stay apart at any depth and `repr` of the whole is a faithful serialisation. What has no
such form (an object whose state we cannot see) is refused by name rather than hashed by `repr`.
"""

from __future__ import annotations

import collections
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
import zoneinfo
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from asel.errors import UnstableKeyError

__all__ = ["Canon", "Canonicaliser", "canonical", "digest"]

Canon = tuple[Any, ...]


def digest(form: Canon) -> str:
    """Return 32 hexadecimal digits that stand for a canonical form."""
    return hashlib.sha256(repr(form).encode()).hexdigest()[:32]


def canonical(value: Any, path: str = "value", *, see_attributes: bool = False) -> Canon:
    """Return the canonical form of `value`.

    Arrays count by their contents here: what reaches this function is a constant to the kernel.
    With `see_attributes`, a plain object counts by its class and its attributes: right for configs,
    which are data, and wrong for arguments, whose behaviour may hide elsewhere.

    Raises:
        UnstableKeyError: some part of `value`, named from `path` on, has no stable identity.
    """
    return Canonicaliser(see_attributes).form(value, path)


def refuse(value: Any, path: str) -> UnstableKeyError:
    """Return the error that names an argument without a stable identity, and the way out."""
    return UnstableKeyError(
        f"{path} is a {_name(type(value))}, which has no identity that another process would agree on. "
        "Pass a dataclass, a named function, a functools.partial or plain data instead, "
        "or give the kernel a key_builder that says what matters about it.",
        argument=path,
    )


class Canonicaliser:
    """One pass over a value; `traced` tells whether it met a tracer."""

    def __init__(self, see_attributes: bool = False) -> None:
        self._see_attributes = see_attributes
        self.traced = False
        # What we are inside of, so that a function that closes over itself ends.
        self._open: list[int] = []
        self._classes: list[int] = []
        self._namespaces: list[dict[str, Any]] = []

    def form(self, value: Any, path: str) -> Canon:
        if (atom := _ATOMS.get(type(value))) is not None:
            return atom(value)
        if id(value) in self._open:
            return ("cycle", len(self._open) - self._open.index(id(value)))
        self._open.append(id(value))
        try:
            for matches, form in _FORMS:
                if matches(value):
                    return form(self, value, path)
            return self.opaque(value, path)
        finally:
            self._open.pop()

    def each(self, values: Iterable[Any], path: str) -> Canon:
        return tuple(self.form(v, f"{path}[{i}]") for i, v in enumerate(values))

    def items(self, pairs: Iterable[tuple[Any, Any]], path: str) -> Iterator[Canon]:
        for key, value in pairs:
            yield (self.form(key, f"{path} key {key!r}"), self.form(value, f"{path}[{key!r}]"))

    def fields(self, value: Any, names: Iterable[str], path: str) -> Canon:
        return tuple(
            (name, self.form(getattr(value, name), f"{path}.{name}") if hasattr(value, name) else ("unset",))
            for name in names
        )

    def state(self, value: Any, path: str, *, beyond: Iterable[str] = ()) -> Canon:
        """Return the attributes of an instance, from its dict and its slots, that are not in `beyond`."""
        names = set(getattr(value, "__dict__", ()))
        for base in type(value).__mro__:
            slots = base.__dict__.get("__slots__", ())
            names.update([slots] if isinstance(slots, str) else slots)
        names -= {"__dict__", "__weakref__", *beyond}
        computed = {
            n for n in names if isinstance(inspect.getattr_static(type(value), n, None), functools.cached_property)
        }
        return self.fields(value, sorted(names - computed), path)

    def type_of(self, value: Any, path: str) -> Canon:
        return _class(self, type(value), path)

    def opaque(self, value: Any, path: str) -> Canon:
        if type(value) is object and (name := self._sentinel(value)) is not None:
            return ("sentinel", name)
        has_state = hasattr(value, "__dict__") or any("__slots__" in vars(base) for base in type(value).__mro__)
        if self._see_attributes and has_state and not callable(value):
            return ("object", self.type_of(value, path), self.state(value, path))
        raise refuse(value, path)

    @contextmanager
    def within(self, namespace: dict[str, Any]) -> Iterator[None]:
        self._namespaces.append(namespace)
        try:
            yield
        finally:
            self._namespaces.pop()

    def _sentinel(self, value: Any) -> str | None:
        """Return where the functions we are inside of would find a bare object(): that is its identity."""
        for namespace in reversed(self._namespaces):
            for holder in (namespace, *(vars(v) for v in namespace.values() if isinstance(v, types.ModuleType))):
                for name, held in holder.items():
                    if held is value:
                        return f"{holder.get('__name__')}:{name}"
        return None


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', None) or ''}:{getattr(value, '__qualname__', None) or value.__name__}"


def _in_order(forms: Iterable[Canon]) -> Canon:
    return tuple(sorted(forms, key=repr))


_ATOMS: dict[type, Callable[[Any], Canon]] = {
    type(None): lambda v: ("none",),
    bool: lambda v: ("bool", int(v)),
    int: lambda v: ("int", hex(v)),  # decimal digits have a limit
    float: lambda v: ("float", v.hex()),
    complex: lambda v: ("complex", v.real.hex(), v.imag.hex()),
    str: lambda v: ("str", v),
    bytes: lambda v: ("bytes", v),
    bytearray: lambda v: ("bytearray", bytes(v)),
    type(...): lambda v: ("ellipsis",),
    range: lambda v: ("range", hex(v.start), hex(v.stop), hex(v.step)),
}

# Values whose repr is their identity.
_TEXTUAL = (
    decimal.Decimal,
    fractions.Fraction,
    uuid.UUID,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    datetime.timezone,
    zoneinfo.ZoneInfo,
    pathlib.PurePath,
)


# ---------------------------------------------------------------------------------------------
# Code.


def _code(self: Canonicaliser, code: types.CodeType, path: str) -> Canon:
    # Neither the file nor the line: the same function at another path is the same function.
    return (
        "code",
        code.co_code,
        (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags),
        (code.co_names, code.co_varnames, code.co_freevars),
        self.each(code.co_consts, path),
    )


def _function(self: Canonicaliser, fn: types.FunctionType, path: str) -> Canon:
    cells = []
    with self.within(fn.__globals__):
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            try:
                captured = cell.cell_contents
            except ValueError:  # not bound yet
                cells.append((name, ("unbound",)))
            else:
                cells.append((name, self.form(captured, f"{path} closing over {name!r}")))
        defaults = self.form((fn.__defaults__, fn.__kwdefaults__), f"{path} defaults")
    return ("function", _name(fn), _code(self, fn.__code__, path), defaults, tuple(cells))


_TupleField: Any = type(vars(collections.namedtuple("_Named", ["x"]))["x"])


def _class(self: Canonicaliser, cls: type, path: str) -> Canon:
    if "<locals>" not in cls.__qualname__:
        return ("type", _name(cls))
    if id(cls) in self._classes:
        return ("cycle", _name(cls))
    # Made by a function, which may make others of the same name: they count by what is in them.
    self._classes.append(id(cls))
    try:
        held = {k: v for k, v in vars(cls).items() if _tells(k, v)}
        body = tuple((name, self.form(_unwrapped(held[name]), f"{path}.{name}")) for name in sorted(held))
        return ("local type", _name(cls), tuple(_class(self, base, path) for base in cls.__bases__), body)
    finally:
        self._classes.pop()


def _tells(name: str, attribute: Any) -> bool:
    """Tell whether an entry of a class body was written by somebody: not the machinery of its metaclass."""
    if name == "_abc_impl":
        return False
    if not (name.startswith("__") and name.endswith("__")):
        return True
    code = getattr(getattr(attribute, "__func__", attribute), "__code__", None)
    # Those that dataclasses, attrs and namedtuples generate follow from the fields.
    return code is not None and not code.co_filename.startswith("<") and name != "__repr__"


def _unwrapped(attribute: Any) -> Any:
    """Return what a descriptor in a class body stands for."""
    if isinstance(attribute, staticmethod | classmethod):
        return attribute.__func__
    if isinstance(attribute, property):
        return (attribute.fget, attribute.fset, attribute.fdel)
    if isinstance(attribute, functools.cached_property):
        return attribute.func
    if isinstance(attribute, types.MemberDescriptorType | types.GetSetDescriptorType | _TupleField):
        return "slot"
    return attribute


def _builtin(self: Canonicaliser, fn: Any, path: str) -> Canon:
    owner = getattr(fn, "__self__", None)
    if owner is None or isinstance(owner, types.ModuleType):
        return ("builtin", _name(fn))
    return ("bound builtin", fn.__name__, self.form(owner, f"{path}.__self__"))


def _is_importable(value: Any) -> bool:
    """Tell whether a library's callable is found under its own name, as pickle would find it."""
    if not callable(value) or isinstance(value, type):
        return False
    # What a user's function was wrapped in counts by the function, not by the name it is found under.
    is_numpy = type(value).__module__.partition(".")[0] == "numpy"
    if not is_numpy and (not _from_jax(value) or hasattr(value, "__wrapped__")):
        return False
    name = getattr(value, "__name__", None)
    homes = [getattr(value, "__module__", None) or ""]
    if isinstance(value, np.ufunc):  # which do not know their module
        homes = ["numpy", "scipy.special", "ml_dtypes"]
    return any(getattr(sys.modules.get(home), str(name), None) is value for home in homes)


# ---------------------------------------------------------------------------------------------
# Data.


def _mapping(self: Canonicaliser, value: Mapping[Any, Any], path: str) -> Canon:
    items = self.items(value.items(), path)
    ordered = tuple(items) if isinstance(value, OrderedDict) else _in_order(items)
    factory = self.form(value.default_factory, f"{path} factory") if isinstance(value, defaultdict) else ()
    return ("mapping", self.type_of(value, path), ordered, factory, self.state(value, path))


def _sequence(self: Canonicaliser, value: Any, path: str) -> Canon:
    return ("sequence", self.type_of(value, path), self.each(value, path), self.state(value, path))


def _plain_subclass(self: Canonicaliser, value: Any, path: str) -> Canon:
    # The base's own view of the value: a subclass may convert or print as something else.
    plain, view = next((kind, view) for kind, view in _PLAIN.items() if isinstance(value, kind))
    return ("as", self.type_of(value, path), _ATOMS[plain](view(value)), self.state(value, path))


_PLAIN: dict[type, Callable[[Any], Any]] = {
    int: int.__index__,
    float: float.__float__,
    complex: complex.__complex__,
    str: str.__str__,
    bytes: bytes.__bytes__,
}


def _dataclass(self: Canonicaliser, value: Any, path: str) -> Canon:
    fields = dataclasses.fields(value)
    # A subclass that is no dataclass of its own keeps what it adds in no field.
    is_own = "__dataclass_fields__" in vars(type(value))
    beyond = () if is_own else self.state(value, path, beyond=[f.name for f in fields])
    compared = (f.name for f in fields if f.compare)
    return ("dataclass", self.type_of(value, path), self.fields(value, compared, path), beyond)


def _model(self: Canonicaliser, value: Any, path: str) -> Canon:
    hidden = [getattr(value, part, None) for part in ("__pydantic_extra__", "__pydantic_private__")]
    fields = self.fields(value, type(value).model_fields, path)
    return ("model", self.type_of(value, path), fields, self.each(hidden, f"{path} (hidden fields)"))


def _attrs(self: Canonicaliser, value: Any, path: str) -> Canon:
    names = (attribute.name for attribute in type(value).__attrs_attrs__ if attribute.eq)
    return ("attrs", self.type_of(value, path), self.fields(value, names, path))


def _contents(self: Canonicaliser, array: Any, path: str) -> Canon:
    if type(array) not in (np.ndarray, np.memmap) or array.dtype.hasobject:
        raise refuse(array, path)
    contents = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
    return ("array", _dtype(array.dtype), array.shape, contents)


def _dtype(dtype: np.dtype[Any]) -> Canon:
    is_plain = dtype.names is None and dtype.subdtype is None
    return ("dtype", dtype.name, dtype.str) if is_plain else ("dtype", repr(dtype))


# ---------------------------------------------------------------------------------------------
# JAX.


def _from_jax(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] in ("jax", "jaxlib")


def _jax_value(self: Canonicaliser, value: Any, path: str) -> Canon:
    """JAX's own values, told apart by what they are rather than by what they print."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

    if isinstance(value, jax.core.Tracer):
        self.traced = True
        return ("traced", *aval_form(value.aval))
    if isinstance(value, jax.Array):
        if jnp.issubdtype(value.dtype, jax.dtypes.extended):
            return ("key array", str(value.dtype), _contents(self, np.asarray(jax.random.key_data(value)), path))
        return _contents(self, np.asarray(value), path)
    if isinstance(value, jax.ShapeDtypeStruct):
        sharding = self.form(value.sharding, f"{path}.sharding")
        return ("shape", dims(value.shape), str(value.dtype), int(value.weak_type), sharding)
    if isinstance(value, PartitionSpec):
        axes = (frozenset(value.unreduced), frozenset(value.reduced))
        return ("spec", self.each(_partitions(value), path), self.each(axes, path))
    if value is PartitionSpec.UNCONSTRAINED:
        return ("unconstrained",)
    if isinstance(value, Mesh | AbstractMesh):
        placed = _ranks(d.id for d in value.devices.flat) if isinstance(value, Mesh) else ()
        return ("mesh", tuple(value.shape.items()), tuple(map(str, value.axis_types)), placed)
    if isinstance(value, NamedSharding):
        return ("named sharding", self.form(value.mesh, path), self.form(value.spec, path), value.memory_kind)
    if isinstance(value, jax.sharding.SingleDeviceSharding):
        return ("single device", value.memory_kind)
    if isinstance(value, Sharding):
        assigned: Any = value._device_assignment
        return (
            "sharding",
            _name(type(value)),
            _ranks(d.id for d in assigned),
            str(getattr(value, "_hlo_sharding", "")),
        )
    if isinstance(value, jax.Device):
        return ("device", value.platform, value.device_kind)
    if callable(value) and hasattr(value, "__wrapped__"):
        # What jit, custom_vjp and their kin make of a function: the function, and what they keep beside it.
        beside = [name for name in getattr(value, "__dict__", ()) if not name.startswith("_")]
        return ("jax function", _name(type(value)), self.fields(value, ("__wrapped__", *sorted(beside)), path))
    return self.opaque(value, path)


def aval_form(aval: Any) -> Canon:
    """Return what an abstract value says of an array: shape, dtype, weak type, explicit sharding."""
    sharding: Any = getattr(aval, "sharding", None)
    spec: Canon = ()
    is_placed = sharding is not None and not sharding.mesh.empty
    if is_placed and any(part is not None for part in _partitions(sharding.spec)):
        spec = canonical(sharding)
    return (dims(aval.shape), str(aval.dtype), int(getattr(aval, "weak_type", False)), spec)


def _partitions(spec: Any) -> tuple[Any, ...]:
    # Before JAX 0.10 a spec could only be iterated; since then some refuse to be.
    return spec.partitions if hasattr(spec, "partitions") else tuple(spec)


def dims(shape: Iterable[Any]) -> tuple[Any, ...]:
    """Return a shape in plain integers, whatever integers it was given in; symbolic dimensions by name."""
    return tuple(int(n) if hasattr(n, "__index__") else str(n) for n in shape)


def _ranks(ids: Iterable[int]) -> tuple[int, ...]:
    # Relative, so that a replica on devices 4-7 shares what one on devices 0-3 has learned.
    listed = list(ids)
    rank = {device: i for i, device in enumerate(sorted(set(listed)))}
    return tuple(rank[device] for device in listed)


def flatten_node(value: Any) -> tuple[list[tuple[str, Any]], Any] | None:
    """Return a pytree node's children with the steps that lead to them, and its static part; None for a leaf.

    An object that was registered as static is its own static part, which tells nothing of it.
    """
    tree_util = sys.modules.get("jax.tree_util")  # nothing is registered with JAX before it is imported
    if tree_util is None or value is None:
        return None
    try:
        flat = tree_util.default_registry.flatten_one_level_with_keys(value)
    except (TypeError, ValueError):  # keys that do not compare: JAX could not take it as a tree either
        return None
    if flat is None or flat[1] is value:
        return None
    names = getattr(value, "_fields", None) if isinstance(value, tuple) else None
    steps = [f".{name}" for name in names] if names else [_step(key) for key, _ in flat[0]]
    return list(zip(steps, (child for _, child in flat[0]), strict=True)), flat[1]


def _step(key: Any) -> str:
    import jax

    return f"[{key.key}]" if isinstance(key, jax.tree_util.FlattenedIndexKey) else str(key)


def _node(self: Canonicaliser, value: Any, path: str) -> Canon:
    node = flatten_node(value)
    assert node is not None
    children = tuple(self.form(child, path + step) for step, child in node[0])
    return ("node", self.type_of(value, path), self.form(node[1], f"{path} (static fields)"), children)


# ---------------------------------------------------------------------------------------------

_Matcher = Callable[[Any], bool]
_Former = Callable[[Canonicaliser, Any, str], Canon]


def _is(*kinds: Any) -> _Matcher:
    return lambda value: isinstance(value, kinds)


# In order: the first that matches decides. Enums come before int and str, which some of them are.
_FORMS: list[tuple[_Matcher, _Former]] = [
    (_is(enum.Enum), lambda self, v, path: ("enum", self.type_of(v, path), v.name or str(v.value))),
    (_is(type), _class),
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
    (_is_importable, lambda self, v, path: ("importable", getattr(v, "__module__", None) or "", v.__name__)),
    (_is(types.ModuleType), lambda self, v, path: ("module", v.__name__)),
    (_is(np.dtype), lambda self, v, path: _dtype(v)),
    (_is(np.ndarray), _contents),
    (_is(np.generic), lambda self, v, path: ("scalar", str(v.dtype), v.tobytes())),
    (_from_jax, _jax_value),
    (
        _is(types.GenericAlias),
        lambda self, v, path: ("alias", self.form(v.__origin__, path), self.each(v.__args__, path)),
    ),
    (
        lambda v: getattr(v, "tzinfo", None) is not None and isinstance(v, datetime.datetime | datetime.time),
        lambda self, v, path: (
            "text",
            self.type_of(v, path),
            repr(v.replace(tzinfo=None)),
            self.form(v.tzinfo, f"{path}.tzinfo"),
        ),
    ),
    (_is(slice), lambda self, v, path: ("slice", self.each((v.start, v.stop, v.step), path))),
    (_is(*_TEXTUAL), lambda self, v, path: ("text", self.type_of(v, path), repr(v))),
    (dataclasses.is_dataclass, _dataclass),
    (lambda v: isinstance(getattr(type(v), "model_fields", None), dict), _model),
    (lambda v: hasattr(type(v), "__attrs_attrs__"), _attrs),
    (_is(types.SimpleNamespace), lambda self, v, path: ("namespace", self.type_of(v, path), self.state(v, path))),
    (_is(Mapping), _mapping),
    (_is(tuple, list), _sequence),
    (
        _is(set, frozenset),
        lambda self, v, path: ("set", self.type_of(v, path), _in_order(self.each(v, path)), self.state(v, path)),
    ),
    (_is(int, float, complex, str, bytes), _plain_subclass),
    (lambda v: flatten_node(v) is not None, _node),
]
