"""A command-line agent in a session against a served model; used by `codex_cli*.py` and `claude_code*.py`.

The agent itself is unchanged and talks to a relay on loopback, which forwards everything to the server and
changes requests as a check says (`Change`). It records the traffic, so each event of each stream is checked
against the SDK's own types.

The pair was not trained with tools and its context is 1,024 tokens, so its requests get two fields that
agents cannot send (`answered`): `structured_outputs` leaves the model one answer, and
`truncate_prompt_tokens` truncates the prompt. A published model writes its calls itself (`calling`): the
relay offers it one tool of the agent, with the arguments and commands that are safe to run, and requires a
call.
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
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from trial import FOLDER, KEY, URL

PROMPT_TOKENS = 500  # of the pair
TURN_S = 180
SECRET = "4711"  # in a file that only a tool can read
NOTE = "note.txt"
REPORT = r"The number is [0-9]{4}\."


def called(tool: str, arguments: str) -> str:
    """A call in the template's form; its content need not be JSON."""
    return f'<tool_call>\n{{"name": "{tool}", "arguments": {arguments}}}\n</tool_call>'


# An agent's prompts are longer than the published model's context.
_OF_CALLER = {"truncate_prompt_tokens": 2000, "temperature": 0}
Change: TypeAlias = Callable[[dict[str, Any]], None]  # of a request's body


def answered(text: str) -> Change:
    """The model says this, with the calls in it."""
    whole = {"format": {"type": "const_string", "value": text}}
    fields = {"structured_outputs": {"structural_tag": whole}, "truncate_prompt_tokens": PROMPT_TOKENS}
    return lambda body: body.update(fields)


def calling(tool: str, schema: str, properties: Mapping[str, Any], fields: Mapping[str, Any]) -> Change:
    """The model must call a tool, and writes its arguments. `schema`: the tool's field of that name."""

    def change(body: dict[str, Any]) -> None:
        (offered,) = (each for each in body["tools"] if each.get("name") == tool)
        arguments = {"type": "object", "properties": dict(properties), "required": list(properties)}
        body["tools"] = [{**offered, schema: {**arguments, "additionalProperties": False}}]
        body.update({**_OF_CALLER, **fields})

    return change


def reporting(fields: Mapping[str, Any]) -> Change:
    """The model answers with a number (`REPORT`), which so small a model may misread."""
    sentence = {"structured_outputs": {"regex": REPORT}}
    return lambda body: body.update({**_OF_CALLER, **sentence, **fields})


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
    """A relay between an agent and the server. `changes`: of the agent's next requests with tools."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Passing)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.changes: list[Change] = []
        self.exchanges: list[Exchange] = []
        self.lock = threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def take(self, body: dict[str, Any]) -> Exchange | None:
        """Change and record a request with tools; other requests get a short answer."""
        with self.lock:
            is_turn = bool(body.get("tools"))
            change = self.changes.pop(0) if is_turn and self.changes else answered("ok")
            exchange = Exchange(dict(body)) if is_turn else None
            if exchange is not None:
                self.exchanges.append(exchange)
        change(body)
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

    def turn(self, arguments: Sequence[str], changes: Sequence[Change]) -> tuple[str, list[Exchange]]:
        """The agent's output, and its requests: one per change, each with a correct stream."""
        self.relay.changes, begin = list(changes), len(self.relay.exchanges)
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
        assert len(exchanges) == len(changes), (
            f"{len(exchanges)} requests for {len(changes)} answers: {said[-600:]}"
        )
        return done.stdout, exchanges
