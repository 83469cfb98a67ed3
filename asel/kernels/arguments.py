"""The kinds of arguments: arrays, containers and constants."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from asel.kernels.canonical import canonical
from asel.kernels.canonical_jax import flatten_node
from asel.runtime.lazy_module import LazyModule

if TYPE_CHECKING:
    import numpy as np
else:
    np = LazyModule("numpy", globals(), "np")

__all__ = ["children_of", "has_attribute", "is_duck_array", "is_numeric", "split_leaves"]

_ORDERED = (OrderedDict, defaultdict)


def is_numeric(value: Any) -> bool:
    """Return whether a value is a NumPy array or scalar that JAX accepts; text, dates, records and objects are not."""
    if type(value) not in (np.ndarray, np.memmap) and not isinstance(value, np.generic):
        return False
    return value.dtype.kind in "biufc" or (value.dtype.kind == "V" and value.dtype.names is None)


def is_duck_array(value: Any) -> bool:
    """Return whether a value has the attributes of an array, without calling its `__getattr__`.

    Flax's `nnx.Rngs` makes a random stream for any attribute that is looked up, and calling one advances it.
    """
    if isinstance(value, type) or not has_attribute(value, "devices"):
        return False
    return has_attribute(value, "shape") and has_attribute(value, "dtype") and callable(getattr(value, "devices", None))


def has_attribute(value: Any, name: str) -> bool:
    """Return whether an object or its class has an attribute, without calling its `__getattr__`."""
    return name in getattr(value, "__dict__", ()) or any(name in vars(base) for base in type(value).__mro__)


def children_of(value: Any) -> tuple[list[tuple[str, Any]], Any] | None:
    """Return a container's children, each with the step to it, and its static part; None for a leaf."""
    if type(value) in _ORDERED:  # to JAX, only with keys that can be sorted
        if isinstance(value, defaultdict):  # the order of insertion does not count
            items = sorted(value.items(), key=lambda item: repr(canonical(item[0])))
        else:
            items = list(value.items())
        aux = ([key for key, _ in items], getattr(value, "default_factory", None))
        return [(f"[{key!r}]", item) for key, item in items], aux
    return flatten_node(value)


def split_leaves(tree: Any, is_array: Callable[[Any], bool]) -> tuple[list[Any], list[bool], Callable[..., Any]]:
    """Return a pytree's arrays, whether each leaf is an array, and a function that rebuilds the tree with other arrays.

    That function keeps the tree's constants, but none of its arrays.
    """
    import jax

    leaves, structure = jax.tree_util.tree_flatten(tree)
    is_dynamic = [is_array(leaf) for leaf in leaves]
    constants = [None if dynamic else leaf for leaf, dynamic in zip(leaves, is_dynamic, strict=True)]

    def rebuild(*arrays: Any) -> Any:
        given = iter(arrays)
        merged = [next(given) if dynamic else leaf for leaf, dynamic in zip(constants, is_dynamic, strict=True)]
        return jax.tree_util.tree_unflatten(structure, merged)

    return [leaf for leaf, dynamic in zip(leaves, is_dynamic, strict=True) if dynamic], is_dynamic, rebuild
