"""URLs of Redis stores, valid and invalid."""

from __future__ import annotations

import sys
from pathlib import Path

import anyio
import pytest
from support.redis_checks import (
    ADDRESS,
)

from asel.errors import InvalidRequestError, StoreError
from asel.stores import open_store
from asel.stores.redis.store import RedisStore


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("http://:hunter2@host", "not a Redis URL"),
        ("hunter2", "not a Redis URL"),
        ("redis://:hunter2@", "host"),
        ("redis://:hunter2@host:0x1", "port"),
        ("redis://:hunter2@host:99999", "port"),
        ("redis://[:hunter2@host", "Redis URL"),
        ("redis://:hunter2\u2100@host", "Redis URL"),
        ("redis://user:hunter2", "port"),
        ("redis://:hunter2/x@host/0", "%2F"),
        ("redis://:hunter2?x@host/0", "%3F"),
        ("redis://:hunter2#x@host/0", "%23"),
        ("redis://:hunter2@host/one", "db"),
        ("redis://:hunter2@host/-1", "db"),
        ("redis://:hunter2@host/1/2", "db"),
        ("redis://:hunter2@host?db=1", "'db'"),
        ("redis://:hunter2@host?password=hunter2", "'password'"),
        ("redis://:hunter2@host?prefix=a*", "prefix='a*'"),
        ("redis://:hunter2@host?prefix=", "prefix=''"),
        ("redis://:hunter2@host?prefix=a&prefix=b", "prefix= is given twice"),
        ("redis://:hunter2@host?timeout_s=soon", "timeout_s='soon'"),
        ("redis://:hunter2@host?timeout_s=0", "timeout_s='0'"),
        ("redis://:hunter2@host?timeout_s=nan", "timeout_s='nan'"),
        ("redis://:hunter2@host?expire_s=-1", "expire_s='-1'"),
        ("redis://:hunter2@host?expire_s=inf", "expire_s='inf'"),
        ("redis://:hunter2@host?ssl_ca_certs=x", "ssl_ca_certs= in a Redis URL needs TLS"),
        ("rediss://:hunter2@host?ssl_ca_certs=/nowhere", "ssl_ca_certs='/nowhere'"),
        ("rediss://:hunter2@host?ssl_certfile=/nowhere", "ssl_certfile='/nowhere'"),
        ("rediss://:hunter2@host?ssl_keyfile=/nowhere", "ssl_keyfile="),
        ("rediss://:hunter2@host?ssl_cert_reqs=maybe", "ssl_cert_reqs='maybe'"),
        ("rediss://:hunter2@host?ssl_check_hostname=maybe", "ssl_check_hostname='maybe'"),
    ],
)
def test_an_invalid_url_is_refused_and_the_part_is_named(url, named):
    """The error names the invalid part and does not show the password."""
    with pytest.raises(InvalidRequestError) as raised:
        RedisStore(url)
    assert named in str(raised.value)
    error: BaseException | None = raised.value
    while error is not None:
        assert "hunter2" not in str(error)
        error = error.__context__


@pytest.mark.parametrize(
    ("url", "location"),
    [
        ("redis://host", "redis://host:6379/0"),
        ("redis://user:hunter2@host:1234/5?prefix=x&timeout_s=1", "redis://host:1234/5?prefix=x"),
        ("rediss://:hunter2@[::1]", "rediss://[::1]:6379/0"),
    ],
)
def test_the_location_has_no_secrets(url, location):
    """It identifies the Redis and nothing else."""
    assert RedisStore(url).location == location
    assert repr(RedisStore(url)) == f"RedisStore({location!r})"


@pytest.mark.parametrize("before", [" ", "\n", "'", '"'])
@pytest.mark.parametrize("kind", [str, Path])
def test_a_quoted_or_indented_url_is_not_a_directory(before, kind):
    """Otherwise a directory would be created with the password in its name."""
    with pytest.raises(InvalidRequestError, match="this URL is not a store") as raised:
        open_store(kind(f"{before}redis://user:hunter2@host"))
    assert "hunter2" not in str(raised.value)


def test_no_file_store_shows_a_secret_in_its_name():
    """A path may be a mangled URL."""
    for name in ("x redis:/user:hunter2@host", "x redis:/user:hunter2@host/s.json"):
        assert "hunter2" not in repr(open_store(Path(name)))


def test_a_host_that_cannot_be_looked_up_is_a_store_error(real_backend):
    """For any fault in the name."""

    async def main() -> None:
        for host in ["no-such-host.invalid", "a..b", "x" * 70]:
            with pytest.raises(StoreError, match="Redis at redis://"):
                await RedisStore(f"redis://{host}?timeout_s=1").get(ADDRESS)

    anyio.run(main, backend=real_backend)


def test_leases_are_renewed_before_they_end():
    """Renewing more slowly would lose every claim."""
    with pytest.raises(InvalidRequestError, match="renew_s"):
        RedisStore("redis://host", lease_s=5, renew_s=5)


def test_without_coredis_the_error_names_the_extra(monkeypatch):
    """The extra is named where it is missing."""
    for name in [name for name in sys.modules if name.startswith(("coredis", "asel.stores.redis."))]:
        monkeypatch.delitem(sys.modules, name)
    for module in ("client", "leases", "refusals"):
        monkeypatch.delattr(f"asel.stores.redis.{module}", raising=False)
    monkeypatch.setitem(sys.modules, "coredis", None)
    with pytest.raises(InvalidRequestError, match=r"pip install 'asel\[redis\]'"):
        RedisStore("redis://host")
