"""One holder of a device at a time among the processes of a host."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack, suppress
from itertools import pairwise
from types import SimpleNamespace

import anyio
import anyio.lowlevel
import jax
import pytest
from support.device_users import DeviceUser, runs

from asel.runtime.threads import run_in_thread
from asel.tuning import host_lock
from asel.tuning.device_lock import alone_on
from asel.tuning.host_lock import HostLock, host_device, lock_directory

PATIENCE_S = 10.0  # after this a closed gate fails the test; no passing test waits so long


@pytest.fixture(autouse=True)
def _own_directory(monkeypatch, tmp_path):
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(host_lock, "_warned", set())


@pytest.fixture
def patience_ends(monkeypatch):
    """Let patience end at once, as if the holder had been waited for long enough."""
    monkeypatch.setattr(host_lock, "_PATIENCE_S", 0.0)


async def is_free(name: str = "cpu-0") -> bool:
    """Return whether another process could take the lock now: to the system, a second handle counts as one."""
    other = HostLock(name)
    other._patience_s = PATIENCE_S
    with anyio.move_on_after(0.05):
        async with other.held([]):
            return True
    return False


@pytest.mark.timeout(90)
def test_samples_of_two_processes_never_overlap_and_a_killed_holder_frees_the_device(tmp_path):
    """Two workers of a service take turns on the device, in threads or in worker processes, and after `kill -9`."""
    log = tmp_path / "log"
    with ExitStack() as stack:
        users = [DeviceUser("asyncio", "thread", log), DeviceUser("trio", "process", log)]
        for user in users:
            stack.callback(user.end)
        assert [user.says() for user in users] == ["ready", "ready"]
        for user in users:
            user.do("tune")
        assert [user.says() for user in users] == ["tuned", "tuned"]
        noted = runs(log)
        assert all(earlier.end_ns <= later.start_ns for earlier, later in pairwise(noted))
        # Neither waited for the other's whole tune.
        assert sum(earlier.user != later.user for earlier, later in pairwise(noted)) >= 10

        holder = users[0]
        holder.do("hold")
        assert holder.says() == "held"
        assert not anyio.run(is_free)
        holder.process.kill()
        holder.process.wait()

        async def take() -> None:
            with anyio.fail_after(PATIENCE_S):
                async with alone_on(jax.local_devices()[:1], [], across_processes=True):
                    pass

        anyio.run(take)


def test_a_waiting_process_goes_before_one_that_just_had_the_device(real_backend):
    """A process that samples without a pause cannot keep the device to itself."""

    async def main():
        busy, waiting, turns = HostLock("cpu-0"), HostLock("cpu-0"), []

        async def wait():
            async with waiting.held([]):
                turns.append("waiting")

        with anyio.fail_after(PATIENCE_S):
            async with anyio.create_task_group() as tasks:
                async with busy.held([]):
                    tasks.start_soon(wait)
                    await anyio.wait_all_tasks_blocked()  # its first attempt failed
                    while waiting._files is None or busy._files[0].take():  # until it is in the queue
                        busy._files[0].give_back()
                        await anyio.lowlevel.checkpoint()
                async with busy.held([]):
                    turns.append("busy")
        assert turns == ["waiting", "busy"]

    anyio.run(main, backend=real_backend)


def test_a_thread_left_behind_keeps_the_device_unless_it_timed_out(real_backend):
    """After a cancelled sample the device is free once its thread has finished; one that hangs delays no other."""

    async def main():
        lock, back = HostLock("cpu-0"), threading.Event()

        async def leave_behind(error):
            left_behind = []
            with suppress(TimeoutError):
                async with lock.held(left_behind):
                    with anyio.move_on_after(0):
                        await run_in_thread("hanging", lambda: back.wait(PATIENCE_S), left_behind=left_behind)
                    if error is not None:
                        raise error
            return left_behind[0]

        await leave_behind(TimeoutError())
        assert await is_free()
        thread = await leave_behind(None)
        assert not await is_free()
        is_back = anyio.Event()
        thread.when_done(is_back.set)
        back.set()
        with anyio.fail_after(PATIENCE_S):
            await is_back.wait()
            while not await is_free():  # the lock is released in the same round of the loop
                pass

    anyio.run(main, backend=real_backend)


def test_a_holder_that_keeps_the_lock_is_waited_for_once(patience_ends, caplog, real_backend):
    """A stopped process costs one wait and one warning; the lock is respected again once it could be taken."""

    async def main():
        stopped, lock = HostLock("cpu-0"), HostLock("cpu-0")
        async with stopped.held([]):
            for _ in range(3):
                async with lock.held([]):
                    pass
        assert [record.message for record in caplog.records] == [
            "another process has held cpu-0 for 0 s: tuning goes on, and timings may be taken beside another process's"
        ]
        async with lock.held([]):
            assert not await is_free()
        assert await is_free()

    anyio.run(main, backend=real_backend)


def test_tuning_goes_on_without_a_lock(tmp_path, monkeypatch, caplog):
    """If other users may write to the directory there is no lock: that is logged once, and tuning goes on."""
    tmp_path.chmod(0o777)  # so that it does not count as private
    monkeypatch.setattr(host_lock.tempfile, "gettempdir", lambda: str(tmp_path))
    planted = tmp_path / f"asel-{os.geteuid()}"
    planted.symlink_to(tmp_path)

    async def main():
        for _ in range(2):
            async with HostLock("cpu-0").held([]):
                assert await is_free()

    anyio.run(main)
    (record,) = caplog.records
    assert "cannot lock cpu-0" in record.message
    assert str(planted) in record.message
    assert sorted(path.name for path in tmp_path.iterdir()) == [planted.name]


def test_the_lock_survives_a_fork_and_a_deleted_file():
    """A forked child neither frees nor keeps its parent's lock; if the file is deleted, all processes use a new one."""

    folder = lock_directory()

    async def main():
        lock = HostLock("cpu-0")
        async with lock.held([]):
            parents = os.dup(lock._files[1]._descriptor)  # what a fork leaves with the parent, here seen from the child
            lock.renew()
            assert not await is_free()
            os.close(parents)
            assert await is_free()
        async with lock.held([]):
            assert not await is_free()
        for path in list(folder.iterdir()):
            path.unlink()
        async with lock.held([]):
            assert not await is_free()

    anyio.run(main)


def test_a_device_has_one_name_in_all_processes(monkeypatch):
    """A GPU has the same name in programs that number it differently."""
    gpu, cpu = SimpleNamespace(platform="gpu", local_hardware_id=0, id=8), jax.local_devices()[0]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert host_device(gpu) == "gpu-0"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert host_device(gpu) == "gpu-1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8f/../x")
    assert host_device(gpu) == "gpu-GPU-8f_.._x"
    assert host_device(cpu) == f"cpu-{cpu.local_hardware_id if cpu.local_hardware_id is not None else cpu.id}"
