"""What a call looks like to every process: its canonical form, worked out once for each new signature."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from asel.buckets import Bucketing, Outside
from asel.canonical import Canon, Canonicaliser, aval_form, canonical, dims
from asel.signatures import call_form, children_of, is_duck_array, is_numeric, settings_form

__all__ = ["Encoder", "whereabouts"]


class Encoder:
    """One pass over a call, and what it noticed: the device, tracers, sizes outside their buckets."""

    def __init__(self, bucketing: Bucketing | None = None) -> None:
        self._bucketing = bucketing
        self.device: Any = None
        self.traced = False
        self.outside: list[Outside] = []

    def call(self, inv: Any) -> Canon:
        """Return the call's canonical form.

        Raises:
            UnstableKeyError: an argument has no stable identity.
        """
        args = tuple(self._value(v, f"args[{i}]") for i, v in enumerate(inv.args))
        kwargs = self._pairs(inv.kwargs, "kwargs")
        settings = settings_form()
        return (args, kwargs, settings, call_form(inv))

    def _value(self, value: Any, path: str) -> Canon:
        import jax

        if isinstance(value, jax.core.Tracer):
            self.traced = True
            return self._array(path, *aval_form(value.aval))
        if isinstance(value, jax.Array):
            shape, dtype, weak, explicit = aval_form(value.aval)
            placement = self._placement(value.sharding, path)
            # Where the type of an array names its sharding, a tracer of it does too: they share a key.
            return self._array(path, shape, dtype, weak, explicit or placement)
        if isinstance(value, jax.ShapeDtypeStruct):
            dtype = str(jax.dtypes.canonicalize_dtype(value.dtype, allow_extended_dtype=True))
            placement = () if value.sharding is None else self._placement(value.sharding, path)
            return self._array(path, dims(value.shape), dtype, int(value.weak_type), placement)
        if is_numeric(value):
            return self._array(path, value.shape, str(jax.dtypes.canonicalize_dtype(value.dtype)), 0, ())
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
            return ("node", self._constant(type(value), path), self._constant(aux, f"{path} (static fields)"), inner)
        return ("constant", self._constant(value, path))

    def _constant(self, value: Any, path: str) -> Canon:
        canonicaliser = Canonicaliser()
        form = canonicaliser.form(value, path)
        self.traced |= canonicaliser.traced
        return form

    def _pairs(self, mapping: Mapping[Any, Any], path: str) -> Canon:
        encoded = (
            (self._constant(key, f"{path} key"), self._value(item, f"{path}[{key!r}]")) for key, item in mapping.items()
        )
        return tuple(sorted(encoded, key=repr))

    def _array(self, path: str, shape: tuple[Any, ...], dtype: str, weak: int, placement: Canon) -> Canon:
        if self._bucketing is not None:
            shape, outside = self._bucketing.apply(path, shape)
            self.outside += outside
        return ("array", shape, dtype, weak, placement)

    def _placement(self, sharding: Any, path: str) -> Canon:
        try:
            devices = sharding.device_set
        except ValueError:  # over an abstract mesh: a shape of no devices in particular
            return canonical(sharding, f"{path}.sharding")
        if self.device is None:
            self.device = min(devices, key=lambda d: d.id)
        return canonical(sharding, f"{path}.sharding") if len(devices) > 1 else ()


def whereabouts(inv: Any) -> tuple[Any, bool]:
    """Return the device a call's arguments live on, if they do, and whether some are being traced."""
    import jax

    device, traced = None, False
    for leaf in _leaves((*inv.args, *inv.kwargs.values())):
        if isinstance(leaf, jax.core.Tracer):
            traced = True
        elif device is None and (devices := _devices(leaf)):
            device = min(devices, key=lambda d: getattr(d, "id", 0))
    return device, traced


def devices_of(args: Iterable[Any], kwargs: Mapping[str, Any]) -> set[Any]:
    """Return all the devices that arguments live on."""
    return {device for leaf in _leaves((*args, *kwargs.values())) for device in _devices(leaf)}


def _devices(leaf: Any) -> Iterable[Any]:
    import jax

    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        try:  # not by `devices()`: an array that its caller has donated since has a sharding all the same
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
