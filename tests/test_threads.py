"""Blocking steps in threads of our own, and the handle by which they call back. Real threads, ordered by gates."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import queue
import random
import subprocess
import sys
import threading
import time
import weakref
from contextvars import ContextVar
from functools import partial
from types import SimpleNamespace

import anyio
import pytest

from asel import threads
from asel.loop import LoopHandle
from asel.threads import _Crew, _Step, run_in_thread

PATIENCE_S = 10.0  # how long a gate holds before the test is called broken; never reached by a passing one


class Gate:
    """Work that says it has begun and then stands still until it is let go."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self._open = threading.Event()
        self.thread: threading.Thread | None = None

    def work(self) -> str:
        self.thread = threading.current_thread()
        self.entered.set()
        assert self._open.wait(PATIENCE_S)
        return "done"

    def open(self) -> None:
        self._open.set()

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._open.set()  # whatever the test found, no thread outlives it
        if self.thread is not None:
            self.thread.join(PATIENCE_S)


async def leave_behind(gate: Gate, left_behind: list, what: str = "waiting", **options) -> bool:
    """Cancel a gated step before it can end; tell whether the cancellation came through."""
    with anyio.move_on_after(0) as scope:
        await run_in_thread(what, gate.work, left_behind=left_behind, **options)
    return scope.cancelled_caught


def test_what_the_work_returns_is_returned_from_another_thread(real_backend):
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


def test_what_the_work_raises_is_raised(real_backend):
    """An exception comes out as the object it was, with the traceback of where it was raised."""
    error = LookupError("no such block")

    def work():
        raise error

    with pytest.raises(LookupError) as caught:
        anyio.run(run_in_thread, "looking", work, backend=real_backend)
    assert caught.value is error
    assert caught.traceback[-1].name == "work"


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError])
def test_what_would_end_a_program_is_an_ordinary_error(kind, real_backend):
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


def test_grace_is_not_asked_of_a_step_that_ended(real_backend):
    """Grace is for cancelled waits: a step that ends by itself never asks for it."""
    asked = []
    answer = anyio.run(
        lambda: run_in_thread("adding", lambda: 2, grace_s=lambda: asked.append(1) or 1.0), backend=real_backend
    )
    assert (answer, asked) == (2, [])


def test_callbacks_run_on_the_loop(real_backend):
    """Whoever waits for a thread to come back is called in the loop's thread, so it needs no locks."""

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


def test_a_thread_is_used_again_and_ends_when_idle(real_backend):
    """One step after the other is one thread; two at once are two; and none is kept for long."""

    async def main():
        first = await run_in_thread("one", threading.current_thread)
        assert await run_in_thread("two", threading.current_thread) is first
        assert await run_in_thread("three", lambda: threading.current_thread().name) == "asel: three"
        with Gate() as gate:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(run_in_thread, "waiting", gate.work)
                await anyio.to_thread.run_sync(gate.entered.wait, PATIENCE_S)
                assert await run_in_thread("meanwhile", threading.current_thread) is not gate.thread
                gate.open()
        return first

    thread = anyio.run(main, backend=real_backend)
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_a_thread_that_was_left_behind_is_used_again_only_once_it_is_back(real_backend):
    """Whoever comes next does not wait behind a step that hangs."""

    async def main():
        with Gate() as gate:
            left_behind = []
            await leave_behind(gate, left_behind)
            assert gate.entered.wait(PATIENCE_S)
            assert await run_in_thread("next", threading.current_thread) is not gate.thread

    anyio.run(main, backend=real_backend)


class Big:
    """Something to be let go of."""


def test_what_a_step_held_is_let_go_of_when_it_is_told(real_backend):
    """A step that was left behind is remembered by name: not with its work, nor with all that this held."""

    async def main():
        with Gate() as gate:
            left_behind, back, big = [], anyio.Event(), Big()
            seen = weakref.ref(big)
            with anyio.move_on_after(0):
                await run_in_thread(
                    "holding", partial(lambda gate, big: gate.work(), gate, big), left_behind=left_behind
                )
            del big
            assert seen() is not None
            left_behind[0].when_done(back.set)
            gate.open()
            with anyio.fail_after(PATIENCE_S):
                await back.wait()
            return seen()

    assert anyio.run(main, backend=real_backend) is None


def test_what_says_what_a_step_does_is_not_kept_either(real_backend):
    """It may know the candidates by their programs; of a thread that was left behind, only what it was at is."""
    gate, left_behind = Gate(), []

    async def main():
        back, big = anyio.Event(), Big()
        seen = weakref.ref(big)
        with anyio.move_on_after(0):
            await run_in_thread(partial(_name_of, big), gate.work, left_behind=left_behind)
        del big
        assert seen() is not None
        left_behind[0].when_done(back.set)
        gate.open()
        with anyio.fail_after(PATIENCE_S):
            await back.wait()
        return seen()

    assert anyio.run(main, backend=real_backend) is None
    assert left_behind[0].what == "measuring a Big"


def _name_of(one) -> str:
    return f"measuring a {type(one).__name__}"


class Trouble(Exception):
    """An error that can be referred to weakly."""


def test_an_idle_thread_keeps_nothing(real_backend, monkeypatch):
    """Neither what its last step returned nor what that raised."""
    monkeypatch.setattr(threads, "_crew", _Crew(patience_s=PATIENCE_S))

    def fail():
        raise Trouble

    async def failing():
        try:
            await run_in_thread("failing", fail)
        except Trouble as error:
            return weakref.ref(error)

    async def making():
        return weakref.ref(await run_in_thread("making", Big))

    async def main():
        with anyio.fail_after(PATIENCE_S / 2):
            for seen in (await making(), await failing()):
                while gc.collect() or seen() is not None:
                    await anyio.lowlevel.checkpoint()

    anyio.run(main, backend=real_backend)


def test_a_thread_that_counts_as_idle_is_not_the_last_to_hold_what_it_made(real_backend, monkeypatch):
    """A program that ends waits for busy threads alone, and JAX brings it down where another then drops an array."""
    told, tell = threading.Event(), _Step.tell

    def tell_and_stay(step):
        tell(step)
        assert told.wait(10)

    monkeypatch.setattr(threads, "_crew", _Crew(patience_s=PATIENCE_S))
    monkeypatch.setattr(_Step, "tell", tell_and_stay)

    async def main():
        try:
            made = await run_in_thread("making", Big)
            assert not threads._crew.busy
            seen = weakref.ref(made)
            del made
            assert seen() is None
        finally:
            told.set()

    anyio.run(main, backend=real_backend)


class _Slow:
    """A lock that its first holder, once it has it, keeps for as long as another needs to come and wait for it."""

    def __init__(self, seconds):
        self._lock, self._left_s = threading.Lock(), seconds

    def __enter__(self):
        self._lock.acquire()
        seconds, self._left_s = self._left_s, 0
        time.sleep(seconds)

    def __exit__(self, *error):
        self._lock.release()


def test_a_step_handed_over_as_a_thread_is_about_to_end_is_done():
    """The thread has lost patience when it is taken from among the idle: it does that step before it ends."""
    crew = _Crew(patience_s=0.1)

    def do(what):
        told, found = threading.Event(), []
        at_once = SimpleNamespace(post=lambda callback: callback())
        crew.start(_Step(what, lambda: found.append(threading.current_thread()), at_once, told.set))
        assert told.wait(PATIENCE_S)
        return found[0]

    first = do("one")
    crew.lock = _Slow(0.25)  # taken by this thread, while the other one's patience ends
    assert do("two") is first
    first.join(PATIENCE_S)
    assert not first.is_alive()
    assert (crew.idle, crew.busy) == ([], set())


def test_steps_are_done_whenever_threads_end(real_backend, monkeypatch):
    """Threads that end about as fast as steps come: every step is done, once, and no thread is left."""
    crew = _Crew(patience_s=0.001)
    monkeypatch.setattr(threads, "_crew", crew)
    done = []

    async def steps(seed):
        pauses = random.Random(seed)
        for number in range(60):
            await run_in_thread("adding", partial(done.append, (seed, number)))
            await anyio.sleep(pauses.choice([0, 0.0008, 0.001, 0.0012]))

    async def main():
        with anyio.fail_after(PATIENCE_S):
            async with anyio.create_task_group() as tasks:
                for seed in range(6):
                    tasks.start_soon(steps, seed)

    anyio.run(main, backend=real_backend)
    assert sorted(done) == [(seed, number) for seed in range(6) for number in range(60)]


def _throw_into(thread):
    """Do what libraries that time functions out do: raise an exception in another thread."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(KeyboardInterrupt))


def test_an_idle_thread_that_is_killed_is_replaced(real_backend, monkeypatch):
    """An exception thrown into a thread too late finds it idle: it ends, and the next step has another thread."""
    crew, ended = _Crew(patience_s=0.02), []
    monkeypatch.setattr(threads, "_crew", crew)
    monkeypatch.setattr(threading, "excepthook", ended.append)

    async def main():
        first = await run_in_thread("one", threading.current_thread)
        _throw_into(first)
        first.join(PATIENCE_S)
        assert not first.is_alive()
        with anyio.fail_after(PATIENCE_S):
            return await run_in_thread("two", lambda: 2)

    assert anyio.run(main, backend=real_backend) == 2
    assert [hook.exc_type for hook in ended] == [KeyboardInterrupt]


def test_a_thread_that_is_killed_leaves_its_next_step_to_another(real_backend, monkeypatch):
    """What it was handed before it could end is done all the same."""
    crew, ended = _Crew(), []
    monkeypatch.setattr(threads, "_crew", crew)
    monkeypatch.setattr(threading, "excepthook", ended.append)

    async def main():
        first = await run_in_thread("one", threading.current_thread)
        _throw_into(first)  # seen by the thread when it wakes, with the step in its hands
        with anyio.fail_after(PATIENCE_S):
            assert await run_in_thread("two", threading.current_thread) is not first
        first.join(PATIENCE_S)

    anyio.run(main, backend=real_backend)
    assert [hook.exc_type for hook in ended] == [KeyboardInterrupt]


def _striking(method):
    """Return a method that is struck by an exception from outside, the first time it is called."""
    blows = [KeyboardInterrupt]

    def struck(self):
        if blows:
            raise blows.pop()
        return method(self)

    return struck


@pytest.mark.parametrize(("owner", "moment"), [(_Step, "run"), (threads._Worker, "_rest"), (_Step, "tell")])
def test_a_thread_that_is_killed_at_its_step_tells_all_the_same(real_backend, monkeypatch, owner, moment):
    """Whoever waits gets the result where there is one, and else an error; the thread is gone from the crew."""
    crew, ended = _Crew(), queue.SimpleQueue()
    monkeypatch.setattr(threads, "_crew", crew)
    monkeypatch.setattr(threading, "excepthook", ended.put)
    monkeypatch.setattr(owner, moment, _striking(getattr(owner, moment)))

    async def main():
        with anyio.fail_after(PATIENCE_S):
            if moment == "run":
                with pytest.raises(RuntimeError, match="its thread was killed"):
                    await run_in_thread("one", lambda: 1)
            else:
                assert await run_in_thread("one", lambda: 1) == 1
            assert await run_in_thread("two", lambda: 2) == 2

    anyio.run(main, backend=real_backend)
    killed = ended.get(timeout=PATIENCE_S)  # whoever waited was told before the thread came to its end
    assert killed.exc_type is KeyboardInterrupt
    killed.thread.join(PATIENCE_S)
    assert ended.empty()
    assert all(worker._thread is not killed.thread for worker in (*crew.busy, *crew.idle))


def test_a_thread_that_was_left_behind_and_is_killed_is_over(real_backend, monkeypatch):
    """A device is not stuck for good because the thread that was left there was killed between its step and telling."""
    ended = queue.SimpleQueue()
    monkeypatch.setattr(threads, "_crew", _Crew())
    monkeypatch.setattr(threading, "excepthook", ended.put)
    monkeypatch.setattr(threads._Worker, "_rest", _striking(threads._Worker._rest))

    async def main():
        with Gate() as gate, anyio.fail_after(PATIENCE_S):
            left_behind, back = [], anyio.Event()
            await leave_behind(gate, left_behind)
            left_behind[0].when_done(back.set)
            gate.open()
            await back.wait()
            assert not left_behind[0].alive

    anyio.run(main, backend=real_backend)
    assert ended.get(timeout=PATIENCE_S).exc_type is KeyboardInterrupt


def test_a_thread_whose_loop_cannot_be_told_goes_on(real_backend, monkeypatch, caplog):
    """Whatever goes wrong in telling one loop is logged, and the thread is there for the next step."""
    post = LoopHandle.post

    def broken(self, callback):
        post(self, callback)
        raise OSError("the pipe is closed")

    async def main():
        with monkeypatch.context() as patched:
            patched.setattr(LoopHandle, "post", broken)
            first = await run_in_thread("one", threading.current_thread)
            with anyio.fail_after(PATIENCE_S):
                while "nobody could be told that one is over" not in caplog.text:
                    await anyio.lowlevel.checkpoint()
        with anyio.fail_after(PATIENCE_S):
            assert await run_in_thread("two", threading.current_thread) is first

    anyio.run(main, backend=real_backend)


def test_where_no_thread_can_be_started_it_is_said_and_nothing_is_kept(real_backend, monkeypatch):
    """A machine out of threads is an error of the step that needed one."""
    crew = _Crew()
    monkeypatch.setattr(threads, "_crew", crew)

    def refuse(self):
        raise RuntimeError("can't start new thread")

    async def main():
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="can't start"):
                await run_in_thread("one", bool)
        assert crew.busy == set()
        assert await run_in_thread("two", lambda: 2) == 2

    anyio.run(main, backend=real_backend)


def test_a_forked_child_has_threads_of_its_own(real_backend):
    """The child of a process with an idle thread starts a new one, instead of waiting for the parent's."""
    code = (
        "import os, sys, anyio; from asel.threads import run_in_thread\n"
        "ask = lambda: anyio.run(run_in_thread, 'asking', os.getpid, backend=sys.argv[1])\n"
        "assert ask() == os.getpid()\n"
        "child = os.fork()\n"
        "if child: assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0\n"
        "else: os._exit(0 if ask() == os.getpid() else 1)\n"
    )
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", code, real_backend], timeout=30, check=False)
    assert ended.returncode == 0


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
from asel.threads import run_in_thread

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


def test_a_process_with_a_hung_thread_exits(real_backend):
    """A candidate that hangs for good does not keep the process from ending, cleanly."""
    ended = subprocess.run(
        [sys.executable, "-c", _HANGS, real_backend], capture_output=True, text=True, timeout=15, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "['hanging']\n", "")


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
    """What one thread posts is called in the order in which it was posted."""

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
    """`post` says False where there is no loop left to run the call, and raises nothing."""
    called = []

    async def main():
        return LoopHandle()

    assert anyio.run(main, backend=real_backend).post(lambda: called.append(1)) is False
    assert called == []


@pytest.mark.anyio
async def test_a_handle_tells_its_loops_time():
    """Every moment in an event is on the axis of the loop's own clock, a virtual one included."""
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
