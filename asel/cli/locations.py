"""Finds the caches of a command by location: a directory, a document, a Redis URL, or the name of an operation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asel.errors import InvalidRequestError
from asel.redaction import redact

if TYPE_CHECKING:
    from asel.stores.persistent_cache import PersistentCache

__all__ = [
    "StoreOption",
    "cache_at",
    "cache_to_fill",
    "caches_at",
    "existing_folder",
    "new_cache_at",
    "why_not_writable",
]

StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        "-s",
        envvar="ASEL_STORE",
        help="A directory, a *.json document, a redis:// URL, or the name of an operation in the cache directory.",
        show_default="all operations in the cache directory",
    ),
]


def caches_at(location: str | None) -> list[PersistentCache[Any]]:
    """Return the caches at a location, for reading; a directory of caches has several.

    Raises:
        InvalidRequestError: there is none.
    """
    if location is not None and "://" in location:
        _refuse_jax(location)
        return [_opened(location)]
    path = _found(location)
    inner = [] if path.is_file() or _is_cache(path) else sorted(filter(_is_cache, path.iterdir()))
    if not inner and location is None:
        raise InvalidRequestError(
            f"{path} has no cache yet: fill one with `asel tune`, or name another with --store PATH"
        )
    return [_opened(str(one)) for one in inner or [path]]


def cache_at(location: str | None) -> PersistentCache[Any]:
    """Return the one cache at a location, for changing it.

    Raises:
        InvalidRequestError: there is none, or there are several.
    """
    found = caches_at(location)
    if len(found) > 1:
        names = ", ".join(Path(cache.path).name for cache in found[:5])
        raise InvalidRequestError(f"there are {len(found)} caches here ({names}): name one of them with --store")
    return _writable(found[0].path) if location is None or "://" not in location else found[0]


def new_cache_at(location: str | None) -> PersistentCache[Any]:
    """Return the cache at a location that need not exist yet, for writing.

    Here a plain name is a path, too, as in `PersistentCache(path=...)`.

    Raises:
        InvalidRequestError: there is no location, or it is also the name of an operation's cache.
    """
    from asel.stores.persistent_cache import default_root

    if location is None:
        raise InvalidRequestError(
            "name the cache to write with --store: a directory, a *.json document or a redis:// URL"
        )
    _refuse_jax(location)
    if "://" not in location and _is_plain_name(location) and not Path(location).exists():
        of_operation = default_root() / location
        if of_operation.is_dir():
            raise InvalidRequestError(
                f"{location!r} may mean two caches: write ./{location} for a new directory here, "
                f"or {of_operation} for the operation's in the cache directory"
            )
    return _writable(location)


def cache_to_fill(location: str | None, op: str) -> PersistentCache[Any]:
    """Return the cache for an operation's new records: at a location, by default `PersistentCache(op)`."""
    from asel.stores.persistent_cache import PersistentCache

    return PersistentCache(re.sub(r"[^A-Za-z0-9._@+-]", "_", op)) if location is None else new_cache_at(location)


def existing_folder(path: Path) -> Path:
    """Return the folder for the files of a cache at this path, or its nearest existing parent."""
    folder = path if path.is_dir() else path.parent
    while not folder.exists():
        folder = folder.parent
    return folder


def why_not_writable(folder: Path) -> str | None:
    """Try to create a file in a folder; return the reason if that fails, otherwise None."""
    import tempfile

    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".asel-probe-"):
            return None
    except OSError as error:
        return f"{folder} cannot be written: {redact(error.strerror or error)}"


def _writable(location: str) -> PersistentCache[Any]:
    from asel.stores.persistent_cache import PersistentCache

    return PersistentCache("asel", location)


def _opened(location: str) -> PersistentCache[Any]:
    """Return a cache for reading, which does not even move bad files aside."""
    from asel.stores import open_store
    from asel.stores.persistent_cache import PersistentCache

    return PersistentCache("asel", open_store(location, read_only=True))


def _found(location: str | None) -> Path:
    from asel.stores.persistent_cache import default_root

    root = default_root()
    if location is None:
        if not root.is_dir():
            raise InvalidRequestError(
                f"there is no cache in {root} yet: fill one with `asel tune`, or name one with --store PATH"
            )
        return root
    path = Path(location).expanduser()
    if path.exists():
        if path.is_file() and path.suffix != ".json":
            raise InvalidRequestError(
                f"{location} is a file, and not a *.json document: name a directory or a document"
            )
        return path
    if _is_plain_name(location):
        if (root / location).is_dir():
            return root / location
        raise InvalidRequestError(
            f"there is no cache named {location!r}: neither {path.absolute()} nor {root / location} exists. "
            "`asel cache stats` lists the caches of this machine"
        )
    raise InvalidRequestError(f"there is no cache at {location}: check the path")


def _refuse_jax(location: str) -> None:
    if location.startswith("jax://"):
        raise InvalidRequestError(
            "a jax:// store is inside a jax.distributed program and ends with it: name a directory, a *.json document "
            "or a redis:// URL"
        )


def _is_plain_name(location: str) -> bool:
    return "/" not in location and not location.endswith(".json")


def _is_cache(path: Path) -> bool:
    return path.is_dir() and any(path.glob("schema-*"))
