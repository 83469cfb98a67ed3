"""A document of records: one JSON object, sorted, with a record a line.

    {"asel": 2, "records": [
    {...},
    {...}
    ]}

Each line stands for itself: damage to one costs no other. Lines of other versions of the format are kept
as they are. A document that somebody has formatted in another way is read as well.
"""

from __future__ import annotations

import heapq
import io
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice, pairwise
from typing import Any, NamedTuple

from asel.stores import records, strict_json
from asel.stores.records import Address, OtherSchemaError, Record, RecordError, Rejected

__all__ = [
    "FOOTER",
    "Contents",
    "Found",
    "Line",
    "bare_lines",
    "compose",
    "header",
    "in_order",
    "is_header",
    "parse",
    "read_facts",
    "read_lines",
    "read_whole",
    "records_in",
]

FOOTER = b"\n]}\n"
_HEADER = re.compile(rb'\{"asel": ?[0-9]+, ?"records": ?\[')
_RECORD_START = re.compile(rb'\{\s*"asel"\s*:\s*[0-9]+\s*,(?!\s*"records")')


def header() -> bytes:
    return b'{"asel": %d, "records": [\n' % records.SCHEMA


class Line(NamedTuple):
    """An intact record, as the line that a document keeps, and what else there is to know of it."""

    address: Address
    text: str
    cfg: Any


@dataclass(frozen=True, slots=True)
class Found:
    """What was read: records, lines of other versions, and what is wrong with the rest."""

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
    """What a document holds, with its records as checked lines."""

    lines: dict[Address, bytes] = field(default_factory=dict)
    foreign: list[bytes] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)


def compose(contents: Contents) -> Iterator[bytes]:
    """Give a document piece by piece."""
    lines = chain((contents.lines[address] for address in in_order(contents.lines)), sorted(contents.foreign))
    yield header()
    separator = b""
    while some := b",\n".join(islice(lines, 256)):
        yield separator + some
        separator = b",\n"
    yield FOOTER


def in_order(addresses: Iterable[Address]) -> Iterator[Address]:
    """Give addresses sorted. One sort of tens of thousands would hold the interpreter lock for long."""
    left = iter(addresses)
    runs = []
    while run := sorted(islice(left, 512)):
        runs.append(run)
    return heapq.merge(*runs)


def parse(document: bytes, where: str, known: Mapping[bytes, Address]) -> Contents:
    """Return what a document holds; lines that are `known` from an earlier reading are not checked again."""
    contents, found = Contents(), Found()
    with io.BytesIO(document) as lines:
        if is_header(lines.readline()):
            for number, text in bare_lines(lines, 2):
                if (address := known.get(text)) is not None:
                    contents.lines[address] = text
                else:
                    _read_line(number, text, where, found)
        else:
            found = read_whole(document, where)
    contents.lines.update((line.address, line.text.encode()) for line in found.lines)
    contents.foreign.extend(found.foreign)
    contents.rejected.extend(found.rejected)
    return contents


def is_header(line: bytes) -> bool:
    """Tell whether a document begins as ours do, and has a record a line."""
    return _HEADER.fullmatch(line.strip()) is not None


def read_whole(document: bytes, where: str) -> Found:
    """Read a document that somebody has formatted, or whose first line is damaged."""
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
    """Return the records of a parsed document, whatever they are.

    Raises:
        RecordError: it is not a document.
    """
    if not isinstance(document, Mapping) or not isinstance(document.get("records"), list):
        raise RecordError("it is not a document of records")
    return document["records"]  # type: ignore[no-any-return]


def read_facts(many: Iterable[Any], where: str, first: int = 0) -> Found:
    """Read records that somebody has parsed as JSON; `first` is the number of the first one."""
    found = Found()
    for number, facts in enumerate(many, first):
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
    """Read bare lines, each for itself."""
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
    """Read the records of a line whose ends are damaged, or of lines that became one; tell if none is lost."""
    pieces, lost = list(_pieces(text)), False
    for piece in pieces:
        try:
            found.add(piece)
        except RecordError:
            lost = True
    return bool(pieces) and not lost


def _pieces(text: bytes) -> Iterator[str]:
    """Give each part of a text that begins as a record does, up to where its JSON ends."""
    starts = [match.start() for match in _RECORD_START.finditer(text)]
    for start, end in pairwise([*starts, len(text)]):
        piece = text[start:end].decode(errors="replace")
        try:
            yield strict_json.first(piece)
        except (ValueError, RecursionError):
            yield piece
