"""Blocking steps in threads of our own. Real threads, ordered by gates."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from types import SimpleNamespace

import anyio
import pytest
from support.gates import PATIENCE_S, Gate, leave_behind

from asel.runtime.loop import LoopHandle
from asel.runtime.threads import _Step, run_in_thread


def test_the_result_comes_back_from_another_thread(real_backend):
    """Blocking work happens off the event loop's thread, and its result comes back."""

    async def main():
        return threading.get_ident(), await run_in_thread("asking", lambda: (threading.get_ident(), 42))

    loop_thread, (work_thread, answer) = anyio.run(main, backend=real_backend)
    assert answer == 42
    assert work_thread != loop_thread


def test_the_loop_takes_turns_while_the_work_blocks(real_backend):
    """Work that waits for the loop gets what it waits for, because the loop is not waiting for it."""

    async def main():
        with Gate() as gate:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(run_in_thread, "waiting for the loop", gate.work)
                await anyio.to_thread.run_sync(gate.entered.wait, PATIENCE_S)
                gate.open()  # reached only if the loop runs while the work stands still

    anyio.run(main, backend=real_backend)


def test_an_exception_of_the_work_is_raised(real_backend):
    """An exception comes out as the object it was, with the traceback of where it was raised."""
    error = LookupError("no such block")

    def work():
        raise error

    with pytest.raises(LookupError) as caught:
        anyio.run(run_in_thread, "looking", work, backend=real_backend)
    assert caught.value is error
    assert caught.traceback[-1].name == "work"


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError])
def test_system_exit_in_the_work_is_an_ordinary_error(kind, real_backend):
    """SystemExit and its like are the work's own business: the loop sees a RuntimeError that names them."""

    def work():
        raise kind("over")

    with pytest.raises(RuntimeError, match=f"compiling raised {kind.__name__}: over") as caught:
        anyio.run(run_in_thread, "compiling", work, backend=real_backend)
    assert type(caught.value.__cause__) is kind


def test_cancellation_returns_at_once_and_names_the_thread(real_backend):
    """A wait that is cancelled does not wait for its thread, but says which one it left at work."""

    async def main():
        with Gate() as gate:
            left_behind = []
            assert await leave_behind(gate, left_behind, "measuring Blocks(3)")
            # The gate is still shut, so coming here at all shows that nobody waited for the thread.
            [busy] = left_behind
            assert (busy.what, busy.alive) == ("measuring Blocks(3)", True)

            back = anyio.Event()
            busy.when_done(back.set)
            gate.open()
            with anyio.fail_after(PATIENCE_S):
                await back.wait()
            assert not busy.alive

    anyio.run(main, backend=real_backend)


def test_cancellation_without_a_list_is_silent(real_backend):
    """Naming the threads left behind is for those who ask."""

    async def main():
        with Gate() as gate, anyio.move_on_after(0) as scope:
            await run_in_thread("waiting", gate.work)
        return scope.cancelled_caught

    assert anyio.run(main, backend=real_backend)


def test_grace_waits_for_a_thread_that_comes_back(real_backend):
    """Within its grace a cancelled step ends in peace: no thread is left behind, and the wait is still cancelled."""

    async def main():
        with Gate() as gate:
            left_behind = []

            def grace_s():  # asked only once the wait has been cancelled
                gate.open()
                return PATIENCE_S

            assert await leave_behind(gate, left_behind, grace_s=grace_s)
            assert left_behind == []
            assert gate.entered.is_set()

    anyio.run(main, backend=real_backend)


def test_grace_ends(real_backend):
    """A thread that does not come back within the grace is left behind like any other."""

    async def main():
        with Gate() as gate:
            left_behind = []
            assert await leave_behind(gate, left_behind, "hanging", grace_s=0.01)
            assert [busy.what for busy in left_behind] == ["hanging"]

    anyio.run(main, backend=real_backend)


class Spin:
    """Work that computes in Python for ever, unless it is stopped."""

    def __init__(self) -> None:
        self.began = lambda: None
        self.stopped = threading.Event()
        self._give_up_at = time.monotonic() + PATIENCE_S

    def work(self) -> None:
        try:
            self.began()
            self._spin()  # a function of its own, since Python 3.13 may pass by the handlers of the one it strikes
        except SystemExit:
            self.stopped.set()
            raise

    def _spin(self) -> None:
        while time.monotonic() < self._give_up_at:
            with suppress(Exception):  # as a candidate may
                len(str(self))


def test_a_loop_in_python_is_stopped_once_its_caller_left(real_backend, capfd):
    """It would keep the interpreter from all other threads; and its end prints nothing on stderr."""
    spin = Spin()

    async def main():
        with anyio.CancelScope() as scope:
            handle = LoopHandle()
            spin.began = lambda: handle.post(scope.cancel)
            await run_in_thread("spinning", spin.work, left_behind=[], stops=True)
        assert scope.cancelled_caught
        await anyio.to_thread.run_sync(spin.stopped.wait, PATIENCE_S)
        assert await run_in_thread("the next step", lambda: 2) == 2

    anyio.run(main, backend=real_backend)
    assert spin.stopped.is_set()
    assert capfd.readouterr().err == ""


def test_a_step_that_is_over_is_not_stopped():
    """The thread may be at another's step by then."""
    step = _Step("adding", lambda: 2, SimpleNamespace(post=lambda callback: None))
    result = step.result
    step.run()
    step.stop()
    sum(range(1000))  # an exception would strike here
    assert result.value == 2


def test_a_step_that_is_stopped_before_it_begins_never_does():
    """A thread takes a moment to start, and nobody may wait any more by then."""
    done = []
    step = _Step("appending", lambda: done.append(1), SimpleNamespace(post=lambda callback: None))
    step.stop()
    step.run()
    assert done == []


def test_a_blocked_thread_that_does_not_stop_is_left_behind(real_backend):
    """Nothing stops a thread that runs no Python: the exception is raised once, and the wait ends all the same."""

    async def main():
        with Gate() as gate:
            left_behind = []
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(partial(run_in_thread, "hanging", gate.work, left_behind=left_behind, stops=True))
                await anyio.to_thread.run_sync(gate.entered.wait)
                tasks.cancel_scope.cancel()
            assert [busy.what for busy in left_behind] == ["hanging"]

    anyio.run(main, backend=real_backend)


def test_grace_is_not_asked_of_a_step_that_ended(real_backend):
    """Grace is for cancelled waits: a step that ends by itself never asks for it."""
    asked = []
    answer = anyio.run(
        lambda: run_in_thread("adding", lambda: 2, grace_s=lambda: asked.append(1) or 1.0), backend=real_backend
    )
    assert (answer, asked) == (2, [])


def test_callbacks_run_on_the_loop(real_backend):
    """The callback for a thread that has come back runs in the loop's thread, so it needs no locks."""

    async def main():
        with Gate() as gate:
            left_behind, called_in, all_called = [], [], anyio.Event()
            await leave_behind(gate, left_behind)
            left_behind[0].when_done(lambda: called_in.append(threading.get_ident()))
            left_behind[0].when_done(lambda: (called_in.append(threading.get_ident()), all_called.set()))
            gate.open()
            with anyio.fail_after(PATIENCE_S):
                await all_called.wait()
            left_behind[0].when_done(lambda: called_in.append(threading.get_ident()))  # late: called at once
            assert called_in == [threading.get_ident()] * 3

    anyio.run(main, backend=real_backend)


def test_context_variables_follow_and_stay_apart(real_backend):
    """The work sees its caller's context variables; what it sets is its own."""
    request = ContextVar("request")

    def work():
        seen = request.get()
        request.set("the thread's")
        return seen

    async def main():
        request.set("the caller's")
        assert await run_in_thread("reading", work) == "the caller's"
        assert request.get() == "the caller's"

    anyio.run(main, backend=real_backend)


def test_threads_are_named_daemons(real_backend):
    """A thread says what it does, and does not keep the interpreter from leaving."""
    thread = anyio.run(run_in_thread, "compiling Blocks(1)", threading.current_thread, backend=real_backend)
    assert thread.daemon
    assert thread.name == "asel: compiling Blocks(1)"


def test_a_thread_may_outlive_its_loop(real_backend):
    """A thread that comes back to a loop that has ended finds nobody to tell, and ends quietly."""
    with Gate() as gate:
        left_behind = []
        assert anyio.run(leave_behind, gate, left_behind, backend=real_backend)
        assert gate.entered.wait(PATIENCE_S)
        gate.open()
        gate.thread.join(PATIENCE_S)
        # Had calling back raised, pytest would turn the thread's unhandled error into a failure.
        assert not left_behind[0].alive


_HANGS = """
import sys, threading, anyio
from asel.runtime.threads import run_in_thread

async def main():
    entered, left_behind = threading.Event(), []
    def hang():
        entered.set()
        threading.Event().wait()
    with anyio.move_on_after(0):
        await run_in_thread("hanging", hang, left_behind=left_behind)
    entered.wait()
    print([busy.what for busy in left_behind if busy.alive])

anyio.run(main, backend=sys.argv[1])
"""


@pytest.mark.timeout(60)  # another process starts
def test_a_process_with_a_hung_thread_exits(real_backend):
    """A candidate that hangs forever does not keep the process from ending, cleanly."""
    ended = subprocess.run([sys.executable, "-c", _HANGS, real_backend], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "['hanging']\n", "")
