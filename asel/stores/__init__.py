"""Stores keep records beyond the process: a directory, a document, Redis, a JAX cluster."""

from __future__ import annotations

import os
import re
from importlib import import_module
from typing import TYPE_CHECKING, Any

from asel.errors import InvalidRequestError
from asel.stores.protocol import Change, Changed, Claim, Store, StoreDefaults, StoreStats
from asel.stores.records import Address, Record, Rejected

if TYPE_CHECKING:
    from asel.stores.directory import DirectoryStore
    from asel.stores.document import DocumentStore

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

# Imported on first use: their dependencies take long to import, and some exist on POSIX only.
_FILE_STORES = {"DirectoryStore": "asel.stores.directory", "DocumentStore": "asel.stores.document"}


def __getattr__(name: str) -> Any:
    if name in _FILE_STORES:
        return getattr(import_module(_FILE_STORES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def open_store(location: Any, *, read_only: bool = False) -> Store:
    """Return the store at a location: a Redis or jax:// URL, a `*.json` document, a directory, or a store itself.

    Nothing is read or created yet. In a directory that is `read_only`, even bad files stay in place.

    Raises:
        InvalidRequestError: it is none of these.
    """
    if isinstance(location, os.PathLike):
        location = os.fspath(location)
    if isinstance(location, str) and "\0" in location:
        raise InvalidRequestError("a path with a NUL character in it is not a store; use a path, or a redis:// URL")
    if isinstance(location, str) and location:
        if location.startswith(("redis://", "rediss://")):
            from asel.stores.redis.store import RedisStore  # needs the extra asel[redis]

            return RedisStore(location)
        if location.startswith("jax://"):
            from asel.stores.jax_cluster import JaxClusterStore

            return JaxClusterStore(location)
        # No message repeats a misspelt URL: any part may hold the password. pathlib turns two slashes into one.
        if "://" in location or re.match(r"[\s'\"]*[a-z][a-z0-9+.-]+:/", location, re.IGNORECASE):
            scheme = re.match(r"[a-z][a-z0-9+.-]*(?=:/)", location, re.IGNORECASE)
            shown = f"{scheme[0]}://" if scheme else "this URL"
            raise InvalidRequestError(f"{shown} is not a store; use a path, or a redis:// or rediss:// URL as text")
        if location.endswith(".json"):
            from asel.stores.document import DocumentStore

            return DocumentStore(location)
        from asel.stores.directory import DirectoryStore

        return DirectoryStore(location, read_only=read_only)
    if all(hasattr(location, method) for method in ("get", "put", "claim", "records", "delete")):
        return location  # type: ignore[no-any-return]
    kind = type(location).__name__  # not the text, which may be a URL with a password
    raise InvalidRequestError(
        f"a {kind} is not a store; use a path, a redis:// URL as text, or an object with the Store protocol"
    )
