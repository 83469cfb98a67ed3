"""Places that keep records: a directory, a document, Redis."""

from __future__ import annotations

import os
from typing import Any

from asel.errors import InvalidRequestError
from asel.stores.directory import DirectoryStore
from asel.stores.document import DocumentStore
from asel.stores.protocol import Change, Changed, Claim, Store, StoreDefaults, StoreStats
from asel.stores.records import Address, Record, Rejected

__all__ = [
    "Address",
    "Change",
    "Changed",
    "Claim",
    "DirectoryStore",
    "DocumentStore",
    "Record",
    "Rejected",
    "Store",
    "StoreDefaults",
    "StoreStats",
    "open_store",
]


def open_store(location: Any, *, read_only: bool = False) -> Store:
    """Return the store at a location: a Redis URL, a `*.json` document, a directory, or a store itself.

    Nothing is read or made yet. A directory that is `read_only` keeps even what is bad in it where it is.

    Raises:
        InvalidRequestError: it is none of these.
    """
    if isinstance(location, os.PathLike):
        location = os.fspath(location)
    if isinstance(location, str) and location:
        if location.startswith(("redis://", "rediss://")):
            from asel.stores.redis import RedisStore  # needs the extra asel[redis]

            return RedisStore(location)
        if "://" in location:
            scheme = location.partition("://")[0]
            raise InvalidRequestError(f"{scheme}:// is no store; use a path, or a redis:// or rediss:// URL")
        return DocumentStore(location) if location.endswith(".json") else DirectoryStore(location, read_only=read_only)
    if all(hasattr(location, method) for method in ("get", "put", "claim", "records", "delete")):
        return location  # type: ignore[no-any-return]
    kind = type(location).__name__  # and not its text: it may be a URL of some kind, with a password in it
    raise InvalidRequestError(
        f"a {kind} is no store; use a path, a redis:// URL as text, or an object with the Store protocol"
    )
