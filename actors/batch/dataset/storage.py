"""A folder for input or output: on a disk, or in an object store.

`s3://`, `gs://` and `abfs://` are Arrow's file systems, `hf://` is Hugging Face's; they find credentials on
every node (environment, files, instance roles). The URL may name another S3 server:
`s3://bucket/x?endpoint_override=http://host:9000`. A written file appears complete or not at all: by rename
on a disk, by a single put in an object store. Picklable.

An output folder may contain what an attacker has put there, so no name leads out of it and no link in it is
followed. Input belongs to the user, and its links are followed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Literal
from urllib.parse import quote

import pyarrow as pa
from pyarrow import fs

from ....cluster.errors import ConfigError, brief_url
from ....cluster.safe_file_names import inner_name
from ...system.atomic_files import TEMPORARY, make_folder, write_atomically

URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://?")  # pathlib turns two slashes into one
SCHEMES = ("file", "s3", "gs", "gcs", "abfs", "abfss", "hf")
_REPEATED = re.compile(r"'?[A-Za-z0-9+.-]+://[^']*'?")  # URLs in Arrow's messages, with secrets
READ_PAUSES_S = (0.2, 0.4, 0.8, 1.6)  # before reading a remote object again
NUM_REQUESTS = 16  # in parallel: object stores answer many as fast as one


@dataclass(frozen=True, slots=True)
class Entry:
    name: str
    size: int
    modified_s: float


@dataclass(frozen=True, slots=True)
class Storage:
    """A folder. It need not exist before something is written."""

    where: str  # as the user wrote it, without a URL's query and credentials; for messages
    filesystem: fs.FileSystem
    root: str  # the folder's path in it
    private: bool = False  # other users of the disk may not read what is written
    follows_links: bool = False  # links in this folder are followed; for input

    @classmethod
    def open(cls, where: str, *, field: str, private: bool = False, follows_links: bool = False) -> Storage:
        """Return the storage of a path or URL. Raises ConfigError, which names `field`."""
        where = str(where)
        found = URL.match(where)
        if found is None or found[1] == "file":
            path = where[len(found[0]) :] if found else where
            root = Path(f"/{path.lstrip('/')}" if found else path).resolve()
            return cls(where, fs.LocalFileSystem(), str(root), private=private, follows_links=follows_links)
        if found[1] not in SCHEMES:
            raise ConfigError(
                f"{field}: {brief_url(where)} is a {found[1]}:// URL. Known: {', '.join(SCHEMES)}, or a "
                "path.",
                param=field,
            )
        address, _, query = where[len(found[0]) :].partition("?")
        shown = brief_url(where)
        try:
            filesystem, root = _open_remote(found[1], address, query)
        except (OSError, ValueError, pa.ArrowException) as error:
            why = _REPEATED.sub("the URL", str(error))
            raise ConfigError(f"{field}: {shown} cannot be used: {why}.", param=field) from None
        return cls(shown, filesystem, root.rstrip("/"), private=private, follows_links=follows_links)

    @property
    def local(self) -> bool:
        return isinstance(self.filesystem, fs.LocalFileSystem)

    @property
    def kind(self) -> Literal["file", "folder"] | None:
        found = self.filesystem.get_file_info(self.root).type
        if found == fs.FileType.File:
            return "file"
        return "folder" if found == fs.FileType.Directory else None

    @property
    def name(self) -> str:
        return PurePosixPath(self.root).name

    @property
    def parent(self) -> Storage:
        where = self.root if self.local else self.where
        above = where.rstrip("/").rpartition("/")[0] or "/"
        return replace(self, where=above, root=str(PurePosixPath(self.root).parent))

    def subfolder(self, *parts: str) -> Storage:
        return replace(self, where=self._join(self.where, *parts), root=self.path(*parts))

    def path(self, *parts: str) -> str:
        """Return the path of a name in the file system.

        Unless links are followed, raises ValueError for a name that leads out of the folder, and OSError for
        a path with a link or with something that is neither file nor folder.
        """
        if not self.follows_links:
            name = inner_name("/".join(part for part in parts if part))
            if self.local:
                self._check_links(name)
        return self._join(self.root, *parts)

    def entries(self, folder: str = "", *, recursive: bool = False) -> list[Entry]:
        """Return the files in a folder by name, without temporary ones; empty if there is no folder."""
        base = self.path(folder) if folder else self.root
        infos = self.filesystem.get_file_info(
            fs.FileSelector(base, allow_not_found=True, recursive=recursive)
        )
        files = (info for info in infos if info.type == fs.FileType.File)
        entries = (
            Entry(str(PurePosixPath(info.path).relative_to(self.root)), info.size or 0, _modified_s(info))
            for info in files
            if not info.base_name.startswith(TEMPORARY)
        )
        return sorted(entries, key=lambda entry: entry.name)

    def entry(self, name: str) -> Entry | None:
        info = self.filesystem.get_file_info(self.path(name))
        return Entry(name, info.size or 0, _modified_s(info)) if info.type == fs.FileType.File else None

    def read(self, name: str) -> bytes:
        """Return the content. Raises FileNotFoundError, OSError.

        Of an object smaller than S3's answer "slow down", the client library does not repeat the request.
        """
        pauses_s = () if self.local else READ_PAUSES_S
        for pause_s in (*pauses_s, None):
            try:
                with self.reader(name) as file:
                    return file.read()
            except FileNotFoundError:
                raise
            except OSError:
                if pause_s is None:
                    raise
                time.sleep(pause_s)
        raise AssertionError("the last attempt returns or raises")

    def reader(self, name: str) -> pa.NativeFile:
        return self.filesystem.open_input_file(self.path(name))

    def write(self, name: str, content: bytes | pa.Buffer, *, synced: bool = True) -> None:
        """Write a complete file. `synced`: it survives a power failure, not only killed processes."""
        path = self.path(name)
        if self.local:
            make_folder(Path(path).parent, private=self.private)
            write_atomically(
                Path(path),
                lambda temporary: temporary.write_bytes(content),
                synced=synced,
                private=self.private,
            )
            return
        with self.filesystem.open_output_stream(path) as stream:  # one put: it appears when closed
            stream.write(content)

    def scratch_folder(self) -> Path | None:
        """Return a folder on the same disk for files without names; None for an object store."""
        if not self.local:
            return None
        make_folder(Path(self.root), private=self.private)
        return Path(self.root)

    def remove(self, *names: str) -> None:
        if self.local or len(names) < 2:
            for name in names:
                self._remove(name)
            return
        with ThreadPoolExecutor(NUM_REQUESTS) as requests:
            list(requests.map(self._remove, names))

    def remove_folder(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.filesystem.delete_dir(self.path(name))

    def _remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.filesystem.delete_file(self.path(name))

    def remove_leftovers(self, folder: str, older_than_s: float) -> None:
        """Remove half-written files that killed writers have left in a folder of a disk."""
        for path in Path(self.path(folder)).glob(f"{TEMPORARY}*") if self.local else ():
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.lstat().st_mtime > older_than_s:
                    path.unlink()

    def _check_links(self, name: str) -> None:
        at = self.root
        for part in name.split("/"):
            at = f"{at}/{part}"
            try:
                mode = os.lstat(at).st_mode
            except (FileNotFoundError, NotADirectoryError):
                return
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise OSError(errno.ELOOP, f"{at} is a link, or no regular file; remove it", name)

    @staticmethod
    def _join(base: str, *parts: str) -> str:
        return "/".join([base.rstrip("/"), *(part for part in parts if part)])


def _modified_s(info: fs.FileInfo) -> float:
    return (info.mtime_ns or 0) / 1e9


def _open_remote(scheme: str, address: str, query: str) -> tuple[fs.FileSystem, str]:
    if scheme == "hf":
        from huggingface_hub import HfFileSystem

        return fs.PyFileSystem(fs.FSSpecHandler(HfFileSystem())), address
    options = [query] if query else []
    if scheme == "s3":
        options.append("allow_delayed_open=true")  # one put per file instead of three requests
    url = f"{scheme}://{quote(address, safe='/@:%=+,;!~()$&')}"  # Arrow does not accept spaces in URLs
    return fs.FileSystem.from_uri(f"{url}?{'&'.join(options)}" if options else url)
