"""Blocking steps in our own threads. Real threads, ordered by gates."""

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


def test_the_loop_runs_while_the_work_blocks(real_backend):
    """Work may wait for the loop to do something, because the loop does not wait for the work."""

    async def main():
        with Gate() as gate:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(run_in_thread, "waiting for the loop", gate.work)
                await anyio.to_thread.run_sync(gate.entered.wait, PATIENCE_S)
                gate.open()  # reached only if the loop runs while the work stands still

    anyio.run(main, backend=real_backend)


def test_an_exception_of_the_work_is_raised(real_backend):
    """The same exception object is raised, with its original traceback."""
    error = LookupError("no such block")

    def work():
        raise error

    with pytest.raises(LookupError) as caught:
        anyio.run(run_in_thread, "looking", work, backend=real_backend)
    assert caught.value is error
    assert caught.traceback[-1].name == "work"


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError])
def test_system_exit_in_the_work_is_an_ordinary_error(kind, real_backend):
    """SystemExit and the like become a RuntimeError that names them, and do not end the loop."""

    def work():
        raise kind("over")

    with pytest.raises(RuntimeError, match=f"compiling raised {kind.__name__}: over") as caught:
        anyio.run(run_in_thread, "compiling", work, backend=real_backend)
    assert type(caught.value.__cause__) is kind


def test_cancellation_returns_at_once_and_lists_the_thread(real_backend):
    """A cancelled caller does not wait for its thread; the thread is added to `left_behind`."""

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


def test_the_list_of_abandoned_threads_is_optional(real_backend):
    """Without `left_behind`, a cancelled caller returns just the same."""

    async def main():
        with Gate() as gate, anyio.move_on_after(0) as scope:
            await run_in_thread("waiting", gate.work)
        return scope.cancelled_caught

    assert anyio.run(main, backend=real_backend)


def test_grace_waits_for_a_thread_that_comes_back(real_backend):
    """If the thread finishes within the grace, none is left behind, and the wait is still cancelled."""

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
    """A thread that has not finished after the grace is left behind."""

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


def test_a_python_loop_is_stopped_when_its_caller_leaves(real_backend, capfd):
    """It would compete with all other threads for the interpreter. Stopping it prints nothing on stderr."""
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


def test_a_finished_step_is_not_stopped():
    """By then, the thread may be running another step."""
    step = _Step("adding", lambda: 2, SimpleNamespace(post=lambda callback: None))
    result = step.result
    step.run()
    step.stop()
    sum(range(1000))  # an exception would strike here
    assert result.value == 2


def test_a_step_stopped_before_it_begins_never_begins():
    """A thread takes a moment to start, and its caller may have left by then."""
    done = []
    step = _Step("appending", lambda: done.append(1), SimpleNamespace(post=lambda callback: None))
    step.stop()
    step.run()
    assert done == []


def test_a_blocked_thread_that_does_not_stop_is_left_behind(real_backend):
    """A thread outside Python cannot be stopped: the exception stays pending, and the wait ends anyway."""

    async def main():
        with Gate() as gate:
            left_behind = []
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(partial(run_in_thread, "hanging", gate.work, left_behind=left_behind, stops=True))
                await anyio.to_thread.run_sync(gate.entered.wait)
                tasks.cancel_scope.cancel()
            assert [busy.what for busy in left_behind] == ["hanging"]

    anyio.run(main, backend=real_backend)


def test_grace_is_computed_only_for_a_cancelled_wait(real_backend):
    """If a step ends by itself, its `grace_s` function is never called."""
    asked = []
    answer = anyio.run(
        lambda: run_in_thread("adding", lambda: 2, grace_s=lambda: asked.append(1) or 1.0), backend=real_backend
    )
    assert (answer, asked) == (2, [])


def test_callbacks_run_on_the_loop(real_backend):
    """Callbacks of an abandoned thread run in the loop's thread, so they need no locks."""

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


def test_work_gets_a_copy_of_the_callers_context(real_backend):
    """The work sees its caller's context variables; its own changes stay in the thread."""
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
    """A thread is named after its step, and does not keep the interpreter from exiting."""
    thread = anyio.run(run_in_thread, "compiling Blocks(1)", threading.current_thread, backend=real_backend)
    assert thread.daemon
    assert thread.name == "asel: compiling Blocks(1)"


def test_a_thread_may_outlive_its_loop(real_backend):
    """A thread that finishes after its loop has ended does so quietly."""
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
    """A candidate that hangs forever does not keep the process from exiting cleanly."""
    ended = subprocess.run([sys.executable, "-c", _HANGS, real_backend], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "['hanging']\n", "")
