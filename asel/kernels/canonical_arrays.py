"""The canonical form of a constant array: a digest of its contents.

An array that cannot change (a `jax.Array`, a read-only NumPy array) is hashed once, any other array at each call.
"""

from __future__ import annotations

import functools
import hashlib
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from asel.errors import UnstableKeyError
from asel.runtime.lazy_module import LazyModule

if TYPE_CHECKING:
    import numpy as np

    from asel.kernels.canonical import Canon
else:
    np = LazyModule("numpy", globals(), "np")

__all__ = ["MAX_MUTABLE_BYTES", "array_form", "dtype_form", "dtype_name", "jax_array_form"]

MAX_MUTABLE_BYTES = 1 << 20
"""Mutable NumPy arrays are hashed at each call, on the event loop. A megabyte takes about a millisecond."""


class _HashedOnce:
    """A memo of the forms of arrays that cannot change. It keeps no array alive."""

    def __init__(self) -> None:
        self._forms: dict[int, tuple[weakref.ref[Any], Canon]] = {}

    def form(self, array: Any, make: Callable[[], Canon]) -> Canon:
        name = id(array)
        entry = self._forms.get(name)
        if entry is not None and entry[0]() is array:
            return entry[1]
        made = make()
        self._forms[name] = (weakref.ref(array, functools.partial(self._forget, name)), made)
        return made

    def _forget(self, name: int, ref: weakref.ref[Any]) -> None:
        if (entry := self._forms.get(name)) is not None and entry[0] is ref:
            del self._forms[name]

    def __len__(self) -> int:
        return len(self._forms)


hashed_once = _HashedOnce()


def array_form(array: Any, path: str) -> Canon | None:
    """Return the form of a NumPy array; None for an object array, or for a subclass, which may have more state.

    Raises:
        UnstableKeyError: the array is mutable, and too large to be hashed at each call.
    """
    if type(array) not in (np.ndarray, np.memmap) or array.dtype.hasobject:
        return None
    if _is_read_only(array):
        return hashed_once.form(array, functools.partial(_hashed, array))
    if array.nbytes > MAX_MUTABLE_BYTES:
        raise UnstableKeyError(
            f"{path} is a NumPy array of {array.nbytes / 1e6:.0f} MB, which would be hashed at every call, since it "
            "may have changed. Pass it to the kernel as an argument; or capture a jax.Array, or a copy that is "
            "read-only (array.flags.writeable = False), which are hashed once.",
            argument=path,
        )
    return _hashed(array)


def jax_array_form(array: Any, path: str) -> Canon:
    """Return the form of a JAX array: the same as that of a NumPy array of equal contents.

    Raises:
        UnstableKeyError: other processes hold a part of the array.
    """
    return hashed_once.form(array, functools.partial(_jax_contents, array, path))


def _jax_contents(array: Any, path: str) -> Canon:
    import jax
    import jax.numpy as jnp

    if not array.is_fully_addressable:
        raise UnstableKeyError(
            f"{path} is a jax.Array that also lies on devices of other processes, so its contents cannot be seen "
            "here. Pass it to the kernel as an argument.",
            argument=path,
        )
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        return ("key array", str(array.dtype), _hashed(np.asarray(jax.random.key_data(array))))
    return _hashed(np.asarray(array))


def _is_read_only(array: Any) -> bool:
    """Return whether an array and every array it is a view of are read-only."""
    while isinstance(array, np.ndarray):
        if array.flags.writeable:
            return False
        array = array.base
    return array is None or isinstance(array, bytes)


def _hashed(array: np.ndarray[Any, Any]) -> Canon:
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return ("array", dtype_form(array.dtype), array.shape, hashlib.sha256(flat.data).hexdigest())


def dtype_form(dtype: np.dtype[Any]) -> Canon:
    is_plain = dtype.names is None and dtype.subdtype is None
    return ("dtype", dtype.name, dtype.str) if is_plain else ("dtype", repr(dtype))


@functools.lru_cache(maxsize=256)
def dtype_name(dtype: Any) -> str:
    """Return a dtype as text. Cached, because NumPy builds the text anew each time."""
    return str(dtype)
