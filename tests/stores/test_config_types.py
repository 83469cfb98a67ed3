"""One cache for kernels with different config types."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import anyio
import pytest
from pydantic import BaseModel
from support.kernels import H100, Bench, Blocks, Toy, call

from asel import InvalidRequestError, Invocation, Kernel, PersistentCache


@dataclass(frozen=True)
class Tiles:
    rows: int
    order: tuple[int, ...] = (0, 1)


class Model(BaseModel):
    depth: int


class Pair(NamedTuple):
    a: int
    b: int


@dataclass(frozen=True)
class Strips:
    rows: int
    order: tuple[int, ...] = (0, 1)


class Layout(Enum):
    ROWS = "rows"
    COLUMNS = "columns"


class Other(Kernel[Any, Any]):
    op_id = "other"

    def __init__(self, *configs: Any) -> None:
        super().__init__()
        self.configs = configs

    def run(self, x, *, cfg):
        return x

    def heuristic_cfg(self, inv):
        return self.configs[0]

    def candidate_cfgs(self, inv):
        return self.configs


OTHER = Invocation("other", (H100.array((8, 128)),), {})


@pytest.fixture(params=["cache", "cache.json"])
def make_cache(request, tmp_path):
    return lambda **options: PersistentCache("shared", tmp_path / request.param, **options)


@pytest.mark.parametrize(
    "configs",
    [
        (Tiles(1), Tiles(2, (1, 0))),
        (Model(depth=1), Model(depth=2)),
        (Pair(1, 2), Pair(3, 4)),
        ((1, 2), (3, 4)),
        ({"a": 1}, {"a": 2}),
        (1, 2),
        ("auto", 2),
        (Layout.ROWS, Layout.COLUMNS),
    ],
)
def test_one_cache_serves_kernels_with_different_configs(make_cache, configs, real_backend):
    """In the next process, each kernel gets its config with its own type."""

    async def scene():
        for expected in ("autotune", "persistent"):
            bench = Bench(costs=lambda cfg: 0.001, persistent=make_cache())
            async with bench.chain as chain:
                toys = await chain.select(call(), Toy())
                others = await chain.select(OTHER, Other(*configs))
            assert (toys.tier, others.tier) == (expected, expected)
            assert type(toys.cfg) is Blocks
            assert any(others.cfg == cfg and type(others.cfg) is type(cfg) for cfg in configs)

    anyio.run(scene, backend=real_backend)


@pytest.mark.parametrize(
    ("configs", "own"),
    [
        ((Tiles(1), Tiles(2)), Tiles(7, (1, 0))),
        ((Model(depth=1),), Model(depth=7)),
        ((Pair(1, 2),), Pair(7, 8)),
        (((1, 2),), (7, 8)),
        ((1, 2), 7),
        (("auto", 2), 7),
        (("auto", Tiles(2)), Tiles(7)),
    ],
)
def test_a_users_put_is_read_as_the_kernels_type(make_cache, configs, own):
    """It is not a candidate, so the type is inferred from the candidates."""

    async def scene():
        kernel, chain = Other(*configs), Bench(persistent=make_cache()).chain
        await make_cache().put(*chain.resolve(OTHER, kernel).key, own)
        found = await chain.select(OTHER, kernel)
        assert (found.tier, found.cfg, type(found.cfg)) == ("persistent", own, type(own))

    anyio.run(scene)


@pytest.mark.parametrize(
    "configs", [(Tiles(1), Strips(1)), (Layout.ROWS, "rows"), ((1, 2), [1, 2]), (Model(depth=1), {"depth": 1})]
)
def test_a_record_that_may_be_either_of_two_candidates_answers_for_neither(make_cache, configs, real_backend):
    """Their JSON is equal, and a config of the wrong class would run another program than the winner."""

    async def scene():
        for _ in range(2):
            bench = Bench(costs=lambda cfg: 0.005 if cfg is configs[0] else 0.001, persistent=make_cache())
            async with bench.chain as chain:
                found = await chain.select(OTHER, Other(*configs))
            assert (found.tier, found.cfg) == ("autotune", configs[1])
            assert type(found.cfg) is type(configs[1])
        return bench

    last = anyio.run(scene, backend=real_backend)
    assert "a PersistentCache with a dumper and a loader" in last.sink.named("record_rejected")[0].reason


def test_a_record_that_does_not_fit_the_kernels_type_is_rejected(make_cache):
    """An event has the reason, and the key is tuned."""

    async def scene():
        kernel, bench = Other(Tiles(1), Tiles(2)), Bench(costs=lambda cfg: 0.001, persistent=make_cache())
        async with bench.chain as chain:
            await make_cache().put(*chain.resolve(OTHER, kernel).key, {"rows": "many"})
            assert (await chain.select(OTHER, kernel)).tier == "autotune"
        [rejected] = bench.sink.named("record_rejected")
        assert "rows" in rejected.reason

    anyio.run(scene)


def test_the_refusal_of_a_config_names_the_type_of_the_cache(make_cache):
    """The fix is to omit the type."""

    async def scene():
        with pytest.raises(InvalidRequestError, match="made with cfg_type=Blocks; without it, each kernel's"):
            await make_cache(cfg_type=Blocks).put("d", "o", "k", Tiles(1))

    anyio.run(scene)


def test_get_returns_json_values_without_a_config_type(make_cache):
    """`get` has no kernel; `cfg_type` or a loader provides the type."""

    async def scene():
        await make_cache().put("d", "o", "k", Tiles(1))
        assert await make_cache().get("d", "o", "k") == {"rows": 1, "order": [0, 1]}
        assert await make_cache(cfg_type=Tiles).get("d", "o", "k") == Tiles(1)

    anyio.run(scene)
