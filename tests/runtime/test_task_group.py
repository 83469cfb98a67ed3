"""A task group that one task opens and any other may close."""

from __future__ import annotations

from contextlib import asynccontextmanager

import anyio
import pytest

from asel.runtime.task_group import OwnTaskGroup

pytestmark = pytest.mark.anyio


async def test_resources_outlive_the_tasks_that_need_them():
    """Tasks end first; the closing caller may do more work before the resources are closed."""
    steps = []

    @asynccontextmanager
    async def resource(name):
        steps.append(f"{name} open")
        yield
        steps.append(f"{name} closed")

    async def work():
        try:
            await anyio.sleep_forever()
        finally:
            steps.append("task ended")

    group = OwnTaskGroup([resource("a"), resource("b")])
    tasks = await group.open()
    tasks.start_soon(work)
    await anyio.wait_all_tasks_blocked()
    await group.end_tasks()
    steps.append("last words")
    await group.close_resources(1.0)
    assert steps == ["a open", "b open", "task ended", "last words", "b closed", "a closed"]


async def test_a_task_that_fails_ends_the_others_and_fails_the_close():
    """A single error is raised without its group, and the event loop goes on."""

    async def fail():
        raise KeyError("a defect")

    group = OwnTaskGroup()
    tasks = await group.open()
    tasks.start_soon(anyio.sleep_forever)
    tasks.start_soon(fail)
    await anyio.wait_all_tasks_blocked()
    with pytest.raises(KeyError, match="a defect"):
        await group.end_tasks()
    await group.close_resources(1.0)


async def test_a_resource_that_hangs_is_cancelled():
    """Closing is bounded."""

    @asynccontextmanager
    async def hanging():
        try:
            yield
        finally:
            await anyio.sleep_forever()

    group = OwnTaskGroup([hanging()])
    await group.open()
    await group.end_tasks()
    start = anyio.current_time()
    await group.close_resources(3.0)
    assert anyio.current_time() - start == pytest.approx(3.0)


@pytest.mark.parametrize("ends", ["raises", "is cancelled"])
async def test_a_group_that_is_not_opened_leaves_nothing_open(ends):
    """If opening fails or is cancelled, the resources that are already open are closed."""
    open_now = []

    @asynccontextmanager
    async def first():
        open_now.append("first")
        try:
            yield
        finally:
            open_now.remove("first")

    @asynccontextmanager
    async def second():
        if ends == "raises":
            raise OSError("no")
        await anyio.sleep_forever()
        yield

    group = OwnTaskGroup([first(), second()])
    if ends == "raises":
        with pytest.raises(OSError, match="no"):
            await group.open()
    else:
        with anyio.move_on_after(1.0) as scope:
            await group.open()
        assert scope.cancelled_caught
    assert open_now == []
