"""Selectors for code without `await`."""

from __future__ import annotations

import _thread
import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import anyio
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.gates import until_the_main_thread_waits
from support.kernels import BEST, GUESS, H100, QUICK, Blocks, Picky, Toy, call, scripted
from support.paths import TESTS

from asel import (
    AutotunePolicy,
    BlockingExecutor,
    BlockingSelector,
    Executor,
    InvalidRequestError,
    Invocation,
    Kernel,
    NoConfigError,
    SelectorClosedError,
    Tuner,
    device_fingerprint,
    get_invocations,
    overlay_cache,
    policy_override,
    warm_up,
)
from asel.testing import RecordingSink


def selector(costs=QUICK, **given):
    given.setdefault("tuner", scripted(costs)[0])
    given.setdefault("sinks", ())
    return BlockingSelector(**given)


def test_every_method_works_without_await(real_backend):
    """On either backend; a selector that is not entered opens with the first call that needs it."""
    kernel, sink = Toy(), RecordingSink()
    blocking = selector(sinks=[sink], backend=real_backend)
    assert blocking.choose(call(), kernel) == BEST
    assert blocking.select(call(), kernel).tier == "memory"
    assert blocking.choose_nowait(call(), kernel) == BEST
    assert blocking.choose(call(override_cfg=GUESS), kernel) == GUESS
    assert blocking.explain(call(), kernel).answered_by == "memory"
    assert blocking.retune(call(), kernel) == BEST
    assert blocking.withdraw(call(), kernel, BEST, MemoryError())
    assert blocking.choose(call(), kernel) != BEST
    with blocking.events() as events:
        assert blocking.choose_nowait(call(16), kernel) == GUESS
        assert next(event.key.call for event in events if event.name == "autotune_finish") == "x=f32[16,128]"
    blocking.settled()
    assert blocking.statistics().pending == {}
    assert [item.outcome for item in blocking.warm_up([(kernel, call(16)), (kernel, call(32))]).items] == [
        "known",
        "tuned",
    ]
    with overlay_cache({blocking.resolve(call(16), kernel).key: GUESS}), policy_override(blocking, wait_s=0.0):
        assert (blocking.choose(call(16), kernel), blocking.policy.wait_s) == (GUESS, 0.0)
    blocking.freeze()
    assert blocking.choose(call(64), kernel) == GUESS
    blocking.policy = AutotunePolicy(allow_heuristics=False)
    with pytest.raises(NoConfigError, match="the chain is frozen"):
        blocking.choose(call(128), kernel)
    blocking.close()
    blocking.close()
    assert sink.names[-1] == "closed"
    for ask in (lambda: blocking.choose(call(), kernel), blocking.settled):
        with pytest.raises(SelectorClosedError):
            ask()
    with blocking, pytest.raises(InvalidRequestError, match="open already"), blocking:
        pass


def test_a_memory_hit_stays_in_its_thread(monkeypatch):
    """A hit costs as much as a hit of the chain."""
    with selector() as blocking:
        assert [blocking.choose(call(), Toy()) for _ in range(2)] == [BEST] * 2
        monkeypatch.setattr(blocking, "_opened", None)
        assert blocking.choose(call(), Toy()) == BEST
        monkeypatch.undo()


def test_concurrent_threads_share_one_tune():
    """Threads share a tune as tasks do."""
    tuner, measure = scripted(QUICK)
    with selector(tuner=tuner) as blocking:
        start = threading.Barrier(8)

        def ask(_):
            start.wait()
            return blocking.choose(call(), Toy())

        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(ask, range(8))) == [BEST] * 8
        assert len(measure.compiled) == 3


class Asked:
    """A scripted measure that records its arguments and its thread."""

    def __init__(self):
        self.script = scripted(QUICK)[1]
        self.args, self.threads = [], set()

    async def compile(self, trial):
        self.args += trial.args
        self.threads.add(threading.current_thread())
        return await self.script.compile(trial)


def test_the_first_trace_of_a_step_has_the_tuned_config():
    """The trace waits in its thread; the tune runs in others, with shapes in the place of tracers, under one key."""
    measure, traced_with, kernel = Asked(), [], Toy()
    with selector(tuner=Tuner(0, 1, measure=measure, strategy="exhaustive")) as blocking:

        @jax.jit
        def step(x):
            cfg = blocking.choose(Invocation("toy", (x,), {}), kernel)
            traced_with.append(cfg)
            return (x * cfg.m).sum()

        x = jnp.ones((8, 128))
        with jax.default_matmul_precision("highest"):
            np.testing.assert_allclose(jax.jit(jax.grad(step))(x), np.full((8, 128), 3.0))
            assert blocking.select(Invocation("toy", (x,), {}), kernel).tier == "memory"
        assert set(traced_with) == {BEST}
        assert blocking.explain(Invocation("toy", (x,), {}), kernel).answered_by == "autotune"  # other settings
    assert measure.args == [jax.ShapeDtypeStruct((8, 128), jnp.float32)] * 3
    assert threading.main_thread() not in measure.threads
    assert len(get_invocations(device_fingerprint())["toy@v1"]) == 1


def interrupted_while_it_waits(interrupt):
    """Return a tuner whose measure calls `interrupt` once the main thread waits for it, and then hangs."""

    class Interrupting:
        async def compile(self, trial):
            await until_the_main_thread_waits()
            interrupt()
            await anyio.sleep_forever()

    return Tuner(0, 1, measure=Interrupting())


def test_ctrl_c_ends_a_wait_and_the_selector_immediately():
    """A script that is interrupted while a candidate hangs does not wait for it."""
    tuner = interrupted_while_it_waits(lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt), selector(tuner=tuner) as blocking:
        blocking.choose(call(), Toy())
    assert blocking.chain.close_grace_s == 0.2  # a thread that has yet to come back gets 5 s otherwise
    with pytest.raises(SelectorClosedError):
        blocking.settled()


def test_ctrl_c_just_before_the_wait_begins_is_noticed():
    """Python does not interrupt a lock for a signal that came just before, so a wait checks now and then."""
    tuner = interrupted_while_it_waits(_thread.interrupt_main)  # it marks a signal as received, and wakes no thread
    with pytest.raises(KeyboardInterrupt), selector(tuner=tuner) as blocking:
        blocking.choose(call(), Toy())


_INTERRUPTED_SCRIPT = """
import atexit, signal, threading
atexit.register(lambda: print(selector.chain.close_grace_s))  # runs after the handlers that asel registers

import anyio
from asel import BlockingSelector, Tuner
from support.gates import until_the_main_thread_waits
from support.kernels import Toy, call

class Interrupting:
    async def compile(self, trial):
        await until_the_main_thread_waits()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        await anyio.sleep_forever()

selector = BlockingSelector(tuner=Tuner(0, 1, measure=Interrupting()), sinks=())
selector.choose(call(), Toy())
"""


@pytest.mark.timeout(60)
def test_an_interrupted_script_without_a_with_block_ends_immediately():
    """An uncaught Ctrl-C ends the program without the grace of an orderly close."""
    done = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED_SCRIPT], cwd=TESTS, capture_output=True, text=True, check=False
    )
    assert "KeyboardInterrupt" in done.stderr
    assert done.stdout == "0.2\n"


def test_a_call_that_would_deadlock_is_refused(monkeypatch):
    """A kernel called by the loop, and the child of a fork, would wait forever."""

    class Asking(Toy):
        def candidate_cfgs(self, inv):
            with pytest.raises(InvalidRequestError, match="own event loop, which cannot wait; use choose_nowait"):
                blocking.choose(call(16), Toy())
            return super().candidate_cfgs(inv)

    with selector() as blocking:
        assert blocking.choose(call(), Asking()) == BEST
        pid = os.getpid()
        monkeypatch.setattr(os, "getpid", lambda: pid + 1)
        with pytest.raises(InvalidRequestError, match="open one in each process"):
            blocking.choose(call(32), Toy())
        monkeypatch.undo()


def test_a_garbage_collected_selector_ends_its_thread():
    """A notebook's cell may replace a selector without closing it."""
    blocking = selector()
    blocking.choose(call(), Toy())
    thread, gone = blocking._loop._thread, weakref.ref(blocking)
    del blocking
    gc.collect()
    assert gone() is None
    thread.join()


def test_an_error_while_opening_is_raised():
    """It is raised in the thread that opens the selector."""

    class Broken:
        async def __aenter__(self):
            raise OSError("no such device")

        async def __aexit__(self, *error): ...

        async def autotune(self, *args, **kwargs): ...

    blocking = BlockingSelector(tuner=Broken(), sinks=())
    with pytest.raises(OSError, match="no such device"):
        blocking.choose(call(), Toy())


# ---------------------------------------------------------------------------------------------
# Choose, then run.


class Scaled(Kernel):
    """Computes in JAX, with a gradient of its own that is 100 times the true one."""

    op_id = "scaled"

    def prepare(self, x, by=2):
        return (x,), {"by": int(by)}

    def run(self, x, *, cfg, by):
        ran.append((cfg, threading.current_thread() is threading.main_thread()))
        return x * by

    def fwd_with_residuals(self, x, *, cfg, by):
        return self.run(x, cfg=cfg, by=by), None

    def vjp(self, residuals, dy, x, *, cfg, by):
        return (dy * by * 100,)

    def heuristic_cfg(self, inv):
        return 1

    def candidate_cfgs(self, inv):
        return [1, 2]


ran = []


def test_an_executor_runs_kernels_in_its_callers_thread():
    """With and without a trace; kernels are tuned before the first run, and can be differentiated."""
    kernel, x = Scaled(), jnp.arange(4.0)
    policy = AutotunePolicy(validate_backward=True)
    with BlockingSelector(policy=policy, tuner=scripted({1: 0.003, 2: 0.001})[0], sinks=()) as blocking:
        execute = BlockingExecutor(blocking)
        ran.clear()
        gradient = jax.jit(jax.grad(lambda x: execute(kernel, x, by=3).sum()))(x)
        np.testing.assert_allclose(gradient, np.full(4, 300.0))
        assert ran == [(2, True)]
        for _ in range(2):
            np.testing.assert_allclose(execute(kernel, x, by=3), x * 3)
        assert ran == [(2, True)] * 2  # traced once for both
        np.testing.assert_allclose(execute(kernel, x, by=3, cfg=1), x * 3)
        assert ran[-1] == (1, True)
        assert execute.choose_config(kernel, x, by=4) == 2
        np.testing.assert_allclose(execute.nowait(kernel, x, by=5), x * 5)
        assert ran[-1] == (1, True)  # it does not wait for the tune
        np.testing.assert_allclose(execute.compile(kernel, x, by=6)(x, by=6), x * 6)
    with pytest.raises(InvalidRequestError, match="a ConfigSelectorChain is not a BlockingSelector"):
        BlockingExecutor(blocking.chain)
    with pytest.raises(InvalidRequestError, match="use a BlockingExecutor with it"):
        Executor(blocking)
    with pytest.raises(InvalidRequestError, match=r"write selector.warm_up\("):
        warm_up(blocking, []).send(None)


_MAPPED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
from serving.test_blocking import Scaled
from asel import AutotunePolicy, BlockingExecutor, BlockingSelector, Invocation, Tuner

how = {"method": "shard_map", "mesh": Mesh(np.array(jax.devices()), ("d",)), "in_specs": (P("d"),), "out_specs": P("d")}
assert how["mesh"].size == 2
policy = AutotunePolicy(validate_backward=True)
with BlockingSelector(policy=policy, tuner=Tuner(0, 1), sinks=()) as selector:
    execute, kernel = BlockingExecutor(selector), Scaled()
    gradient = jax.jit(jax.grad(lambda x: execute(kernel, x, by=3, **how).sum()))(jnp.arange(4.0))
    np.testing.assert_allclose(gradient, np.full(4, 300.0))
    again = selector.select(Invocation("scaled", (jnp.arange(4.0),), {"by": 3}, **how), kernel)
print(again.tier, {one.how for one in again.report.outcomes})
"""


@pytest.mark.timeout(90)
def test_a_mapped_call_is_tuned_while_jax_traces():
    """The arrays for the measurement are on all devices of the mesh, as the traced ones will be."""
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", _MAPPED], cwd=TESTS, env=env, capture_output=True, text=True, check=False
    )
    assert done.stdout == "memory {'forward+backward'}\n", done.stderr


def test_calls_that_cannot_wait_open_a_selector_too():
    """The tune runs in the background, and preloaded records are in memory."""
    blocking = selector()
    execute = BlockingExecutor(blocking, jit=False)
    assert execute.nowait(Picky(), H100.array((8, 128))) == "ran 1"
    blocking.settled()
    assert execute.nowait(Picky(), H100.array((8, 128))) == "ran 3"
    blocking.close()


def test_a_winner_that_fails_is_replaced_in_the_callers_thread():
    """As with an `Executor`, the next best answers, and the winner is withdrawn."""
    picky, sink = Picky(m3=MemoryError("too large")), RecordingSink()
    with selector(sinks=[sink]) as blocking:
        execute = BlockingExecutor(blocking, jit=False)
        x = H100.array((8, 128))
        assert [execute(picky, x) for _ in range(2)] == ["ran 2", "ran 2"]
        assert picky.ran == [3, 2, 3, 2]
        picky.breaks = {n: ValueError("rank 3") for n in (1, 2, 3)}
        with pytest.raises(ValueError, match="rank 3"):
            execute(picky, x)
    assert [event.instead for event in sink.named("winner_failed")] == [Blocks(2)]


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_background_tune_begins_after_the_callers_run(backend):
    """The run has the cores to itself, as with an `Executor`; the tune begins even if the run raises."""
    pending = []

    class Looks(Kernel):
        op_id = "looks"

        def run(self, x, *, cfg, fails=False):
            if threading.current_thread() is threading.main_thread():
                pending.append(sum(selector.statistics().pending.values()))
                if fails:
                    raise ValueError("no")
            return x * cfg

        def heuristic_cfg(self, inv):
            return 1

        def candidate_cfgs(self, inv):
            return [1, 2]

    op, policy = Looks(), AutotunePolicy(cache_miss_fallback="background")
    with BlockingSelector(policy=policy, tuner=Tuner(1, 1), sinks=(), backend=backend) as selector:
        execute = BlockingExecutor(selector)
        execute(op, jnp.ones(4))
        selector.settled()
        with pytest.raises(ValueError, match="no"):
            execute(op, jnp.ones(4), fails=True)
        selector.settled()
        assert set(pending) == {0}
        for keywords in ({}, {"fails": True}):
            assert selector.select(Invocation("looks", (jnp.ones(4),), keywords), op).tier == "memory"


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_selector_works_within_a_running_trio_loop(backend):
    """A notebook's cells run in one; trio does not let its tasks call into another trio loop."""

    async def cell():
        with selector(backend=backend) as blocking:
            return blocking.choose(call(), Toy())

    assert anyio.run(cell, backend="trio") == BEST
