"""Kernels whose best config depends on the machine: nothing here is made up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from asel.kernel import Invocation, Kernel

__all__ = ["BlockedMatMul", "Blocks", "Chunk", "ChunkedAttention"]


@dataclass(frozen=True)
class Blocks:
    """Rows of the left operand that are multiplied at a time."""

    rows: int


class BlockedMatMul(Kernel[Blocks, jax.Array]):
    """A matrix product, block of rows by block of rows."""

    op_id = "demo.matmul"
    version = "1"

    def run(self, a: Any, b: Any, *, cfg: Blocks) -> jax.Array:
        blocks = a.reshape(a.shape[0] // cfg.rows, cfg.rows, a.shape[1])
        product: jax.Array = jax.lax.map(lambda block: block @ b, blocks)
        return product.reshape(a.shape[0], b.shape[1])

    def heuristic_cfg(self, inv: Invocation[Blocks, jax.Array]) -> Blocks:
        return Blocks(min(32, inv.args[0].shape[0]))

    def candidate_cfgs(self, inv: Invocation[Blocks, jax.Array]) -> Iterable[Blocks]:
        rows = inv.args[0].shape[0]
        # 96 divides no power of two, so it fails: an outcome like any other, told in the report and on its span.
        return [Blocks(n) for n in (8, 32, 96, 128, 512) if rows % n == 0 or n == 96]


@dataclass(frozen=True)
class Chunk:
    """Keys that each query looks at in one step."""

    keys: int


class ChunkedAttention(Kernel[Chunk, jax.Array]):
    """Softmax attention over chunks of the keys, with a running maximum."""

    op_id = "demo.attention"
    version = "1"

    def run(self, q: Any, k: Any, v: Any, *, cfg: Chunk) -> jax.Array:
        chunks = k.shape[0] // cfg.keys
        scale = q.shape[-1] ** -0.5

        def step(carry: Any, kv: Any) -> Any:
            best, total, out = carry
            scores = (q @ kv[0].T) * scale
            higher = jnp.maximum(best, scores.max(-1))
            weights = jnp.exp(scores - higher[:, None])
            decay = jnp.exp(best - higher)
            return (higher, total * decay + weights.sum(-1), out * decay[:, None] + weights @ kv[1]), None

        start = (jnp.full(q.shape[0], -jnp.inf), jnp.zeros(q.shape[0]), jnp.zeros_like(q))
        split = (k.reshape(chunks, cfg.keys, -1), v.reshape(chunks, cfg.keys, -1))
        (_, total, out), _ = jax.lax.scan(step, start, split)
        return out / total[:, None]

    def heuristic_cfg(self, inv: Invocation[Chunk, jax.Array]) -> Chunk:
        return Chunk(min(64, inv.args[1].shape[0]))

    def candidate_cfgs(self, inv: Invocation[Chunk, jax.Array]) -> Iterable[Chunk]:
        keys = inv.args[1].shape[0]
        return [Chunk(n) for n in (32, 64, 256, 1024) if keys % n == 0]
