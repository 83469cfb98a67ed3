"""Tokamax's ops are kernels, and tokamax uses the configs that asel chose."""

from __future__ import annotations

import pickle
import sys

import anyio
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokamax
from absl import flags
from support.tokamax_ops import BlockedScale, GpuScale, Rows, x

from asel import (
    AutotunePolicy,
    ConfigSelectorChain,
    Executor,
    InvalidRequestError,
    Invocation,
    NoConfigError,
    PersistentCache,
    Tuner,
)
from asel.integrations.tokamax import TokamaxFunction, TokamaxOp, autotune, bound_call
from asel.testing import ScriptedMeasure

# Tokamax reads its settings from the command line when it first needs one, and pytest's is not for it.
flags.FLAGS(sys.argv[:1])


def selector(costs, **options) -> ConfigSelectorChain:
    return ConfigSelectorChain(tuner=Tuner(0, 1, measure=ScriptedMeasure(costs)), sinks=(), **options)


def by_rows(cfg: Rows) -> float:
    """Two rows at a time are the fastest."""
    return 1e-4 * (1 + abs(cfg.rows - 2))


def test_the_best_implementation_of_attention_is_measured_and_run():
    """Its config is an implementation's name; a missing implementation is a failure; gradients are tokamax's."""
    kernel = TokamaxFunction(tokamax.dot_product_attention, ("triton", "xla", "xla_chunked"))
    q = jax.random.normal(jax.random.key(0), (1, 64, 2, 16))

    async def main():
        async with ConfigSelectorChain(tuner=Tuner(1, 1, check=True), sinks=()) as chain:
            execute = Executor(chain)
            out = await execute(kernel, q, q, value=q, is_causal=True)
            selection = await chain.select(Invocation(kernel.op_id, (q, q, q), {"is_causal": True}), kernel)
            return out, selection, jax.grad(lambda q: execute.nowait(kernel, q, q, q, is_causal=True).sum())(q)

    out, selection, gradient = anyio.run(main)
    np.testing.assert_allclose(out, tokamax.dot_product_attention(q, q, q, is_causal=True), 1e-3, 1e-3)
    expected = jax.grad(lambda q: tokamax.dot_product_attention(q, q, q, is_causal=True).sum())(q)
    np.testing.assert_allclose(gradient, expected, 1e-3, 1e-3)
    assert selection.tier == "memory"  # by position and by name, it is one call
    assert selection.key.call == "query=f32[1,64,2,16], key=f32[1,64,2,16], value=f32[1,64,2,16], is_causal=True"
    outcomes = {outcome.cfg: outcome for outcome in selection.report.outcomes}
    assert list(outcomes) == ["auto", "triton", "xla", "xla_chunked"]
    assert outcomes["triton"].error_type == "NotImplementedError"
    assert outcomes["xla"].alias_of == "auto"
    assert outcomes["xla_chunked"].median_s > 0


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (tokamax.layer_norm, (jnp.ones((4, 8)), jnp.ones(8), None)),
        (tokamax.ragged_dot, (jnp.ones((6, 4)), jnp.ones((2, 4, 3)), jnp.array([2, 4]))),
        (tokamax.gated_linear_unit, (jnp.ones((4, 8)), jnp.ones((8, 2, 8)))),
    ],
)
def test_every_function_that_names_its_implementations_is_a_kernel(function, args):
    """The choices are in the function's signature; without a tune, tokamax chooses."""
    kernel = TokamaxFunction(function)
    candidates = list(kernel.candidate_cfgs(Invocation(kernel.op_id, args, {})))
    assert candidates[0] == kernel.heuristic_cfg(Invocation(kernel.op_id, args, {})) == "auto"
    assert {"xla", "triton"} <= set(candidates)
    for cfg in ("auto", "xla"):
        np.testing.assert_array_equal(kernel.run(*args, cfg=cfg), function(*args, implementation="xla"))
    assert pickle.loads(pickle.dumps(kernel)).op_id == kernel.op_id == f"tokamax.{function.__name__}"


def test_an_op_is_tuned_over_its_own_configs_and_stored(tmp_path):
    """Heuristic and candidates are the op's, in a fixed order; a stored config is read with its type."""

    async def main():
        kernel = TokamaxOp(BlockedScale())
        inv = Invocation(kernel.op_id, (x,), {"factor": 2.0})
        assert kernel.heuristic_cfg(inv) == Rows(rows=8)
        assert list(kernel.candidate_cfgs(inv)) == [Rows(rows=rows) for rows in (1, 2, 4, 8)]
        chosen = []
        for _ in range(2):
            async with selector(by_rows, persistent=PersistentCache("ops", tmp_path)) as chain:
                chosen.append(await chain.select(inv, kernel))
                np.testing.assert_allclose(await Executor(chain)(kernel, x, factor=2.0), 2 * x)
        assert [(one.tier, one.cfg) for one in chosen] == [("autotune", Rows(rows=2)), ("memory", Rows(rows=2))]

    anyio.run(main)


def test_tokamax_uses_the_tuned_configs():
    """Inside the overlay, tokamax's own call has the winner; outside, it does not."""
    bound = BlockedScale().bind(x, factor=3.0)

    async def main():
        policy = AutotunePolicy()
        async with selector(by_rows, policy=policy) as chain:
            nothing_to_choose = BlockedScale(Rows(rows=4)).bind(x, factor=1.0)
            return await autotune(chain, [bound, nothing_to_choose])

    result = anyio.run(main)
    assert isinstance(result, tokamax.AutotuningResult)
    assert [one.op for one, _ in result.data] == [BlockedScale()]
    assert bound.default_config == Rows(rows=8)
    with result:
        assert bound.default_config == Rows(rows=2)
        np.testing.assert_allclose(BlockedScale()(x, factor=3.0), 3 * x)
    assert bound.default_config == Rows(rows=8)
    with tokamax.AutotuningResult.loads(result.dumps()):  # from a file, in another process
        assert bound.default_config == Rows(rows=2)


def test_a_restarted_process_has_the_overlay_from_its_store(tmp_path):
    """The overlay has preloaded configs, with the measurements of another process."""

    async def main():
        results = []
        for _ in range(2):
            async with selector(by_rows, persistent=PersistentCache("ops", tmp_path)) as chain:
                results.append(await autotune(chain, [BlockedScale().bind(x, factor=3.0)]))
        return results

    first, again = anyio.run(main)
    assert again.data == first.data != ()


def test_ops_with_different_fields_have_different_keys():
    """The fields change the result, so they are in the version; one that cannot be compared is refused."""
    plain, shifted = BlockedScale(), BlockedScale(bias=1.0)
    assert TokamaxOp(plain).version == tokamax.__version__
    assert TokamaxOp(shifted).version not in (TokamaxOp(plain).version, TokamaxOp(BlockedScale(bias=2.0)).version)
    assert TokamaxOp(shifted).version == TokamaxOp(BlockedScale(bias=1.0)).version
    fixed = TokamaxOp(BlockedScale(Rows(rows=4)))
    inv = Invocation(fixed.op_id, (x,), {"factor": 2.0})
    assert [fixed.heuristic_cfg(inv), *fixed.candidate_cfgs(inv)] == [Rows(rows=4), Rows(rows=4)]
    with pytest.raises(InvalidRequestError, match="BlockedScale has a field that other processes cannot compare"):
        TokamaxOp(BlockedScale(bias=lambda: 1.0))


def test_an_object_that_cannot_be_a_kernel_is_refused_in_one_sentence(monkeypatch):
    """The message names the problem with the op, the function or this version of tokamax."""
    with pytest.raises(InvalidRequestError, match="is not a tokamax Op; TokamaxFunction takes functions"):
        TokamaxOp(tokamax.layer_norm)
    with pytest.raises(InvalidRequestError, match="'norm' names no implementations"):
        TokamaxFunction(jnp.linalg.norm)

    batched = tokamax.BatchedShapeDtype((8, 2), jnp.float32, vmap_axes=((0, 3),))
    with pytest.raises(InvalidRequestError, match="within vmap"):
        bound_call(BlockedScale().bind(batched, factor=1.0))

    async def ask_for_a_gpu_op():
        kernel = TokamaxOp(GpuScale())
        policy = AutotunePolicy(allow_autotune=False)
        async with selector(0.1, policy=policy) as chain:
            await chain.choose(Invocation(kernel.op_id, (x,), {"factor": 5.0}), kernel)

    with pytest.raises(NoConfigError, match="GpuScale does not run on cpu"):
        anyio.run(ask_for_a_gpu_op)

    async def with_an_old_tokamax():
        async with selector(by_rows) as chain:
            await autotune(chain, [BlockedScale().bind(x, factor=5.0)])

    monkeypatch.delattr(tokamax, "AutotuningResult")
    with pytest.raises(InvalidRequestError, match=r"tokamax [\d.]+ has no tokamax.AutotuningResult, which asel needs"):
        anyio.run(with_an_old_tokamax)
