"""ejKernel's own modules with asel's executor in the place of theirs."""

from __future__ import annotations

import importlib
import tempfile
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from asel import BlockingExecutor, BlockingSelector
from asel.testing import RecordingSink, ScriptedMeasure
from asel.tuning.tuner import Tuner

_compilation_cache_dir = jax.config.jax_compilation_cache_dir
with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(), tempfile.TemporaryDirectory() as scratch:
    # Importing ejKernel makes directories at home and turns JAX's compilation cache on for the whole process.
    patch.setenv("EJKERNEL_PERSISTENT_CACHE_DIR", scratch)
    warnings.simplefilter("ignore")
    pooling = importlib.import_module("ejkernel.modules.operations.pooling")
    attention = importlib.import_module("ejkernel.modules.operations.scaled_dot_product_attention")
jax.config.update("jax_compilation_cache_dir", _compilation_cache_dir)

X = jnp.arange(2 * 64 * 16, dtype=jnp.float32).reshape(2, 64, 16)
Q, K, V = np.random.default_rng(0).normal(size=(3, 1, 16, 2, 8)).astype(np.float32)
SPEC = PartitionSpec("d")


@pytest.fixture
def sink(monkeypatch):
    """The events of a selector that chooses for both modules."""
    found = RecordingSink()
    tuner = Tuner(0, 1, measure=ScriptedMeasure(lambda cfg: 0.001))
    with BlockingSelector(tuner=tuner, sinks=[found]) as selector:
        monkeypatch.setattr(pooling, "_mean_pooling_executor", BlockingExecutor(selector))
        monkeypatch.setattr(attention, "_executor", BlockingExecutor(selector))
        yield found


def test_modules_run_through_asels_executor(sink):
    """Their `_cfg`, and `method`, `mesh` and the specs as None, belong to the call, not to the kernel."""
    pooled = pooling.mean_pooling(X, chunk_size=16)
    np.testing.assert_allclose(pooled, X.mean(1), rtol=1e-5)
    np.testing.assert_array_equal(jax.jit(partial(pooling.mean_pooling, chunk_size=16))(X), pooled)
    gradient = jax.jit(jax.grad(lambda x: pooling.mean_pooling(x, chunk_size=16).sum()))(X)
    np.testing.assert_allclose(gradient, jnp.full(X.shape, 1 / 64))

    attended = attention.scaled_dot_product_attention(Q, K, V, causal=True)
    np.testing.assert_allclose(attended, jax.nn.dot_product_attention(Q, K, V, is_causal=True), rtol=1e-4, atol=1e-5)
    assert [event.key.op_id for event in sink.named("autotune_finish")] == [
        "mean_pooling@v0",
        "scaled_dot_product_attention@v0",
    ]


def test_a_config_given_to_a_module_is_an_override(sink):
    """The module passes it to the executor."""
    kernel = pooling.MeanPooling()
    cfg = kernel.heuristic_cfg(None)
    pooling.mean_pooling(X, chunk_size=16, cfg=cfg)
    assert sink.names == ["override"]
    assert sink.events[0].cfg == cfg


def test_a_module_is_mapped_over_shards(sink):
    """With a mesh, its `method` is `shard_map`, and the specs apply."""
    mesh = Mesh(np.array(jax.devices()[:1]), ("d",))
    how = {"mesh": mesh, "in_specs": (SPEC,) * 3 + (None,) * 3, "out_specs": SPEC}
    mapped = attention.scaled_dot_product_attention(Q, K, V, causal=True, **how)
    plain = attention.scaled_dot_product_attention(Q, K, V, causal=True)
    np.testing.assert_allclose(mapped, plain, rtol=1e-5)
    assert len({event.key for event in sink.named("autotune_finish")}) == 2
