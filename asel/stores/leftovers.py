"""Removes half-written files of dead writers, and keeps a bounded number of bad files.

The plain functions here block, and run in a thread.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable
from contextlib import suppress

import filelock

from asel.stores.file_ops import TEMPORARY_PREFIX, HeldFile, directory_lock, facts_of, held_file, make_temporary, opened
from asel.stores.records import RecordError

__all__ = ["is_temporary", "set_aside", "set_aside_names", "sweep", "trim"]

# A writer locks its file right after creating it. A process may be suspended in between, but hardly for this long.
_UNLOCKED_S = 60.0
# On a file system without locks, age alone decides. No write takes this long.
_ABANDONED_S = 3600.0
# Bad files are kept for people to examine: the newest, within these limits.
MAX_SET_ASIDE_FILES = 100
MAX_SET_ASIDE_BYTES = 64 << 20
_SET_ASIDE_NAME = re.compile(r".+\.json\.[0-9a-f]{8}")


def is_temporary(name: str) -> bool:
    """Return whether a name is that of a half-written file, of a running or a killed writer."""
    return name.startswith(TEMPORARY_PREFIX)


def sweep(names: Iterable[str], directory: int) -> None:
    """Remove the temporary files of dead writers.

    A living writer holds a lock on its file. Ages are measured by the file system's clock, which may differ
    from this machine's by hours.
    """
    now: float | None = None
    for name in names:
        with suppress(OSError, RecordError), held_file(name, directory) as file:
            limit = _UNLOCKED_S
            try:
                if not filelock.lock_descriptor(file.descriptor, blocking=False):
                    continue
            except OSError:
                limit = _ABANDONED_S
            now = _clock(directory) if now is None else now
            if now - file.facts.st_mtime > limit:
                os.unlink(name, dir_fd=directory)


def _clock(directory: int) -> float:
    """Return the time by the file system's clock."""
    file, name = make_temporary(None, directory)
    try:
        return os.fstat(file).st_mtime
    finally:
        os.unlink(name, dir_fd=directory)
        os.close(file)


def set_aside(name: str, directory: int, judged: HeldFile | None, root: int) -> str | None:
    """Move a bad file to `set-aside/`, for a person to examine; return its new name, or None if it is gone.

    Only the file that was examined is moved: a good record that has replaced it meanwhile stays. `judged` is None for a
    link, a directory or a device.
    """
    aside = f"{name}.{secrets.token_hex(4)}"
    with opened("set-aside", inside=root, make=True) as keep, directory_lock(directory):
        if judged is None:
            is_bad = not stat.S_ISREG(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)
        else:
            is_bad = judged.is_still(name, directory)
        if not is_bad:
            return None
        os.rename(name, aside, src_dir_fd=directory, dst_dir_fd=keep)
    with opened("set-aside", inside=root) as keep:
        trim(set_aside_names(keep), keep)
    return f"set-aside/{aside}"


def set_aside_names(directory: int) -> list[str]:
    """Return the names of the bad files that were moved to a directory; other files are ignored."""
    return [name for name in os.listdir(directory) if _SET_ASIDE_NAME.fullmatch(name)]


def trim(
    names: Iterable[str],
    directory: int,
    *,
    max_files: int = MAX_SET_ASIDE_FILES,
    max_bytes: int = MAX_SET_ASIDE_BYTES,
) -> None:
    """Remove the oldest of some files until the others are within the limits; the newest always stays."""
    # A file keeps its modification time when it is moved; its change time is the time of the move.
    files = sorted(facts_of(names, directory), key=lambda file: file[1].st_ctime_ns, reverse=True)
    kept_bytes = 0
    for place, (name, facts) in enumerate(files):
        kept_bytes += facts.st_size
        if place and (place >= max_files or kept_bytes > max_bytes):
            with suppress(OSError):
                if stat.S_ISDIR(facts.st_mode):
                    shutil.rmtree(name, dir_fd=directory)  # it does not follow links
                else:
                    os.unlink(name, dir_fd=directory)
