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


@contextmanager
def hub_with(dataset: str, files: Mapping[str, bytes]) -> Iterator[str]:
    """The address of a hub with one dataset of files in folders, one level deep (`HF_ENDPOINT`)."""

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == f"/api/datasets/{dataset}":
                self._answer(json.dumps({"id": dataset, "sha": REVISION, "siblings": []}).encode())
            elif path.startswith(tree := f"/api/datasets/{dataset}/tree/main"):
                self._answer(json.dumps(_listed(files, path.removeprefix(tree).strip("/"))).encode())
            elif path.startswith(raw := f"/datasets/{dataset}/resolve/main/"):
                begin, end = self.headers["Range"].removeprefix("bytes=").split("-")
                self._answer(files[path.removeprefix(raw)][int(begin) : int(end) + 1], 206)
            else:
                self._answer(b"{}", 404)

        def _answer(self, content: bytes, status: int = 200) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with _served(Hub) as address:
        yield address


@contextmanager
def hub_with_model(model: str, folder: Path, sent: dict[str, int]) -> Iterator[str]:
    """The address of a hub with one model.

    Args:
        sent: gets the bytes sent of each file, and the requested revisions as @NAME.
    """

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            name = path.rpartition("/")[2]
            if path.startswith(f"/api/models/{model}/revision/"):
                sent[f"@{name}"] = 0
                files = [{"rfilename": file.name} for file in folder.iterdir()]
                self._answer(json.dumps({"id": model, "sha": REVISION, "siblings": files}).encode())
            elif path.startswith(f"/api/models/{model}/tree/"):
                tree = {file.name: file.read_bytes() for file in folder.iterdir()}
                self._answer(json.dumps(_files(tree)).encode())
            elif path.startswith(f"/{model}/resolve/") and (folder / name).is_file():
                self._file(name, (folder / name).read_bytes())
            else:
                self._answer(b"{}", 404)

        def _file(self, name: str, content: bytes) -> None:
            if (wanted := self.headers["Range"]) is not None:
                begin, end = wanted.removeprefix("bytes=").split("-")
                content = content[int(begin) : int(end) + 1]
            if self.command == "GET":
                sent[name] = sent.get(name, 0) + len(content)
            self._answer(content, 200 if wanted is None else 206)

        def _answer(self, content: bytes, status: int = 200) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", f'"{zlib.crc32(content)}"')
            self.send_header("X-Repo-Commit", REVISION)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

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
