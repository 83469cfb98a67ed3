"""A forked child works, even if the parent's threads held locks during the fork."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, threading, warnings
import asel.kernels.call_registry
from asel import AutotunePolicy, BlockingSelector, ConfigCache, ConfigSelectorChain, Invocation, Kernel
from asel.runtime.counter import Count

class Doubling(Kernel):
    op_id = "doubling"
    def run(self, x, *, cfg): return x
    def heuristic_cfg(self, inv): return 1
    def candidate_cfgs(self, inv): return [1, 2]

selector = BlockingSelector(policy=AutotunePolicy(allow_autotune=False), sinks=[])
count = Count()
count.add()
cache = ConfigCache(max_entries=8)
chain = ConfigSelectorChain(cache, sinks=[])
cache.put("dev", "op", "key", 7)
held, release = threading.Event(), threading.Event()

def hold():
    with (
        cache._lock, chain._tunes.background_queue._lock, asel.kernels.call_registry._lock,
        selector._opening, count._lock,
    ):
        held.set()
        release.wait(30)

thread = threading.Thread(target=hold)
thread.start()
held.wait(10)
warnings.simplefilter("ignore")  # Python warns that the process has threads, which is the point
if (child := os.fork()) == 0:
    signal.alarm(10)
    cache.put("dev", "op", "other", 8)
    asel.kernels.call_registry.record_invocation("dev", "op", "key", Doubling(), (), {})
    ok = cache.get("dev", "op", "key") == 7 and chain.choose_nowait(Invocation("doubling", (3,), {}), Doubling()) == 1
    ok = ok and count.value == 1 and selector.choose(Invocation("doubling", (3,), {}), Doubling()) == 1
    cache.clear()
    os._exit(0 if ok else 1)
status = os.waitpid(child, 0)[1]
release.set()
thread.join()
assert cache.get("dev", "op", "key") == 7
raise SystemExit(f"the child ended with {status}" if status else 0)
"""


@pytest.mark.timeout(60)  # another process loads JAX
def test_a_forked_child_does_not_wait_for_a_lock_of_the_parent():
    """A fork copies a lock but not its holder, so the child makes each lock anew."""
    command = [sys.executable, "-c", PROGRAM]
    ended = subprocess.run(command, timeout=55, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


OPEN = """
import asyncio, os, signal, threading, warnings
import anyio, jax
from asel import ConfigSelectorChain, Invocation, Kernel, Tuner
from asel.testing import ScriptedMeasure

class Doubling(Kernel):
    op_id = "doubling"
    def run(self, x, *, cfg): return x
    def heuristic_cfg(self, inv): return 1
    def candidate_cfgs(self, inv): return [1, 2]

events = []
measure = ScriptedMeasure({1: 0.002, 2: 0.001})
chain = ConfigSelectorChain(sinks=[], on_event=events.append, tuner=Tuner(0, 1, measure=measure, strategy="exhaustive"))
opened, over = threading.Event(), threading.Event()
call = lambda n: Invocation("doubling", (n,), {})

async def serve():
    async with chain:
        opened.set()
        await anyio.to_thread.run_sync(over.wait)

def child():
    signal.alarm(40)
    chain.choose_nowait(call(1), Doubling())
    assert [event.name for event in events] == ["heuristics"], events

    async def again():
        assert await chain.choose(call(2), Doubling()) == 2
        async with chain:
            assert await chain.choose(call(3), Doubling()) == 2
            await chain.settled()

    anyio.run(again, backend=BACKEND)

thread = threading.Thread(target=anyio.run, args=(serve,), kwargs={"backend": BACKEND})
thread.start()
opened.wait(10)
warnings.simplefilter("ignore")
if (pid := os.fork()) == 0:
    try:
        child()
    except BaseException:
        import traceback
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
status = os.waitpid(pid, 0)[1]
assert chain.choose_nowait(call(4), Doubling()) == 1
over.set()
thread.join()
raise SystemExit(f"the child ended with {status}" if status else 0)
"""


@pytest.mark.timeout(60)  # another process loads JAX
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_an_open_chain_is_not_open_in_a_forked_child(backend):
    """The parent's loop does not run there: the child emits its own events, tunes, and may open the chain."""
    command = [sys.executable, "-c", f"BACKEND = {backend!r}\n{OPEN}"]
    ended = subprocess.run(command, timeout=55, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
