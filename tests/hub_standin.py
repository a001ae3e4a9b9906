"""As much of a Hugging Face hub as a dataset's reader asks: its name, its folders, ranges of its files."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

REVISION = "c" * 40


@contextmanager
def hub_with(dataset: str, files: Mapping[str, bytes]) -> Iterator[str]:
    """The address of a hub with one dataset of files in folders, one deep (`HF_ENDPOINT`)."""

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

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _listed(files: Mapping[str, bytes], folder: str) -> list[dict[str, object]]:
    if not folder:
        return [{"type": "directory", "path": name.partition("/")[0], "oid": "b" * 40} for name in files][:1]
    return [{"type": "file", "path": name, "size": len(files[name]), "oid": "a" * 40} for name in files]
