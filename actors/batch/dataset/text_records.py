"""Records of text files: lines of JSON, lines of text, and rows of CSV or TSV, each with its byte offset.

From any offset later records can be read, so engines read only the rows they answer. A row of CSV may span
lines. Blank lines are not records. A malformed record does not affect others. pyarrow's readers provide none
of this (docs/decisions/batch-input.md).
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Literal, Self

import pyarrow as pa

from ....cluster.errors import brief
from .row_requests import Record

TextFormat = Literal["jsonl", "openai", "csv", "tsv", "text"]
DELIMITERS = {"csv": ",", "tsv": "\t"}
Raw = bytes | list[str]  # a line, or the fields of a CSV row
BOM = b"\xef\xbb\xbf"  # Windows programs write it before UTF-8
NOT_UTF8 = "it is not UTF-8 text"
MAX_LINE_BYTES = 64 * 2**20  # a file with longer lines is not a file of rows, and must not fill the memory

csv.field_size_limit(min(sys.maxsize, MAX_LINE_BYTES))  # process-wide; Python's default of 128 KiB is too low


class BadTextError(Exception):
    def __init__(self, offset: int, why: str) -> None:
        super().__init__(why)
        self.offset = offset
        self.why = why


class BadRecordError(Exception):
    def __init__(self, why: str, text: str) -> None:
        super().__init__(why)
        self.why = why
        self.text = text


class TextFile:
    """An open file of records. Raises BadTextError. `header`: the columns of a CSV or TSV file."""

    def __init__(self, file: pa.NativeFile | io.RawIOBase, format: TextFormat, buffer_bytes: int) -> None:
        self._format: TextFormat = format
        self._file = io.BufferedReader(file, buffer_bytes)  # type: ignore[arg-type]  # it has RawIOBase's methods
        self.header: list[str] = []
        self._delimiter = DELIMITERS.get(format)
        if self._delimiter is not None:
            _, raw = next(_csv_records(self.lines(), self._delimiter), (0, None))
            self.header = raw if isinstance(raw, list) else []
            if twice := [name for name, count in Counter(self.header).items() if count > 1]:
                self.close()
                raise BadTextError(0, f"the header names the column {brief(min(twice))} twice; rename one")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    @property
    def offset(self) -> int:
        return self._file.tell()

    def lines(self, offset: int = 0, digest: hashlib._Hash | None = None) -> Iterator[tuple[int, bytes]]:
        """Yield offset and content of lines, ended by line feeds alone. `digest` gets all bytes."""
        self._file.seek(offset)
        while line := self._file.readline(MAX_LINE_BYTES + 1):
            if len(line) > MAX_LINE_BYTES:
                raise BadTextError(offset, f"a line has more than {MAX_LINE_BYTES >> 20} MiB")
            if digest is not None:
                digest.update(line)
            yield offset, (line.removeprefix(BOM) if offset == 0 else line).removesuffix(b"\n")
            offset += len(line)

    def raw_records(self, offset: int = 0, digest: hashlib._Hash | None = None) -> Iterator[tuple[int, Raw]]:
        """Yield offset and content of each record from `offset` on, without the header of CSV."""
        lines = self.lines(offset, digest)
        if self._delimiter is None:
            return ((at, line) for at, line in lines if line.strip())
        records = _csv_records(lines, self._delimiter)
        if offset == 0:
            next(records, None)
        return records

    def record(self, raw: Raw) -> Record:
        """Return a record; an empty CSV field becomes None. Raises BadRecordError, UnicodeDecodeError."""
        if isinstance(raw, list):
            if len(raw) > len(self.header):
                why = f"The row has {len(raw)} fields, the header {len(self.header)}: put a field with commas"
                raise BadRecordError(f"{why} in quotes.", json.dumps(raw, ensure_ascii=False))
            return {name: field or None for name, field in zip(self.header, raw, strict=False)}
        text = raw.decode("utf-8").rstrip("\r")
        if self._delimiter is not None:
            raise BadRecordError(
                f"The row is not {self._format.upper()}: it has a carriage return outside quotes.", text
            )
        return {"prompt": text} if self._format == "text" else {"text": text}


def _csv_records(lines: Iterator[tuple[int, bytes]], delimiter: str) -> Iterator[tuple[int, Raw]]:
    taken = _CsvLines(lines)
    reader = csv.reader(taken, delimiter=delimiter)
    while True:
        taken.lines.clear()
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if "field limit" in str(error):
                raise BadTextError(taken.begin, f"a field has more than {MAX_LINE_BYTES >> 20} MiB") from None
            yield taken.begin, "".join(taken.lines).encode()  # the reader continues with the next line
            continue
        if taken.ended:  # every line ends in a line feed, so an incomplete record is inside quotes
            raise BadTextError(taken.begin, "a quoted field begins that never ends")
        if fields:
            yield taken.begin, fields


class _CsvLines:
    """Lines for `csv.reader`, and how far it has read."""

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
                text = line.decode("utf-8") + "\n"
            except UnicodeDecodeError:
                raise BadTextError(begin, NOT_UTF8) from None
            self.lines.append(text)
            yield text
        self.ended = True
