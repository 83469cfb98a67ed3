"""Parses a document that was reformatted, one record at a time.

Parsed as a whole, ten thousand records are a million objects. One pass of Python's garbage collector over them, or
freeing them, stops every thread for a fifth of a second.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

from asel.stores import strict_json
from asel.stores.records import MAX_BYTES

__all__ = ["NotJson", "RecordStream"]

# The size that C code may parse alone, see `strict_json`. A larger record is read in pieces that double in size.
_PIECE_BYTES = 1 << 15
# A record has at most MAX_BYTES, and reformatting may have added blanks.
_MAX_AHEAD = 4 * MAX_BYTES
_HEADER = re.compile(r'\s*\{\s*(?:"asel"\s*:\s*[0-9]+\s*,\s*)?"records"\s*:\s*\[')
_BETWEEN = re.compile(r"[\s,]*")
_RECORD_START = re.compile(r'\{\s*"asel"\s*:\s*[0-9]+\s*,(?!\s*"records")')
_MAX_RECORD_START = 256
# The largest text behind the records: other entries of the document.
_MAX_TAIL = 1 << 16


class NotJson(NamedTuple):
    """A record that cannot be parsed, with the reason."""

    reason: str


class RecordStream:
    """Iterates over the records of a document; a `NotJson` takes the place of each that cannot be parsed.

    The document is `begin` and the rest of `file`, which need not be seekable.
    """

    def __init__(self, begin: bytes, file: IO[bytes]) -> None:
        self._file = file
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._text, self._at, self._is_all = self._decoder.decode(begin), 0, False
        header = _HEADER.match(self._text)
        self.is_document = header is not None
        """Whether it begins like a document, so that its records can be read one at a time."""
        if header is not None:
            self._at = header.end()

    def __iter__(self) -> Iterator[Any]:
        while True:
            try:
                if not self._find_next():
                    return
                record = self._next()
            except (ValueError, RecursionError) as error:
                record = NotJson(str(error) or "nested too deeply")
            yield record
            if isinstance(record, NotJson) and not self._skip():
                return

    def _find_next(self) -> bool:
        """Move on to the next record; return False at the end of the document.

        Raises:
            ValueError: the document goes on behind its records, or ends among them.
        """
        while (between := _BETWEEN.match(self._text, self._at)) is not None:
            self._at = between.end()
            if self._at < len(self._text) or self._is_all:
                break
            self._read_on()
        if self._text[self._at : self._at + 1] not in ("]", ""):
            return True
        while not self._is_all and len(self._text) - self._at < _MAX_TAIL:
            self._read_on()
        tail = self._text[self._at :]
        if len(tail) > _MAX_TAIL or "records" in strict_json.loads('{"":[' + tail):
            raise ValueError("there is more behind the records")
        return False

    def _next(self) -> Any:
        while True:
            try:
                value, end = strict_json.value_at(self._text, self._at)
            except (ValueError, RecursionError):
                if self._is_all or len(self._text) - self._at > _MAX_AHEAD:
                    raise
            else:
                if end < len(self._text) or self._is_all:
                    self._at = end
                    return value
            self._read_on()

    def _skip(self) -> bool:
        """Move on to the next text that looks like the beginning of a record; return False if there is none."""
        self._at += 1
        while (start := _RECORD_START.search(self._text, self._at)) is None:
            if self._is_all:
                return False
            self._at = max(self._at, len(self._text) - _MAX_RECORD_START)  # a beginning may be cut off here
            self._read_on()
        self._at = start.start()
        return True

    def _read_on(self) -> None:
        ahead = self._text[self._at :]
        piece = self._file.read(max(_PIECE_BYTES, len(ahead)))
        self._is_all = not piece
        self._text, self._at = ahead + self._decoder.decode(piece, self._is_all), 0
