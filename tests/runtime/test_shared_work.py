"""One piece of work, many waiters."""

from __future__ import annotations

import anyio
import pytest

from asel.errors import TuningError
from asel.runtime.shared_work import Shared

pytestmark = pytest.mark.anyio


async def test_every_waiter_gets_the_result():
    """Every waiter, whether it comes before or after the end, gets the same result."""
    pending, results = Shared(), []

    async def wait():
        results.append(await pending.wait())

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        assert pending.waiters == 3
        pending.succeed("answer")
    assert results == ["answer"] * 3
    assert await pending.wait() == "answer"
    assert pending.waiters == 0


async def test_every_waiter_raises_its_own_copy_of_the_error():
    """An error has one traceback, so each waiter gets its own copy, with the original as its cause."""
    pending = Shared()
    original = TuningError("all failed", outcomes=(1, 2))
    pending.fail(original)
    raised = []
    for _ in range(2):
        with pytest.raises(TuningError, match="all failed") as caught:
            await pending.wait()
        raised.append(caught.value)
    assert raised[0] is not raised[1]
    for error in raised:
        assert error.__cause__ is original
        assert error.outcomes == (1, 2)


async def test_it_ends_once():
    """The first result or error counts; later ones change nothing."""
    pending = Shared()
    pending.succeed(1)
    pending.fail(ValueError("late"))
    pending.succeed(2)
    assert await pending.wait() == 1


async def test_the_next_waiter_carries_on_when_the_carrier_is_cancelled():
    """Shared work is done by one waiter at a time, and passes from waiter to waiter until it is done."""
    pending, carriers, results = Shared(), [], []

    async def wait(scope):
        async def work():
            carriers.append(scope)
            await anyio.sleep(1)
            pending.succeed("answer")

        with scope:
            results.append(await pending.carry(work, lambda: results.append("abandoned")))

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(wait, anyio.CancelScope())
        for _ in range(2):
            await anyio.sleep(0.5)
            carriers[-1].cancel()
    assert results == ["answer"]
    assert len(carriers) == 3


async def test_the_last_waiter_to_leave_abandons_the_work():
    """Work without an owner and without waiters has ended; `abandon` is called once."""
    pending, abandoned = Shared(), []
    async with anyio.create_task_group() as tasks:
        for _ in range(2):
            tasks.start_soon(pending.carry, anyio.sleep_forever, lambda: abandoned.append(True))
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    assert abandoned == [True]
    assert pending.ended
