"""`PersistentCache`: configs that outlive the process, over any store."""

from __future__ import annotations

import datetime
import logging
import os
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, Self

import platformdirs

from asel import moving
from asel.codec import Codec
from asel.errors import InvalidRequestError
from asel.kernel import Cfg
from asel.keys import CacheKey, alike
from asel.memo import Memo
from asel.moving import Imported
from asel.outcomes import TuneReport
from asel.persistence import Sought, Stored
from asel.redaction import redact
from asel.stores import open_store, strict_json
from asel.stores.protocol import Claim, Store, StoreDefaults, StoreStats
from asel.stores.records import MOST_BYTES, Address, Record, RecordError, Rejected, environment_digest, log_rejected
from asel.threads import run_in_thread

__all__ = ["PersistentCache"]

logger = logging.getLogger("asel")
_NAMES = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@+-]{0,127}")
_PROCESS = uuid.uuid4().hex[:12]


def _writer() -> str:
    return f"{_PROCESS}-{os.getpid()}"  # a forked child is another writer


class PersistentCache(Generic[Cfg]):
    """Keeps configs for other processes and later runs.

    `path` is a directory, a `*.json` document, a `redis://` or `rediss://` URL, or a store; without it,
    a directory named `opname` under `ASEL_CACHE_DIR` or the platform's cache directory. Configs are
    written by `dumper`, or as the dataclass, pydantic model or JSON value they are, and come back by
    `loader`, or as `cfg_type`, or as JSON values; `loader` and `dumper` are called in threads. `shipped` are
    stores that are only read, and only where `path` has nothing. With `async with`, connections stay open
    meanwhile; without it, everything works.
    """

    has_claims = True

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
            # PersistentCache("/path/to/cache.json", loader, dumper), as its ancestor's documentation has it.
            opname, path, loader, dumper = Path(opname).stem, opname, path or loader, loader if path else dumper
        elif not isinstance(opname, str) or not _NAMES.fullmatch(opname):
            shown = "a URL" if ":/" in str(opname) else repr(opname)  # which may have a password in it
            raise InvalidRequestError(
                f"PersistentCache: opname, {shown}, must be a plain name of letters, digits and ._@+-; "
                "pass a location as path="
            )
        if isinstance(shipped, str | bytes | os.PathLike):
            raise InvalidRequestError("PersistentCache: shipped must be a list of locations, not a single one")
        self.opname = opname
        self.store: Store = open_store(_default_root() / opname if path is None else path)
        self.shipped: tuple[Store, ...] = tuple(open_store(location, read_only=True) for location in shipped)
        self._codec: Codec[Cfg] = Codec(loader, dumper, cfg_type)
        self._listeners: list[Callable[[Rejected], object]] = []
        self._warned: set[Address] = set()
        self._told: Memo[bool] = Memo(1024)
        for store in self._layers:
            store.on_rejected = self._reject

    def __repr__(self) -> str:
        return f"PersistentCache({self.opname!r}, {self.path!r})"

    @property
    def path(self) -> str:
        """Where the records are; never with a secret in it."""
        return redact(self.store.location)

    @property
    def _layers(self) -> tuple[Store, ...]:
        return (self.store, *self.shipped)

    # For its users.

    async def get(self, device: str, op_id: str, call_key: str) -> Cfg | None:
        """Return the newest config of a key, however it came about.

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
        """Store a config in the place of whatever is there for its key.

        Raises:
            InvalidRequestError: it cannot be stored; nothing was changed.
            StoreError: the store did not take it.
        """
        record = Record(
            key=CacheKey(device, op_id, call_key),
            cfg=await run_in_thread("writing a config", partial(self._codec.dump, cfg)),
            environment={},
            created=time.time(),
            writer=_writer(),
        )
        await self.store.put(record, replace=True)
        older = [other async for other in self.store.records(record.key) if other.address != record.address]
        for other in older:
            await self.store.delete(other.address, expected=other)

    # For a chain.

    async def find(self, sought: Sought[Cfg]) -> Stored[Cfg] | None:
        """Return the record for key, checksum and environment; else what a user put; else another environment's."""
        here = environment_digest(sought.environment)
        for store in self._layers:
            exact = await store.get(Address(sought.key, sought.checksum, here))
            if exact is not None and (stored := await self._newest([exact], sought.among)) is not None:
                return stored
            others = [record async for record in store.records(sought.key) if record != exact]
            put = [record for record in others if not record.checksum and not record.environment]
            elsewhere = [record for record in others if record.checksum == sought.checksum and not sought.exact]
            if (stored := await self._newest(put, sought.among)) is not None:
                return stored
            if (stored := await self._newest(elsewhere, sought.among)) is not None:
                return replace(stored, foreign=True)
        return None

    async def keep(self, report: TuneReport[Cfg], *, replace: bool, claim: Claim | None = None) -> Stored[Cfg]:
        """Store a tune's result; if another was first, return what it stored."""
        among = tuple(outcome.cfg for outcome in report.outcomes)
        record = await run_in_thread("writing a config", partial(self._record_of, report))
        kept = await self.store.put(record, replace=replace, claim=claim)
        if kept == record:
            return Stored(report.winner, report, record=record)
        stored = await self._newest([kept], among)
        if stored is None:  # it answers nobody who asks as we do
            await self.store.put(record, replace=True)
            return Stored(report.winner, report, record=record)
        return self._adopted(stored, record)

    def claim(self, sought: Sought[Cfg], wait_s: float, anew: bool) -> AbstractAsyncContextManager[Claim]:
        address = Address(sought.key, sought.checksum, environment_digest(sought.environment))
        return self.store.claim(address, wait_s=wait_s, anew=anew)

    def read(self, record: Record, sought: Sought[Cfg]) -> Stored[Cfg] | None:
        return self._told_of(record, self._read(record, sought.among))

    async def reports(self, sought: Sought[Cfg]) -> list[TuneReport[Cfg]]:
        """Return what earlier tunes of a key found, oldest first, whatever they chose among."""
        records = [record for store in self._layers async for record in store.records(sought.key)]
        records.sort(key=lambda record: record.created)

        def read() -> list[TuneReport[Cfg]]:
            found = (self._report(record, sought.among) for record in records)
            return [report for report in found if report is not None]

        return await run_in_thread("reading reports", read)

    async def withdraw(self, stored: Stored[Cfg]) -> bool:
        """Remove a record that proved wrong, if it is still the one that was found; return whether it did."""
        if stored.record is None:
            return False
        return await self.store.delete(stored.record.address, expected=stored.record)

    @asynccontextmanager
    async def told(self, listener: Callable[[Rejected], object]) -> AsyncIterator[None]:
        """Tell `listener` of records that had to be rejected, while the block runs."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    # For whoever moves caches about.

    async def records(self) -> AsyncIterator[Record]:
        """Give every record of the store, shipped ones aside."""
        async for record in self.store.records():
            yield record

    async def export(self, filter: Callable[[Record], bool] | None = None) -> dict[str, Any]:
        """Return the records as a document: JSON, to be imported elsewhere or shipped as a `*.json` file.

        All of them are in memory then: `export_to` writes any number to a file.
        """
        return await moving.export(self.store, filter)

    async def export_to(self, path: str | os.PathLike[str], filter: Callable[[Record], bool] | None = None) -> int:
        """Write the records to a file as a document, in the place of what is there; return how many.

        Raises:
            InvalidRequestError: the file is the store itself.
            StoreError: the store could not be read, or the file not be written.
        """
        return await moving.export_to(self.store, path, filter)

    async def import_(self, document: Mapping[str, Any] | str | os.PathLike[str]) -> Imported:
        """Take in an exported document, or a file with one.

        What is there already stays as it is, so doing it twice changes nothing. A bad record costs itself alone.

        Raises:
            InvalidRequestError: it is not a document.
        """
        return await moving.import_(self.store, document, self._codec.load)

    async def stats(self) -> StoreStats:
        """Return how many records the store has, and what lies in it besides."""
        stats: Callable[[], Any] = getattr(self.store, "stats", None) or partial(StoreDefaults.stats, self.store)
        return await stats()  # type: ignore[no-any-return]

    async def prune(
        self,
        predicate: Callable[[Record], bool] | None = None,
        *,
        older_than: float | datetime.timedelta | None = None,
        not_environment: Mapping[str, str] | None = None,
    ) -> int:
        """Delete the records that any of the conditions names; return how many.

        `older_than` is an age in seconds. `not_environment` names what was measured with other software;
        what a user put was not measured, and stays.
        """
        return await moving.prune(self.store, predicate, older_than, not_environment)

    # Its connections.

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

    # Between records and configs.

    async def _newest(self, records: list[Record], among: tuple[Cfg, ...] = ()) -> Stored[Cfg] | None:
        """Return the newest record that can be used, and report the newer ones that cannot."""
        newest_first = sorted(records, key=lambda record: record.created, reverse=True)
        for record in newest_first:
            read = await run_in_thread("reading a config", partial(self._read, record, among))
            if (stored := self._told_of(record, read)) is not None:
                return stored
        return None

    def _read(self, record: Record, among: tuple[Cfg, ...]) -> Stored[Cfg] | Rejected:
        try:
            cfg = self._codec.reader(among)(record.cfg)
        except RecordError as error:
            return Rejected(f"{self.path} ({record.key.op_id})", redact(error), record.key)
        # What a user put is the user's business; a tune chooses among its candidates.
        if record.checksum and among and not self._is_candidate(cfg, record.cfg, among):
            reason = f"its config, {record.cfg!r:.200}, is not a candidate of the kernel"
            return Rejected(f"{self.path} ({record.key.op_id})", reason, record.key)
        return Stored(cfg, self._report(record, among), record=record)

    def _is_candidate(self, cfg: Cfg, value: Any, among: tuple[Cfg, ...]) -> bool:
        if any(cfg is one or alike(cfg, one) for one in among):
            return True
        for one in among:  # a loader may make something else of it than the candidate it was
            with suppress(InvalidRequestError):
                if strict_json.dumps(self._codec.dump(one)) == strict_json.dumps(value):  # 1 and 1.0 differ
                    return True
        return False

    def _told_of(self, record: Record, read: Stored[Cfg] | Rejected) -> Stored[Cfg] | None:
        """Return what was read, unless it was rejected: each record and reason is reported once."""
        if not isinstance(read, Rejected):
            return read
        told = (record.address, record.created, record.writer, read.reason)
        if self._told.get(told) is None:
            self._told.put(told, True)
            self._reject(read)
        return None

    def _record_of(self, report: TuneReport[Cfg]) -> Record:
        return Record(
            key=report.key,
            cfg=self._codec.dump(report.winner),
            checksum=report.checksum,
            environment=dict(report.environment),
            report=self._spelt(report),
            created=time.time(),
            seconds=report.seconds,
            writer=_writer(),
        )

    def _spelt(self, report: TuneReport[Cfg]) -> dict[str, Any] | None:
        try:
            text = report.to_json(self._codec.dump)
        except InvalidRequestError as error:  # the winner could be stored; that another cannot is no reason not to
            logger.debug("stored without its report: %s", redact(error))
            return None
        if len(text) > MOST_BYTES // 2:  # compilers' errors have no bound
            logger.debug("stored without its report, which has %d bytes", len(text))
            return None
        spelt: dict[str, Any] = strict_json.loads(text)
        return spelt

    def _report(self, record: Record, among: tuple[Cfg, ...]) -> TuneReport[Cfg] | None:
        if record.report is None:
            return None
        try:
            return TuneReport.from_facts(record.report, self._codec.reader(among))
        except (RecordError, ValueError, TypeError, KeyError, AttributeError) as error:
            logger.debug("the report of a record of %s cannot be read: %s", record.key, redact(error))
            return None

    def _adopted(self, stored: Stored[Cfg], ours: Record) -> Stored[Cfg]:
        assert stored.record is not None
        if stored.record.writer != ours.writer:
            logger.debug("%s was tuned by another process first; its config is adopted", ours.key)
            return replace(stored, adopted=True, conflict="key_out_of_sync")
        if stored.record.cfg != ours.cfg and ours.address not in self._warned:
            self._warned.add(ours.address)
            logger.warning(
                "%s was tuned twice in this process, with %s and then %s; the first stays. "
                "Share one ConfigCache between chains, or use retune.",
                *(ours.key, stored.record.cfg, ours.cfg),
            )
        return replace(stored, adopted=True, conflict="duplicated_key")

    def _reject(self, rejected: Rejected) -> None:
        for listener in list(self._listeners) or [log_rejected]:
            listener(rejected)


def _default_root() -> Path:
    return Path(os.environ.get("ASEL_CACHE_DIR") or platformdirs.user_cache_dir("asel", appauthor=False))
