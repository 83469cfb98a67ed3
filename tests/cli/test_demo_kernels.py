"""The demo's kernels compute the correct result with each config."""

from __future__ import annotations

import anyio
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from asel import ConfigSelectorChain, Executor, Invocation, Measured, Tuner
from asel.cli.demo.kernels import BlockedMatMul, ChunkedAttention, PallasMatMul, Tile


def random(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(sum(shape)), shape)


def attention(q, k, v):
    return jax.nn.softmax((q @ k.T) * q.shape[-1] ** -0.5) @ v


CALLS = [
    (BlockedMatMul(), (random(128, 16), random(16, 8)), jnp.matmul),
    (ChunkedAttention(), (random(16, 8), random(256, 8), random(256, 8)), attention),
    (PallasMatMul(), (random(64, 16), random(16, 64)), jnp.matmul),
    (PallasMatMul(), (random(40, 16), random(16, 24)), jnp.matmul),  # which no tile of a common size fits
]


@pytest.mark.parametrize(("kernel", "args", "reference"), CALLS)
def test_every_config_computes_the_same_result(kernel, args, reference):
    """A config changes how a result is computed, never the result."""
    inv = Invocation(kernel.op_id, args, {})
    configs = dict.fromkeys([kernel.heuristic_cfg(inv), *kernel.candidate_cfgs(inv)])
    if isinstance(kernel, BlockedMatMul):
        configs = [cfg for cfg in configs if cfg.rows != 96]  # which fails on purpose
    for cfg in configs:
        np.testing.assert_allclose(
            jax.jit(kernel.run, static_argnames="cfg")(*args, cfg=cfg), reference(*args), 1e-4, 1e-5
        )


def test_a_pallas_kernel_is_tuned_over_its_block_sizes():
    """It is interpreted on a CPU, and the outputs of its candidates are compared."""
    kernel, args = CALLS[2][:2]

    async def main():
        async with ConfigSelectorChain(tuner=Tuner(1, 1, check=True), sinks=()) as selector:
            out = await Executor(selector)(kernel, *args)
            selection = await selector.select(Invocation(kernel.op_id, args, {}), kernel)
        np.testing.assert_allclose(out, args[0] @ args[1], 1e-4, 1e-5)
        return selection

    selection = anyio.run(main)
    assert selection.cfg == selection.report.winner
    assert {outcome.cfg for outcome in selection.report.outcomes if isinstance(outcome, Measured)} == {
        Tile(rows, columns) for rows in (32, 64) for columns in (32, 64)
    }
