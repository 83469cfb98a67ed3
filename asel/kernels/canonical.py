"""Canonical forms of Python values: equal in every process exactly when the values are.

A form consists of tagged tuples of strings, bytes and integers, so 1, True and 1.0 differ at any depth, and `repr` of
a form is a faithful serialisation. Plain data, enums, dataclasses, arrays, functions and partials have a form.
Everything else is refused: its `repr` may contain an address or omit state.
"""

from __future__ import annotations

import dataclasses
import decimal
import enum
import fractions
import functools
import hashlib
import inspect
import pathlib
import types
import uuid
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from asel.errors import UnstableKeyError
from asel.kernels.canonical_arrays import array_form, dtype_form
from asel.kernels.canonical_functions import FUNCTION_FORMS, class_form, library_function, name_of, wrapper_form
from asel.kernels.canonical_jax import flatten_node, is_from_jax, jax_form
from asel.runtime.lazy_module import LazyModule

if TYPE_CHECKING:
    import numpy as np
else:
    np = LazyModule("numpy", globals(), "np")

__all__ = ["Canon", "Canonicaliser", "attributes_of", "canonical", "digest"]

Canon = tuple[Any, ...]


def digest(form: Canon) -> str:
    """Return the digest of a canonical form: 32 hexadecimal digits."""
    return hashlib.sha256(repr(form).encode()).hexdigest()[:32]


def canonical(value: Any, path: str = "value", *, see_attributes: bool = False) -> Canon:
    """Return the canonical form of `value`, in which arrays count by their contents.

    With `see_attributes`, a plain object counts by its class and its attributes. That is right for configs, which are
    data, and wrong for arguments, whose behaviour may depend on more.

    Raises:
        UnstableKeyError: a part of `value` has no stable identity. The error names it, starting with `path`.
    """
    return Canonicaliser(see_attributes).form(value, path)


class Canonicaliser:
    """One pass over a value; `traced` is True if it met a tracer."""

    def __init__(self, see_attributes: bool = False) -> None:
        self._see_attributes = see_attributes
        self.traced = False
        # The ids of the enclosing values, to stop at cycles, such as a function that closes over itself.
        self._open: list[int] = []

    def form(self, value: Any, path: str) -> Canon:
        if (atom := _ATOMS.get(type(value))) is not None:
            return atom(value)
        if id(value) in self._open:
            return ("cycle", len(self._open) - self._open.index(id(value)))
        self._open.append(id(value))
        try:
            form = self._compound(value, path)
        finally:
            self._open.pop()
        if form is None:
            raise UnstableKeyError(
                f"{path} is a {name_of(type(value))}, which has no identity that other processes could recognise. "
                "Pass a dataclass, a named function, a functools.partial or plain data instead, "
                "or give the kernel a key_builder that returns the facts its answer depends on.",
                argument=path,
            )
        return form

    def _compound(self, value: Any, path: str) -> Canon | None:
        """Return the form of a value that is not an atom; None if it has none."""
        if isinstance(value, type):
            return class_form(self, value, path)
        for kinds, form in _forms():
            if isinstance(value, kinds):
                return form(self, value, path)
        if (named := library_function(value)) is not None:
            return named
        if is_from_jax(value) and (form_of_jax := jax_form(self, value, path)) is not None:
            return form_of_jax
        if (data := _data_form(value)) is not None:
            return data(self, value, path)
        if (node := flatten_node(value)) is not None:
            children = tuple(self.form(child, path + step) for step, child in node[0])
            return ("node", self.type_of(value, path), self.form(node[1], f"{path} (static fields)"), children)
        return wrapper_form(self, value, path) or self._object(value, path)

    def _object(self, value: Any, path: str) -> Canon | None:
        if type(value) is object:
            return self.marker(value)
        has_state = hasattr(value, "__dict__") or any("__slots__" in vars(base) for base in type(value).__mro__)
        if not self._see_attributes or not has_state or callable(value):
            return None
        return ("object", self.type_of(value, path), self.state(value, path))

    def marker(self, value: object) -> Canon | None:
        """Return the form of a bare `object()`, which has nothing but its identity."""
        return None

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

    def state(self, value: Any, path: str, *, without: Iterable[str] = ()) -> Canon:
        """Return the form of an instance's attributes, from its dict and its slots, except those in `without`."""
        names = _attribute_names(value).difference(without)
        computed = {
            n for n in names if isinstance(inspect.getattr_static(type(value), n, None), functools.cached_property)
        }
        return self.fields(value, sorted(names - computed), path)

    def type_of(self, value: Any, path: str) -> Canon:
        return self.form(type(value), path)


def attributes_of(value: Any) -> list[Any]:
    """Return the values of an instance's attributes, from its dict and its slots."""
    return [getattr(value, name) for name in _attribute_names(value) if hasattr(value, name)]


def _attribute_names(value: Any) -> set[str]:
    names = set(getattr(value, "__dict__", ()))
    for base in type(value).__mro__:
        slots = base.__dict__.get("__slots__", ())
        names.update(_mangled(name, base) for name in ([slots] if isinstance(slots, str) else slots))
    return names - {"__dict__", "__weakref__"}


def _mangled(name: str, owner: type) -> str:
    """Return the name under which Python keeps a slot."""
    is_private = name.startswith("__") and not name.endswith("__")
    return f"_{owner.__name__.lstrip('_')}{name}" if is_private else name


# ---------------------------------------------------------------------------------------------
# Plain data. Attributes that a subclass adds to a builtin type count as well.

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

_BASE_VALUES: dict[type, Callable[[Any], Any]] = {
    int: int.__index__,
    float: float.__float__,
    complex: complex.__complex__,
    str: str.__str__,
    bytes: bytes.__bytes__,
}
"""Read the value with the base class's method: a subclass may override the conversion."""


def _scalar_subclass(self: Canonicaliser, value: Any, path: str) -> Canon:
    base, read = next((base, read) for base, read in _BASE_VALUES.items() if isinstance(value, base))
    return ("as", self.type_of(value, path), _ATOMS[base](read(value)), self.state(value, path))


def _in_order(forms: Iterable[Canon]) -> Canon:
    return tuple(sorted(forms, key=repr))


def _mapping(self: Canonicaliser, value: Mapping[Any, Any], path: str) -> Canon:
    items = self.items(value.items(), path)
    ordered = tuple(items) if isinstance(value, OrderedDict) else _in_order(items)
    factory = self.form(value.default_factory, f"{path} factory") if isinstance(value, defaultdict) else ()
    return ("mapping", self.type_of(value, path), ordered, factory, self.state(value, path))


def _sequence(self: Canonicaliser, value: Any, path: str) -> Canon:
    return ("sequence", self.type_of(value, path), self.each(value, path), self.state(value, path))


def _set(self: Canonicaliser, value: Any, path: str) -> Canon:
    return ("set", self.type_of(value, path), _in_order(self.each(value, path)), self.state(value, path))


def _enum(self: Canonicaliser, value: Any, path: str) -> Canon:
    return ("enum", self.type_of(value, path), value.name or str(value.value))


def _text(self: Canonicaliser, value: Any, path: str) -> Canon:
    return ("text", self.type_of(value, path), repr(value))


def _slice(self: Canonicaliser, value: slice, path: str) -> Canon:
    return ("slice", self.each((value.start, value.stop, value.step), path))


@functools.cache
def _forms() -> list[tuple[Any, Callable[[Canonicaliser, Any, str], Canon | None]]]:
    # In order: enums come before int and str, which some of them are.
    return [
        (enum.Enum, _enum),
        *FUNCTION_FORMS,
        (np.ndarray, lambda self, value, path: array_form(value, path)),
        (np.dtype, lambda self, value, path: dtype_form(value)),
        (np.generic, lambda self, value, path: ("scalar", str(value.dtype), value.tobytes())),
        (types.ModuleType, lambda self, value, path: ("module", value.__name__)),
        (slice, _slice),
        ((decimal.Decimal, fractions.Fraction, uuid.UUID, pathlib.PurePath), _text),
    ]


# ---------------------------------------------------------------------------------------------
# Containers, and classes that declare their fields.


def _dataclass(self: Canonicaliser, value: Any, path: str) -> Canon:
    fields = dataclasses.fields(value)
    # A subclass that is not itself a dataclass may add attributes that are not fields.
    is_own = "__dataclass_fields__" in vars(type(value))
    added = () if is_own else self.state(value, path, without=[f.name for f in fields])
    compared = (f.name for f in fields if f.compare)
    return ("dataclass", self.type_of(value, path), self.fields(value, compared, path), added)


def _pydantic_model(self: Canonicaliser, value: Any, path: str) -> Canon:
    hidden = [getattr(value, part, None) for part in ("__pydantic_extra__", "__pydantic_private__")]
    fields = self.fields(value, type(value).model_fields, path)
    return ("model", self.type_of(value, path), fields, self.each(hidden, f"{path} (hidden fields)"))


def _attrs(self: Canonicaliser, value: Any, path: str) -> Canon:
    names = (attribute.name for attribute in type(value).__attrs_attrs__ if attribute.eq)
    return ("attrs", self.type_of(value, path), self.fields(value, names, path))


def _data_form(value: Any) -> Callable[[Canonicaliser, Any, str], Canon] | None:
    if dataclasses.is_dataclass(value):
        return _dataclass
    if isinstance(getattr(type(value), "model_fields", None), dict):
        return _pydantic_model
    if hasattr(type(value), "__attrs_attrs__"):
        return _attrs
    for kinds, form in _CONTAINERS:
        if isinstance(value, kinds):
            return form
    return None


_CONTAINERS: list[tuple[Any, Callable[[Canonicaliser, Any, str], Canon]]] = [
    (Mapping, _mapping),
    ((tuple, list), _sequence),
    ((set, frozenset), _set),
    (tuple(_BASE_VALUES), _scalar_subclass),
]
