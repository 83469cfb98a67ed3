"""The Redis store, against a real redis-server that is treated badly."""

from __future__ import annotations

import anyio
import pytest
from redis_server import RedisServer
from store_contract import LAWS

from asel.stores.redis import RedisStore


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


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_contract(law, server, real_backend):
    """The laws of every store."""
    anyio.run(law, lambda: RedisStore(server.url()), backend=real_backend)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_contract_while_open(law, server, real_backend):
    """The laws hold over one kept connection as well."""

    async def main() -> None:
        async with RedisStore(server.url()) as store:
            await law(lambda: store)

    anyio.run(main, backend=real_backend)
