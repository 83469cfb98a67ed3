"""A second Ctrl-C while the first one closes the chain."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

# Each of these programs takes 100 s to close, unless a second interrupt ends it.
COMMON = """
import signal, sys, threading, anyio, jax.numpy as jnp, trio
from asel import AutotunePolicy, ConfigSelectorChain, Invocation, Kernel, Tuner, kernel
from asel.testing import ScriptedMeasure

CALL = (jnp.ones(3),)
begun = threading.Event()

def report(line):
    print(line, flush=True)

async def ask_until_interrupted(chain, kernel, in_body=lambda: None):
    \"\"\"Ask in a block of the chain; tell when all tasks wait: for the kernel or the store, then for closing.\"\"\"
    leaving = anyio.Event()

    @trio.lowlevel.enable_ki_protection  # or an interrupt might strike this task
    async def tell_when_all_wait():
        await anyio.to_thread.run_sync(begun.wait)
        await anyio.wait_all_tasks_blocked()
        report("begun")
        await leaving.wait()
        await anyio.wait_all_tasks_blocked()
        report("closing")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tell_when_all_wait)
        async with chain:
            try:
                await chain.choose(Invocation(kernel.op_id, CALL, {}), kernel)
            finally:
                leaving.set()
                in_body()

def run(main, *args):
    try:
        anyio.run(main, *args, backend=sys.argv[1])
    except* KeyboardInterrupt:
        report("interrupted")
"""

HANGING = """
@kernel(op_id="blocked", configs=[1, 2], heuristic=1)
def blocked(x, *, cfg):
    begun.set()
    threading.Event().wait(120)
    return x

async def main():
    policy = AutotunePolicy(candidate_timeout_s=120)
    in_body = (lambda: signal.raise_signal(signal.SIGINT)) if sys.argv[2:] == ["body"] else (lambda: None)
    await ask_until_interrupted(ConfigSelectorChain(policy=policy, sinks=[], close_grace_s=100.0), blocked, in_body)

run(main)
"""

SAVING = """
class Kept(Kernel):
    op_id = "kept"
    def run(self, x, *, cfg): return x
    def heuristic_cfg(self, inv): return 1
    def candidate_cfgs(self, inv): return [1, 2]

class Slow:
    def __init__(self, on_put):
        self.on_put = on_put
    async def get(self, *key):
        return None
    async def put(self, *key_and_cfg):
        self.on_put()
        await anyio.sleep(120)

def saving_chain(on_put):
    tuner = Tuner(0, 1, measure=ScriptedMeasure({1: 0.002, 2: 0.001}))
    seconds = {"close_grace_s": 100.0, "store_timeout_s": 100.0}
    return ConfigSelectorChain(tuner=tuner, persistent=Slow(on_put), sinks=[], **seconds)
"""

SAVING_ONCE = """
async def main():
    await ask_until_interrupted(saving_chain(begun.set), Kept())

run(main)
"""

# The second interrupt strikes at each call and return of the closing code in turn, until it first waits.
SAVING_AND_INTERRUPTED = """
def strikes(position):
    left = position

    def profile(frame, kind, _):
        nonlocal left
        if kind in ("call", "c_return") and {"asel", "anyio"} & set(frame.f_code.co_filename.split("/")):
            left -= 1
            if left == 0 or frame.f_code.co_name == "wait":
                sys.setprofile(None)
                signal.raise_signal(signal.SIGINT)

    async def main():
        async with saving_chain(lambda: signal.raise_signal(signal.SIGINT)) as chain:
            try:
                await chain.choose(Invocation("kept", CALL, {}), Kept())
            finally:
                sys.setprofile(profile)

    report(position)
    run(main)
    return left == 0

position = 1
while strikes(position):
    position += 1
"""


def started(backend, *programs, arguments=()):
    return subprocess.Popen(
        [sys.executable, "-c", COMMON + "".join(programs), backend, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output_to_its_end(child, within_s):
    try:
        return child.communicate(timeout=within_s)
    finally:
        child.kill()


@pytest.mark.timeout(60)  # another process loads JAX
@pytest.mark.parametrize("second", ["body", "close"])
def test_a_second_interrupt_does_not_wait_for_threads(real_backend, second):
    """The first Ctrl-C gives threads their grace; a second one ends the program."""
    with started(real_backend, HANGING, arguments=[second]) as child:
        assert child.stdout.readline() == "begun\n"
        child.send_signal(signal.SIGINT)
        if second == "close":
            assert child.stdout.readline() == "closing\n"
            child.send_signal(signal.SIGINT)
        out, errors = output_to_its_end(child, 50)
    assert (out.splitlines()[-1:], child.returncode) == (["interrupted"], 0), errors


@pytest.mark.timeout(60)  # another process loads JAX
def test_a_second_interrupt_does_not_wait_for_the_store(real_backend):
    """The first Ctrl-C lets a result be stored; a second one does not."""
    with started(real_backend, SAVING, SAVING_ONCE) as child:
        assert child.stdout.readline() == "begun\n"
        child.send_signal(signal.SIGINT)
        assert child.stdout.readline() == "closing\n"
        child.send_signal(signal.SIGINT)
        out, errors = output_to_its_end(child, 50)
    assert (out, child.returncode) == ("interrupted\n", 0), errors


@pytest.mark.timeout(60)  # another process loads JAX
def test_a_second_interrupt_may_come_before_closing_awaits():
    """Asyncio raises it between any two lines of the code that closes."""
    with started("asyncio", SAVING, SAVING_AND_INTERRUPTED) as child:
        out, errors = output_to_its_end(child, 50)
    lines = out.splitlines()
    assert (set(lines[1::2]), child.returncode) == ({"interrupted"}, 0), (lines[-2:], errors)
    assert len(lines[::2]) > 30
