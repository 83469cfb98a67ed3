"""The queue for a device: who is woken, in which order, and what happens when a waiter is cancelled."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Generator
from typing import Any

import anyio
import pytest
from support.kernels import TUNE_S, Bench, Toy, call

from asel.tuning.device_lock import DeviceLock, DeviceStuck

WAITERS = 50


class Resumed:
    """An awaitable that counts how often the event loop resumes it."""

    def __init__(self, work: Awaitable[Any], counts: Counter[int], name: int) -> None:
        self._work, self._counts, self._name = work, counts, name

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._work.__await__()
        resume, value = steps.send, None
        while True:
            try:
                asked = resume(value)
            except StopIteration as end:
                return end.value
            try:
                resume, value = steps.send, (yield asked)
            except BaseException as error:
                resume, value = steps.throw, error
            self._counts[self._name] += 1


class LeftBehind:
    """An abandoned thread in virtual time."""

    def __init__(self) -> None:
        self.alive = True
        self._callbacks = []

    def when_done(self, callback) -> None:
        self._callbacks.append(callback)

    def come_back(self) -> None:
        self.alive = False
        for callback in self._callbacks:
            callback()


async def hold(lock: DeviceLock, turns: list, name: object, seconds: float = 1.0) -> None:
    async with lock.held([]):
        turns.append(name)
        await anyio.sleep(seconds)


@pytest.mark.anyio
async def test_each_release_wakes_one_waiter():
    """A release wakes only the next in line, so the cost of a turn does not grow with the queue."""
    lock, turns, resumed = DeviceLock(), [], Counter()

    async def wait(name: int) -> None:
        turn = lock.held([])
        await Resumed(turn.__aenter__(), resumed, name)
        turns.append(name)
        await anyio.sleep(1)
        await turn.__aexit__(None, None, None)

    async with anyio.create_task_group() as tasks:
        async with lock.held([]):
            for name in range(WAITERS):
                tasks.start_soon(wait, name)
                await anyio.wait_all_tasks_blocked()
        assert turns == []
    assert turns == list(range(WAITERS))
    assert resumed == dict.fromkeys(range(WAITERS), 1)


@pytest.mark.anyio
async def test_the_last_holder_may_go_on_before_the_next_in_line():
    """A tune's samples stay together: its task may take the lock again until the next waiter has run."""
    lock, turns, resumed = DeviceLock(), [], Counter()

    async def wait() -> None:
        turn = lock.held([])
        await Resumed(turn.__aenter__(), resumed, 0)
        turns.append("waiter")
        await turn.__aexit__(None, None, None)

    async with anyio.create_task_group() as tasks:
        for sample in range(3):
            async with lock.held([]):
                turns.append(sample)
                if sample == 0:
                    tasks.start_soon(wait)
                await anyio.wait_all_tasks_blocked()
    assert turns == [0, 1, 2, "waiter"]
    assert resumed[0] == 3  # once a release


@pytest.mark.anyio
async def test_no_task_overtakes_a_waiter_that_was_woken():
    """A task that asks between a release and the next waiter's turn queues behind that waiter."""
    lock, turns, released = DeviceLock(), [], anyio.Event()

    async def newcomer() -> None:
        await released.wait()
        await hold(lock, turns, "newcomer")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(newcomer)
        async with lock.held([]):
            tasks.start_soon(hold, lock, turns, "waiter")
            await anyio.wait_all_tasks_blocked()
            released.set()
    assert turns == ["waiter", "newcomer"]


@pytest.mark.anyio
@pytest.mark.parametrize("order", ["released, cancelled", "cancelled, released"])
async def test_a_waiter_cancelled_as_its_turn_comes_passes_it_on(order):
    """The lock never lies idle for a waiter that was woken and cancelled in the same moment."""
    lock, turns, scope = DeviceLock(), [], anyio.CancelScope()

    async def unlucky() -> None:
        with scope:
            await hold(lock, turns, "unlucky")

    async with anyio.create_task_group() as tasks:
        async with lock.held([]):
            for work in (unlucky, lambda: hold(lock, turns, "next"), lambda: hold(lock, turns, "last")):
                tasks.start_soon(work)
                await anyio.wait_all_tasks_blocked()
            if order == "cancelled, released":
                scope.cancel()
        scope.cancel()
    assert turns[-2:] == ["next", "last"]  # it may have had the lock for a moment before it left


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)
async def test_a_woken_waiter_that_asyncio_cancels_passes_its_turn_on():
    """`asyncio.Task.cancel` may hit a waiter that was woken and has not run yet; anyio's scopes do not."""
    lock, turns = DeviceLock(), []
    async with lock.held([]):
        unlucky, other = [asyncio.create_task(hold(lock, turns, name)) for name in ("unlucky", "next")]
        await anyio.wait_all_tasks_blocked()
    unlucky.cancel()
    with pytest.raises(asyncio.CancelledError):
        await unlucky
    await other
    assert turns == ["next"]


@pytest.mark.anyio
async def test_everyone_in_line_learns_that_the_device_is_stuck():
    """When patience with an abandoned thread ends, all waiters fail at the same moment."""
    lock, told = DeviceLock(), []

    async def wait() -> None:
        with pytest.raises(DeviceStuck):
            await hold(lock, [], "never")
        told.append(anyio.current_time())

    start = anyio.current_time()
    async with anyio.create_task_group() as tasks:
        for _ in range(WAITERS):
            tasks.start_soon(wait)
        with anyio.move_on_after(1):
            async with lock.held([LeftBehind()], patience_s=5):
                await anyio.sleep_forever()
    assert told == pytest.approx([start + 5] * WAITERS)


@pytest.mark.anyio
async def test_a_thread_that_comes_back_in_time_leaves_no_deadline_behind():
    """Once the abandoned thread has finished, the waiters wait for ordinary holders, without a deadline."""
    lock, turns, thread = DeviceLock(), [], LeftBehind()
    async with anyio.create_task_group() as tasks:
        with anyio.move_on_after(1):
            async with lock.held([thread], patience_s=5):
                for name in ("first", "second"):
                    tasks.start_soon(hold, lock, turns, name, 100)
                    await anyio.wait_all_tasks_blocked()
                await anyio.sleep_forever()
        await anyio.sleep(1)
        assert turns == []
        thread.come_back()
    assert turns == ["first", "second"]


@pytest.mark.anyio
async def test_a_thread_that_returns_at_once_after_a_timeout_leaves_the_device_free():
    """The deadline has passed, but no waiter has run yet: each gets its turn, and none raises DeviceStuck."""
    lock, turns, thread = DeviceLock(), [], LeftBehind()
    names = ["first", "second", "third"]
    async with anyio.create_task_group() as tasks:
        with pytest.raises(TimeoutError):
            async with lock.held([thread]):
                for name in names:
                    tasks.start_soon(hold, lock, turns, name)
                    await anyio.wait_all_tasks_blocked()
                raise TimeoutError
        thread.come_back()
    assert sorted(turns) == sorted(names)


@pytest.mark.anyio
async def test_many_cold_keys_are_answered_one_by_one():
    """Keys requested at once are measured one after the other, so the first answer is early."""
    answered, kernel = [], Toy()
    async with Bench().chain as chain:

        async def ask(size: int) -> None:
            await chain.choose(call(size), kernel)
            answered.append(anyio.current_time() - start)

        start = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            for size in range(10):
                tasks.start_soon(ask, size)
    assert answered == pytest.approx([TUNE_S * (n + 1) for n in range(10)])
