"""Records: a config as a store keeps it, with its provenance.

A record is one line of JSON that ends with a digest of all the rest:

    {"asel":2,"cfg":{"m":64},...,"writer":"...","sha256":"9f2c41..."}

Everything read is checked before it is used, and nothing in it is ever executed. A record that does not fit, or
does not match its digest, is rejected with the reason: a flipped bit costs one record and never changes an answer.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Required

from typing_extensions import TypedDict

from asel.errors import InvalidRequestError
from asel.kernels.keys import CacheKey
from asel.redaction import redact
from asel.stores import strict_json

if TYPE_CHECKING:
    from pydantic import JsonValue, TypeAdapter

__all__ = [
    "MAX_BYTES",
    "MAX_DEPTH",
    "SCHEMA",
    "Address",
    "OtherSchemaError",
    "Record",
    "RecordError",
    "Rejected",
    "ends_with_own_digest",
    "environment_digest",
    "is_deeper",
    "key_digest",
    "log_rejected",
    "schema_name",
    "sha256",
]

# The version of the format. Each version keeps its records apart from the others' and leaves theirs alone.
SCHEMA = 2
# A record of a thousand candidates with a hundred samples each is about half of this.
MAX_BYTES = 4 << 20
MAX_DEPTH = 64
logger = logging.getLogger("asel")


class RecordError(ValueError):
    """The text is not a record; the message says why."""


class OtherSchemaError(RecordError):
    """The record was written by another version of asel: not for us to read, nor to move away."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """An entry of a store that could not be used: its location, the reason, and its key if known."""

    where: str
    reason: str
    key: CacheKey | None = None


def log_rejected(rejected: Rejected) -> None:
    """Log a rejected record: what stores do until a listener is set."""
    logger.warning("a record at %s was rejected: %s", redact(rejected.where), redact(rejected.reason))


class Address(NamedTuple):
    """The address of a record: everything that can change the answer.

    A config that a user puts has neither checksum nor environment.
    """

    key: CacheKey
    checksum: str = ""
    environment: str = ""

    @property
    def digest(self) -> str:
        """The same text for equal addresses, safe in a file name or a Redis key."""
        return f"{self.key_digest}.{_short_digest(self.checksum)}.{_short_digest(self.environment)}"

    @property
    def key_digest(self) -> str:
        """The common prefix of the digests of all addresses of one key."""
        return key_digest(self.key)


def schema_name() -> str:
    """Return the name that keeps this version's records and claims apart from other versions'."""
    return f"schema-{SCHEMA}"


def key_digest(key: CacheKey) -> str:
    return _digest(*key)[:32]


def environment_digest(environment: Mapping[str, str]) -> str:
    """Return the digest of an environment; empty if the environment is unknown."""
    return _digest(*(text for pair in sorted(environment.items()) for text in pair)) if environment else ""


def _digest(*texts: str) -> str:
    joined = _TEXTS.encode(texts)  # escapes lone surrogates, too
    return hashlib.sha256(joined.encode()).hexdigest()


_TEXTS = json.JSONEncoder(separators=(",", ":"))


@functools.lru_cache(maxsize=4096)
def _short_digest(text: str) -> str:
    return _digest(text)[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A config as JSON, with its provenance."""

    key: CacheKey
    cfg: JsonValue
    checksum: str = ""
    environment: dict[str, str]
    """The software it was measured with."""
    report: dict[str, JsonValue] | None = None
    """The report of the tune, as `TuneReport.to_json` writes it."""
    created: float
    """Seconds since the epoch."""
    seconds: float = 0.0
    """How long the tune took."""
    writer: str = ""
    """The process that wrote it."""

    @property
    def call(self) -> str:
        """The readable call, from the tune's report; empty for a config that a user put."""
        call = None if self.report is None else self.report.get("call")
        return call if isinstance(call, str) else self.key.call

    @property
    def address(self) -> Address:
        return Address(self.key, self.checksum, environment_digest(self.environment))

    def to_json(self) -> str:
        """Return the record as one line of JSON, and check that it can be read again.

        Raises:
            InvalidRequestError: a value has no JSON form, or the record is too large.
        """
        try:
            line = self.line()
            read = Record.from_json(line)
            if read != self:
                raise RecordError("it is different when it is read again from JSON")
            strict_json.discard(read.report)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequestError(f"a record of {self.key.op_id!r} cannot be stored: {error}") from error
        return line

    def line(self) -> str:
        """Return the record as one line of JSON, unchecked: for a record that was read."""
        body = strict_json.dumps(self._facts())
        return f"{body[:-1]}{_MARK}{sha256(body)}{_END}"

    def to_facts(self) -> dict[str, Any]:
        """Return the record as parsed JSON, digest included. Its nested values are the record's own."""
        facts = self._facts()
        return {**facts, "sha256": sha256(strict_json.dumps(facts))}

    def _facts(self) -> dict[str, Any]:
        return {"asel": SCHEMA, **{name: getattr(self, name) for name in _FIELDS}, "key": list(self.key)}

    @classmethod
    def from_json(cls, text: str | bytes) -> Record:
        """Return the record that was written.

        Raises:
            OtherSchemaError: it is of another version.
            RecordError: it is not a record, or was changed since it was written.
        """
        if len(text) > MAX_BYTES:
            raise RecordError(f"it has {len(text):,} bytes, and a record at most {MAX_BYTES:,}")
        try:
            text = text.decode() if isinstance(text, bytes) else text
            return cls._checked(strict_json.loads(text), is_intact=ends_with_own_digest(text.strip()))
        except RecordError:
            raise
        except (ValueError, RecursionError) as error:
            raise RecordError(f"it is not JSON: {error or 'nested too deeply'}") from error

    @classmethod
    def from_facts(cls, facts: Any) -> Record:
        """Return the record of some parsed JSON, in any formatting.

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
        if is_deeper(facts, MAX_DEPTH):
            raise RecordError(f"it is nested more than {MAX_DEPTH} deep")
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
        found = _validated(given)
        del found["asel"]
        return cls(**found)


# The end of a line: the digest of the text before it, as if the object were closed there.
_MARK, _END = ',"sha256":"', '"}'
_TAIL = len(_MARK) + 64 + len(_END)


# hashlib releases the GIL for pieces of 2,048 bytes and more, for microseconds. A thread that does so every 0.1 ms
# starves the event loop: each release restarts the 5 ms after which the loop may demand the GIL, and the releasing
# thread takes it back before the loop has woken up. Stalls were as long as 790 ms.
_HASH_PIECE_BYTES = 2047


def sha256(text: str) -> str:
    digest, contents = hashlib.sha256(), memoryview(text.encode())
    for start in range(0, len(contents), _HASH_PIECE_BYTES):
        digest.update(contents[start : start + _HASH_PIECE_BYTES])
    return digest.hexdigest()


def ends_with_own_digest(line: str) -> bool:
    """Return whether a line is unchanged since it was written. False for a reformatted line, which may be intact."""
    body, tail = f"{line[:-_TAIL]}}}", line[-_TAIL:]
    return tail.startswith(_MARK) and tail[len(_MARK) : -len(_END)] == sha256(body)


def _matches(facts: dict[str, Any], digest: Any) -> bool:
    try:
        return bool(digest == sha256(strict_json.dumps(facts)))
    except (TypeError, ValueError, RecursionError) as error:  # a caller may pass objects that no JSON parser returns
        raise RecordError(f"it is not JSON: {error}") from error


_FIELDS = ("key", "cfg", "checksum", "environment", "report", "created", "seconds", "writer")


class _Facts(TypedDict, total=False):
    """The fields of a record as parsed JSON, not yet checked."""

    __pydantic_config__ = {"extra": "forbid", "strict": True}  # type: ignore[misc]  # noqa: RUF012

    asel: int
    key: Required[CacheKey]
    cfg: Required[Any]  # any JSON value, so there is nothing to check
    checksum: str
    environment: Required[dict[str, str]]
    report: dict[str, Any] | None
    created: Required[float]
    seconds: float
    writer: str


@functools.cache
def _adapter() -> TypeAdapter[_Facts]:
    from pydantic import TypeAdapter  # takes a tenth of a second, which `import asel` should not

    return TypeAdapter(_Facts)


def _validated(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of a record as a record's fields.

    Raises:
        RecordError: one is missing, unknown, or of the wrong type.
    """
    from pydantic import ValidationError

    try:
        return {**_adapter().validate_python(facts)}
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the record"
        raise RecordError(f"{where}: {first['msg']}") from error
    except RecursionError as error:
        raise RecordError("it is nested too deeply") from error


def is_deeper(value: Any, max_depth: int) -> bool:
    """Return whether some parsed JSON is nested more than `max_depth` deep."""
    layer = [value] if type(value) in (dict, list) else []
    for _ in range(max_depth):
        layer = [
            inner
            for outer in layer
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if type(inner) in (dict, list)
        ]
        if not layer:
            return False
    return True
