"""Runs a kernel's `prepare`: in a thread at first, since it may compile, then on the loop once it proved quick."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from asel.errors import UnstableKeyError
from asel.kernels.kernel import Kernel
from asel.kernels.signature import plain_signature
from asel.runtime.bounded_memo import BoundedMemo
from asel.serving.runs import QUICK_S, in_a_thread, timed

__all__ = ["Preparation", "own_prepare"]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_MAX_SIGNATURES = 65_536
_NO_PREPARE = Kernel.prepare


def own_prepare(kernel: Any) -> Callable[..., Any] | None:
    """Return the kernel's `prepare`; None if it returns its arguments unchanged."""
    prepare = getattr(kernel, "prepare", None)
    if prepare is None or getattr(prepare, "__func__", None) is _NO_PREPARE:
        return None
    return prepare  # type: ignore[no-any-return]


class Preparation:
    """Prepares the arguments of calls."""

    def __init__(self) -> None:
        # By signature: whether the last time took less than a millisecond.
        self._was_quick: BoundedMemo[bool] = BoundedMemo(_MAX_SIGNATURES)

    async def prepare(
        self, kernel: Any, prepare: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments:
        """Return the arguments as the kernel prepares them."""
        return self.prepare_if_quick(kernel, prepare, args, kwargs) or await self._prepare_in_thread(
            kernel, prepare, args, kwargs
        )

    def prepare_if_quick(
        self, kernel: Any, prepare: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        """Return the arguments as the kernel prepares them; None if that may take long."""
        try:
            token = plain_signature(kernel, args, kwargs, for_program=True)
        except (UnstableKeyError, RecursionError):
            return None
        if not self._was_quick.get(token):
            return None
        start = time.perf_counter()
        prepared, keywords = prepare(*args, **kwargs)
        if time.perf_counter() - start >= QUICK_S:
            self._was_quick.forget(token)
        return tuple(prepared), keywords

    async def _prepare_in_thread(
        self, kernel: Any, prepare: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments:
        token = None
        with suppress(UnstableKeyError, RecursionError):
            token = plain_signature(kernel, args, kwargs, for_program=True)
        ran = await in_a_thread(f"preparing {kernel.op_id}", partial(timed, partial(prepare, *args, **kwargs)))
        if ran.error is not None:
            raise ran.error
        if token is not None:
            self._was_quick.put(token, ran.seconds < QUICK_S)
        prepared, keywords = ran.out
        return tuple(prepared), keywords
