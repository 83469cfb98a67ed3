"""World-writable directories: planted files neither leak our data nor redirect our writes."""

from __future__ import annotations

import fcntl
import os
import stat
import threading

import anyio
import filelock
import pytest
from support.store_contract import everything, record

from asel import PersistentCache
from asel.errors import StoreError
from asel.stores import DirectoryStore, DocumentStore, document_file, file_claims
from asel.stores import file_ops as files


@pytest.fixture
def secret(tmp_path):
    """A file that other users may not read."""
    path = tmp_path / "secret"
    path.write_text("the private key")
    path.chmod(0o600)
    return path


@pytest.fixture
def shared(tmp_path):
    path = tmp_path / "shared"
    path.mkdir()
    path.chmod(0o1777)
    return path


def test_a_link_planted_while_the_lock_is_waited_for_is_not_copied(shared, secret, monkeypatch):
    """The document is opened once, after the lock was taken, and a link is refused."""
    store, failures, is_waiting = DocumentStore(shared / "s.json"), [], threading.Event()
    anyio.run(store.put, record())

    class Announced(filelock.UnixFileLock):
        def acquire(self, *args, **kwargs):
            is_waiting.set()
            return super().acquire(*args, **kwargs)

    def put():
        try:
            anyio.run(store.put, record(2, checksum="c2"))
        except StoreError as error:
            failures.append(str(error))

    with filelock.UnixFileLock(shared / ".s.json.lock"):  # the attacker's
        monkeypatch.setattr(filelock, "UnixFileLock", Announced)
        writer = threading.Thread(target=put)
        writer.start()
        assert is_waiting.wait(10)
        store.path.unlink()
        store.path.symlink_to(secret)
    writer.join()
    assert len(failures) == 1
    assert "link" in failures[0]
    assert not [path.name for path in shared.iterdir() if not path.is_symlink() and "key" in path.read_text()]


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664])
def test_copies_of_a_document_keep_its_permissions(shared, mode):
    """The copy of a bad document, and each later version."""
    store = DocumentStore(shared / "s.json")
    store.on_rejected = lambda rejected: None
    store.path.write_text("bad, and none of your business")
    store.path.chmod(mode)
    anyio.run(store.put, record())
    for name in ("s.json", "s.json.bad-0"):
        assert stat.S_IMODE((shared / name).stat().st_mode) == mode


def test_a_copy_with_another_group_has_no_group_permissions(shared, monkeypatch):
    """The other group may have other members."""
    store = DocumentStore(shared / "s.json")
    store.on_rejected = lambda rejected: None
    store.path.write_text("bad")
    store.path.chmod(0o664)

    def refuse(*args):
        raise PermissionError

    monkeypatch.setattr(os, "fchown", refuse)
    anyio.run(store.put, record())
    assert stat.S_IMODE((shared / "s.json.bad-0").stat().st_mode) == 0o604


def test_only_links_of_trusted_users_are_followed(shared, monkeypatch, tmp_path):
    """Links of this user, root and the directory's owner are followed, and no others."""
    real = DocumentStore(tmp_path / "real.json")
    anyio.run(real.put, record())
    link = shared / "s.json"
    link.symlink_to(real.path)
    rejected = []

    def read():
        store = DocumentStore(link)
        store.on_rejected = rejected.append
        return anyio.run(everything, store)

    assert read() == [record()]
    true_stat = os.stat

    def strangers(*args, **kwargs):
        facts = true_stat(*args, **kwargs)
        if kwargs.get("follow_symlinks") is False and stat.S_ISLNK(facts.st_mode):
            return os.stat_result((*facts[:4], os.geteuid() + 1000, *facts[5:]))
        return facts

    monkeypatch.setattr(os, "stat", strangers)
    assert read() == []
    assert "link" in rejected[0].reason


@pytest.mark.parametrize("plant", [os.mkdir, os.mkfifo], ids=["directory", "pipe"])
def test_a_path_that_is_not_a_file_is_neither_read_nor_replaced(shared, plant):
    """A pipe does not hang a reader, and a put raises an error with the reason."""
    store = DocumentStore(shared / "s.json")
    store.on_rejected = lambda rejected: None
    plant(store.path)

    async def scene():
        with anyio.fail_after(10):
            assert await store.get(record().address) is None
            with pytest.raises(StoreError, match="plain file"):
                await store.put(record())

    anyio.run(scene)
    assert not store.path.is_file()


def test_a_planted_temporary_name_is_not_written_through(shared, secret):
    """The temporary file is created, and an existing one is never opened."""
    (shared / ".s.json.tmp").symlink_to(secret)
    store = DocumentStore(shared / "s.json")
    anyio.run(store.put, record())
    assert anyio.run(store.get, record().address) == record()
    assert secret.read_text() == "the private key"


def test_an_export_replaces_a_planted_link_and_not_what_it_leads_to(shared, secret, tmp_path):
    """A file is written beside it and renamed into its place."""
    cache = PersistentCache("toy", DirectoryStore(tmp_path / "cache"))
    target = shared / "export.json"
    target.symlink_to(secret)

    async def scene():
        await cache.store.put(record())
        assert await cache.export_to(target) == 1

    anyio.run(scene)
    assert secret.read_text() == "the private key"
    assert not target.is_symlink()


def test_a_document_too_large_to_read_is_not_overwritten(shared, monkeypatch):
    """It cannot be merged, so it is not replaced."""
    monkeypatch.setattr(document_file, "_MAX_BYTES", 1000)
    store = DocumentStore(shared / "s.json")
    store.path.write_text("x" * 2000)

    async def scene():
        with pytest.raises(StoreError, match="2,000 bytes"):
            await store.put(record())

    anyio.run(scene)
    assert store.path.read_text() == "x" * 2000


def test_a_link_planted_during_a_claim_is_not_followed(shared, tmp_path, monkeypatch):
    """The folder of the claims is opened once, so replacing it by a link has no effect."""
    outside = tmp_path / "outside"
    outside.mkdir()
    store, locked = DirectoryStore(shared / "cache"), file_claims._locked
    victims = []

    def swap_first(name, folder):
        monkeypatch.undo()
        claims = store.root / "claims"
        claims.rename(store.root / "elsewhere")
        claims.symlink_to(outside)
        victims.append(outside / name)
        victims[0].write_text("precious")
        return locked(name, folder)

    monkeypatch.setattr(file_claims, "_locked", swap_first)

    async def scene():
        async with store.claim(record().address) as claim:
            assert claim.held

    anyio.run(scene)
    assert [path.read_text() for path in outside.iterdir()] == ["precious"]
    assert not list((store.root / "elsewhere").iterdir())


def test_stale_locks_behind_a_link_are_not_removed(shared, tmp_path):
    """With any name."""
    outside = tmp_path / "outside"
    outside.mkdir()
    for number in range(300):
        (outside / f"{record(checksum=f'{number}').address.digest}.schema-2.lock").touch()
    (shared / "cache").mkdir()
    (shared / "cache" / "claims").symlink_to(outside)
    anyio.run(DirectoryStore(shared / "cache").stats)
    assert len(list(outside.iterdir())) == 300


@pytest.fixture
def strangers_file(monkeypatch):
    """Make every plain file appear to belong to another user."""
    fstat = os.fstat

    def of_a_stranger(file):
        facts = fstat(file)
        if stat.S_ISREG(facts.st_mode):
            return os.stat_result((*facts[:4], os.geteuid() + 1000, *facts[5:]))
        return facts

    monkeypatch.setattr(os, "fstat", of_a_stranger)


@pytest.mark.usefixtures("strangers_file")
def test_a_strangers_document_in_a_shared_directory_is_neither_read_nor_written(shared):
    """Its records would be trusted, and our records would go to its owner."""
    store, rejected = DocumentStore(shared / "s.json"), []
    store.on_rejected = rejected.append
    store.path.write_text("{}")

    async def scene():
        for _ in range(2):
            assert await store.get(record().address) is None
        with pytest.raises(StoreError, match="belongs to another user"):
            await store.put(record())

    anyio.run(scene)
    assert ["another user" in bad.reason for bad in rejected] == [True]
    assert store.path.read_text() == "{}"


@pytest.mark.usefixtures("strangers_file")
def test_in_a_private_directory_a_document_may_have_any_owner(shared):
    """Every user with write permission was given it deliberately."""
    shared.chmod(0o775)
    store = DocumentStore(shared / "s.json")

    async def scene():
        await store.put(record())
        assert await store.get(record().address) == record()

    anyio.run(scene)


def test_a_lock_that_is_never_released_is_an_error_in_time(shared, monkeypatch):
    """It costs a StoreError and does not block a thread for ever."""
    monkeypatch.setattr(files, "_LOCK_S", 0.05)
    store, rejected = DirectoryStore(shared / "cache"), []
    store.on_rejected = rejected.append

    async def scene():
        await store.put(record())
        [path] = store.root.rglob("*.json")
        held = os.open(path.parent, os.O_RDONLY)
        try:
            fcntl.flock(held, fcntl.LOCK_EX)
            with pytest.raises(StoreError, match="held the directory's lock"):
                await store.put(record(2), replace=True)
            with pytest.raises(StoreError, match="held the directory's lock"):
                await store.delete(record().address)
            assert await store.get(record().address) == record()
            path.write_text("bad")
            assert await store.get(record().address) is None
        finally:
            os.close(held)
        assert path.read_text() == "bad"
        assert [bad.where for bad in rejected] == [str(path)]
        assert await store.put(record(2)) == record(2)

    anyio.run(scene)
