"""The canonical form of a call, equal in every process; computed once for each new signature."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from asel.kernels.arguments import children_of, is_duck_array, is_numeric
from asel.kernels.buckets import Bucketing, Outside
from asel.kernels.call_settings import call_form, settings_form
from asel.kernels.canonical import Canon, Canonicaliser, canonical
from asel.kernels.canonical_arrays import dtype_name
from asel.kernels.canonical_jax import aval_form, dims, sharding_form

__all__ = ["Encoder", "at_upper_bounds", "device_and_traced"]


class Encoder:
    """One pass over a call, which also finds its device, tracers, and sizes outside their buckets.

    `constants` has the path and hash of each constant, and `parts` is the sum of all hashes. So for calls that differ
    in one constant only, `parts` minus that constant's hash is the same.
    """

    def __init__(self, bucketing: Bucketing | None = None, names: Sequence[tuple[str, bool]] = ()) -> None:
        self.bucketing = bucketing
        self._names = names
        self.device: Any = None
        self.traced = False
        self.outside: list[Outside] = []
        self.constants: list[tuple[str, int]] = []
        self.parts = 0
        self._markers: dict[int, int] = {}

    def call(self, inv: Any) -> Canon:
        """Return the call's canonical form. Arguments go by parameter name, so keyword and positional calls are equal.

        Raises:
            UnstableKeyError: an argument has no stable identity.
        """
        forms = [self._value(v, f"args[{i}]") for i, v in enumerate(inv.args)]
        named = list(self._pairs(inv.kwargs, "kwargs"))
        for (name, is_positional_only), form in zip(self._names, forms, strict=False):
            # With `**kwargs`, a keyword may have the name of a positional-only parameter. It is another argument.
            named.append((("position", name) if is_positional_only else canonical(name), form))
        unnamed = tuple(forms[len(self._names) :])
        settings, options = settings_form(), call_form(inv)
        self.parts += hash((settings, options))
        return (tuple(sorted(named, key=repr)), unnamed, settings, options)

    def _value(self, value: Any, path: str) -> Canon:
        import jax

        if isinstance(value, jax.core.Tracer):
            self.traced = True
            return self._array(path, *aval_form(value.aval))
        if isinstance(value, jax.Array):
            shape, dtype, weak, explicit = aval_form(value.aval)
            placement = self._placement(value.sharding)
            # An explicit sharding comes first: a tracer has that one only, and the two share a key.
            return self._array(path, shape, dtype, weak, explicit or placement)
        if isinstance(value, jax.ShapeDtypeStruct):
            dtype = dtype_name(jax.dtypes.canonicalize_dtype(value.dtype, allow_extended_dtype=True))
            placement = () if value.sharding is None else self._placement(value.sharding)
            return self._array(path, dims(value.shape), dtype, int(value.weak_type), placement)
        if is_numeric(value):
            return self._array(path, value.shape, dtype_name(jax.dtypes.canonicalize_dtype(value.dtype)), 0, ())
        if is_duck_array(value):
            devices = sorted(value.devices(), key=lambda d: getattr(d, "id", 0))
            self.device = self.device or devices[0]
            return self._array(
                path, dims(value.shape), str(value.dtype), 0, () if len(devices) == 1 else (len(devices),)
            )
        if type(value) is dict:
            return ("dict", self._pairs(value, path))
        if type(value) in (tuple, list):
            items = tuple(self._value(item, f"{path}[{i}]") for i, item in enumerate(value))
            return (type(value).__name__, items)
        if (node := children_of(value)) is not None:
            steps, aux = node
            inner = tuple(self._value(child, path + step) for step, child in steps)
            form = self._counted(aux, f"{path} (static fields)", _ByOrder(self._markers))
            return ("node", self._constant(type(value), path), form, inner)
        return ("constant", self._counted(value, path))

    def _constant(self, value: Any, path: str, canonicaliser: Canonicaliser | None = None) -> Canon:
        canonicaliser = canonicaliser or Canonicaliser()
        form = canonicaliser.form(value, path)
        self.traced |= canonicaliser.traced
        return form

    def _counted(self, value: Any, path: str, canonicaliser: Canonicaliser | None = None) -> Canon:
        """Return the form of a constant in an argument, and count it in `constants` and `parts`."""
        form = self._constant(value, path, canonicaliser)
        self.constants.append((path, part := hash((path, form))))
        self.parts += part
        return form

    def _pairs(self, mapping: Mapping[Any, Any], path: str) -> Canon:
        encoded = (
            (self._constant(key, f"{path} key"), self._value(item, f"{path}[{key!r}]")) for key, item in mapping.items()
        )
        return tuple(sorted(encoded, key=repr))

    def _array(self, path: str, shape: tuple[Any, ...], dtype: str, weak: int, placement: Canon) -> Canon:
        if self.bucketing is not None:
            shape, outside = self.bucketing.apply(path, shape)
            self.outside += outside
        form = ("array", shape, dtype, weak, placement)
        self.parts += hash((path, form))
        return form

    def _placement(self, sharding: Any) -> Canon:
        try:
            devices = sharding.device_set
        except ValueError:  # an abstract mesh has no devices
            return sharding_form(sharding)
        if self.device is None:
            self.device = min(devices, key=lambda d: d.id)
        if len(devices) > 1:
            return sharding_form(sharding)
        return _memory_kind(sharding, next(iter(devices)))


class _ByOrder(Canonicaliser):
    """Numbers the bare `object()`s of a call in order of appearance: equinox marks related leaves with them."""

    def __init__(self, markers: dict[int, int]) -> None:
        super().__init__()
        self._markers = markers

    def marker(self, value: object) -> Canon:
        return ("marker", self._markers.setdefault(id(value), len(self._markers)))


def _memory_kind(sharding: Any, device: Any) -> Canon:
    """Return the kind of memory an array is in; empty for its device's default memory."""
    kind = getattr(sharding, "memory_kind", None)
    return () if kind is None or kind == device.default_memory().kind else ("memory", kind)


def at_upper_bounds(inv: Any, bucketing: Bucketing) -> Any:
    """Return the call at its buckets' upper bounds, with shapes in the place of smaller arrays.

    Candidates are listed and measured for that size, so they do not depend on which size in the bucket comes first.
    """
    import jax

    def enlarged(path: tuple[Any, ...], leaf: Any) -> Any:
        if not (isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) or is_numeric(leaf) or is_duck_array(leaf)):
            return leaf
        where = ("args", "kwargs")[path[0].idx] + jax.tree_util.keystr(path[1:])
        shape = bucketing.upper_bounds(where, tuple(leaf.shape))
        return leaf if shape == tuple(leaf.shape) else _shape_like(leaf, shape)

    call = (tuple(inv.args), dict(inv.kwargs))
    args, kwargs = larger = jax.tree_util.tree_map_with_path(enlarged, call)
    unchanged = all(map(operator.is_, jax.tree_util.tree_leaves(larger), jax.tree_util.tree_leaves(call)))
    return inv if unchanged else replace(inv, args=args, kwargs=kwargs)


def _shape_like(leaf: Any, shape: tuple[int, ...]) -> Any:
    import jax

    is_placed = isinstance(leaf, jax.ShapeDtypeStruct) or getattr(leaf, "committed", False)
    sharding = leaf.sharding if is_placed and not isinstance(leaf, jax.core.Tracer) else None
    weak_type = bool(getattr(leaf, "weak_type", False))
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, weak_type=weak_type)  # type: ignore[no-untyped-call]


def device_and_traced(inv: Any) -> tuple[Any, bool]:
    """Return the device of a call's arguments, None if they have none, and whether any argument is a tracer."""
    import jax

    device, traced = None, False
    for leaf in _leaves((*inv.args, *inv.kwargs.values())):
        if isinstance(leaf, jax.core.Tracer):
            traced = True
        elif device is None and (devices := _devices(leaf)):
            device = min(devices, key=lambda d: getattr(d, "id", 0))
    return device, traced


def devices_of(args: Iterable[Any], kwargs: Mapping[str, Any]) -> set[Any]:
    """Return all devices that the arguments are on."""
    return {device for leaf in _leaves((*args, *kwargs.values())) for device in _devices(leaf)}


def _devices(leaf: Any) -> Iterable[Any]:
    import jax

    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        try:  # `devices()` would fail for an array that was donated since
            return () if leaf.sharding is None else leaf.sharding.device_set
        except ValueError:  # over an abstract mesh
            return ()
    return leaf.devices() if is_duck_array(leaf) else ()


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if type(value) is dict:
            yield from _leaves(value.values())
        elif type(value) in (tuple, list):
            yield from _leaves(value)
        elif (node := children_of(value)) is not None:
            yield from _leaves(child for _, child in node[0])
        else:
            yield value
