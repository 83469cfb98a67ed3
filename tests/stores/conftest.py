"""The stores that several test files open; each file has its own Redis, emptied for each test."""

from __future__ import annotations

from functools import partial

import pytest
from support.redis_server import RedisServer

from asel.stores import DirectoryStore, DocumentStore
from asel.stores.redis.leases import Lease

MAKERS = {
    "directory": lambda path: DirectoryStore(path / "cache"),
    "document": lambda path: DocumentStore(path / "c.json"),
}


@pytest.fixture(params=MAKERS)
def make_store(request, tmp_path):
    return partial(MAKERS[request.param], tmp_path)


@pytest.fixture
def directory(tmp_path):
    return DirectoryStore(tmp_path / "cache")


@pytest.fixture
def document(tmp_path):
    return DocumentStore(tmp_path / "c.json")


@pytest.fixture(scope="module")
def running():
    with RedisServer() as server:
        yield server


@pytest.fixture
def server(running):
    with running.client() as client:
        client.flushall()
        client.config_resetstat()
    return running


@pytest.fixture
def pausing(monkeypatch):
    """How often a waiter came to its pause."""
    came = []
    pause = Lease.pause

    async def noted(self) -> None:
        came.append(self)
        await pause(self)

    monkeypatch.setattr(Lease, "pause", noted)
    return came
