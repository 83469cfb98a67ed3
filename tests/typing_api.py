"""What a type checker makes of the public API. Checked by mypy in the suite; never run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import assert_type

import jax

from asel import (
    AutotunePolicy,
    BatchSummary,
    BlockingExecutor,
    BlockingSelector,
    ConfigCache,
    ConfigSelectorChain,
    Event,
    Executor,
    Invocation,
    Kernel,
    PersistentCache,
    Selection,
    Sink,
    Tuner,
    TuneReport,
    kernel,
    overlay_cache,
    policy_override,
)
from asel.kernels.kernel import FunctionKernel
from asel.selection.results import Explanation
from asel.stores.protocol import Store
from asel.stores.redis.store import RedisStore
from asel.testing import RecordingSink, ScriptedMeasure


@dataclass(frozen=True)
class Blocks:
    m: int
    n: int


class MatMul(Kernel[Blocks, jax.Array]):
    op_id = "matmul"
    version = "1"

    def run(self, a: jax.Array, b: jax.Array, *, cfg: Blocks) -> jax.Array:
        return a @ b

    def heuristic_cfg(self, inv: Invocation[Blocks, jax.Array]) -> Blocks:
        return Blocks(128, 128)

    def candidate_cfgs(self, inv: Invocation[Blocks, jax.Array]) -> Iterable[Blocks]:
        return [Blocks(m, n) for m in (64, 128) for n in (64, 128)]


@kernel(op_id="scale", configs=[1, 2], heuristic=1)
def scale(x: jax.Array, *, cfg: int) -> jax.Array:
    return x * cfg


async def select(a: jax.Array) -> None:
    cache: ConfigCache[Blocks] = ConfigCache(max_entries=100)
    inv: Invocation[Blocks, jax.Array] = Invocation("matmul", (a, a), {})
    sinks: list[Sink] = [RecordingSink()]
    async with ConfigSelectorChain[Blocks, jax.Array](
        cache, AutotunePolicy(wait_s=1.0), tuner=Tuner[Blocks](measure=ScriptedMeasure(0.1)), sinks=sinks
    ) as selector:
        assert_type(await selector.choose(inv, MatMul()), Blocks)
        selection = await selector.select(inv, MatMul())
        assert_type(selection, Selection[Blocks])
        assert_type(selection.report, TuneReport[Blocks] | None)
        assert_type(selector.choose_nowait(inv, MatMul()), Blocks)
        assert_type(await selector.explain(inv, MatMul()), Explanation[Blocks])
        assert_type(await selector.retune(inv, MatMul()), Blocks)
        with overlay_cache({("dev", "op", "key"): Blocks(1, 1)}), policy_override(selector, allow_autotune=False):
            assert_type(cache.get("dev", "op", "key"), Blocks | None)
        assert_type(await selector.withdraw(inv, MatMul(), Blocks(1, 1), ValueError("no")), bool)
        assert_type(await Executor(selector)(MatMul(), a, a), jax.Array)
        assert_type(await Executor(selector)(MatMul(), a, a, cfg=Blocks(1, 1)), jax.Array)
        assert_type(Executor(selector).nowait(MatMul(), a, a), jax.Array)
        async with selector.events() as stream:
            async for event in stream:
                assert_type(event, Event)


def block(a: jax.Array) -> None:
    inv: Invocation[Blocks, jax.Array] = Invocation("matmul", (a, a), {})
    with BlockingSelector[Blocks, jax.Array](persistent=PersistentCache("matmul")) as selector:
        assert_type(selector.choose(inv, MatMul()), Blocks)
        assert_type(selector.select(inv, MatMul()), Selection[Blocks])
        assert_type(selector.warm_up([(MatMul(), inv)]), BatchSummary)
        assert_type(BlockingExecutor(selector)(MatMul(), a, a), jax.Array)
        with selector.events() as events:
            assert_type(next(events), Event)


async def keep() -> None:
    cache = PersistentCache("matmul", cfg_type=Blocks, shipped=["configs.json"])
    assert_type(cache, PersistentCache[Blocks])
    assert_type(await cache.get("dev", "op", "key"), Blocks | None)
    await cache.put("dev", "op", "key", Blocks(1, 1))
    assert_type(await cache.prune(older_than=3600), int)


assert_type(scale, FunctionKernel[int, jax.Array])

store: Store = RedisStore("redis://localhost")
