"""Removal of records by age, environment or predicate, a page at a time."""

from __future__ import annotations

import datetime
import inspect
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

from asel.errors import InvalidRequestError
from asel.kernels.devices import ENVIRONMENT_NAMES, environment
from asel.runtime.threads import run_in_thread
from asel.stores.pages import Page, apply_page, record_batches
from asel.stores.protocol import Change, Store
from asel.stores.records import Record

__all__ = ["prune"]


async def prune(
    store: Store,
    predicate: Callable[[Record], bool] | None,
    older_than: float | datetime.timedelta | None,
    not_environment: Mapping[str, str] | None,
    dry_run: bool,
) -> int:
    """Delete the records that meet all of the conditions, or count them."""
    should_delete = _condition(predicate, older_than, not_environment)
    if not_environment is not None:
        await _refuse_unknown_versions(store, not_environment)
    page = Page()
    deleted = 0
    async for batch in record_batches(store, should_delete):
        if dry_run:
            deleted += len(batch)
            continue
        for change in await run_in_thread("pruning", partial(_deletions, batch)):
            page.add(change)
        if page.is_full:
            deleted += await _delete(store, page)
            page = Page()
    return deleted + await _delete(store, page)


def _condition(predicate: Any, older_than: Any, not_environment: Any) -> Callable[[Record], bool]:
    """Return a function that returns whether to delete a record."""
    if predicate is None and older_than is None and not_environment is None:
        raise InvalidRequestError("prune: give a condition: a predicate, older_than= or not_environment=")
    if predicate is not None and not callable(predicate):
        raise InvalidRequestError(f"prune: {predicate!r:.200} is not a function of a record")
    if inspect.iscoroutinefunction(predicate):  # every coroutine is true
        raise InvalidRequestError(f"prune: {predicate!r:.200} is a coroutine function; pass a plain one")
    age_s = older_than.total_seconds() if isinstance(older_than, datetime.timedelta) else older_than
    if age_s is not None and (isinstance(age_s, bool) or not isinstance(age_s, int | float) or not age_s >= 0):
        raise InvalidRequestError(f"prune: older_than={older_than!r} must be an age in seconds, zero or more")
    if not_environment is not None:
        _check_environment(not_environment)
    now = time.time()

    def should_delete(record: Record) -> bool:
        return (
            (age_s is None or now - record.created > age_s)
            and (not_environment is None or _differs(record.environment, not_environment))
            and (predicate is None or bool(predicate(record)))
        )

    return should_delete


def _check_environment(wanted: Any) -> None:
    names = ", ".join(ENVIRONMENT_NAMES)
    if not isinstance(wanted, Mapping) or not wanted:
        what = "is empty" if isinstance(wanted, Mapping) else "is not a dict"
        raise InvalidRequestError(f"prune: not_environment={wanted!r} {what}; give one or more of {names}")
    for name, value in wanted.items():
        if name not in ENVIRONMENT_NAMES:
            raise InvalidRequestError(f"prune: not_environment has {name!r}, which is not one of {names}")
        if not isinstance(value, str):
            raise InvalidRequestError(f"prune: not_environment[{name!r}] must be a string, not {value!r}")


def _differs(made_with: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    """Return whether a record was measured with other software than `wanted`."""
    return bool(made_with) and any(made_with.get(name) != value for name, value in wanted.items())


async def _refuse_unknown_versions(store: Store, wanted: Mapping[str, str]) -> None:
    """Refuse versions that no record has: a typing error would delete every record."""
    unseen, is_empty = dict(wanted), True
    async with aclosing(record_batches(store, lambda record: bool(record.environment))) as batches:
        async for batch in batches:
            is_empty = is_empty and not batch
            for record in batch:
                if not _differs(record.environment, wanted):
                    return
                unseen = {name: value for name, value in unseen.items() if record.environment.get(name) != value}
    here = await run_in_thread("reading the environment", environment)
    if is_empty or not _differs(here, wanted):
        return
    unknown = {name: value for name, value in unseen.items() if here[name] != value}
    shown = " and ".join(f"{name}={value!r}" for name, value in (unknown or wanted).items())
    raise InvalidRequestError(
        f"prune: neither a record nor this process has {shown}{'' if unknown else ' together'}, so everything measured "
        "would be deleted; asel.environment() returns the versions of this process"
    )


def _deletions(batch: list[Record]) -> list[Change]:
    return [Change.delete(record.address, expected=record) for record in batch]


async def _delete(store: Store, page: Page) -> int:
    return sum(changed.done for changed in await apply_page(store, page))
