"""Records in files of text: where each begins, in bytes, and what it says.

    bytes -> lines (`split_lines`) -> raw records with offsets (`raw_records`) -> a record (`TextRecords`)

A raw record is a line of JSON or of text, or the fields of a CSV row, which may span lines. Blank lines are
no records. From the offset of a record its successors can be read without what stands before it. Knows no
files: `survey.py` and `reading.py` bring the bytes.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterable, Iterator
from typing import Literal

from ...cluster.errors import DatasetError
from .rows import Record

TextFormat = Literal["jsonl", "openai", "csv", "text"]
Raw = bytes | list[str]
BOM = b"\xef\xbb\xbf"  # Windows writes it before UTF-8
NOT_UTF8 = "it is not UTF-8 text"
MAX_LINE_BYTES = 64 * 2**20  # what has longer lines is no file of rows, and must not fill the memory

csv.field_size_limit(min(sys.maxsize, MAX_LINE_BYTES))  # of the process; Python's own ends a job at 128 KiB


class BadTextError(Exception):
    """What makes a file unreadable from `offset` on, in words."""

    def __init__(self, offset: int, why: str) -> None:
        super().__init__(why)
        self.offset = offset
        self.why = why


def split_lines(chunks: Iterable[bytes], offset: int = 0) -> Iterator[tuple[int, bytes]]:
    """Offset and content of each line; only a line feed ends one, and is not part of it.

    Args:
        offset: where in the file the first chunk begins.
    """
    held: list[bytes] = []
    num_held = 0
    for chunk in chunks:
        *whole, last = chunk.split(b"\n")
        if whole:
            whole[0] = b"".join((*held, whole[0]))
            held, num_held = [], 0
        for line in whole:
            yield offset, line
            offset += len(line) + 1
        held.append(last)
        num_held += len(last)
        if num_held > MAX_LINE_BYTES:
            raise BadTextError(offset, f"a line has more than {MAX_LINE_BYTES >> 20} MiB")
    if last := b"".join(held):
        yield offset, last


def raw_records(lines: Iterator[tuple[int, bytes]], format: TextFormat) -> Iterator[tuple[int, Raw]]:
    """Offset and content of each record, the header of a CSV file among them. Raises BadTextError."""
    if format == "csv":
        yield from _csv_records(lines)
        return
    for offset, line in lines:
        if offset == 0:
            line = line.removeprefix(BOM)
        if line.strip():
            yield offset, line


class BadRecordError(Exception):
    """A raw record that is no record: why, and what it says."""

    def __init__(self, why: str, text: str) -> None:
        super().__init__(why)
        self.why = why
        self.text = text


class TextRecords:
    """Makes records of raw ones.

    Args:
        header: the columns of a CSV file.
    """

    def __init__(self, format: TextFormat, header: list[str] | None = None) -> None:
        self._format = format
        self._header = header

    def record(self, raw: Raw) -> Record:
        """A record as `rows.read_record` takes it; an empty field of CSV is none.

        Raises BadRecordError, UnicodeDecodeError.
        """
        if isinstance(raw, list):
            return self._csv_record(raw)
        text = raw.decode("utf-8").rstrip("\r")
        if self._format == "csv":
            raise BadRecordError("The row is not CSV: a carriage return stands outside quotes.", text)
        return {"prompt": text} if self._format == "text" else {"text": text}

    def _csv_record(self, fields: list[str]) -> Record:
        assert self._header is not None, "CSV without its header"
        if len(fields) > len(self._header):
            why = f"The row has {len(fields)} fields, the header {len(self._header)}: put a field with commas"
            raise BadRecordError(f"{why} in quotes.", json.dumps(fields, ensure_ascii=False))
        return {name: field or None for name, field in zip(self._header, fields, strict=False)}


def checked_header(raw: Raw | None, file: str) -> list[str]:
    """The columns of a CSV file by its first record. Raises DatasetError."""
    header = raw if isinstance(raw, list) else []
    twice = next((name for place, name in enumerate(header) if name in header[:place]), None)
    if twice is not None:
        raise DatasetError(
            f"input: the header of {file} names the column {twice!r} twice. Rename one.", param="input"
        )
    return header


def _csv_records(lines: Iterator[tuple[int, bytes]]) -> Iterator[tuple[int, Raw]]:
    taken = _CsvLines(lines)
    reader = csv.reader(taken)
    while True:
        taken.lines.clear()
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if "field limit" in str(error):
                raise BadTextError(taken.begin, f"a field has more than {MAX_LINE_BYTES >> 20} MiB") from None
            yield taken.begin, "".join(taken.lines).encode()  # it reads on with the next line
            continue
        if taken.ended:  # all lines end in a line feed: a record that waits for more is inside quotes
            raise BadTextError(taken.begin, "a quoted field begins that never ends")
        if fields:
            yield taken.begin, fields


class _CsvLines:
    """Lines as `csv.reader` takes them, and how far it has come."""

    def __init__(self, lines: Iterator[tuple[int, bytes]]) -> None:
        self._lines = lines
        self.lines: list[str] = []  # of the record that is being read
        self.begin = 0  # offset of the first of them
        self.ended = False

    def __iter__(self) -> Iterator[str]:
        for begin, line in self._lines:
            if not self.lines:
                self.begin = begin
            try:
                text = (line.removeprefix(BOM) if begin == 0 else line).decode("utf-8") + "\n"
            except UnicodeDecodeError:
                raise BadTextError(begin, NOT_UTF8) from None
            self.lines.append(text)
            yield text
        self.ended = True
