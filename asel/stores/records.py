"""What a store keeps: a config, and all that is known of how it was found.

A record is one line of JSON that ends with a digest of all the rest:

    {"asel":2,"cfg":{"m":64},...,"writer":"...","sha256":"9f2c41..."}

Whatever is read is checked before it is used, and nothing in it is ever executed. A record that does not fit, or
does not match its digest, is rejected with the reason: a flipped bit costs one record and never changes an answer.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Required

from pydantic import ConfigDict, JsonValue, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from asel.errors import InvalidRequestError
from asel.keys import CacheKey
from asel.redaction import redact
from asel.stores import strict_json

__all__ = [
    "MOST_BYTES",
    "SCHEMA",
    "Address",
    "OtherSchemaError",
    "Record",
    "RecordError",
    "Rejected",
    "environment_digest",
    "key_digest",
    "log_rejected",
    "schema_name",
]

# The version of the format. Each version keeps its records apart from the others' and leaves theirs alone.
SCHEMA = 2
# A record of a thousand candidates with a hundred samples each is about half of this.
MOST_BYTES = 4 << 20
MOST_DEPTH = 64
logger = logging.getLogger("asel")


class RecordError(ValueError):
    """The text is not a record; the message says why."""


class OtherSchemaError(RecordError):
    """The record was written by another version of asel: not for us to read, nor to move away."""


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


def schema_name() -> str:
    """Return what the places of this version's records and claims are called, apart from other versions'."""
    return f"schema-{SCHEMA}"


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
            line = self.line()
            if Record.from_json(line) != self:
                raise RecordError("it does not come back from JSON as it was")
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequestError(f"a record of {self.key.op_id!r} cannot be stored: {error}") from error
        return line

    def line(self) -> str:
        """Return the record as one line of JSON, unchecked: for one that was read."""
        body = strict_json.dumps(self._facts())
        return f"{body[:-1]}{_MARK}{_sha256(body)}{_END}"

    def to_facts(self) -> dict[str, Any]:
        """Return the record as parsed JSON, digest included. Its nested values are the record's own."""
        facts = self._facts()
        return {**facts, "sha256": _sha256(strict_json.dumps(facts))}

    def _facts(self) -> dict[str, Any]:
        return {"asel": SCHEMA, **{name: getattr(self, name) for name in _FIELDS}, "key": list(self.key)}

    @classmethod
    def from_json(cls, text: str | bytes) -> Record:
        """Return the record that was written.

        Raises:
            OtherSchemaError: it is of another version.
            RecordError: it is not a record, or was changed since it was written.
        """
        if len(text) > MOST_BYTES:
            raise RecordError(f"it has {len(text):,} bytes, and a record at most {MOST_BYTES:,}")
        try:
            text = text.decode() if isinstance(text, bytes) else text
            return cls._checked(strict_json.loads(text), is_intact=_ends_with_own_digest(text.strip()))
        except RecordError:
            raise
        except (ValueError, RecursionError) as error:
            raise RecordError(f"it is not JSON: {error or 'nested too deeply'}") from error

    @classmethod
    def from_facts(cls, facts: Any) -> Record:
        """Return the record that some parsed JSON is, whichever way it was spelt.

        Raises:
            OtherSchemaError: it is of another version.
            RecordError: it is not a record, or was changed since it was written.
        """
        return cls._checked(facts, is_intact=False)

    @classmethod
    def _checked(cls, facts: Any, *, is_intact: bool) -> Record:
        if not isinstance(facts, dict):
            raise RecordError(f"it is a JSON {type(facts).__name__}, and a record is an object")
        version = facts.get("asel")
        if type(version) is not int:
            raise RecordError(f"it has version {version!r:.40}, which is not a number")
        if version != SCHEMA:
            raise OtherSchemaError(f"it has version {version}, and this asel reads version {SCHEMA}")
        if _is_deeper(facts, MOST_DEPTH):
            raise RecordError(f"it is nested more than {MOST_DEPTH} deep")
        given = {name: value for name, value in facts.items() if name != "sha256"}
        if "sha256" not in facts:
            raise RecordError("it has no sha256, the digest that every record carries")
        if not is_intact and not _matches(given, facts["sha256"]):
            raise RecordError(
                "its contents do not match its digest: it was damaged, or edited by hand "
                "(use PersistentCache.put to change a config)"
            )
        if isinstance(given.get("key"), list):
            given["key"] = tuple(given["key"])
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


# How a line ends: the digest of all before it, as if the object were closed there.
_MARK, _END = ',"sha256":"', '"}'
_TAIL = len(_MARK) + 64 + len(_END)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _ends_with_own_digest(line: str) -> bool:
    """Tell whether a line is as it was written. One that is spelt another way may be intact, too."""
    body, tail = f"{line[:-_TAIL]}}}", line[-_TAIL:]
    return tail.startswith(_MARK) and tail[len(_MARK) : -len(_END)] == _sha256(body)


def _matches(facts: dict[str, Any], digest: Any) -> bool:
    try:
        return bool(digest == _sha256(strict_json.dumps(facts)))
    except (TypeError, ValueError, RecursionError) as error:  # of parsed JSON that somebody else parsed
        raise RecordError(f"it is not JSON: {error}") from error


_FIELDS = ("key", "cfg", "checksum", "environment", "report", "created", "seconds", "writer")


class _Facts(TypedDict, total=False):
    """A record as it is read, before it is checked."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)  # type: ignore[misc]

    asel: int
    key: Required[CacheKey]
    cfg: Required[Any]  # already parsed: a second look would find nothing else
    checksum: str
    environment: Required[dict[str, str]]
    report: dict[str, Any] | None
    created: Required[float]
    seconds: float
    writer: str


_ADAPTER = TypeAdapter(_Facts)


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
