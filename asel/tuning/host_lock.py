"""Locks on devices among the processes of a host: a locked file for each device.

They keep two workers of a service on one machine from timing candidates at the same time. The files are in a directory
that is private to the user, so processes of other users and of other containers are not excluded.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
import tempfile
import time
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from asel.kernels.devices import platform_of
from asel.redaction import redact
from asel.runtime.fork import renew_after_fork
from asel.runtime.threads import AbandonedThread, run_in_thread

try:
    import fcntl
except ImportError:  # Windows has none
    fcntl = None  # type: ignore[assignment]

__all__ = ["HostLock", "host_device", "lock_directory"]

logger = logging.getLogger("asel")
# A holder has the device for a series of samples, one long sample, or a foreign tuner's whole tune. One that keeps it
# for twice the default tune budget was stopped or hangs.
_PATIENCE_S = 120.0
# The delays between a waiter's attempts. At a handover, the device is idle for half a delay on average.
_FIRST_DELAY_S, _MAX_DELAY_S = 1e-3, 10e-3
# With these variables, a process numbers the devices that it may use from zero.
_VISIBLE_DEVICES = {
    "cuda": ("CUDA_VISIBLE_DEVICES",),
    "gpu": ("CUDA_VISIBLE_DEVICES",),
    "rocm": ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
}
_warned: set[str] = set()


def host_device(device: Any) -> str:
    """Return a device's name on this host, which does not depend on its number in this process."""
    platform = str(getattr(device, "platform", device)).lower()
    index = getattr(device, "local_hardware_id", None)
    index = str(getattr(device, "id", 0) if index is None else index)
    for variable in _VISIBLE_DEVICES.get(platform, ()):
        visible = [name.strip() for name in os.environ.get(variable, "").split(",") if name.strip()]
        if index.isdecimal() and int(index) < len(visible):
            index = visible[int(index)]
            break
    return re.sub(r"[^A-Za-z0-9_.-]", "_", f"{platform_of(device)}-{index}")


def lock_directory() -> Path:
    """Return the user's directory of device locks, created if missing.

    Raises:
        OSError: it cannot be created, or other users may write to it.
    """
    user = os.geteuid()
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{user}")
    folder = runtime / "asel" if _is_private(runtime) else Path(tempfile.gettempdir()) / f"asel-{user}"
    with suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    if not _is_private(folder):
        raise PermissionError(errno.EPERM, "other users may write to it", str(folder))
    return folder


def _is_private(folder: Path) -> bool:
    try:
        facts = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid() and not facts.st_mode & 0o022


class _LockFile:
    """An open file that one process at a time can lock. However a process ends, its locks end with it."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        self._close = weakref.finalize(self, os.close, self._descriptor)

    def take(self) -> bool:
        """Return whether the lock was acquired, without waiting."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def give_back(self) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    @property
    def was_removed(self) -> bool:
        """Whether the file was deleted, so that other processes lock a new one of this name."""
        return os.fstat(self._descriptor).st_nlink == 0

    def close(self) -> None:
        # Without unlocking: a forked child shares its parent's lock.
        self._close()


class HostLock:
    """One event loop's handle on a device's lock.

    Every process takes a second lock, the queue, before the device's lock, and a waiter holds it meanwhile. So a
    process that samples without a pause lets a waiting one go first. If locking is impossible, that is logged once, and
    no process waits.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._files: tuple[_LockFile, _LockFile] | None = None
        self._is_unavailable = fcntl is None
        self._patience_s = _PATIENCE_S
        self._holds = 0
        renew_after_fork(self)

    @asynccontextmanager
    async def held(self, left_behind: list[AbandonedThread]) -> AsyncIterator[None]:
        """Hold the device inside the block; afterwards it is free once every thread in `left_behind` has finished.

        After a timeout it is free immediately, since the threads may never finish.
        """
        await self._take()
        self._holds += 1
        hold, timed_out = self._holds, False
        try:
            yield
        except TimeoutError:
            timed_out = True
            raise
        finally:
            self._release(hold, [] if timed_out else left_behind)

    async def _take(self) -> None:
        """Return once this process holds the device, or has given up."""
        deadline = time.monotonic() + self._patience_s
        try:
            while not self._is_unavailable:
                if self._files is None:
                    self._files = await run_in_thread("opening a device's lock", self._open)
                queue, device = self._files
                try:
                    taken = await _acquire(queue, deadline) and await _acquire(device, deadline)
                finally:
                    queue.give_back()
                if not taken:
                    self._give_up()
                    return
                self._patience_s = _PATIENCE_S
                if not (queue.was_removed or device.was_removed):
                    return
                self.renew()
        except OSError as error:
            self._is_unavailable = True
            self.renew()  # closing the files unlocks them
            self._warn_once(f"cannot lock {self._name} on this host ({redact(error)})")

    def _open(self) -> tuple[_LockFile, _LockFile]:
        folder = lock_directory()
        return _LockFile(folder / f"{self._name}.queue"), _LockFile(folder / f"{self._name}.lock")

    def _give_up(self) -> None:
        # Otherwise each further sample would wait as long, until that holder is gone.
        self._patience_s = 0.0
        self._warn_once(f"another process has held {self._name} for {_PATIENCE_S:g} s")

    def _warn_once(self, what: str) -> None:
        if what not in _warned:
            _warned.add(what)
            logger.warning("%s: tuning goes on, and timings may be taken beside another process's", what)

    def _release(self, hold: int, left_behind: list[AbandonedThread]) -> None:
        busy = next((thread for thread in left_behind if thread.alive), None)
        if busy is not None:
            busy.when_done(partial(self._release, hold, left_behind))
        elif hold == self._holds and self._files is not None:  # otherwise the next holder already has it
            self._files[1].give_back()

    def renew(self) -> None:
        """Close the files: they were deleted, or belong to the parent of a fork."""
        files, self._files = self._files or (), None
        for file in files:
            file.close()


async def _acquire(file: _LockFile, deadline: float) -> bool:
    """Poll until the lock is acquired, without blocking a thread. Return False after the deadline."""
    delay_s = _FIRST_DELAY_S
    while not file.take():
        if time.monotonic() >= deadline:
            return False
        await anyio.sleep(delay_s)
        delay_s = min(1.5 * delay_s, _MAX_DELAY_S)
    return True
