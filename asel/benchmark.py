"""Compiles and times one candidate with JAX, off the event loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from asel.devices import Settings
from asel.measure import Sampler, Trial
from asel.threads import run_in_thread

__all__ = ["JaxMeasure", "abstract", "concrete"]


class JaxMeasure:
    """Times a candidate as `jax.jit` would run it.

    Array leaves of the arguments are parameters of the compiled function; everything else is a
    constant. Tracers and shapes become zeros of the same shape, dtype and sharding.
    """

    def __init__(self, *, timer: Callable[[], float] = time.perf_counter) -> None:
        self._timer = timer

    async def compile(self, trial: Trial[Any]) -> Sampler:
        step = partial(run_in_thread, grace_s=trial.grace_s, left_behind=trial.left_behind)
        run = await step(f"compiling {trial.cfg!r}", partial(_compile, trial))

        def timed() -> float:
            with _settings(trial.settings):
                start = self._timer()
                run()
                return self._timer() - start

        return partial(step, f"measuring {trial.cfg!r}", timed)


def _compile(trial: Trial[Any]) -> Callable[[], Any]:
    """Return a function that runs the compiled candidate once and waits for its outputs."""
    with _settings(trial.settings):
        leaves, structure = jax.tree_util.tree_flatten((trial.args, dict(trial.kwargs)))
        dynamic = [_is_array(leaf) for leaf in leaves]
        arrays = [concrete(leaf, trial.device) for leaf, is_array in zip(leaves, dynamic, strict=True) if is_array]

        def forward(*values: Any) -> Any:
            given = iter(values)
            merged = [next(given) if is_array else leaf for leaf, is_array in zip(leaves, dynamic, strict=True)]
            args, kwargs = jax.tree_util.tree_unflatten(structure, merged)
            return trial.fn(*args, **kwargs)

        timed = forward if trial.objective == "forward" else _with_backward(forward, arrays)
        compiled = jax.jit(timed).lower(*arrays).compile()
        return lambda: jax.block_until_ready(compiled(*arrays))  # type: ignore[no-untyped-call]


def _with_backward(forward: Callable[..., Any], arrays: list[Any]) -> Callable[..., Any]:
    """Return forward and gradient of every inexact output with respect to every inexact input."""
    wanted = tuple(i for i, array in enumerate(arrays) if jnp.issubdtype(array.dtype, jnp.inexact))
    if not wanted:
        return forward

    def loss(*values: Any) -> Any:
        total = jnp.zeros((), jnp.float32)
        for leaf in jax.tree_util.tree_leaves(forward(*values)):
            if jnp.issubdtype(jnp.result_type(leaf), jnp.complexfloating):
                total += jnp.sum(leaf.real).astype(jnp.float32) + jnp.sum(leaf.imag).astype(jnp.float32)
            elif jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
                total += jnp.sum(leaf.astype(jnp.float32))
        return total

    return jax.value_and_grad(loss, argnums=wanted)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) or (
        isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufcV"
    )


def concrete(leaf: Any, device: Any = None) -> Any:
    """Return an array that can be computed with: `leaf` itself, or zeros in the place of a shape."""
    if isinstance(leaf, jax.core.Tracer):
        leaf = abstract(leaf)
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    zeros = np.zeros(leaf.shape, leaf.dtype)
    return jax.device_put(zeros, leaf.sharding if leaf.sharding is not None else device)


def abstract(leaf: Any) -> Any:
    """Return `leaf`, or its shape where it is a tracer, which must not outlive its trace."""
    if isinstance(leaf, jax.core.Tracer):
        weak_type = getattr(leaf.aval, "weak_type", False)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=weak_type)  # type: ignore[no-untyped-call]
    return leaf


@contextmanager
def _settings(settings: Settings | None) -> Iterator[None]:
    if settings is None:
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(jax.enable_x64(settings.x64))
        stack.enter_context(jax.default_matmul_precision(settings.matmul_precision))
        stack.enter_context(jax.default_device(settings.default_device))
        yield
