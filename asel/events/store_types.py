"""Events of a store: reads, writes, claims, rejected records, outages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from asel.events.types import Event, Severity
from asel.redaction import redact

if TYPE_CHECKING:
    from asel.kernels.keys import CacheKey

__all__ = ["ClaimWait", "Persisted", "RecordRejected", "StoreFailed", "StoreRead", "StoreRecovered", "StoreRetry"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Persisted(Event):
    """A tune's result reached the store. If `adopted`, the store already had a record, whose config is used."""

    name: ClassVar[str] = "persisted"
    tune_id: str
    cfg: Any
    adopted: bool
    conflict: Literal["duplicated_key", "key_out_of_sync"] | None = None
    """Whether this process or another wrote that record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRead(Event):
    """The store answered a read."""

    name: ClassVar[str] = "store_read"
    found: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRejected(Event):
    """The store holds a value that is not a valid record for this key. It counts as a miss."""

    name: ClassVar[str] = "record_rejected"
    severity: ClassVar[Severity] = "warning"
    where: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimWait(Event):
    """A tune asked a shared store for the right to tune its key.

    `held`: this process tunes. `record`: another process's result arrived in the meantime. `timed_out`: the holder
    of the claim may be stuck, so this process tunes as well.
    """

    name: ClassVar[str] = "claim_wait"
    waited_s: float
    outcome: Literal["held", "record", "timed_out"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRecovered(Event):
    """The store works again, after an outage of `failing_s` seconds."""

    name: ClassVar[str] = "store_recovered"
    severity: ClassVar[Severity] = "info"
    operation: str
    failing_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFailed(Event):
    """An outage of the store began; its tier declines. Emitted once for each outage."""

    name: ClassVar[str] = "store_error"
    severity: ClassVar[Severity] = "warning"
    operation: str
    error_type: str
    message: str

    @classmethod
    def of(cls, key: CacheKey, operation: str, start: float, end: float, error: Exception) -> StoreFailed:
        kind = type(error).__name__
        return cls(key=key, start=start, end=end, operation=operation, error_type=kind, message=redact(error))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRetry(StoreFailed):
    """The store was tried during an outage, and failed again."""

    name: ClassVar[str] = "store_retry"
    severity: ClassVar[Severity] = "debug"
