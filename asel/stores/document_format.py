"""A document of records: one JSON object, sorted, with a record a line.

    {"asel": 2, "records": [
    {...},
    {...}
    ]}

Each line can be read alone: damage to one affects no other. Lines of other versions of the format are kept
unchanged. A document that was reformatted can be read as well.
"""

from __future__ import annotations

import heapq
import io
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice, pairwise
from typing import IO, Any, NamedTuple, TypeVar

from asel.stores import records, strict_json
from asel.stores.protocol import READ_BATCH
from asel.stores.record_stream import NotJson, RecordStream
from asel.stores.records import MAX_BYTES, Address, OtherSchemaError, Record, RecordError, Rejected

__all__ = [
    "FOOTER",
    "Contents",
    "Found",
    "Line",
    "bare_lines",
    "compose",
    "in_order",
    "in_pieces",
    "is_header",
    "parse",
    "read_facts",
    "read_lines",
    "read_reformatted",
    "records_in",
]

Key = TypeVar("Key", bound=tuple[Any, ...])

FOOTER = b"\n]}\n"
# Joining this much takes a tenth of a millisecond, and writing it one call.
_PIECE_BYTES = 1 << 18
# The largest document that is read as a whole, because it does not begin as asel's documents do.
_MAX_WHOLE_BYTES = 256 << 20
# The largest header of a document.
_MAX_HEADER_BYTES = 1 << 12
_HEADER = re.compile(rb'\{"asel": ?[0-9]+, ?"records": ?\[')
_RECORD_START = re.compile(rb'\{\s*"asel"\s*:\s*[0-9]+\s*,(?!\s*"records")')


def header() -> bytes:
    return b'{"asel": %d, "records": [\n' % records.SCHEMA


class Line(NamedTuple):
    """An intact record as a line of a document, with its address and its config."""

    address: Address
    text: str
    cfg: Any


@dataclass(frozen=True, slots=True)
class Found:
    """The result of reading: records, lines of other versions, and the reasons why the rest was rejected."""

    lines: list[Line] = field(default_factory=list)
    foreign: list[bytes] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)

    def add(self, text: str) -> None:
        """Read a record.

        Raises:
            RecordError: it is not one.
        """
        try:
            record = Record.from_json(text)
        except OtherSchemaError:
            self.foreign.append(text.encode())
        else:
            self.lines.append(Line(record.address, record.line() if "\n" in text else text, record.cfg))


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of a document, with its records as checked lines."""

    lines: dict[Address, bytes] = field(default_factory=dict)
    foreign: list[bytes] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)

    def add(self, found: Found) -> None:
        self.lines.update((line.address, line.text.encode()) for line in found.lines)
        self.foreign.extend(found.foreign)
        self.rejected.extend(found.rejected)


def compose(contents: Contents) -> Iterator[bytes]:
    """Give a document in pieces, with its records in order."""
    return in_pieces(chain((contents.lines[address] for address in in_order(contents.lines)), sorted(contents.foreign)))


def in_pieces(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Give the document that has these lines, in pieces of a few records or one large record."""
    pieces, size, separator = [header()], 0, b""
    for line in lines:
        pieces += (separator, line)
        size, separator = size + len(line), b",\n"
        if size > _PIECE_BYTES:
            yield b"".join(pieces)
            pieces, size = [], 0
    yield b"".join((*pieces, FOOTER))


def in_order(keys: Iterable[Key]) -> Iterator[Key]:
    """Give keys in order, after reading them all. Sorting tens of thousands at once would hold the GIL for too long."""
    left = iter(keys)
    runs = []
    while run := sorted(islice(left, 512)):
        runs.append(run)
    return heapq.merge(*runs)


def parse(document: bytes, where: str, checked: Mapping[bytes, Address]) -> Contents:
    """Return the contents of a document; lines that were `checked` before are not checked again."""
    contents, found = Contents(), Found()
    with io.BytesIO(document) as lines:
        if is_header(first := lines.readline(MAX_BYTES)):
            for number, text in bare_lines(lines, 2):
                if (address := checked.get(text)) is not None:
                    contents.lines[address] = text
                else:
                    _read_line(number, text, where, found)
            contents.add(found)
        else:
            for some in read_reformatted(first, lines, where):
                contents.add(some)
    return contents


def is_header(line: bytes) -> bool:
    """Return whether this is the first line of a document that has a record on each line, as asel writes it."""
    return _HEADER.fullmatch(line.strip()) is not None


def read_reformatted(begin: bytes, file: IO[bytes], where: str) -> Iterator[Found]:
    """Read a document that was reformatted or has a damaged first line, a few records at a time if possible.

    The document is `begin` and the rest of the file.

    Raises:
        RecordError: it would have to be read as a whole, and is too large.
    """
    begin += file.read(max(0, _MAX_HEADER_BYTES - len(begin)))
    stream = RecordStream(begin, file)
    if stream.is_document:
        records_left, number = iter(stream), 0
        while step := list(islice(records_left, READ_BATCH)):
            yield read_facts(step, where, number)
            number += len(step)
        return
    whole = begin + file.read(_MAX_WHOLE_BYTES)
    if len(whole) > _MAX_WHOLE_BYTES:
        raise RecordError(f"{where} has over {_MAX_WHOLE_BYTES:,} bytes, and does not begin as a document of records")
    yield _read_whole(whole, where)


def _read_whole(document: bytes, where: str) -> Found:
    try:
        return read_facts(records_in(strict_json.loads(document)), where)
    except RecordError as error:
        reason = str(error)
    except (ValueError, RecursionError) as error:
        reason = f"it is not JSON: {error or 'nested too deeply'}"
    found = Found()
    _recover(document, found)
    found.rejected.append(Rejected(where, reason))
    return found


def records_in(document: Any) -> list[Any]:
    """Return the records of a parsed document, unchecked.

    Raises:
        RecordError: it is not a document.
    """
    if not isinstance(document, Mapping) or not isinstance(document.get("records"), list):
        raise RecordError("it is not a document of records")
    return document["records"]  # type: ignore[no-any-return]


def read_facts(many: Iterable[Any], where: str, first: int = 0) -> Found:
    """Read records that are already parsed JSON; `first` is the number of the first one."""
    found = Found()
    for number, facts in enumerate(many, first):
        if isinstance(facts, NotJson):
            found.rejected.append(Rejected(f"{where}, record {number}", f"it is not JSON: {facts.reason}"))
            continue
        try:
            record = Record.from_facts(facts)
            found.lines.append(Line(record.address, record.line(), record.cfg))
        except OtherSchemaError:
            _add_foreign(facts, f"{where}, record {number}", found)
        except RecordError as error:
            found.rejected.append(Rejected(f"{where}, record {number}", str(error)))
    return found


def _add_foreign(facts: Any, where: str, found: Found) -> None:
    try:
        found.foreign.append(strict_json.dumps(facts).encode())
    except (TypeError, ValueError, RecursionError) as error:
        found.rejected.append(Rejected(where, f"it is not JSON: {error}"))


def bare_lines(lines: Iterable[bytes], first: int = 1) -> Iterator[tuple[int, bytes]]:
    """Give the lines that should be records, with their numbers and without the commas between them."""
    for number, line in enumerate(lines, first):
        text = line.strip().removesuffix(b",")
        if text and text != FOOTER.strip() and not is_header(text):
            yield number, text


def read_lines(lines: Iterable[tuple[int, bytes]], where: str) -> Found:
    """Read bare lines, each on its own."""
    found = Found()
    for number, text in lines:
        _read_line(number, text, where, found)
    return found


def _read_line(number: int, text: bytes, where: str, found: Found) -> None:
    try:
        found.add(text.decode())
    except ValueError as error:
        if not _recover(text, found):
            reason = str(error) if isinstance(error, RecordError) else f"it is not JSON: {error}"
            found.rejected.append(Rejected(f"{where}, line {number}", reason))


def _recover(text: bytes, found: Found) -> bool:
    """Read the records of a damaged line, or of lines that were joined; return whether all of them could be read."""
    pieces, lost = list(_pieces(text)), False
    for piece in pieces:
        try:
            found.add(piece)
        except RecordError:
            lost = True
    return bool(pieces) and not lost


def _pieces(text: bytes) -> Iterator[str]:
    """Give each part of a text that begins like a record, up to the end of its JSON."""
    starts = [match.start() for match in _RECORD_START.finditer(text)]
    for start, end in pairwise([*starts, len(text)]):
        piece = text[start:end].decode(errors="replace")
        try:
            yield strict_json.first(piece)
        except (ValueError, RecursionError):
            yield piece
