"""From what the user names to files: paths, folders, patterns and URLs, on any storage.

Called by `source.py`. Knows names and sizes, not what is in the files.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import takewhile
from pathlib import Path, PurePosixPath

import pyarrow as pa

from ...cluster.errors import DatasetError
from .storage import URL, Entry, Storage

HIDDEN = (".", "_")  # what programs leave beside data: _SUCCESS, .crc


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file as it was found. `modified_s` is Unix time."""

    storage: Storage
    name: str
    size: int
    modified_s: float

    def __str__(self) -> str:
        return f"{self.storage.where.rstrip('/')}/{self.name}"

    @property
    def path(self) -> str:
        return self.storage.path(self.name)

    def open(self) -> pa.NativeFile:
        """To seek and read in. Raises OSError."""
        return self.storage.reader(self.name)


def find_files(where: Sequence[str], suffixes: Collection[str]) -> tuple[SourceFile, ...]:
    """All files of the places, each once, sorted by path. Raises DatasetError, ConfigError."""
    found: dict[str, SourceFile] = {}
    for each in where:
        folder, pattern = _split_pattern(each)
        storage = Storage.open(folder, field="input", follows_links=True)
        place = f"{storage.where.rstrip('/')}/{pattern}" if pattern else storage.where
        try:
            files = _matching(storage, pattern) if pattern else _named(storage, suffixes)
        except OSError as error:
            raise _refused(f"{place} cannot be read: {error}.") from None
        if not files:
            raise _refused(
                f"no file matches {place}."
                if pattern
                else f"{place} has no {', '.join(suffixes)} files. Files in folders below it are named by a "
                f"pattern: {place.rstrip('/')}/**/*.jsonl"
            )
        found |= {f"{file.storage.filesystem.type_name}:{file.path}": file for file in files}
    return tuple(found[key] for key in sorted(found))


def _matching(storage: Storage, pattern: str) -> list[SourceFile]:
    parts = pattern.split("/")
    entries = storage.entries(recursive=len(parts) > 1)
    return [_source_file(storage, entry) for entry in entries if _matches(entry.name.split("/"), parts)]


def _named(storage: Storage, suffixes: Collection[str]) -> list[SourceFile]:
    """A file, or those of a folder that have one of the suffixes."""
    kind = storage.kind
    if kind is None:
        raise _refused(f"{storage.where} cannot be read: there is no such file or folder.")
    if kind == "file":
        if storage.local:
            storage.filesystem.open_input_file(storage.root).close()  # raises now, not when all is started
        entry = storage.parent.entry(storage.name)
        return [_source_file(storage.parent, entry)] if entry is not None else []
    return [
        _source_file(storage, entry)
        for entry in storage.entries()
        if PurePosixPath(entry.name).suffix.lower() in suffixes and not entry.name.startswith(HIDDEN)
    ]


def _refused(why: str) -> DatasetError:
    return DatasetError(f"input: {why}", param="input")


def _source_file(storage: Storage, entry: Entry) -> SourceFile:
    return SourceFile(storage, entry.name, entry.size, entry.modified_s)


def _split_pattern(where: str) -> tuple[str, str]:
    """The folder in front of a pattern, and the pattern; all, and none, for a plain name."""
    url = URL.match(where)
    path, query = where, ""
    if url is not None and url[1] != "file":
        path, mark, rest = where.partition("?")
        query = mark + rest
    elif Path(where[len(url[0]) :] if url else where).exists():
        return where, ""
    parts = path.split("/")
    special = re.compile(r"[*\[]" if url else r"[*?\[]")  # behind a URL's ? is its query
    first = next((place for place, part in enumerate(parts) if special.search(part)), None)
    if first is None:
        return where, ""
    folder = "/".join(parts[:first]) or ("/" if path.startswith("/") else ".")
    return folder + query, "/".join(parts[first:])


def _matches(name: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether the parts of a name fit those of a pattern; `**` is any number of folders."""
    if not pattern:
        return not name
    if pattern[0] == "**":
        folders = takewhile(lambda part: not part.startswith(HIDDEN), name[:-1])
        return any(_matches(name[skip:], pattern[1:]) for skip in range(len(list(folders)) + 1))
    if not name or not fnmatchcase(name[0], pattern[0]):
        return False
    if name[0].startswith(HIDDEN) and not pattern[0].startswith(HIDDEN):
        return False
    return _matches(name[1:], pattern[1:])
