"""Claims as locks on files: in real time, with real files and processes."""

from __future__ import annotations

import subprocess
import sys

import anyio
import pytest
from support.paths import TESTS
from support.store_contract import record

from asel.errors import StoreError
from asel.runtime import threads


def run(fn, *args, backend="asyncio"):
    return anyio.run(fn, *args, backend=backend)


@pytest.mark.parametrize(
    ("make_store", "claims"), [("directory", "cache/claims"), ("document", ".c.json.claims")], indirect=["make_store"]
)
def test_claims_are_not_made_through_a_planted_link(make_store, claims, tmp_path):
    """Not even a lock file, since releasing the lock would delete a file of that name."""
    outside = tmp_path / "outside"
    outside.mkdir()
    victim = outside / f"{record().address.digest}.schema-2.lock"
    victim.write_text("precious")
    (tmp_path / claims).parent.mkdir(exist_ok=True)
    (tmp_path / claims).symlink_to(outside)

    async def scene():
        with pytest.raises(StoreError):
            async with make_store().claim(record().address):
                pass

    run(scene)
    assert victim.read_text() == "precious"


def test_waiters_for_a_claim_occupy_no_thread(make_store, real_backend):
    """Thirty waiters poll, and occupy neither shared threads nor asel's between polls."""

    async def scene():
        holder = make_store()
        async with holder.claim(record().address), anyio.create_task_group() as tasks:

            async def wait():
                async with make_store().claim(record().address, wait_s=30):
                    pass

            for _ in range(30):
                tasks.start_soon(wait)
            least = 30
            for _ in range(50):
                await anyio.sleep(0.01)
                least = min(least, len(threads._pool.busy))
                assert anyio.to_thread.current_default_thread_limiter().borrowed_tokens == 0
            assert least < 6
            tasks.cancel_scope.cancel()

    run(scene, backend=real_backend)


FORKED = """
import os, sys, anyio
sys.path.insert(0, {tests!r})
from support.store_contract import record
from asel.stores import DirectoryStore

async def main():
    async with DirectoryStore({root!r}).claim(record().address) as claim:
        child = os.fork()
        if child == 0:
            os.read(0, 1)  # lives on until its input ends
            os._exit(0)
        print(claim.held, flush=True)
        os.kill(os.getpid(), 9)

anyio.run(main)
"""


def test_a_forked_child_does_not_keep_its_dead_parents_lock(directory, request):
    """Otherwise the child would delay others by `wait_s`, like any stuck holder."""
    script = FORKED.format(tests=str(TESTS), root=str(directory.root))
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"True\n"
        holder.wait()

        async def scene():
            async with directory.claim(record().address, wait_s=10) as claim:
                assert claim.held

        run(scene)  # while the child lives
        holder.stdin.close()
