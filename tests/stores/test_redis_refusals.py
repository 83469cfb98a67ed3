"""Refusals of Redis, and the advice in the errors; passwords, users and TLS."""

from __future__ import annotations

import logging
import pickle
import ssl

import anyio
import pytest
import trustme
from support.redis_checks import (
    ADDRESS,
    QUOTED,
    SECRET,
    every_operation_fails,
    every_word,
    works,
)
from support.redis_server import RedisServer, free_port, in_front_of
from support.store_contract import everything, record

from asel.errors import StoreError
from asel.stores.redis.store import RedisStore


def test_the_error_of_a_full_redis_has_advice(real_backend):
    """Writes are refused, and reads still work."""

    async def main() -> None:
        store = RedisStore(server.url())
        await store.put(record(1))
        with server.client() as client:
            client.config_set("maxmemory", 1)
        with pytest.raises(StoreError, match="is full: raise its maxmemory"):
            await store.put(record(2, checksum="c2"))
        with pytest.raises(StoreError, match="is full"):
            async with store.claim(ADDRESS):
                pass
        assert await everything(store) == [record(1)]
        assert await store.get(ADDRESS) == record(1)

    with RedisServer() as server:
        anyio.run(main, backend=real_backend)


def test_the_error_of_a_read_only_redis_has_advice(real_backend):
    """A replica is read, and a bad value on it is reported once though it cannot be set aside."""

    async def main() -> None:
        store, told = RedisStore(server.url()), []
        store.on_rejected = told.append
        await store.put(record(1))
        with server.client() as client:
            client.set(f"asel:2:record:{record(checksum='c2').address.digest}", "nonsense")
            client.config_set("replica-serve-stale-data", "yes")
            client.replicaof("127.0.0.1", free_port())
        with pytest.raises(StoreError, match="read-only replica: give the address of the primary"):
            await store.put(record(2, checksum="c3"))
        for _ in range(3):
            assert await everything(store) == [record(1)]
        assert len(told) == 1

    with RedisServer() as server:
        anyio.run(main, backend=real_backend)


def test_a_wrong_password_is_an_error_that_does_not_show_it(real_backend, caplog):
    """The right one works; a missing one is an error, too."""
    caplog.set_level(logging.DEBUG)

    async def main() -> None:
        right = RedisStore(f"redis://:{QUOTED}@127.0.0.1:{server.port}")
        await works(right)
        for url, advice in [
            (f"redis://127.0.0.1:{server.port}", "wants a password: put it into the URL"),
            (f"redis://:wr0ng{QUOTED}@127.0.0.1:{server.port}", "refused the user or the password"),
            (f"redis://hunter2:wr0ng@127.0.0.1:{server.port}", "refused the user or the password"),
        ]:
            store = RedisStore(url)
            for error in await every_operation_fails(store, 5):
                assert advice in str(error)
                assert "hunter2" not in every_word(error)
                assert "wr0ng" not in every_word(error)
                assert pickle.loads(pickle.dumps(error)).args == error.args
        for db, error in [(99, "has no database 99")]:
            with pytest.raises(StoreError, match=error):
                await RedisStore(f"redis://:{QUOTED}@127.0.0.1:{server.port}/{db}").get(ADDRESS)
        assert "hunter2" not in repr(right) + right.location + repr(right._target)

    with RedisServer(password=SECRET) as server:
        anyio.run(main, backend=real_backend)
    assert "hunter2" not in caplog.text
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]


def test_a_user_with_too_few_rights_gets_an_explanation(real_backend):
    """A user with exactly the documented rights can do everything."""

    async def main() -> None:
        with server.client() as client:
            needs = [
                "~team:*",
                "resetchannels",
                "&team:*",
                "+@scripting",
                "+@read",
                "+@write",
                "+@pubsub",
                "+@connection",
                "-@dangerous",
            ]
            client.execute_command("ACL", "SETUSER", "enough", "on", ">hunter2", *needs)
            client.execute_command("ACL", "SETUSER", "foreign", "on", ">hunter2", "~x:*", "+@all")
            client.execute_command("ACL", "SETUSER", "reader", "on", ">hunter2", "~*", "+@all", "-@write")
            client.execute_command("ACL", "SETUSER", "nobody", "on", ">hunter2", "-@all", "+hello", "+select")
        password = "hunter2"
        await works(RedisStore(f"redis://enough:hunter2@127.0.0.1:{server.port}?prefix=team"))
        for user in ["foreign", "reader", "nobody"]:
            with pytest.raises(StoreError, match=r"does not allow this user .* ~team:\*") as raised:
                await RedisStore(f"redis://{user}:{password}@127.0.0.1:{server.port}?prefix=team").put(record())
            assert "hunter2" not in every_word(raised.value)

    with RedisServer() as server:
        anyio.run(main, backend=real_backend)


def test_an_error_that_repeats_the_password_is_not_shown(real_backend, caplog):
    """An old Redis repeats the HELLO command in its error, and other servers may answer anything."""
    caplog.set_level(logging.DEBUG)
    answers = [
        b"-ERR unknown command `HELLO`, with args beginning with: `3`, `AUTH`, `default`, `"
        + SECRET.encode()
        + b"`\r\n",
        b"-ERR " + SECRET.encode() + b"\r\n",
        b"+" + SECRET.encode() + b"\r\n",
        SECRET.encode() + b"\r\n",
        b"-ERR " + repr(SECRET).upper().encode() + b" " * 290 + SECRET[:8].encode() + b"\r\n",
        b"HTTP/1.1 400 Bad Request\r\n\r\n" + QUOTED.encode(),
    ]

    async def main(port: int) -> None:
        for error in await every_operation_fails(RedisStore(f"redis://:{QUOTED}@127.0.0.1:{port}?timeout_s=0.5"), 4):
            assert "hunter2" not in every_word(error).lower()

    for answer in answers:
        with in_front_of(0, answer=answer) as port:
            anyio.run(main, port, backend=real_backend)
    assert "hunter2" not in caplog.text


def test_tls_checks_certificate_and_host(server, real_backend, tmp_path):
    """The URL may have an authority or a client certificate."""
    authority = trustme.CA()
    mine, theirs = authority.issue_cert("127.0.0.1"), authority.issue_cert("asel@example.org")
    paths = {name: tmp_path / f"{name}.pem" for name in ("ca", "cert", "key")}
    authority.cert_pem.write_to_path(paths["ca"])
    paths["cert"].write_bytes(theirs.cert_chain_pems[0].bytes())
    theirs.private_key_pem.write_to_path(paths["key"])
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    mine.configure_cert(context)
    authority.configure_trust(context)

    async def main(port: int) -> None:
        own = f"ssl_certfile={paths['cert']}&ssl_keyfile={paths['key']}"
        trusted = RedisStore(f"rediss://127.0.0.1:{port}?ssl_ca_certs={paths['ca']}&{own}&timeout_s=5")
        assert trusted.location == f"rediss://127.0.0.1:{port}/0"
        await works(trusted)
        async with trusted:
            await works(trusted)
        await works(RedisStore(f"rediss://127.0.0.1:{port}?ssl_cert_reqs=none&{own}&timeout_s=5"))
        with pytest.raises(StoreError, match="certificate verify failed"):
            await RedisStore(f"rediss://127.0.0.1:{port}?{own}").get(ADDRESS)
        for url in [
            f"rediss://localhost:{port}?ssl_ca_certs={paths['ca']}&{own}",  # another host than it is for
            f"rediss://127.0.0.1:{port}?ssl_ca_certs={paths['ca']}",  # without a certificate of one's own
            f"redis://127.0.0.1:{port}?timeout_s=0.3",
            f"rediss://127.0.0.1:{server.port}?timeout_s=0.3",
        ]:
            with pytest.raises(StoreError):
                await RedisStore(url).get(ADDRESS)

    context.verify_mode = ssl.CERT_REQUIRED
    with in_front_of(server.port, context) as port:
        anyio.run(main, port, backend=real_backend)
