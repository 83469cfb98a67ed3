"""Parses a `redis://` URL.

A URL may hold a password, and in a misspelt URL the password may be in any part. So no
error here, and no error in its context, repeats the part before the query.
"""

from __future__ import annotations

import math
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from asel.errors import InvalidRequestError

__all__ = ["Target"]

_TLS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname", "ssl_cert_reqs")
_PARAMETERS = ("prefix", "expire_s", "timeout_s", *_TLS)
_SHAPE = "redis://user:password@host:port/db?prefix=asel&timeout_s=2"
# A prefix has none of the characters that Redis reads as a pattern, and no spaces.
_PREFIX = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


@dataclass(frozen=True, slots=True)
class Target:
    """A Redis database, with the settings for its use."""

    host: str
    port: int
    db: int
    username: str | None = field(repr=False)
    password: str | None = field(repr=False)
    tls: ssl.SSLContext | None = field(repr=False)
    prefix: str
    expire_s: float | None
    timeout_s: float

    @classmethod
    def from_url(cls, url: str) -> Target:
        """Return the target of a URL.

        Raises:
            InvalidRequestError: a part of it is invalid; the message names the part.
        """
        parts = _split(url)
        given = _parameters(parts)
        port = _port(parts)
        path = parts.path.strip("/")
        if not parts.hostname:
            raise InvalidRequestError(f"a Redis URL needs a host: {_SHAPE}")
        if port is None:
            raise InvalidRequestError(f"the port of a Redis URL is a number up to 65535: {_SHAPE}")
        if path and not re.fullmatch(r"[0-9]{1,9}", path):
            raise InvalidRequestError(f"the database (db) of a Redis URL is a number, as in {_SHAPE}")
        prefix = given.get("prefix", "asel")
        if not _PREFIX.fullmatch(prefix):
            raise InvalidRequestError(
                f"prefix={prefix!r} in a Redis URL: give 1 to 128 letters, digits, or any of _ . : / -"
            )
        return cls(
            host=unquote(parts.hostname),
            port=port,
            db=int(path or 0),
            username=unquote(parts.username) if parts.username else None,
            password=unquote(parts.password) if parts.password else None,
            tls=_tls(given) if parts.scheme == "rediss" else None,
            prefix=prefix,
            expire_s=_seconds(given, "expire_s") if "expire_s" in given else None,
            timeout_s=_seconds(given, "timeout_s") if "timeout_s" in given else 2.0,
        )

    @property
    def location(self) -> str:
        """The URL without user, password and settings."""
        scheme, host = "rediss" if self.tls else "redis", f"[{self.host}]" if ":" in self.host else self.host
        suffix = "" if self.prefix == "asel" else f"?prefix={self.prefix}"
        return f"{scheme}://{host}:{self.port}/{self.db}{suffix}"


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
    except ValueError:  # its text has the whole host part
        parts = None
    if parts is None or parts.scheme not in ("redis", "rediss"):
        raise InvalidRequestError(f"this is not a Redis URL; one looks like {_SHAPE}")
    if "@" in parts.path + parts.query or parts.fragment:
        raise InvalidRequestError(
            "the user or password of a Redis URL contains one of / ? #, or the part after the host contains @ or #:"
            " write them as %2F %3F %23 %40"
        )
    return parts


def _port(parts: SplitResult) -> int | None:
    try:
        return parts.port or 6379
    except ValueError:  # its text repeats the port, which may be part of a password
        return None


def _parameters(parts: SplitResult) -> dict[str, str]:
    given: dict[str, str] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name not in _PARAMETERS:
            raise InvalidRequestError(f"unknown parameter {name!r} in a Redis URL; known: {', '.join(_PARAMETERS)}")
        if name in _TLS and parts.scheme != "rediss":
            raise InvalidRequestError(f"{name}= in a Redis URL needs TLS: write rediss:// instead of redis://")
        if name in given:
            raise InvalidRequestError(f"{name}= is given twice in a Redis URL")
        given[name] = value
    return given


def _seconds(given: Mapping[str, str], name: str) -> float:
    try:
        seconds = float(given[name])
    except ValueError:
        seconds = math.nan
    if not 0.001 <= seconds <= 1e9:  # Redis counts milliseconds
        raise InvalidRequestError(f"{name}={given[name]!r} in a Redis URL: give seconds, 0.001 or more")
    return seconds


def _choice(given: Mapping[str, str], name: str, choices: Mapping[str, bool]) -> bool:
    text = given.get(name, next(iter(choices)))
    if text not in choices:
        raise InvalidRequestError(f"{name}={text!r} in a Redis URL: give one of {', '.join(choices)}")
    return choices[text]


def _tls(given: Mapping[str, str]) -> ssl.SSLContext:
    checks_host = _choice(given, "ssl_check_hostname", {"true": True, "false": False})
    checks_certificate = _choice(given, "ssl_cert_reqs", {"required": True, "none": False})
    context = ssl.create_default_context()
    context.check_hostname = checks_host and checks_certificate
    context.verify_mode = ssl.CERT_REQUIRED if checks_certificate else ssl.CERT_NONE
    try:
        if authority := given.get("ssl_ca_certs"):
            context.load_verify_locations(authority)
    except OSError as error:
        raise InvalidRequestError(f"ssl_ca_certs={authority!r} in a Redis URL: {error}") from error
    certificate, key = given.get("ssl_certfile"), given.get("ssl_keyfile")
    if key and not certificate:
        raise InvalidRequestError("ssl_keyfile= in a Redis URL needs ssl_certfile= beside it")
    try:
        if certificate:
            # A key with a passphrase would ask for it at the terminal.
            context.load_cert_chain(certificate, key, password=lambda: "")
    except OSError as error:
        raise InvalidRequestError(f"ssl_certfile={certificate!r} in a Redis URL: {error}") from error
    return context
