"""The HTTP client of Manta's own commands, against a server whose bytes a test chooses."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from manta.cluster.errors import ConfigError, MantaError, UnreachableError
from manta.jobs.common.http_client import ServerClient, await_ready


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any

    def do_GET(self) -> None:
        self._reply()

    def do_POST(self) -> None:
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self._reply()

    def _reply(self) -> None:
        self.server.asked.append((self.path, self.client_address[1]))
        status, content = self.server.answers.pop(0)
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serving(*answers: tuple[int, bytes]) -> Iterator[Any]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        server.answers, server.asked, server.bodies = list(answers), [], []  # type: ignore[attr-defined]
        server.url = f"http://127.0.0.1:{server.server_port}"  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(timeout=600)


def unused_url() -> str:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        return f"http://127.0.0.1:{closed.getsockname()[1]}"


def events(*payloads: str) -> bytes:
    return "".join(f"data: {payload}\n\n" for payload in payloads).encode()


def test_answers_of_any_status_reuse_one_connection() -> None:
    refusal = json.dumps({"error": {"message": "No such model."}}).encode()
    with serving((404, refusal), (500, b"<html>"), (200, b"[1]")) as server:
        with ServerClient(f"{server.url}/v1/") as client:
            found = [client.request("/v1/completions", {"prompt": [1]}) for _ in range(3)]
        assert [answer.status for answer in found] == [404, 500, 200]
        assert [answer.error for answer in found[:2]] == ["No such model.", "<html>."]
        assert found[2].body == {}
        assert len({port for _, port in server.asked}) == 1
        assert {path for path, _ in server.asked} == {"/v1/completions"}


def test_a_404_is_an_error_that_names_the_path() -> None:
    with serving((200, b'{"x": 1}'), (503, b"")) as server, ServerClient(server.url) as client:
        assert client.get_json("/v1/models") == {"x": 1}
        with pytest.raises(MantaError, match="/v1/models answered 503"):
            client.get_json("/v1/models")


def test_a_stream_yields_its_chunks_and_must_end_correctly() -> None:
    whole = events('{"n": 1}', '{"n": 2}', "[DONE]")
    failing = events('{"n": 1}', '{"error": {"message": "Gone."}}', "[DONE]")
    refused = json.dumps({"error": {"message": "Too long."}}).encode()
    answers = [(200, b": hi\n\n" + whole), (200, failing), (200, events('{"n": 1}')), (400, refused)]
    with serving(*answers) as server, ServerClient(server.url) as client:
        assert [chunk["n"] for chunk in client.stream_chat({"messages": []})] == [1, 2]
        assert server.bodies == [{"messages": [], "stream": True}]
        for said in ("The stream failed: Gone", "ended early", "answered 400: Too long"):
            with pytest.raises(MantaError, match=said):
                list(client.stream_chat({"messages": []}))


def test_waiting_for_a_server_ends_when_it_is_ready_or_cannot_become_ready() -> None:
    with serving((503, b""), (200, b"")) as server:
        assert await_ready(server.url, 240.0) > 0.0
        assert [path for path, _ in server.asked] == ["/health"] * 2
    nowhere = unused_url()
    with pytest.raises(UnreachableError, match=f"{nowhere} was not ready within 0 s"):
        await_ready(nowhere, 0.0)

    def look() -> None:
        raise MantaError("it has ended")

    with pytest.raises(MantaError, match="it has ended"):
        await_ready(nowhere, 240.0, look)


def test_an_unreachable_server_is_named_with_its_url() -> None:
    nowhere = unused_url()
    with (
        ServerClient(nowhere) as client,
        pytest.raises(UnreachableError, match=f"{nowhere} cannot be reached"),
    ):
        client.request("/v1/models")
    for url in ("ftp://x", "http://", "http://x:port"):
        with pytest.raises(ConfigError, match="is not a URL like"):
            ServerClient(url)
