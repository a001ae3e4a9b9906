"""A stand-in for the parts of a Hugging Face hub that readers use: names, folders, ranges of files."""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

REVISION = "c" * 40


class _Hub(BaseHTTPRequestHandler):
    def answer(self, content: bytes, status: int = 200) -> None:
        """Answer a GET, or a HEAD without the content."""
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{zlib.crc32(content)}"')
        self.send_header("X-Repo-Commit", REVISION)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def wanted(self, content: bytes) -> bytes:
        """Return the requested range of a file."""
        if (wanted := self.headers["Range"]) is None:
            return content
        begin, end = wanted.removeprefix("bytes=").split("-")
        return content[int(begin) : int(end) + 1]

    def log_message(self, format: str, *args: object) -> None: ...


@contextmanager
def hub_with(dataset: str, files: Mapping[str, bytes]) -> Iterator[str]:
    """The address of a hub with one dataset of files in folders, one level deep (`HF_ENDPOINT`)."""

    class Hub(_Hub):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == f"/api/datasets/{dataset}":
                self.answer(json.dumps({"id": dataset, "sha": REVISION, "siblings": []}).encode())
            elif path.startswith(tree := f"/api/datasets/{dataset}/tree/main"):
                self.answer(json.dumps(_listed(files, path.removeprefix(tree).strip("/"))).encode())
            elif path.startswith(raw := f"/datasets/{dataset}/resolve/main/"):
                self.answer(self.wanted(files[path.removeprefix(raw)]), 206)
            else:
                self.answer(b"{}", 404)

    with _served(Hub) as address:
        yield address


@contextmanager
def hub_with_model(model: str, folder: Path, sent: dict[str, int]) -> Iterator[str]:
    """The address of a hub with one model.

    Args:
        sent: gets the bytes sent of each file, and the requested revisions as @NAME.
    """

    class Hub(_Hub):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            name = path.rpartition("/")[2]
            if path.startswith(f"/api/models/{model}/revision/"):
                sent[f"@{name}"] = 0
                files = [{"rfilename": file.name} for file in folder.iterdir()]
                self.answer(json.dumps({"id": model, "sha": REVISION, "siblings": files}).encode())
            elif path.startswith(f"/api/models/{model}/tree/"):
                tree = {file.name: file.read_bytes() for file in folder.iterdir()}
                self.answer(json.dumps(_files(tree)).encode())
            elif path.startswith(f"/{model}/resolve/") and (folder / name).is_file():
                content = self.wanted((folder / name).read_bytes())
                if self.command == "GET":
                    sent[name] = sent.get(name, 0) + len(content)
                self.answer(content, 206 if "Range" in self.headers else 200)
            else:
                self.answer(b"{}", 404)

    with _served(Hub) as address:
        yield address


@contextmanager
def _served(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _listed(files: Mapping[str, bytes], folder: str) -> list[dict[str, Any]]:
    if not folder:
        return [{"type": "directory", "path": name.partition("/")[0], "oid": "b" * 40} for name in files][:1]
    return _files(files)


def _files(files: Mapping[str, bytes]) -> list[dict[str, Any]]:
    return [{"type": "file", "path": name, "size": len(files[name]), "oid": "a" * 40} for name in files]
