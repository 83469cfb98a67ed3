"""Helpers for keys, signatures and resolved calls."""

from __future__ import annotations

from typing import Any

import jax

from asel import Invocation, Kernel, UnstableKeyError
from asel.kernels.key_memo import KeyMemo
from asel.kernels.keys import call_key
from asel.kernels.signature import signature
from support.kernels import Listed

KERNEL: Kernel[Any, Any] = Kernel("k")
CALL: Invocation[Any, Any] = Invocation("toy", (1,), {})


def key(*args: Any, **kwargs: Any) -> str:
    return call_key(Invocation("k", args, kwargs), KERNEL)


def sig(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    return signature(KERNEL, args, kwargs)


def signature_of(inv: Invocation[Any, Any], kernel: Any) -> tuple[Any, ...]:
    return signature(kernel, inv.args, inv.kwargs, inv)


def resolve(inv: Invocation[Any, Any], of: Any = KERNEL) -> Any:
    return Listed(KeyMemo().resolve(inv, of), inv, of)


def key_or_refusal(value: Any) -> str:
    try:
        return key(value)
    except UnstableKeyError:
        return f"refused {id(value)}"


def sharing(*values: Any) -> int:
    """Return the number of values that share their key with an earlier one; refused values share none."""
    return len(values) - len({key_or_refusal(value) for value in values})


def during_trace(fn: Any, *args: Any) -> Any:
    """Return the result of `fn` while JAX traces it."""
    seen = []
    jax.jit(lambda *xs: seen.append(fn(*xs)))(*args)
    return seen[0]


def abstract_mesh(names: str = "x") -> Any:
    return jax.sharding.AbstractMesh((2,), tuple(names))
