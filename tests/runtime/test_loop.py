"""`LoopHandle`: an event loop's clock, and calls into the loop from other threads."""

from __future__ import annotations

import threading
from contextvars import ContextVar

import anyio
import pytest
from support.gates import PATIENCE_S

from asel.runtime.loop import LoopHandle
from asel.runtime.threads import run_in_thread


def test_a_posted_call_runs_on_the_loop_in_the_posters_context(real_backend):
    """`post` hands a call over without waiting: it runs in the loop's thread with the poster's context variables."""
    request, seen = ContextVar("request"), []

    async def main():
        loop, called = LoopHandle(), anyio.Event()

        def callback():
            seen.append((threading.get_ident(), loop.is_current(), request.get()))
            called.set()

        def thread():
            request.set("the poster's")
            return loop.is_current(), loop.post(callback)

        assert loop.is_current()
        assert await run_in_thread("posting", thread) == (False, True)
        with anyio.fail_after(PATIENCE_S):
            await called.wait()
        assert seen == [(threading.get_ident(), True, "the poster's")]

    anyio.run(main, backend=real_backend)


def test_posted_calls_keep_their_order(real_backend):
    """The calls that one thread posts run in the order in which it posted them."""

    async def main():
        loop, called, finished = LoopHandle(), [], anyio.Event()

        def thread():
            for i in range(100):
                loop.post(lambda i=i: called.append(i))
            loop.post(finished.set)

        await run_in_thread("posting", thread)
        with anyio.fail_after(PATIENCE_S):
            await finished.wait()
        assert called == list(range(100))

    anyio.run(main, backend=real_backend)


def test_a_call_posted_to_a_loop_that_ended_is_refused(real_backend):
    """If no loop is left to run the call, `post` returns False and raises nothing."""
    called = []

    async def main():
        return LoopHandle()

    assert anyio.run(main, backend=real_backend).post(lambda: called.append(1)) is False
    assert called == []


@pytest.mark.anyio
async def test_a_handle_knows_the_time_of_its_loop():
    """Events are timed by the loop's own clock, virtual or not."""
    loop = LoopHandle()
    start = loop.now()
    assert start == anyio.current_time()
    await anyio.sleep(3600)
    assert loop.now() - start == pytest.approx(3600)
    assert loop.now() == anyio.current_time()


def test_a_handles_time_can_be_read_from_any_thread(real_backend):
    """A thread stamps its events with the loop's clock, without asking the loop."""

    async def main():
        loop = LoopHandle()
        before = anyio.current_time()
        read = await run_in_thread("reading the clock", loop.now)
        assert before <= read <= anyio.current_time()

    anyio.run(main, backend=real_backend)
