"""Converts records to configs and reports, and back."""

from __future__ import annotations

import logging
import os
import time
import uuid
from contextlib import suppress
from dataclasses import replace
from typing import Any, Generic

from asel.errors import InvalidRequestError
from asel.kernels.candidates import same_config
from asel.kernels.kernel import Cfg
from asel.kernels.keys import CacheKey
from asel.redaction import redact
from asel.stores import strict_json
from asel.stores.codec import Codec
from asel.stores.config_store import Stored
from asel.stores.records import MAX_BYTES, Record, RecordError, Rejected
from asel.tuning.outcomes import Skipped, TuneReport

__all__ = ["RecordCodec"]

logger = logging.getLogger("asel")
# Above this number of candidates, a record leaves out those that the search did not try: it would have megabytes.
_MAX_OUTCOMES = 2000
_PROCESS = uuid.uuid4().hex[:12]


def _writer() -> str:
    return f"{_PROCESS}-{os.getpid()}"  # a forked child is another writer


class RecordCodec(Generic[Cfg]):
    """Makes records and reads them. Everything here may call a user's functions, and runs in a thread."""

    def __init__(self, codec: Codec[Cfg], location: str) -> None:
        self._codec = codec
        self._location = location

    def of_config(self, key: CacheKey, cfg: Cfg) -> Record:
        """Return the record of a config that a user puts.

        Raises:
            InvalidRequestError: the config cannot be stored.
        """
        return Record(key=key, cfg=self._codec.dump(cfg), environment={}, created=time.time(), writer=_writer())

    def of_tune(self, report: TuneReport[Cfg]) -> Record:
        """Return the record of a tune.

        Raises:
            InvalidRequestError: the winner cannot be stored.
        """
        return Record(
            key=report.key,
            cfg=self._codec.dump(report.winner),
            checksum=report.checksum,
            environment=dict(report.environment),
            report=self._report_as_json(report),
            created=time.time(),
            seconds=report.seconds,
            writer=_writer(),
        )

    def _report_as_json(self, report: TuneReport[Cfg]) -> dict[str, Any] | None:
        if len(report.outcomes) > _MAX_OUTCOMES:
            report = replace(report, outcomes=tuple(o for o in report.outcomes if not isinstance(o, Skipped)))
        try:
            text = report.to_json(self._codec.dump)
        except InvalidRequestError as error:  # a losing config cannot be stored; the winner can
            logger.debug("stored without its report: %s", redact(error))
            return None
        if len(text) > MAX_BYTES // 2:  # compiler errors may have any length
            logger.debug("stored without its report, which has %d bytes", len(text))
            return None
        facts: dict[str, Any] = strict_json.loads(text)
        return facts

    def config(self, key: CacheKey, checksum: str, value: Any, among: tuple[Cfg, ...]) -> Cfg | Rejected:
        """Return a record's config, which has to be one of the kernel's candidates unless a user put it."""
        try:
            cfg = self._codec.reader(among)(value)
        except RecordError as error:
            return Rejected(f"{self._location} ({key.op_id})", redact(error), key)
        if checksum and among and not self._is_candidate(cfg, value, among):
            reason = f"its config, {value!r:.200}, is not a candidate of the kernel"
            return Rejected(f"{self._location} ({key.op_id})", reason, key)
        return cfg

    def stored(self, record: Record, among: tuple[Cfg, ...]) -> Stored[Cfg] | Rejected:
        """Return a record as the stored config that a chain works with."""
        cfg = self.config(record.key, record.checksum, record.cfg, among)
        return cfg if isinstance(cfg, Rejected) else Stored(cfg, self.report(record, among), record=record)

    def report(self, record: Record, among: tuple[Cfg, ...]) -> TuneReport[Cfg] | None:
        """Return the report that came with a record, if it can be read."""
        if record.report is None:
            return None
        try:
            return TuneReport.from_facts(record.report, self._codec.reader(among))
        except (RecordError, ValueError, TypeError, KeyError, AttributeError) as error:
            logger.debug("the report of a record of %s cannot be read: %s", record.key, redact(error))
            return None

    def _is_candidate(self, cfg: Cfg, value: Any, among: tuple[Cfg, ...]) -> bool:
        if any(cfg is one or same_config(cfg, one) for one in among):
            return True
        for one in among:  # a loader may return another type than the candidate's, so their JSON is compared
            with suppress(InvalidRequestError):
                if strict_json.dumps(self._codec.dump(one)) == strict_json.dumps(value):  # 1 and 1.0 differ
                    return True
        return False
