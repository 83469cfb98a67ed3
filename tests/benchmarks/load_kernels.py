"""The kernels of the load benchmark, in their own module, because worker processes import them by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from families import FAMILIES, Blocks

from asel import Kernel

__all__ = ["Cold", "Warm", "cold_args"]

_FAMILY = FAMILIES[-1]  # the recurrence: 24 programs, and compiling dominates running
_STEPS, _WIDTH = 4096, 32


class Warm(Kernel[int, jax.Array]):
    """The served kernel: products of square matrices, one after the other."""

    op_id = "warm"

    def run(self, x: Any, y: Any, *, cfg: int) -> jax.Array:
        out: jax.Array = jax.lax.fori_loop(0, 8, lambda _, out: out @ y * 1e-3, x + cfg)
        return out

    def heuristic_cfg(self, inv: Any) -> int:
        return 0

    def candidate_cfgs(self, inv: Any) -> Iterable[int]:
        return (0, 1)


class Cold(Kernel[Blocks, jax.Array]):
    """The kernel that is tuned meanwhile."""

    op_id = "cold"

    def run(self, decay: Any, x: Any, *, cfg: Blocks) -> jax.Array:
        return _FAMILY.run(decay, x, cfg=cfg)

    def heuristic_cfg(self, inv: Any) -> Blocks:
        return Blocks(128, 4)

    def candidate_cfgs(self, inv: Any) -> Iterable[Blocks]:
        return _FAMILY.candidates


def cold_args(number: int) -> tuple[jax.Array, jax.Array]:
    """Return the arguments of a call with a new key."""
    x = jnp.ones((_STEPS, _WIDTH + number))
    return x, x
