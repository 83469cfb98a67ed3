"""Objects of flax and equinox that `jax.jit` takes as arguments, each made anew in the process that asks."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
from flax import nnx

from asel import Invocation, Kernel
from asel.kernels.keys import call_key


def linear(features: int = 3) -> Any:
    return nnx.Linear(2, features, rngs=nnx.Rngs(0))


def graphdef(features: int = 3) -> Any:
    return nnx.graphdef(linear(features))


def nnx_jitted(scale: int = 1) -> Any:
    return nnx.jit(lambda model, x: model(x) * scale)


def filter_jitted(scale: int = 1) -> Any:
    return eqx.filter_jit(lambda x: x * scale)


def batch_norm(size: int = 3) -> Any:
    return eqx.nn.BatchNorm(size, "batch", mode="ema")


def batch_norm_with_state(size: int = 3) -> Any:
    return eqx.nn.make_with_state(eqx.nn.BatchNorm)(size, "batch", mode="ema")


def bound_method(size: int = 3) -> Any:
    return eqx.nn.Linear(2, size, key=jax.random.key(0)).__call__


LIBRARY_OBJECTS = {
    "graphdef": graphdef,
    "module": linear,
    "nnx.jit": nnx_jitted,
    "filter_jit": filter_jitted,
    "BatchNorm": batch_norm,
    "BatchNorm and its state": batch_norm_with_state,
    "a bound method": bound_method,
}


def library_keys() -> dict[str, str]:
    of: Kernel[Any, Any] = Kernel("k")
    return {name: call_key(Invocation("k", (make(),), {}), of) for name, make in LIBRARY_OBJECTS.items()}
