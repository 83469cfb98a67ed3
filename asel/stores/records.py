"""What a store keeps: a config, and all that is known of how it was found.

A record is plain JSON. Whatever is read is checked before it is believed, and nothing in it is ever
executed: a record that does not fit is rejected with the reason.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Required

from pydantic import ConfigDict, JsonValue, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from asel.errors import InvalidRequestError
from asel.keys import CacheKey
from asel.redaction import redact

__all__ = [
    "MOST_BYTES",
    "SCHEMA",
    "Address",
    "Record",
    "RecordError",
    "Rejected",
    "environment_digest",
    "key_digest",
    "log_rejected",
]

SCHEMA = 1
# A record of a thousand candidates with a hundred samples each is about half of this.
MOST_BYTES = 4 << 20
MOST_DEPTH = 64
logger = logging.getLogger("asel")


class RecordError(ValueError):
    """What was read is no record; the message says why."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """Something in a store that could not be used: where it is, whose it would have been, and why not."""

    where: str
    reason: str
    key: CacheKey | None = None


def log_rejected(rejected: Rejected) -> None:
    """Tell the log, where nobody else wants to know."""
    logger.warning("a record at %s was rejected: %s", redact(rejected.where), redact(rejected.reason))


class Address(NamedTuple):
    """What a record is kept under: everything that can change the answer.

    What a user puts without a tune has neither checksum nor environment.
    """

    key: CacheKey
    checksum: str = ""
    environment: str = ""

    @property
    def digest(self) -> str:
        """The same text for equal addresses, safe in a file name or a Redis key."""
        return ".".join((self.key_digest, _digest(self.checksum)[:16], _digest(self.environment)[:16]))

    @property
    def key_digest(self) -> str:
        """What the digests of all addresses of one key begin with."""
        return key_digest(self.key)


def key_digest(key: CacheKey) -> str:
    return _digest(*key)[:32]


def environment_digest(environment: Mapping[str, str]) -> str:
    """Return the name of an environment; nothing is known of an empty one, and it has none."""
    return _digest(*(text for pair in sorted(environment.items()) for text in pair)) if environment else ""


def _digest(*texts: str) -> str:
    spelt = json.dumps(texts, separators=(",", ":"))  # lone surrogates and all
    return hashlib.sha256(spelt.encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A config as JSON, with its provenance."""

    key: CacheKey
    cfg: JsonValue
    checksum: str = ""
    environment: dict[str, str]
    """The software it was measured with."""
    report: dict[str, JsonValue] | None = None
    """The whole tune, as `TuneReport.to_json` has it."""
    created: float
    """Seconds since the epoch."""
    seconds: float = 0.0
    """How long the tune took."""
    writer: str = ""
    """The process that wrote it."""

    @property
    def address(self) -> Address:
        return Address(self.key, self.checksum, environment_digest(self.environment))

    def to_json(self) -> str:
        """Return the record as one line of JSON that is certain to be read again.

        Raises:
            InvalidRequestError: something in it has no place in JSON, or it is too large.
        """
        try:
            text = self.line()
            if Record.from_json(text) != self:
                raise RecordError("it does not come back from JSON as it was")
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequestError(f"a record of {self.key.op_id!r} cannot be stored: {error}") from error
        return text

    def line(self) -> str:
        """Return the record as one line of JSON, unchecked: for one that was read before."""
        facts: dict[str, Any] = {"asel": SCHEMA, **{name: getattr(self, name) for name in _FIELDS}}
        return json.dumps(facts, sort_keys=True, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Record:
        """Return the record that was written.

        Raises:
            RecordError: it is none, or of another version.
        """
        if len(text) > MOST_BYTES:
            raise RecordError(f"it has {len(text):,} bytes, and a record at most {MOST_BYTES:,}")
        try:
            facts = json.loads(text, parse_constant=_refuse, parse_float=_finite)
        except (ValueError, RecursionError) as error:
            raise RecordError(f"it is not JSON: {error or 'nested too deeply'}") from error
        return cls.from_facts(facts)

    @classmethod
    def from_facts(cls, facts: Any) -> Record:
        """Return the record that some parsed JSON is.

        Raises:
            RecordError: it is none, or of another version.
        """
        if not isinstance(facts, dict):
            raise RecordError(f"it is a JSON {type(facts).__name__}, and a record is an object")
        version = facts.get("asel")
        if version != SCHEMA or isinstance(version, bool):
            raise RecordError(f"it has version {version!r}, and this asel reads version {SCHEMA}")
        if _is_deeper(facts, MOST_DEPTH):
            raise RecordError(f"it is nested more than {MOST_DEPTH} deep")
        given = {**facts, "key": tuple(facts["key"])} if isinstance(facts.get("key"), list) else facts
        try:
            found: dict[str, Any] = {**_ADAPTER.validate_python(given)}
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"])) or "the record"
            raise RecordError(f"{where}: {first['msg']}") from error
        except RecursionError as error:
            raise RecordError("it is nested too deeply") from error
        del found["asel"]
        return cls(**found)


_FIELDS = ("key", "cfg", "checksum", "environment", "report", "created", "seconds", "writer")


class _Facts(TypedDict, total=False):
    """A record as it is read, before it is believed."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)  # type: ignore[misc]

    asel: int
    key: Required[CacheKey]
    cfg: Required[Any]  # JSON as it was parsed: looking through all of it again would find nothing else
    checksum: str
    environment: Required[dict[str, str]]
    report: dict[str, Any] | None
    created: Required[float]
    seconds: float
    writer: str


_ADAPTER = TypeAdapter(_Facts)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not a JSON number")


def _finite(digits: str) -> float:
    number = float(digits)
    return number if math.isfinite(number) else _refuse(digits)


def _is_deeper(value: Any, most: int) -> bool:
    level = [value]
    for _ in range(most):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if type(inner) in (dict, list)
        ]
        if not level:
            return False
    return True
