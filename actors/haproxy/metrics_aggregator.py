"""Joins the metrics of all replicas into one `/metrics` response, so that every scrape sees the same series.

Each replica's series carry its name in the label `replica`. A replica that does not answer in time is left
out. The client's API key is forwarded; if all replicas refuse it, the refusal is returned. HAProxy connects
to the server over a Unix socket.
"""

from __future__ import annotations

import http.client
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingUnixStreamServer
from typing import NamedTuple

TIMEOUT_S = 5.0
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
KEY_HEADERS = ("authorization", "x-api-key")  # as in `http/middleware/api_keys.py`


class ScrapeAnswer(NamedTuple):
    status: int
    content_type: str
    body: bytes


def scrape_server(where: Path, replicas: Sequence[tuple[str, int]]) -> ThreadingUnixStreamServer:
    """Return a server on the Unix socket `where` that answers GETs with all replicas' metrics."""

    class Scrape(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            keys = {name: self.headers[name] for name in KEY_HEADERS if name in self.headers}
            answers = scraped(replicas, keys)
            refusal = next((each for each in answers if each.status != 200), None)
            texts = [each.body.decode() for each in answers if each.status == 200]
            answer = refusal
            if texts or answer is None:
                answer = ScrapeAnswer(200, CONTENT_TYPE, joined(texts).encode())
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.content_type)
            self.send_header("Content-Length", str(len(answer.body)))
            self.end_headers()
            self.wfile.write(answer.body)

        def log_message(self, format: str, *args: object) -> None:
            """Do nothing: HAProxy logs the request."""

    class Server(ThreadingUnixStreamServer):
        daemon_threads = True

    return Server(str(where), Scrape)


def scraped(replicas: Sequence[tuple[str, int]], headers: Mapping[str, str]) -> list[ScrapeAnswer]:
    if not replicas:
        return []
    with ThreadPoolExecutor(len(replicas)) as pool:
        answers = pool.map(lambda replica: _metrics_of(replica, headers), replicas)
        return [answer for answer in answers if answer is not None]


def _metrics_of(replica: tuple[str, int], headers: Mapping[str, str]) -> ScrapeAnswer | None:
    connection = http.client.HTTPConnection(*replica, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/metrics", headers=dict(headers))
        response = connection.getresponse()
        return ScrapeAnswer(
            response.status, response.headers.get("Content-Type", CONTENT_TYPE), response.read()
        )
    except (OSError, http.client.HTTPException):  # the replica has just ended
        return None
    finally:
        connection.close()


def joined(expositions: Iterable[str]) -> str:
    """Merge Prometheus expositions: each family once, with the samples of all, equal series once."""
    heads: dict[str, dict[str, None]] = {}
    samples: dict[str, dict[str, str]] = {}
    for exposition in expositions:
        family = ""
        for line in exposition.splitlines():
            if line.startswith("# "):
                family = line.split(" ", 3)[2]
                heads.setdefault(family, {})[line] = None
            elif line:
                series = line[: line.rindex("}") + 1] if "}" in line else line.split(" ", 1)[0]
                samples.setdefault(family, {}).setdefault(series, line)
    lines = [line for family in heads for line in (*heads[family], *samples.get(family, {}).values())]
    return "".join(f"{line}\n" for line in lines)
