"""A command-line agent in a session against the served pair; used by `codex_cli.py` and `claude_code.py`.

The agent itself is unchanged and talks to a relay on loopback, which forwards everything to the server. The
pair was not trained with tools and its context is 1,024 tokens, so the relay adds two fields that agents
cannot send: `structured_outputs` leaves the model one answer, and `truncate_prompt_tokens` truncates the
prompt. It records the traffic, so each event of each stream is checked against the SDK's own types.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from trial import FOLDER, KEY, URL

PROMPT_TOKENS = 500
TURN_S = 180
SECRET = "4711"  # in a file that only a tool can read
NOTE = "note.txt"


def called(tool: str, arguments: str) -> str:
    """A call in the template's form; its content need not be JSON."""
    return f'<tool_call>\n{{"name": "{tool}", "arguments": {arguments}}}\n</tool_call>'


@dataclass
class Exchange:
    """One request of the agent with tools, and the events that answered it."""

    body: dict[str, Any]
    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    answer: bytes = b""

    @property
    def events(self) -> list[dict[str, Any]]:
        assert self.status == 200, self.answer.decode()
        lines = self.answer.decode().splitlines()
        found = [json.loads(line.removeprefix("data:")) for line in lines if line.startswith("data:")]
        named = [line.removeprefix("event:").strip() for line in lines if line.startswith("event:")]
        assert named == [event["type"] for event in found]
        return found


class Relay(ThreadingHTTPServer):
    """A relay between an agent and the server.

    Args:
        answers: what the model says to the agent's next requests with tools.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Passing)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.answers: list[str] = []
        self.exchanges: list[Exchange] = []
        self.lock = threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def take(self, body: dict[str, Any]) -> Exchange | None:
        """Record a request with tools and send the scripted answer; other requests get a short one."""
        with self.lock:
            is_turn = bool(body.get("tools"))
            answer = self.answers.pop(0) if is_turn and self.answers else "ok"
            exchange = Exchange(dict(body)) if is_turn else None
            if exchange is not None:
                self.exchanges.append(exchange)
        whole = {"format": {"type": "const_string", "value": answer}}  # with its calls
        body |= {"structured_outputs": {"structural_tag": whole}, "truncate_prompt_tokens": PROMPT_TOKENS}
        return exchange


class _Passing(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Relay

    def do_POST(self) -> None:
        sent = self.rfile.read(int(self.headers.get("content-length") or 0))
        exchange = None
        if sent.startswith(b"{") and "count_tokens" not in self.path:
            body = json.loads(sent)
            exchange = self.server.take(body)
            sent = json.dumps(body).encode()
        self._pass_on(sent, exchange)

    def do_GET(self) -> None:
        self._pass_on(b"", None)

    do_HEAD = do_GET

    def do_CONNECT(self) -> None:
        """The agent's request for another address: none is reachable in a session."""
        self.send_error(403)

    def _pass_on(self, sent: bytes, exchange: Exchange | None) -> None:
        skipped = {"host", "content-length", "accept-encoding", "connection"}
        headers = {name: value for name, value in self.headers.items() if name.lower() not in skipped}
        place = urlsplit(URL)
        upstream = http.client.HTTPConnection(place.hostname or "", place.port, timeout=TURN_S)
        upstream.request(self.command, self.path, sent or None, {**headers, "Content-Length": str(len(sent))})
        answer = upstream.getresponse()
        self.send_response(answer.status)
        for name in ("content-type", "x-request-id", "request-id", "retry-after"):
            if (value := answer.headers.get(name)) is not None:
                self.send_header(name, value)
        self.send_header("connection", "close")
        self.end_headers()
        self.close_connection = True
        if exchange is not None:
            exchange.headers = {name.lower(): value for name, value in answer.headers.items()}
        while piece := answer.read1(65536):
            self.wfile.write(piece)
            self.wfile.flush()
            if exchange is not None:
                exchange.answer += piece
        if exchange is not None:
            exchange.status = answer.status
        upstream.close()

    def log_message(self, *_: object) -> None:
        pass


class Session:
    """An agent's folder, with a file that a tool can read, and its turns.

    Args:
        program: below the packages that npm installed.
        environment: the agent's own, with the relay's address.
        validate: raises for an event that is not as the SDK knows it.
    """

    def __init__(
        self, program: str, environment: Callable[[Relay], dict[str, str]], validate: Callable[[Any], object]
    ) -> None:
        self.relay = Relay()
        self.home, self.work = FOLDER / "home", FOLDER / "work"
        for folder in (self.home, self.work):
            folder.mkdir(exist_ok=True)
        (self.work / NOTE).write_text(f"The number is {SECRET}.\n")
        self._program = Path(sys.prefix) / "node_modules" / ".bin" / program
        self._validate = validate
        self._environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            # All but the relay is refused, by the relay.
            **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), self.relay.url),
            **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1"),
            "COMPAT_API_KEY": KEY,
            **environment(self.relay),
        }

    def turn(self, arguments: Sequence[str], answers: Sequence[str]) -> tuple[str, list[Exchange]]:
        """The agent's output, and its requests: one per answer, each with a correct stream."""
        self.relay.answers, begin = list(answers), len(self.relay.exchanges)
        done = subprocess.run(
            [self._program, *arguments],
            cwd=self.work,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TURN_S,
        )
        exchanges = self.relay.exchanges[begin:]
        said = f"{done.stdout}\n{done.stderr}"
        print(said, file=sys.stderr)
        for exchange in exchanges:
            for event in exchange.events:
                self._validate(event)
        assert not done.returncode, said[-600:]
        assert len(exchanges) == len(answers), (
            f"{len(exchanges)} requests for {len(answers)} answers: {said[-600:]}"
        )
        return done.stdout, exchanges
