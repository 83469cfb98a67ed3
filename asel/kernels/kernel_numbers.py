"""A number for each kernel, used in signatures."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from functools import partial
from typing import Any

from asel.kernels.arguments import has_attribute
from asel.kernels.canonical import Canonicaliser, attributes_of
from asel.runtime.bounded_memo import BoundedMemo

__all__ = ["is_known_by_itself", "kernel_number", "kernel_numbers"]


def _forget(seen: dict[int, Any], name: int, _: object) -> None:
    seen.pop(name, None)


class _KernelNumbers:
    """A number for each kernel; kernels of one class with equal attributes share a number.

    So a kernel that is made for every call is recognised. A kernel whose attributes have no canonical form, or are
    arrays, is recognised by identity. No kernel is kept alive, except the last few that do not support weak references.
    """

    def __init__(self, max_entries: int = 4096, max_held: int = 256) -> None:
        self._unused = itertools.count()
        self._numbers: BoundedMemo[int] = BoundedMemo(max_entries)
        self._max_held = max_held
        self._held: deque[int] = deque()
        self.seen: dict[int, tuple[int, Any, bool]] = {}
        """By id: the kernel's number, a weak reference to it, and whether it is recognised by identity."""

    def learn(self, kernel: Any) -> int:
        shared = self._shared_number(kernel)
        number = next(self._unused) if shared is None else shared
        name = id(kernel)
        try:
            # The callback runs before the memory is reused, so an id never refers to a later object.
            holder: Any = weakref.ref(kernel, partial(_forget, self.seen, name))
        except TypeError:
            holder = kernel
        self.seen[name] = (number, holder, shared is None and holder is not kernel)
        if holder is kernel:
            self._held.append(name)
            if len(self._held) > self._max_held:
                self.seen.pop(self._held.popleft(), None)  # before the kernel is freed and its id reused
        return number

    def _shared_number(self, kernel: Any) -> int | None:
        """Return the number that equal kernels share; None if this kernel is recognised by identity."""
        kind = type(kernel)
        shows_state = hasattr(kernel, "__dict__") or all("__slots__" in vars(base) for base in kind.__mro__[:-1])
        if not shows_state or any(map(_is_array, attributes_of(kernel))):
            return None
        try:
            form = Canonicaliser().state(kernel, "kernel")
        except Exception:  # attributes may be of any kind, and have no form or raise
            return None
        # The class itself rather than its name: in a notebook, several classes may have one name.
        token = (kind, form)
        if (number := self._numbers.get(token)) is None:
            self._numbers.put(token, number := next(self._unused))
        return number


kernel_numbers = _KernelNumbers()


def _is_array(value: Any) -> bool:
    """Return whether a value is an array. Dtypes and NumPy scalars have the attributes of arrays, but are not."""
    if isinstance(value, type) or not has_attribute(value, "dtype"):
        return False
    import numpy as np

    return not isinstance(value, np.generic)


def kernel_number(kernel: Any) -> int:
    """Return the number that stands for a kernel in signatures."""
    return seen[0] if (seen := kernel_numbers.seen.get(id(kernel))) else kernel_numbers.learn(kernel)


def is_known_by_itself(kernel: Any) -> bool:
    """Return whether a kernel is recognised by identity, so that its signatures are useless once it is freed."""
    kernel_number(kernel)
    return kernel_numbers.seen[id(kernel)][2]
