"""Checks of a Redis store that several test files make."""

from __future__ import annotations

import time
import traceback
from contextlib import asynccontextmanager

import anyio
import pytest

from asel.errors import StoreError
from asel.stores.redis.store import RedisStore
from support.store_contract import KEY, everything, record

ADDRESS = record().address
NAME = f"asel:2:record:{ADDRESS.digest}"
LEASE = f"asel:2:lease:{ADDRESS.digest}"
SECRET = "hunter2/?#@:%"  # all that a URL can trip over
QUOTED = "hunter2%2F%3F%23%40%3A%25"


@asynccontextmanager
async def within(seconds: float):
    """Assert that the block takes no longer than this."""
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


def calls(client) -> dict[str, int]:
    return {name: stats["calls"] for name, stats in client.info("commandstats").items()}


def every_word(error: BaseException | None) -> str:
    """Return all text of an error that a log could show, with its causes and contexts."""
    words = []
    while error is not None:
        words += [str(error), repr(error), "".join(traceback.format_exception(error))]
        assert error.__cause__ is None or error.__context__ is None or error.__cause__ is error.__context__
        error = error.__cause__ or error.__context__
    return "\n".join(words)


async def every_operation_fails(store: RedisStore, seconds: float) -> list[StoreError]:
    """Assert that each operation raises StoreError in time."""

    async def claim(wait_s: float) -> None:
        async with store.claim(ADDRESS, wait_s=wait_s):
            pytest.fail("held without Redis")

    operations = {
        "get": lambda: store.get(ADDRESS),
        "put": lambda: store.put(record()),
        "delete": lambda: store.delete(ADDRESS),
        "delete expected": lambda: store.delete(ADDRESS, expected=record()),
        "claim": lambda: claim(0.0),
        "claim and wait": lambda: claim(30.0),
        "records": lambda: everything(store),
        "records of a key": lambda: everything(store, KEY),
    }
    errors = []

    async def one(name: str) -> None:
        with pytest.raises(StoreError) as raised:
            await operations[name]()
        assert raised.value.location == store.location, name
        errors.append(raised.value)

    async with within(seconds), anyio.create_task_group() as tasks:
        for name in operations:
            tasks.start_soon(one, name)
    return errors


async def works(store: RedisStore) -> None:
    """Assert that each operation works."""
    await store.delete(ADDRESS)
    assert await store.put(record()) == record()
    assert await store.get(ADDRESS) == record()
    assert await everything(store) == await everything(store, KEY) == [record()]
    async with store.claim(ADDRESS, wait_s=5) as claim:
        assert claim.held
    assert await store.delete(ADDRESS, expected=record())


@asynccontextmanager
async def open_or_not(store: RedisStore, is_open: bool):
    if is_open:
        async with store:
            yield
    else:
        yield


both_ways = pytest.mark.parametrize("is_open", [True, False], ids=["open", "not open"])
