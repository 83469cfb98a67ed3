"""Places that keep records: a directory, a document, Redis."""

from __future__ import annotations

import os
import re
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
    if isinstance(location, str) and "\0" in location:
        raise InvalidRequestError("a path with a NUL character in it is not a store; use a path, or a redis:// URL")
    if isinstance(location, str) and location:
        if location.startswith(("redis://", "rediss://")):
            from asel.stores.redis import RedisStore  # needs the extra asel[redis]

            return RedisStore(location)
        # No message repeats it: misspelt, it may have its password in any part. pathlib makes one slash of two.
        if "://" in location or re.match(r"[a-z][a-z0-9+.-]+:/", location, re.IGNORECASE):
            scheme = re.match(r"[a-z][a-z0-9+.-]*(?=:/)", location, re.IGNORECASE)
            shown = f"{scheme[0]}://" if scheme else "this URL"
            raise InvalidRequestError(f"{shown} is not a store; use a path, or a redis:// or rediss:// URL as text")
        return DocumentStore(location) if location.endswith(".json") else DirectoryStore(location, read_only=read_only)
    if all(hasattr(location, method) for method in ("get", "put", "claim", "records", "delete")):
        return location  # type: ignore[no-any-return]
    kind = type(location).__name__  # and not its text: it may be a URL of some kind, with a password in it
    raise InvalidRequestError(
        f"a {kind} is no store; use a path, a redis:// URL as text, or an object with the Store protocol"
    )
