"""Captured traffic as files: the format of a line, and reading it back.

A folder holds segments, `captured-00000042.jsonl`, oldest number first. Each line is one completion:

    {"day": "2026-11-23", "model": "qwen", "tenant": null, "category": "coding",
     "temperature": 0.7, "prompt_token_ids": [1, 2], "token_ids": [3, 4]}

`writer_process.py` writes them. `manta drafter train`, `adapt` and `explain` read them, also while a server
still writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from ...cluster.errors import DatasetError

_SEGMENT = re.compile(r"captured-(\d{8,})\.jsonl")


@dataclass(frozen=True, slots=True)
class CapturedRecord:
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    model: str
    day: str
    tenant: str | None = None
    category: str | None = None
    temperature: float | None = None  # None in files of earlier versions

    def line(self) -> bytes:
        """Return a line of a segment, including the newline."""
        return orjson.dumps(self, option=orjson.OPT_APPEND_NEWLINE)


def is_captured(path: Path) -> bool:
    if path.is_dir():
        return bool(segments(path))
    return _SEGMENT.fullmatch(path.name) is not None


def read_captured(path: Path) -> Iterator[CapturedRecord]:
    """Yield all records of a folder, oldest segment first, or of one segment.

    Skips a last line without a newline (being written, or its writer died), and segments that are removed
    meanwhile. Raises DatasetError if there are no segments, or a line is not a captured completion.
    """
    paths = segments(path) if path.is_dir() else [path]
    if not paths:
        raise DatasetError(f"{path}: there is no captured traffic here. Give the folder of --capture.")
    for each in paths:
        try:
            content = each.read_bytes()
        except FileNotFoundError:
            if each is path:
                raise DatasetError(f"{path}: no such file. Give the folder of --capture.") from None
            continue
        lines = content.split(b"\n")
        for number, line in enumerate(lines[:-1], start=1):
            try:
                yield parse_line(line)
            except ValueError as error:
                raise DatasetError(
                    f"{each}:{number}: not a captured completion ({error}). Remove this line."
                ) from None


def segments(folder: Path) -> list[Path]:
    found = [(segment_number(path), path) for path in folder.iterdir()]
    return [path for number, path in sorted(each for each in found if each[0] is not None)]


def segment_number(path: Path) -> int | None:
    match = _SEGMENT.fullmatch(path.name)
    return None if match is None else int(match[1])


def segment_path(folder: Path, number: int) -> Path:
    return folder / f"captured-{number:08}.jsonl"


def parse_line(line: bytes) -> CapturedRecord:
    row: Any = orjson.loads(line)  # Any: JSON
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    try:
        return CapturedRecord(
            prompt_token_ids=_ids(row["prompt_token_ids"]),
            token_ids=_ids(row["token_ids"]),
            model=str(row["model"]),
            day=str(row["day"]),
            tenant=row.get("tenant"),
            category=row.get("category"),
            temperature=row.get("temperature"),
        )
    except KeyError as error:
        raise ValueError(f"{error.args[0]} is missing") from None


def _ids(values: Any) -> tuple[int, ...]:  # Any: JSON
    if not isinstance(values, list) or not set(map(type, values)) <= {int}:
        raise ValueError("token ids must be a list of integers")
    return tuple(values)
