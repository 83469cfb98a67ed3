"""The limit on concurrent tasks: in virtual time, on both backends."""

from __future__ import annotations

import random
import threading

import anyio
import pytest

from asel.runtime.limiter import Limiter

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("limit", [1, 3])
async def test_no_more_tasks_than_the_limit_run(limit):
    """The others follow as soon as there is room, first come, first served."""
    limiter, inside, came, served = Limiter(limit), [], [], []

    async def one(number: int) -> None:
        came.append(number)
        async with limiter.slot():
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


async def test_a_cancelled_task_frees_its_slot():
    """A cancelled task frees its slot, whether it was waiting, just admitted or already running."""
    limiter, chance = Limiter(2), random.Random(3)

    async def one(patience_s: float, works_s: float) -> None:
        with anyio.move_on_after(patience_s):
            async with limiter.slot():
                await anyio.sleep(works_s)

    async with anyio.create_task_group() as tasks:
        for _ in range(300):
            tasks.start_soon(one, chance.choice([0, 1, 2, 3]), chance.choice([0, 1, 2]))
    with anyio.fail_after(1):
        async with limiter.slot(), limiter.slot():
            pass
        assert limiter.free == 2


async def test_one_object_serves_several_event_loops_at_once():
    """Each loop has the full limit: a task of another loop could not wake this one's."""
    limiter, first_has_it, second_is_done = Limiter(1), threading.Event(), threading.Event()

    async def first():
        async with limiter.slot():
            first_has_it.set()
            await anyio.to_thread.run_sync(second_is_done.wait)

    async def second():
        with anyio.fail_after(10):
            async with limiter.slot():
                assert limiter.free == 0
        assert limiter.free == 1

    def run_both():
        thread = threading.Thread(target=anyio.run, args=(first,))
        thread.start()
        try:
            assert first_has_it.wait(10)
            for backend in ("asyncio", "trio"):
                anyio.run(second, backend=backend)
        finally:
            second_is_done.set()
            thread.join(10)

    await anyio.to_thread.run_sync(run_both)


async def test_one_object_serves_one_event_loop_after_another():
    """A selector may be made before any loop runs, and used in several."""
    limiter = Limiter(1)

    async def use() -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(once)

    async def once() -> None:
        async with limiter.slot():
            await anyio.sleep(0.001)

    for backend in ("asyncio", "trio", "asyncio"):
        await anyio.to_thread.run_sync(lambda backend=backend: anyio.run(use, backend=backend))
