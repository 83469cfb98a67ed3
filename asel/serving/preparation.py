"""Runs a kernel's `prepare`: in a thread at first, since it may compile, and on the loop once it was quick."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from asel.errors import UnstableKeyError
from asel.kernels.kernel import Kernel
from asel.kernels.signature import signature
from asel.runtime.bounded_memo import BoundedMemo
from asel.serving.runs import QUICK_S, in_a_thread, timed

__all__ = ["Preparation", "own_prepare", "prepared"]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_MAX_SIGNATURES = 65_536
_NO_PREPARE = Kernel.prepare


def own_prepare(kernel: Any) -> Callable[..., Any] | None:
    """Return the kernel's `prepare`; None if it returns its arguments unchanged."""
    prepare = getattr(kernel, "prepare", None)
    if prepare is None or getattr(prepare, "__func__", None) is _NO_PREPARE:
        return None
    return prepare  # type: ignore[no-any-return]


def prepared(prepare: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Return the arguments as the kernel prepares them. If some are shapes, `prepare` is traced, and returns shapes."""
    if _has_shapes(args, kwargs):
        return _prepared_shapes(prepare, args, kwargs)
    positional, keywords = prepare(*args, **kwargs)
    return tuple(positional), keywords


def _has_shapes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if (jax := sys.modules.get("jax")) is None:
        return False
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree_util.tree_leaves((args, kwargs)))


def _prepared_shapes(prepare: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    import jax

    leaves, structure = jax.tree_util.tree_flatten((args, kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, jax.ShapeDtypeStruct)]
    made: list[Any] = []
    unchanged: dict[int, Any] = {}

    def trace(tracers: list[Any]) -> list[Any]:
        nonlocal made, structure
        given = list(leaves)
        for place, tracer in zip(places, tracers, strict=True):
            given[place] = tracer
            unchanged[id(tracer)] = leaves[place]
        call_args, call_kwargs = jax.tree_util.tree_unflatten(structure, given)
        made, structure = jax.tree_util.tree_flatten(prepare(*call_args, **call_kwargs))
        return [leaf for leaf in made if isinstance(leaf, jax.core.Tracer)]

    shapes = iter(jax.eval_shape(trace, [leaves[place] for place in places]))
    for place, leaf in enumerate(made):
        if isinstance(leaf, jax.core.Tracer):
            shape = next(shapes)
            made[place] = unchanged.get(id(leaf), shape)  # an argument that is returned unchanged keeps its sharding
    prepared_args, keywords = jax.tree_util.tree_unflatten(structure, made)
    return tuple(prepared_args), keywords


class Preparation:
    """Prepares the arguments of calls."""

    def __init__(self) -> None:
        # By signature: whether the last run took less than a millisecond.
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
        """Return the arguments as the kernel prepares them; None if that may take longer than a millisecond."""
        try:
            token = signature(kernel, args, kwargs, for_program=True)
        except (UnstableKeyError, RecursionError):
            return None
        if not self._was_quick.get(token):
            return None
        start = time.perf_counter()
        made, keywords = prepare(*args, **kwargs)
        if time.perf_counter() - start >= QUICK_S:
            self._was_quick.forget(token)
        return tuple(made), keywords

    async def _prepare_in_thread(
        self, kernel: Any, prepare: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments:
        token = None
        with suppress(UnstableKeyError, RecursionError):
            token = signature(kernel, args, kwargs, for_program=True)
        work = partial(timed, partial(prepared, prepare, args, kwargs))
        ran = await in_a_thread(f"preparing {kernel.op_id}", work)
        if ran.error is not None:
            raise ran.error
        if token is not None:
            self._was_quick.put(token, ran.seconds < QUICK_S and not _has_shapes(args, kwargs))
        made: Arguments = ran.out
        return made
