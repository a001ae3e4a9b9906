"""One answer of all replicas' metrics: `/metrics` behind HAProxy, where every scrape meets the same series.

Each replica's series have its name in the label `replica`. A replica that does not answer in time is left out
of that one scrape. Run by `supervisor.py`; HAProxy comes in over a Unix socket.
"""

from __future__ import annotations

import http.client
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingUnixStreamServer

TIMEOUT_S = 5.0
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def scrape_server(where: Path, replicas: Sequence[tuple[str, int]]) -> ThreadingUnixStreamServer:
    """A server, bound to the socket `where`, that answers every GET for all `replicas` together."""

    class Scrape(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = joined(scraped(replicas)).encode()
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """HAProxy's log has it."""

    class Server(ThreadingUnixStreamServer):
        daemon_threads = True

    return Server(str(where), Scrape)


def scraped(replicas: Sequence[tuple[str, int]]) -> list[str]:
    """What each replica says, all asked at once."""
    if not replicas:
        return []
    with ThreadPoolExecutor(len(replicas)) as pool:
        return [text for text in pool.map(_metrics_of, replicas) if text]


def _metrics_of(replica: tuple[str, int]) -> str:
    connection = http.client.HTTPConnection(*replica, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        return response.read().decode() if response.status == 200 else ""
    except (OSError, http.client.HTTPException):  # it has just gone
        return ""
    finally:
        connection.close()


def joined(expositions: Iterable[str]) -> str:
    """One exposition of several: each family once, with the samples of all; equal series once."""
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
