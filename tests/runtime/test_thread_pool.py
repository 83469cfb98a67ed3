"""The thread pool: threads that are reused, ended, killed and replaced. Real threads, ordered by gates."""

from __future__ import annotations

import ctypes
import gc
import queue
import random
import subprocess
import sys
import threading
import time
import weakref
from functools import partial
from types import SimpleNamespace

import anyio
import pytest
from support.gates import PATIENCE_S, Gate, leave_behind

from asel.runtime import threads
from asel.runtime.loop import LoopHandle
from asel.runtime.threads import _Step, _ThreadPool, run_in_thread


def test_a_thread_is_reused_and_ends_when_idle(real_backend):
    """Consecutive steps share a thread, concurrent steps have one each, and idle threads end soon."""

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


def test_an_abandoned_thread_is_reused_only_after_its_step_ends(real_backend):
    """A hanging step does not delay the next caller."""

    async def main():
        with Gate() as gate:
            left_behind = []
            await leave_behind(gate, left_behind)
            assert gate.entered.wait(PATIENCE_S)
            assert await run_in_thread("next", threading.current_thread) is not gate.thread

    anyio.run(main, backend=real_backend)


class Big:
    """An object whose release is observed."""


@pytest.mark.parametrize("held_by", ["the work", "the description"])
def test_a_step_drops_its_references_before_its_end_is_reported(held_by, real_backend):
    """An abandoned step keeps only its description as text: neither its work nor the function that described it."""
    gate, left_behind = Gate(), []

    async def main():
        back, big = anyio.Event(), Big()
        seen = weakref.ref(big)
        what = partial(_name_of, big) if held_by == "the description" else "measuring a Big"
        work = gate.work if held_by == "the description" else partial(lambda big: gate.work(), big)
        with anyio.move_on_after(0):
            await run_in_thread(what, work, left_behind=left_behind)
        del big, what, work
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


class Outage(Exception):
    """An error that can be referred to weakly."""


def test_an_idle_thread_keeps_nothing(real_backend, monkeypatch):
    """An idle thread holds neither the result nor the error of its last step."""
    monkeypatch.setattr(threads, "_pool", _ThreadPool(patience_s=PATIENCE_S))

    def fail():
        raise Outage

    async def failing():
        try:
            await run_in_thread("failing", fail)
        except Outage as error:
            return weakref.ref(error)

    async def making():
        return weakref.ref(await run_in_thread("making", Big))

    async def main():
        with anyio.fail_after(PATIENCE_S / 2):
            for seen in (await making(), await failing()):
                while gc.collect() or seen() is not None:
                    await anyio.lowlevel.checkpoint()

    anyio.run(main, backend=real_backend)


def test_an_idle_thread_is_not_the_last_to_hold_its_result(real_backend, monkeypatch):
    """An exiting program waits only for busy threads; an idle one that then freed a JAX array would crash it."""
    notified, notify = threading.Event(), _Step.notify_waiters

    def notify_and_stay(step):
        notify(step)
        assert notified.wait(10)

    monkeypatch.setattr(threads, "_pool", _ThreadPool(patience_s=PATIENCE_S))
    monkeypatch.setattr(_Step, "notify_waiters", notify_and_stay)

    async def main():
        try:
            made = await run_in_thread("making", Big)
            assert not threads._pool.busy
            seen = weakref.ref(made)
            del made
            assert seen() is None
        finally:
            notified.set()

    anyio.run(main, backend=real_backend)


class _Slow:
    """A lock whose first holder keeps it until another thread waits for it."""

    def __init__(self, seconds):
        self._lock, self._left_s = threading.Lock(), seconds

    def __enter__(self):
        self._lock.acquire()
        seconds, self._left_s = self._left_s, 0
        time.sleep(seconds)

    def __exit__(self, *error):
        self._lock.release()


def test_a_step_handed_to_an_ending_thread_is_done():
    """A thread that is taken from the idle ones just as it times out runs the step before it ends."""
    pool = _ThreadPool(patience_s=0.1)

    def do(what):
        told, found = threading.Event(), []
        at_once = SimpleNamespace(post=lambda callback: callback())
        pool.start(_Step(what, lambda: found.append(threading.current_thread()), at_once, told.set))
        assert told.wait(PATIENCE_S)
        return found[0]

    first = do("one")
    pool.lock = _Slow(0.25)  # taken by this thread, while the other one's patience ends
    assert do("two") is first
    first.join(PATIENCE_S)
    assert not first.is_alive()
    assert (pool.idle, pool.busy) == ([], set())


def test_every_step_runs_once_while_threads_come_and_go(real_backend, monkeypatch):
    """Even if threads time out as fast as steps arrive, every step runs once and no thread is left."""
    pool = _ThreadPool(patience_s=0.001)
    monkeypatch.setattr(threads, "_pool", pool)
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
    """Raise an exception in another thread, as libraries with function timeouts do."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(KeyboardInterrupt))


def test_an_idle_thread_that_is_killed_is_replaced(real_backend, monkeypatch):
    """If an exception raised from outside comes late and hits an idle thread, the next step gets another thread."""
    pool, ended = _ThreadPool(patience_s=0.02), []
    monkeypatch.setattr(threads, "_pool", pool)
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
    """A step that was already handed to a killed thread still runs."""
    pool, ended = _ThreadPool(), []
    monkeypatch.setattr(threads, "_pool", pool)
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
    """Return a method that is interrupted by an exception from outside on its first call."""
    blows = [KeyboardInterrupt]

    def struck(self):
        if blows:
            raise blows.pop()
        return method(self)

    return struck


@pytest.mark.parametrize(
    ("owner", "moment"), [(_Step, "run"), (threads._PoolThread, "_rest"), (_Step, "notify_waiters")]
)
def test_a_thread_killed_during_its_step_reports_the_end(real_backend, monkeypatch, owner, moment):
    """The waiter gets the result or an error, and the thread leaves the pool."""
    pool, ended = _ThreadPool(), queue.SimpleQueue()
    monkeypatch.setattr(threads, "_pool", pool)
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
    killed = ended.get(timeout=PATIENCE_S)  # the waiter had its answer before the thread ended
    assert killed.exc_type is KeyboardInterrupt
    killed.thread.join(PATIENCE_S)
    assert ended.empty()
    assert all(worker._thread is not killed.thread for worker in (*pool.busy, *pool.idle))


def test_a_killed_abandoned_thread_counts_as_finished(real_backend, monkeypatch):
    """A device is freed even if its abandoned thread is killed after its step, before it can report."""
    ended = queue.SimpleQueue()
    monkeypatch.setattr(threads, "_pool", _ThreadPool())
    monkeypatch.setattr(threading, "excepthook", ended.put)
    monkeypatch.setattr(threads._PoolThread, "_rest", _striking(threads._PoolThread._rest))

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


def test_a_thread_survives_a_callback_that_cannot_be_posted(real_backend, monkeypatch, caplog):
    """An error while notifying a loop is logged, and the thread takes the next step."""
    post = LoopHandle.post

    def broken(self, callback):
        post(self, callback)
        raise OSError("the pipe is closed")

    async def main():
        with monkeypatch.context() as patched:
            patched.setattr(LoopHandle, "post", broken)
            first = await run_in_thread("one", threading.current_thread)
            with anyio.fail_after(PATIENCE_S):
                while "the end of one could not be reported" not in caplog.text:
                    await anyio.lowlevel.checkpoint()
        with anyio.fail_after(PATIENCE_S):
            assert await run_in_thread("two", threading.current_thread) is first

    anyio.run(main, backend=real_backend)


def test_a_thread_that_cannot_be_started_is_an_error(real_backend, monkeypatch):
    """A machine out of threads is an error of the step that needed one."""
    pool = _ThreadPool()
    monkeypatch.setattr(threads, "_pool", pool)

    def refuse(self):
        raise RuntimeError("can't start new thread")

    async def main():
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="can't start"):
                await run_in_thread("one", bool)
        assert pool.busy == set()
        assert await run_in_thread("two", lambda: 2) == 2

    anyio.run(main, backend=real_backend)


def test_a_forked_child_has_threads_of_its_own(real_backend):
    """The child of a process with an idle thread starts a new thread, instead of waiting for the parent's."""
    code = (
        "import os, sys, anyio; from asel.runtime.threads import run_in_thread\n"
        "ask = lambda: anyio.run(run_in_thread, 'asking', os.getpid, backend=sys.argv[1])\n"
        "assert ask() == os.getpid()\n"
        "child = os.fork()\n"
        "if child: assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0\n"
        "else: os._exit(0 if ask() == os.getpid() else 1)\n"
    )
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", code, real_backend], timeout=30, check=False)
    assert ended.returncode == 0
