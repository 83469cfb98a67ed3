"""A document of records: one JSON object, sorted, with a record a line.

    {"asel": 2, "records": [
    {...},
    {...}
    ]}

Each line stands for itself: damage to one costs no other. Lines of other versions of the format are kept
as they are. A document that somebody has formatted in another way is read as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from asel.stores import records, strict_json
from asel.stores.records import Address, OtherSchemaError, Record, RecordError, Rejected

__all__ = [
    "FOOTER",
    "Contents",
    "Found",
    "bare_lines",
    "compose",
    "header",
    "is_header",
    "parse",
    "read_facts",
    "read_lines",
    "records_in",
]

FOOTER = b"\n]}\n"
_HEADER = re.compile(rb'\{"asel": ?[0-9]+, ?"records": ?\[')
_RECORD_START = re.compile(rb'\{\s*"asel"\s*:\s*[0-9]+\s*,(?!\s*"records")')


def header() -> bytes:
    return b'{"asel": %d, "records": [\n' % records.SCHEMA


@dataclass(frozen=True, slots=True)
class Found:
    """What was read: records, lines of other versions, and what is wrong with the rest."""

    records: list[Record] = field(default_factory=list)
    foreign: list[bytes] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Contents:
    """What a document holds, with its records as checked lines."""

    lines: dict[Address, bytes] = field(default_factory=dict)
    foreign: list[bytes] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)


def compose(contents: Contents) -> Iterator[bytes]:
    """Give a document piece by piece."""
    lines = [*(contents.lines[address] for address in sorted(contents.lines)), *sorted(contents.foreign)]
    yield header()
    for start in range(0, len(lines), 256):
        yield (b",\n" if start else b"") + b",\n".join(lines[start : start + 256])
    yield FOOTER


def parse(document: bytes, where: str, known: Mapping[bytes, Address]) -> Contents:
    """Return what a document holds; lines that are `known` from an earlier reading are not checked again."""
    contents, fresh = Contents(), []
    lines = document.split(b"\n")
    if is_header(lines[0]):
        for number, text in bare_lines(lines):
            if (address := known.get(text)) is not None:
                contents.lines[address] = text
            else:
                fresh.append((number, text))
        found = read_lines(fresh, where)
    else:
        found = _read_whole(document, where)
    contents.lines.update((record.address, record.to_json().encode()) for record in found.records)
    contents.foreign.extend(found.foreign)
    contents.rejected.extend(found.rejected)
    return contents


def is_header(line: bytes) -> bool:
    """Tell whether a document begins as ours do, and has a record a line."""
    return _HEADER.fullmatch(line.strip()) is not None


def _read_whole(document: bytes, where: str) -> Found:
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
            found.records.append(Record.from_facts(facts))
        except OtherSchemaError:
            found.foreign.append(strict_json.dumps(facts).encode())
        except RecordError as error:
            found.rejected.append(Rejected(f"{where}, record {number}", str(error)))
    return found


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
        try:
            found.records.append(Record.from_json(text))
        except OtherSchemaError:
            found.foreign.append(text)
        except RecordError as error:
            if not _recover(text, found):
                found.rejected.append(Rejected(f"{where}, line {number}", str(error)))
    return found


def _recover(text: bytes, found: Found) -> bool:
    """Read the records of a line whose ends are damaged, or of lines that became one; tell if none is lost."""
    pieces, lost = list(_pieces(text)), False
    for piece in pieces:
        try:
            found.records.append(Record.from_json(piece))
        except OtherSchemaError:
            found.foreign.append(piece.encode())
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
