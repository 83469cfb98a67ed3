"""`PersistentCache`: configs that outlive the process, over any store."""

from __future__ import annotations

import datetime
import logging
import os
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import platformdirs

from asel.errors import InvalidRequestError
from asel.kernels.kernel import Cfg
from asel.kernels.keys import CacheKey
from asel.redaction import redact
from asel.runtime.threads import run_in_thread
from asel.stores import open_store, removal, strict_json, transfer
from asel.stores.codec import Codec
from asel.stores.config_store import ConfigStoreDefaults, Stored, StoreQuery
from asel.stores.earlier_tunes import TuneIndex
from asel.stores.protocol import Claim, Store, StoreStats, optional_method
from asel.stores.record_codec import RecordCodec
from asel.stores.records import Address, Record, Rejected, environment_digest
from asel.stores.rejections import Rejections
from asel.stores.summaries import RecordSummary
from asel.stores.transfer import Imported
from asel.tuning.outcomes import TuneReport

__all__ = ["PersistentCache", "default_root"]

logger = logging.getLogger("asel")
_NAMES = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@+-]{0,127}")


class PersistentCache(ConfigStoreDefaults[Cfg]):
    """Keeps configs for other processes and later runs.

    `path` is a directory, a `*.json` document, a `redis://`, `rediss://` or `jax://` URL, or a store; without it,
    a directory named `opname` under `ASEL_CACHE_DIR` or the platform's cache directory. `shipped` are
    stores that are only read, for keys that `path` has no record of. `async with` keeps connections open; everything
    also works without it.

    Configs are written by `dumper`, or in pydantic's JSON form of dataclasses, models, enum members and JSON values.
    They are read by `loader`, or as `cfg_type`, which is then the only type that the cache takes. With neither, one
    cache serves any number of kernels: a selector gets a config as the kernel's own candidate or, if it equals none, as
    the type of the kernel's heuristic and candidates; a record that may be either of two candidates is rejected. `get`,
    which has no kernel, returns JSON values. `loader` and `dumper` are called in threads.
    """

    has_claims = True
    can_withdraw = True

    def __init__(
        self,
        opname: str,
        path: Any = None,
        loader: Callable[[Any], Cfg] | None = None,
        dumper: Callable[[Cfg], Any] | None = None,
        cfg_type: type[Cfg] | None = None,
        *,
        shipped: Iterable[Any] = (),
    ) -> None:
        if isinstance(opname, str) and opname.endswith(".json") and (path is None or callable(path)):
            # PersistentCache("/path/to/cache.json", loader, dumper), as ejKernel's documentation shows.
            opname, path, loader, dumper = Path(opname).stem, opname, path or loader, loader if path else dumper
        elif not isinstance(opname, str) or not _NAMES.fullmatch(opname):
            shown = "a URL" if ":/" in str(opname) else repr(opname)  # a URL may have a password in it
            raise InvalidRequestError(
                f"PersistentCache: opname, {shown}, must be a plain name of letters, digits and ._@+-; "
                "pass a location as path="
            )
        if isinstance(shipped, str | bytes | os.PathLike):
            raise InvalidRequestError("PersistentCache: shipped must be a list of locations, not a single one")
        self.opname = opname
        self.store: Store = open_store(default_root() / opname if path is None else path)
        self.shipped: tuple[Store, ...] = tuple(open_store(location, read_only=True) for location in shipped)
        self._codec: Codec[Cfg] = Codec(loader, dumper, cfg_type)
        self._rejections = Rejections()
        self._warned: set[Address] = set()
        self._records: RecordCodec[Cfg] = RecordCodec(self._codec, self.path)
        self._tunes = TuneIndex()
        for store in self._layers:
            store.on_rejected = self._rejections.report

    def __repr__(self) -> str:
        return f"PersistentCache({self.opname!r}, {self.path!r})"

    @property
    def path(self) -> str:
        """The location of the records, without user name and password."""
        return redact(self.store.location)

    @property
    def changes_together(self) -> bool:  # type: ignore[override]
        return bool(getattr(self.store, "changes_together", False))

    @property
    def _layers(self) -> tuple[Store, ...]:
        return (self.store, *self.shipped)

    # For users.

    async def get(self, device: str, op_id: str, call_key: str) -> Cfg | None:
        """Return the newest config of a key, tuned or put.

        Raises:
            StoreError: the store did not answer.
        """
        key = CacheKey(device, op_id, call_key)
        for store in self._layers:
            stored = await self._newest([record async for record in store.records(key)])
            if stored is not None:
                return stored.cfg
        return None

    async def put(self, device: str, op_id: str, call_key: str, cfg: Cfg) -> None:
        """Store a config, replacing any that its key has.

        Raises:
            InvalidRequestError: it cannot be stored; nothing was changed.
            StoreError: the store failed.
        """
        key = CacheKey(device, op_id, call_key)
        record = await run_in_thread("writing a config", partial(self._records.of_config, key, cfg))
        await self.store.put(record, replace=True)
        older = [other async for other in self.store.records(record.key) if other.address != record.address]
        for other in older:
            await self.store.delete(other.address, expected=other)

    # For a selector.

    async def find(self, query: StoreQuery[Cfg]) -> Stored[Cfg] | None:
        """Return the record for key, checksum and environment; or a user's put; or another environment's record."""
        here = environment_digest(query.environment)
        for store in self._layers:
            exact = await store.get(Address(query.key, query.checksum, here))
            if exact is not None and (stored := await self._newest([exact], query.among)) is not None:
                return stored
            others = [record async for record in store.records(query.key) if record != exact]
            put = [record for record in others if not record.checksum and not record.environment]
            elsewhere = [record for record in others if record.checksum == query.checksum and not query.exact]
            if (stored := await self._newest(put, query.among)) is not None:
                return stored
            if (stored := await self._newest(elsewhere, query.among)) is not None:
                return replace(stored, foreign=True)
        return None

    async def keep(self, report: TuneReport[Cfg], *, replace: bool, claim: Claim | None = None) -> Stored[Cfg]:
        """Store a tune's result; if another writer was first, return that writer's."""
        among = tuple(outcome.cfg for outcome in report.outcomes)
        record = await run_in_thread("writing a config", partial(self._records.of_tune, report))
        kept = await self.store.put(record, replace=replace, claim=claim)
        self._tunes.add(RecordSummary.of(record))
        if kept == record:
            return Stored(report.winner, report, record=record)
        stored = await self._newest([kept], among)
        if stored is None:  # this process cannot use it
            await self.store.put(record, replace=True)
            return Stored(report.winner, report, record=record)
        return self._adopted(stored, record)

    def claim(self, query: StoreQuery[Cfg], wait_s: float, anew: bool) -> AbstractAsyncContextManager[Claim]:
        address = Address(query.key, query.checksum, environment_digest(query.environment))
        return self.store.claim(address, wait_s=wait_s, anew=anew)

    def read(self, record: Record, query: StoreQuery[Cfg]) -> Stored[Cfg] | None:
        read = self._records.stored(record, query.among)
        if not isinstance(read, Rejected):
            return read
        self._rejections.report_once(record.address, record.created, read)
        return None

    async def reports(self, query: StoreQuery[Cfg]) -> list[TuneReport[Cfg]]:
        """Return the reports of earlier tunes of a key, with any candidates, oldest first."""
        records = [record for store in self._layers async for record in store.records(query.key)]
        records.sort(key=lambda record: record.created)
        return await self._reports(records, query.among)

    async def _reports(self, records: list[Record], among: tuple[Cfg, ...]) -> list[TuneReport[Cfg]]:
        def read() -> list[TuneReport[Cfg]]:
            found = (self._records.report(record, among) for record in records)
            return [report for report in found if report is not None]

        return await run_in_thread("reading reports", read)

    async def summaries(self, device: str) -> AsyncGenerator[list[RecordSummary]]:
        """Give the summary of every record of a device, shipped ones included, a batch at a time.

        A shipped record is left out if the store itself has one for the same key and checksum.
        """
        own: set[tuple[CacheKey, str]] = set()
        for store in self._layers:
            async with aclosing(optional_method(store, "scan")()) as batches:
                async for lines in batches:
                    batch = [line.summary for line in lines if line.summary.key.device == device]
                    for summary in batch:
                        self._tunes.add(summary)
                    if store is self.store:
                        own.update((summary.key, summary.checksum) for summary in batch if self.shipped)
                    else:
                        batch = [one for one in batch if own.isdisjoint(((one.key, one.checksum), (one.key, "")))]
                    if batch:
                        yield batch
        self._tunes.note_listing(device)

    def read_summary(self, summary: RecordSummary, query: StoreQuery[Cfg]) -> Stored[Cfg] | None:
        """Return the config of a summarized record, without a report. Runs in the calling thread, `loader` included."""
        value = strict_json.loads(summary.cfg_json)
        cfg = self._records.config(summary.key, summary.checksum, value, query.among)
        if not isinstance(cfg, Rejected):
            foreign = not summary.is_user_put and dict(summary.environment) != dict(query.environment)
            return Stored(cfg, foreign=foreign)
        self._rejections.report_once(summary.address, summary.created, cfg)
        return None

    async def earlier_tunes(self, query: StoreQuery[Cfg], limit: int) -> list[TuneReport[Cfg]]:
        """Return the reports of the same kernel, device and software for other calls, newest first.

        The store is listed once a minute at most; a run of `summaries` counts as a listing.
        """
        if not self._tunes.is_fresh(query.key.device):
            async with aclosing(self.summaries(query.key.device)) as batches:
                async for _ in batches:
                    pass
        records = []
        for address in self._tunes.newest(query.key, query.environment, limit):
            for store in self._layers:
                if (record := await store.get(address)) is not None:
                    records.append(record)
                    break
        return await self._reports(records, query.among)

    async def withdraw(self, stored: Stored[Cfg]) -> bool:
        """Remove a record that was found, unless another has replaced it; return whether it was removed."""
        if stored.record is None:
            return False
        return await self.store.delete(stored.record.address, expected=stored.record)

    def rejections_to(self, listener: Callable[[Rejected], object]) -> AbstractAsyncContextManager[None]:
        """Call `listener` with each record that has to be rejected, while the block runs."""
        return self._rejections.to(listener)

    # Moving and removing records.

    async def records(self) -> AsyncIterator[Record]:
        """Give every record of the store, without shipped ones."""
        async for record in self.store.records():
            yield record

    async def export(self, filter: Callable[[Record], bool] | None = None) -> bytes:
        """Return the records as a document: JSON text, to import elsewhere or to ship as a `*.json` file.

        `export_to` writes any number of records to a file without holding them all in memory.
        """
        return await transfer.export(self.store, filter)

    async def export_to(self, path: str | os.PathLike[str], filter: Callable[[Record], bool] | None = None) -> int:
        """Write the records to a file as a document, replacing the file; return their number.

        Raises:
            InvalidRequestError: the file is the store itself.
            StoreError: the store could not be read, or the file could not be written.
        """
        return await transfer.export_to(self.store, path, filter)

    async def import_(self, document: bytes | Mapping[str, Any] | str | os.PathLike[str]) -> Imported:
        """Import a document: exported, parsed by `json.load`, or the path of a file with one.

        Existing records do not change, so importing twice changes nothing. A bad record is skipped alone.

        Raises:
            InvalidRequestError: it is not a document.
        """
        return await transfer.import_(self.store, document, self._codec.load)

    async def stats(self) -> StoreStats:
        """Return the numbers of records, bad files, locks and leftovers."""
        return await optional_method(self.store, "stats")()  # type: ignore[no-any-return]

    async def prune(
        self,
        predicate: Callable[[Record], bool] | None = None,
        *,
        older_than: float | datetime.timedelta | None = None,
        not_environment: Mapping[str, str] | None = None,
        dry_run: bool = False,
    ) -> int:
        """Delete the records that meet all of the conditions and return their number; with `dry_run` only count them.

        `older_than` is an age in seconds. `not_environment` has some or all of the entries of `asel.environment()`, and
        is met by records measured with other software: `{"jax": "0.10.2"}` is met by those of all other versions of
        JAX. A config that a user put was not measured, and does not meet it.

        Raises:
            InvalidRequestError: a condition is missing or mistyped, such as a version that neither a record nor this
                process has; nothing was deleted.
        """
        return await removal.prune(self.store, predicate, older_than, not_environment, dry_run)

    # Connections.

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            for store in self._connected:
                await stack.enter_async_context(store)
            stack.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        for store in reversed(self._connected):
            await store.__aexit__(None, None, None)

    @property
    def _connected(self) -> list[AbstractAsyncContextManager[Any]]:
        return [store for store in self._layers if isinstance(store, AbstractAsyncContextManager)]

    # Records as configs.

    async def _newest(self, records: list[Record], among: tuple[Cfg, ...] = ()) -> Stored[Cfg] | None:
        """Return the newest record that can be used, and report the newer ones that cannot."""
        newest_first = sorted(records, key=lambda record: record.created, reverse=True)
        for record in newest_first:
            read = await run_in_thread("reading a config", partial(self._records.stored, record, among))
            if not isinstance(read, Rejected):
                return read
            self._rejections.report_once(record.address, record.created, read)
        return None

    def _adopted(self, stored: Stored[Cfg], ours: Record) -> Stored[Cfg]:
        assert stored.record is not None
        if stored.record.writer != ours.writer:
            logger.debug("%s was tuned by another process first; its config is adopted", ours.key)
            return replace(stored, adopted=True, conflict="key_out_of_sync")
        if stored.record.cfg != ours.cfg and ours.address not in self._warned:
            self._warned.add(ours.address)
            logger.warning(
                "%s was tuned twice in this process, first %s and then %s; the first result is kept. "
                "Share one ConfigCache between selectors, or use retune.",
                *(ours.key, stored.record.cfg, ours.cfg),
            )
        return replace(stored, adopted=True, conflict="duplicated_key")


def default_root() -> Path:
    """Return the directory of caches without a `path`, each in a folder named after its operation."""
    return Path(os.environ.get("ASEL_CACHE_DIR") or platformdirs.user_cache_dir("asel", appauthor=False))
