"""The right to run on a device among the processes of a host: a locked file for each device.

Two workers of a service on one machine would otherwise time their candidates beside each other. The files are in a
directory that is private to the user, so processes of other users, and of other containers, are not excluded.
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
# for longer than the default tune budget, twice, was stopped or hangs.
_PATIENCE_S = 120.0
# The device is idle for half of such a delay at each handover, and a waiter wakes its loop so often.
_FIRST_DELAY_S, _MAX_DELAY_S = 1e-3, 10e-3
# A program told to see other devices numbers them from zero.
_VISIBLE_DEVICES = {
    "cuda": ("CUDA_VISIBLE_DEVICES",),
    "gpu": ("CUDA_VISIBLE_DEVICES",),
    "rocm": ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
}
_told: set[str] = set()


def host_device(device: Any) -> str:
    """Return a device's name on this host, whatever number it has in this process."""
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
    """Return the user's directory of device locks, made if missing.

    Raises:
        OSError: it cannot be made, or others could put files there.
    """
    user = os.geteuid()
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{user}")
    folder = runtime / "asel" if _is_private(runtime) else Path(tempfile.gettempdir()) / f"asel-{user}"
    with suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    if not _is_private(folder):
        raise PermissionError(errno.EPERM, "others than this user may write to it", str(folder))
    return folder


def _is_private(folder: Path) -> bool:
    try:
        facts = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid() and not facts.st_mode & 0o022


class _LockFile:
    """An open file that one process at a time has locked. Its lock ends with its process, however that ends."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        self._close = weakref.finalize(self, os.close, self._descriptor)

    def take(self) -> bool:
        """Return whether the lock is ours now; never waits."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def give_back(self) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    @property
    def was_removed(self) -> bool:
        """Whether somebody tidied the file away, so that others lock another one of this name."""
        return os.fstat(self._descriptor).st_nlink == 0

    def close(self) -> None:
        # Without unlocking: a forked child shares its parent's lock.
        self._close()


class HostLock:
    """One event loop's handle on a device's lock.

    A waiter holds a second lock meanwhile, the queue, which every process takes before the first. So a process that
    samples without a pause lets a waiting one go first. If there is no lock, that is logged once, and no process waits.
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
        """Hold the device; afterwards it is free once every thread in `left_behind` has come back.

        After a holder that timed out it is free at once, since its threads may never come back.
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
        """Return once the device is ours, or it is clear that it will not be."""
        deadline = time.monotonic() + self._patience_s
        try:
            while not self._is_unavailable:
                if self._files is None:
                    self._files = await run_in_thread("opening a device's lock", self._open)
                queue, device = self._files
                try:
                    taken = await _taken(queue, deadline) and await _taken(device, deadline)
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
            self.renew()  # whatever was locked is free then
            self._tell(f"cannot lock {self._name} on this host ({redact(error)})")

    def _open(self) -> tuple[_LockFile, _LockFile]:
        folder = lock_directory()
        return _LockFile(folder / f"{self._name}.queue"), _LockFile(folder / f"{self._name}.lock")

    def _give_up(self) -> None:
        # Until that holder is gone, each further sample would wait as long.
        self._patience_s = 0.0
        self._tell(f"another process has held {self._name} for {_PATIENCE_S:g} s")

    def _tell(self, what: str) -> None:
        if what not in _told:
            _told.add(what)
            logger.warning("%s: tuning goes on, and timings may be taken beside another process's", what)

    def _release(self, hold: int, left_behind: list[AbandonedThread]) -> None:
        busy = next((thread for thread in left_behind if thread.alive), None)
        if busy is not None:
            busy.when_done(partial(self._release, hold, left_behind))
        elif hold == self._holds and self._files is not None:  # else the next holder has it already
            self._files[1].give_back()

    def renew(self) -> None:
        """Have no files open: they were removed, or belong to the parent of a fork."""
        files, self._files = self._files or (), None
        for file in files:
            file.close()


async def _taken(file: _LockFile, deadline: float) -> bool:
    """Wait until a lock is ours, by asking again and again: nothing here blocks a thread. False after the deadline."""
    delay_s = _FIRST_DELAY_S
    while not file.take():
        if time.monotonic() >= deadline:
            return False
        await anyio.sleep(delay_s)
        delay_s = min(1.5 * delay_s, _MAX_DELAY_S)
    return True
