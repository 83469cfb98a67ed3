"""The limit on concurrent tasks: in virtual time, on both backends."""

from __future__ import annotations

import random

import anyio
import pytest

from asel.limiter import Limiter

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("limit", [1, 3])
async def test_no_more_tasks_than_the_limit_run(limit):
    """The others follow as soon as there is room, first come, first served."""
    limiter, inside, came, served = Limiter(limit), [], [], []

    async def one(number: int) -> None:
        came.append(number)
        async with limiter:
            inside.append(number)
            assert len(inside) <= limit
            served.append(number)
            await anyio.sleep(1)
            inside.remove(number)

    start = anyio.current_time()
    async with anyio.create_task_group() as tasks:
        for number in range(12):
            tasks.start_soon(one, number)
    assert anyio.current_time() - start == pytest.approx(12 / limit)
    # Those who are let in together run in any order.
    rounds = [[sorted(order[i : i + limit]) for i in range(0, 12, limit)] for order in (served, came)]
    assert rounds[0] == rounds[1]


async def test_a_cancelled_task_takes_no_room():
    """Whether it was cancelled before it was admitted, in that moment, or after."""
    limiter, chance = Limiter(2), random.Random(3)

    async def one(patience_s: float, works_s: float) -> None:
        with anyio.move_on_after(patience_s):
            async with limiter:
                await anyio.sleep(works_s)

    async with anyio.create_task_group() as tasks:
        for _ in range(300):
            tasks.start_soon(one, chance.choice([0, 1, 2, 3]), chance.choice([0, 1, 2]))
    with anyio.fail_after(1):
        async with limiter, limiter:
            pass
        assert limiter._free == 2


async def test_one_object_serves_one_event_loop_after_another():
    """A chain is made before there is a loop, and can be used in several."""
    limiter = Limiter(1)

    async def use() -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(once)

    async def once() -> None:
        async with limiter:
            await anyio.sleep(0.001)

    for backend in ("asyncio", "trio", "asyncio"):
        await anyio.to_thread.run_sync(lambda backend=backend: anyio.run(use, backend=backend))
