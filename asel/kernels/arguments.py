"""Sorts the arguments of a call into arrays, containers and constants."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import TYPE_CHECKING, Any

from asel.kernels.canonical import canonical
from asel.kernels.canonical_jax import flatten_node
from asel.runtime.lazy_module import LazyModule

if TYPE_CHECKING:
    import numpy as np
else:
    np = LazyModule("numpy", globals(), "np")

__all__ = ["children_of", "has_attribute", "is_duck_array", "is_numeric"]

_ORDERED = (OrderedDict, defaultdict)


def is_numeric(value: Any) -> bool:
    """Tell whether a NumPy array or scalar is one JAX could take; objects, text, dates and records are constants."""
    if type(value) not in (np.ndarray, np.memmap) and not isinstance(value, np.generic):
        return False
    return value.dtype.kind in "biufc" or (value.dtype.kind == "V" and value.dtype.names is None)


def is_duck_array(value: Any) -> bool:
    """Tell whether a value has an array's shape and dtype; an object that answers to any name does not count.

    Flax's `nnx.Rngs` makes a random stream of every attribute it is asked for, and calling one advances it.
    """
    if isinstance(value, type) or not has_attribute(value, "devices"):
        return False
    return has_attribute(value, "shape") and has_attribute(value, "dtype") and callable(getattr(value, "devices", None))


def has_attribute(value: Any, name: str) -> bool:
    """Tell whether an object has an attribute of its own or its class's, without asking its `__getattr__`."""
    return name in getattr(value, "__dict__", ()) or any(name in vars(base) for base in type(value).__mro__)


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
