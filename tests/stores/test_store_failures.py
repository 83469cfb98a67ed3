"""File systems that refuse: each failure is the real one, where an unprivileged process can have it.

Whatever happens, the chain answers, says so once, and stores what it found when it can.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import stat
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest
from support.kernels import BEST, COSTS, Bench, Blocks, Toy, call

from asel import PersistentCache

QUICK = {cfg: cost / 1000 for cfg, cost in COSTS.items()}


def _is_open_to_all(folder: Path) -> bool:
    return all(one.is_dir() and one.stat().st_mode & stat.S_IXOTH for one in (folder, *folder.parents))


@pytest.fixture
def place():
    """A directory that others than root may enter, too: pytest's own are private, and so may TMPDIR be."""
    folders = map(Path, (tempfile.gettempdir(), "/tmp", "/var/tmp"))
    path = Path(tempfile.mkdtemp(dir=next(filter(_is_open_to_all, folders))))
    path.chmod(0o777)
    yield path
    for directory in (path, *path.rglob("*")):
        if directory.is_dir():
            directory.chmod(0o777)
    while path.exists():  # a put that was left behind may still write
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def unprivileged():
    """Run as another user, because permissions do not apply to root."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def without_locks(monkeypatch):
    """A file system that has no locks."""

    def refuse(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)


@contextmanager
def file_size_limit(most: int):
    """A disk with a limit on the size of a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def bench_over(path, **options) -> Bench:
    return Bench(persistent=PersistentCache("toy", path, cfg_type=Blocks), costs=QUICK, **options)


def errors(bench) -> list[str]:
    return [event.operation for event in bench.sink.named("store_error")]


async def tier_of(bench, size=8) -> str:
    selection = await bench.chain.select(call(size), Toy())
    assert selection.cfg == BEST
    return selection.tier


async def records_in(path) -> int:
    return len([record async for record in PersistentCache("toy", path).records()])


@pytest.mark.parametrize("name", ["cache", "cache.json"])
def test_a_full_disk_costs_no_answer_and_no_later_put(name, place, real_backend):
    """Reads continue, results stay in memory, and they are stored once there is space."""
    path = place / name

    async def scene():
        async with bench_over(path).chain as chain:
            await chain.choose(call(1), Toy())
        bench = bench_over(path)
        async with bench.chain:
            with file_size_limit(200):
                assert await tier_of(bench, 2) == "autotune"
                assert await tier_of(bench, 3) == "autotune"
                assert await tier_of(bench, 2) == "memory"
                assert await tier_of(bench, 1) == "persistent"
            assert errors(bench) == ["put"]
            assert await records_in(path) == 1
        assert await records_in(path) == 3
        assert bench.sink.named("store_recovered")
        assert not [left for left in place.rglob("*") if ".tmp-" in left.name]

    anyio.run(scene, backend=real_backend)


@pytest.mark.parametrize("name", ["cache", "cache.json"])
def test_a_read_only_directory_is_read(name, place, unprivileged):
    """Its records answer, and new results stay in memory."""
    path = place / "team" / name

    async def scene():
        async with bench_over(path).chain as chain:
            await chain.choose(call(1), Toy())
        for directory in (path.parent, *path.parent.rglob("*")):
            if directory.is_dir():
                directory.chmod(0o555)
        bench = bench_over(path)
        async with bench.chain:
            assert await tier_of(bench, 1) == "persistent"
            assert await tier_of(bench, 2) == "autotune"
        assert len(errors(bench)) == 1
        assert bench.sink.named("closed")[0].unsaved == 1

    anyio.run(scene)


@pytest.mark.parametrize("name", ["cache", "cache.json"])
def test_a_directory_without_permission_makes_its_tier_decline(name, place, unprivileged):
    """The other tiers answer."""
    (place / "secret").mkdir(mode=0o000)

    async def scene():
        bench = bench_over(place / "secret" / name)
        async with bench.chain:
            selection = await bench.chain.select(call(), Toy())
            assert (selection.cfg, selection.tier) == (BEST, "autotune")
            assert "Permission denied" in selection.declined["persistent"]
        assert errors(bench) == ["get"]

    anyio.run(scene)


@pytest.mark.parametrize("name", ["cache", "cache.json"])
def test_a_directory_that_vanishes_is_made_again(name, place, real_backend):
    """A cleanup may remove it under a running service."""
    path = place / "deep" / name

    async def scene():
        bench = bench_over(path)
        async with bench.chain:
            await tier_of(bench, 1)
            shutil.rmtree(place / "deep")
            assert await tier_of(bench, 1) == "memory"
            assert await tier_of(bench, 2) == "autotune"
        assert not errors(bench)
        assert await records_in(path) == 1

    anyio.run(scene, backend=real_backend)


def test_a_file_in_the_place_of_the_directory_is_an_error(place):
    """It is never overwritten."""
    (place / "cache").write_text("precious")

    async def scene():
        bench = bench_over(place / "cache")
        async with bench.chain:
            assert await tier_of(bench) == "autotune"
        assert errors(bench) == ["get"]

    anyio.run(scene)
    assert (place / "cache").read_text() == "precious"


def test_without_locks_a_directory_still_stores(place, without_locks):
    """NFS without a lock daemon: every process tunes for itself, and the first to store wins."""

    async def scene():
        bench = bench_over(place / "cache")
        async with bench.chain:
            assert await tier_of(bench) == "autotune"
        assert errors(bench) == ["claim"]
        assert await records_in(place / "cache") == 1

    anyio.run(scene)


def test_without_locks_a_document_is_not_written(place, without_locks):
    """Merging without a lock could lose records of other processes."""

    async def scene():
        bench = bench_over(place / "cache.json")
        async with bench.chain:
            assert await tier_of(bench) == "autotune"
        assert bench.sink.named("closed")[0].unsaved == 1

    anyio.run(scene)
    assert not (place / "cache.json").exists()


def test_a_slow_disk_delays_one_put_and_no_answer(place, monkeypatch, real_backend):
    """The answer comes after the store's timeout; the put completes in the background."""
    gate, fsync = threading.Event(), os.fsync

    def slow(file):
        gate.wait(10)
        fsync(file)

    monkeypatch.setattr(os, "fsync", slow)

    async def scene():
        bench = bench_over(place / "cache", store_timeout_s=0.2)
        async with bench.chain:
            with anyio.fail_after(5):
                assert await tier_of(bench) == "autotune"
                assert await tier_of(bench) == "memory"
            assert errors(bench) == ["put"]
            gate.set()
        assert await records_in(place / "cache") == 1

    anyio.run(scene, backend=real_backend)


def test_an_unreadable_file_costs_one_record(place, unprivileged):
    """A file without read permission in a shared cache is a miss, and stays in place."""
    os.seteuid(0)
    path = place / "cache"
    anyio.run(lambda: _store(path, 1, 2))
    for directory in (path, *path.rglob("*")):
        directory.chmod(0o777)
    private = sorted(path.glob("schema-*/??/*.json"))[0]
    private.chmod(0o000)
    os.seteuid(65534)

    async def scene():
        bench = bench_over(path)
        async with bench.chain:
            tiers = [await tier_of(bench, size) for size in (1, 2)]
        assert sorted(tiers) == ["autotune", "persistent"]
        assert errors(bench) in ([], ["put"])
        assert "Permission denied" in bench.sink.named("record_rejected")[0].reason

    anyio.run(scene)
    assert private.exists()


async def _store(path, *sizes) -> None:
    async with bench_over(path).chain as chain:
        for size in sizes:
            await chain.choose(call(size), Toy())
