"""`PersistentCache.prune`: the records that it deletes, and the conditions that it refuses."""

from __future__ import annotations

from dataclasses import replace

import anyio
import pytest
from support.kernels import COSTS, Blocks

import asel
from asel import InvalidRequestError, PersistentCache
from asel.kernels.keys import CacheKey
from asel.tuning.outcomes import Measured, TuneReport

HERE = {"jax": "1"}


@pytest.fixture(params=["cache", "cache.json"])
def cache(request, tmp_path):
    return PersistentCache("toy", tmp_path / request.param, cfg_type=Blocks)


def report(cfg, checksum="c", environment=HERE):
    outcomes = tuple(Measured(one, cost, (cost, cost), 0.01) for one, cost in COSTS.items())
    key = CacheKey("dev", "toy@v1", "k")
    return TuneReport(key, cfg, outcomes, 1.5, environment, tune_id="t", checksum=checksum)


@pytest.mark.parametrize(
    ("condition", "left"),
    [
        ({"older_than": 3600}, {2, 3}),
        ({"not_environment": HERE}, {1, 3}),
        ({"predicate": lambda record: record.cfg["m"] == 3}, {1, 2}),
        ({"older_than": 3600, "not_environment": HERE}, {1, 2, 3}),
        ({"older_than": 3600, "not_environment": {"jax": "9"}}, {2, 3}),
        ({"older_than": 3600, "predicate": lambda record: record.cfg["m"] == 3}, {1, 2, 3}),
    ],
)
def test_prune_deletes_only_records_that_meet_all_conditions(cache, condition, left):
    """By age, environment and predicate; a user's put has no environment."""

    async def scene():
        await cache.keep(report(Blocks(1)), replace=False)
        [old] = [record async for record in cache.records()]
        await cache.store.put(replace(old, created=1.0), replace=True)
        await cache.keep(report(Blocks(2), environment={"jax": "9"}), replace=False)
        await cache.put("d", "o", "k", Blocks(3))
        assert await cache.prune(**condition) == 3 - len(left)
        assert {record.cfg["m"] async for record in cache.records()} == left

    anyio.run(scene)


def test_prune_without_a_condition_is_refused(cache):
    """An empty condition deletes nothing."""
    with pytest.raises(InvalidRequestError, match="give a condition"):
        anyio.run(cache.prune)


MADE_WITH = {"jax": "0.7.2", "jaxlib": "0.7.2", "platform_version": "cpu"}


async def with_environments(cache, *environments):
    for number, environment in enumerate(environments):
        await cache.keep(report(Blocks(number), checksum=f"{number}", environment=environment), replace=False)


async def kept_in(cache):
    return {record.cfg["m"] async for record in cache.records()}


def test_prune_keeps_records_that_match_the_given_versions(cache):
    """Versions that are not given may differ."""

    async def scene():
        await with_environments(cache, MADE_WITH, MADE_WITH | {"jaxlib": "0.7.1"}, MADE_WITH | {"jax": "0.7.1"})
        assert await cache.prune(not_environment={"jax": "0.7.2"}) == 1
        assert await kept_in(cache) == {0, 1}
        assert await cache.prune(not_environment={"jax": "0.7.2", "jaxlib": "0.7.2"}) == 1
        assert await kept_in(cache) == {0}

    anyio.run(scene)


def test_a_dry_run_counts_without_deleting(cache):
    """`dry_run` returns what a prune would delete, and deletes nothing."""

    async def scene():
        await with_environments(cache, MADE_WITH, MADE_WITH | {"jax": "9"})
        assert await cache.prune(not_environment=MADE_WITH, dry_run=True) == 1
        assert await kept_in(cache) == {0, 1}
        assert await cache.prune(not_environment=MADE_WITH) == 1
        assert await kept_in(cache) == {0}

    anyio.run(scene)


async def awaited(record):
    return False


@pytest.mark.parametrize(
    ("condition", "said"),
    [
        ({"not_environment": {}}, "empty"),
        ({"not_environment": {"jaxx": "0.7.2"}}, "jaxx.*jax, jaxlib, platform_version"),
        ({"not_environment": {"jax": 10}}, "10"),
        ({"not_environment": {"jax": "0.7.3"}}, "neither.*0.7.3"),
        ({"not_environment": MADE_WITH | {"jaxlib": "0.7"}}, "jaxlib='0.7'"),
        ({"not_environment": "0.7.2"}, "0.7.2"),
        ({"predicate": MADE_WITH}, "function"),
        ({"predicate": awaited}, "a coroutine function; pass a plain one"),
        ({"older_than": "1"}, "'1'"),
        ({"older_than": True}, "True"),
        ({"older_than": float("nan")}, "nan"),
    ],
)
@pytest.mark.parametrize("dry_run", [False, True])
def test_a_mistyped_condition_prunes_nothing(cache, condition, said, dry_run):
    """An unknown name, or a version that neither a record nor this process has, is refused before any deletion."""

    async def scene():
        await with_environments(cache, MADE_WITH, MADE_WITH)
        with pytest.raises(InvalidRequestError, match=said):
            await cache.prune(**condition, dry_run=dry_run)
        assert await kept_in(cache) == {0, 1}

    anyio.run(scene)


def test_a_combination_of_versions_without_a_record_prunes_nothing(cache):
    """Each version exists, but no record has both, so every record would be deleted."""

    async def scene():
        await with_environments(cache, MADE_WITH, MADE_WITH | {"jax": "0.7.3", "jaxlib": "0.7.3"})
        with pytest.raises(InvalidRequestError, match=r"jax='0.7.3' and jaxlib='0.7.2' together"):
            await cache.prune(not_environment={"jax": "0.7.3", "jaxlib": "0.7.2"})
        assert await kept_in(cache) == {0, 1}

    anyio.run(scene)


def test_prune_by_the_environment_of_this_process_may_delete_everything_else(cache):
    """After an upgrade no record matches this process, and all earlier measurements are out of date."""

    async def scene():
        await with_environments(cache, MADE_WITH, MADE_WITH)
        await cache.put("d", "o", "k", Blocks(7))
        assert await cache.prune(not_environment=asel.environment()) == 2
        assert await kept_in(cache) == {7}
        assert await cache.prune(not_environment={"jax": "none has it"}) == 0  # and nothing is left to go

    anyio.run(scene)
