"""Real kernels, whose best config depends on the machine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from asel.kernels.kernel import Invocation, Kernel

__all__ = ["BlockedMatMul", "Blocks", "Chunk", "ChunkedAttention", "PallasMatMul", "Tile"]


@dataclass(frozen=True)
class Blocks:
    """The number of rows of the left operand that are multiplied at a time."""

    rows: int


class BlockedMatMul(Kernel[Blocks, jax.Array]):
    """A matrix product, one block of rows at a time."""

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
        # 96 divides no power of two, so it fails: the report and a span show it like any other outcome.
        return [Blocks(n) for n in (8, 32, 96, 128, 512) if rows % n == 0 or n == 96]


@dataclass(frozen=True)
class Chunk:
    """The number of keys that each step handles."""

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


@dataclass(frozen=True)
class Tile:
    """Rows and columns of the product that one program of the grid computes."""

    rows: int
    columns: int


class PallasMatMul(Kernel[Tile, jax.Array]):
    """A matrix product in Pallas, tile by tile; interpreted on a CPU."""

    op_id = "demo.pallas_matmul"
    version = "1"

    def run(self, a: Any, b: Any, *, cfg: Tile) -> jax.Array:
        from jax.experimental import pallas as pl  # which takes a while to import

        (m, k), n = a.shape, b.shape[1]

        def multiply(a_ref: Any, b_ref: Any, out_ref: Any) -> None:
            out_ref[...] = jnp.dot(a_ref[...], b_ref[...], preferred_element_type=jnp.float32).astype(out_ref.dtype)

        product: jax.Array = pl.pallas_call(
            multiply,
            grid=(m // cfg.rows, n // cfg.columns),
            in_specs=[
                pl.BlockSpec((cfg.rows, k), lambda i, j: (i, 0)),
                pl.BlockSpec((k, cfg.columns), lambda i, j: (0, j)),
            ],
            out_specs=pl.BlockSpec((cfg.rows, cfg.columns), lambda i, j: (i, j)),
            out_shape=jax.eval_shape(jnp.matmul, a, b),
            interpret=jax.default_backend() == "cpu",
        )(a, b)
        return product

    def heuristic_cfg(self, inv: Invocation[Tile, jax.Array]) -> Tile:
        (m, _), (_, n) = (array.shape for array in inv.args)
        # The tiles must divide the matrix: the largest of these sizes that does, or a single tile.
        return Tile(*(next((size for size in (128, 64, 32) if length % size == 0), length) for length in (m, n)))

    def candidate_cfgs(self, inv: Invocation[Tile, jax.Array]) -> Iterable[Tile]:
        (m, _), (_, n) = (array.shape for array in inv.args)
        sizes = (32, 64, 128, 256)
        return [Tile(rows, columns) for rows in sizes for columns in sizes if m % rows == 0 and n % columns == 0]
