"""Rewrites the HAProxy configuration that Ray Serve generates. Text in, text out.

* Statistics and metrics listen on loopback; the admin socket is accessible to its owner alone.
* /health and /ping return 503 while no replica is up or the server is draining. Otherwise a replica answers
  them without queueing.
* /metrics of several replicas is one response (`metrics_aggregator.py`).
* HAProxy's own errors have the format of OpenAI's API, with the request's id, and Retry-After where a retry
  helps. (For input that is not HTTP, or ends within the headers, HAProxy uses its built-in error pages.)
* The headers, and as much of the body as HAProxy buffers, must arrive within some seconds. If a replica
  refuses a request before the rest of its body has arrived, HAProxy does not wait for the rest.
* Idle connections are closed after some seconds, and after each response once half of all connections are in
  use. One address may use only a part of the connections. Probes have connections of their own, or a port.
* Of several gateways one gets all requests, because it counts each key's requests and tests suspects; if it
  does not accept a connection, the next one gets them at once.
* A replica that is draining, or has a dead engine, refuses with a status of its own, on which HAProxy tries
  another replica. The client sees it as a 503, and only if there is no other replica. A request under which a
  replica died is not sent again, since it may be the cause.

The lines to change are found by patterns. A missing line means an incompatible version of Ray, and raises
ValueError.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...cluster.request.caller import REQUEST_ID
from .connections import Connections

GATEWAY = "gateway"  # Serve's deployment of gateways
RETRY_HEADER = "x-manta-retry-status"
RETRY_STATUS = 425
# Value of Serve's `retry-on`: retry if no connection was made, or on that status, but not when a connection
# ends without a response.
RETRY_ON = f"conn-failure {RETRY_STATUS}"
NOT_READY = "The server is loading its models. Retry."
DRAINING = "The server is stopping. Retry elsewhere, or later."
LOST = "The replica of this request died. Retry."
RETRY_AFTER_S = 1
# Time limit for a request's headers and the part of its body that HAProxy buffers, unless Serve sets `timeout
# http-request`.
HEAD_TIME = "10s"
# Time that a connection may be idle between two requests.
IDLE_TIME = "10s"
# Header of a response that was sent before the request's body had arrived. HAProxy would wait for the rest of
# the body as long as Serve's `timeout client`: an hour. After a response of its own HAProxy closes the
# connection.
UNFINISHED_HEADER = "x-manta-unfinished"
UNFINISHED = (401, 403, 408, 413, 431, 503)
# Response when all connections but those reserved for probes are in use.
CROWDED = "This server has reached its limit of connections. Retry."
# HAProxy's own errors and their replacements: status -> (status, reason, error type, message). 502 and 504
# become 503, because a retry reaches another replica.
WRONG = "The request is not valid HTTP."
SLOW = "The body arrived too slowly: its beginning must arrive within seconds."
FAILURES = {
    400: (400, "Bad Request", "BadRequestError", WRONG),
    408: (408, "Request Timeout", "RequestTimeoutError", SLOW),
    500: (500, "Internal Server Error", "InternalServerError", "Internal server error."),
    501: (501, "Not Implemented", "NotImplementedError", "This server does not support such a request."),
}
FAILURES |= dict.fromkeys((502, 503, 504), (503, "Service Unavailable", "ServiceUnavailableError", LOST))

_SOCKET = re.compile(r"^(\s*stats socket )(\S+) mode \S+ (.*)$", re.M)
_METRICS = re.compile(r"^(\s*bind )(:\d+)$", re.M)
_STATISTICS = re.compile(r"^(\s*bind )\*(:\d+)$", re.M)
_ERROR_FILE = re.compile(r"^(\s*errorfile) 503 .*$", re.M)
_ERROR_FILES = re.compile(r"^\s*errorfile \d+ .*\n", re.M)
_HEAD_TIME = re.compile(r"^\s*timeout http-request (\S+)", re.M)
_IDLE_TIME = re.compile(r"^(\s*timeout http-keep-alive ).*$", re.M)
_MOST = re.compile(r"^(\s*maxconn )\d+$", re.M)
_FRONTEND = re.compile(r"^frontend http_frontend\n(\s*bind )(.*):(\d+)$", re.M)
_DEFAULTS = re.compile(r"^defaults\n", re.M)
_SERVER = re.compile(r"^    server (\S+) (\S+):(\d+) (.*)$", re.M)
_BACKEND = re.compile(r"^backend (http-\S+)$", re.M)
_REUSE = re.compile(r"^(\s*http-reuse) always$", re.M)
_NOT_FOUND = re.compile(r"^    http-request return status 404 .*$", re.M)
# Paths that orchestrators, load balancers and Prometheus request.
PROBES = ("/health", "/ping", "/metrics", "/-/healthz", "/-/routes")
_ROUTES = "    # Static routing based on path prefixes"


@dataclass(frozen=True, slots=True)
class HAProxyPaths:
    admin: Path  # socket on which HAProxy takes commands
    scrape: Path  # socket that serves the joined metrics
    errors: Path  # folder with HAProxy's own error responses
    draining: Path  # ACL file; the entry `DRAINING_ENTRY` in it means that the server is stopping


@dataclass(frozen=True, slots=True)
class RewrittenConfig:
    text: str
    admin: Path  # the admin socket that Serve connects to
    replicas: tuple[tuple[str, int], ...]  # (host, port) of each replica
    gateways: tuple[str, ...]  # names of their servers; the first one that is up gets the requests


DRAINING_ENTRY = "draining"


def rewritten(
    text: str, places: HAProxyPaths, connections: Connections, gateways: Sequence[str] = ()
) -> RewrittenConfig:
    """Return Serve's configuration with the changes listed above. Raises ValueError.

    `gateways`: those of the configuration before, which come before new ones.
    """
    found = _SOCKET.search(text)
    if found is None:
        raise ValueError("Serve's HAProxy configuration has no line 'stats socket ...'")
    servers = [
        (backend, name, host, int(port))
        for backend, section in _backends(text)
        for name, host, port, options in _SERVER.findall(section)
        if not options.endswith("backup")
    ]
    text = _changed(_SOCKET, rf"\1{places.admin} mode 600 \3", text)
    text = _changed(_METRICS, r"\g<1>127.0.0.1\2", text)
    text = _changed(_STATISTICS, r"\g<1>127.0.0.1\2", text)
    text = _changed(_MOST, rf"\g<1>{connections.total}", text)
    text = _changed(_IDLE_TIME, rf"\g<1>{IDLE_TIME}", text)
    text = _with_defaults(text, places)
    if _BACKEND.search(text):
        # With `always`, a client's first request may use an existing connection to a replica. If that breaks,
        # HAProxy closes the client's connection without a response, and the client may conclude that the
        # request was never sent. With `safe`, the first request gets a new connection.
        text = _changed(_REUSE, r"\1 safe", text)
    else:
        text = _changed(_NOT_FOUND, f"    {_returning(NOT_READY)}", text)
    if _ROUTES not in text:
        raise ValueError(f"Serve's HAProxy configuration has no line {_ROUTES.strip()!r}")
    names = [f"{backend}/{name}" for backend, name, _, _ in servers]
    head_time = _HEAD_TIME.search(text)
    assert head_time is not None, "it has been written"
    rules = _rules(names, places, head_time[1], connections.most)
    text = text.replace(_ROUTES, f"{rules}\n{_ROUTES}", 1) + _scrape_backend(places)
    text = _with_limits(text, connections)
    text, ordered = _with_one_gateway(text, gateways)
    replicas = tuple(dict.fromkeys((host, port) for _, _, host, port in servers))
    return RewrittenConfig(text, Path(found[2]), replicas, ordered)


def write_error_files(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for found, (status, reason, kind, message) in FAILURES.items():
        body = _body(message, status, kind)
        head = [
            f"HTTP/1.1 {status} {reason}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            *([f"Retry-After: {RETRY_AFTER_S}"] if status == 503 else []),
            *(["x-should-retry: false"] if status in (500, 501) else []),
            "Connection: close",
        ]
        _error_file(folder, found).write_bytes("\r\n".join([*head, "", body]).encode())


def _error_file(folder: Path, status: int) -> Path:
    return folder / f"{status}.http"


def _with_defaults(text: str, places: HAProxyPaths) -> str:
    """Replace Serve's error file by ours for all errors, and bound the time for headers."""
    if _ERROR_FILE.search(text) is None:
        raise ValueError("Serve's HAProxy configuration has no line 'errorfile 503 ...'")
    lines = [f"errorfile {status} {_error_file(places.errors, status)}" for status in FAILURES]
    if _HEAD_TIME.search(text) is None:
        lines.append(f"timeout http-request {HEAD_TIME}")
    ours = "".join(f"    {line}\n" for line in lines)
    return _changed(_DEFAULTS, f"defaults\n{ours}", _ERROR_FILES.sub("", text))


def _backends(text: str) -> list[tuple[str, str]]:
    pieces = _BACKEND.split(text)[1:]
    return [(name, rest.split("\nbackend ")[0]) for name, rest in zip(pieces[::2], pieces[1::2], strict=True)]


def _with_one_gateway(text: str, before: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Order the gateways of each backend, and let the first one that is up get all requests."""
    ordered: list[str] = []
    for _, section in _backends(text):
        lines = {name: line for line in section.splitlines() if (name := _gateway_of(line)) is not None}
        if not lines:
            continue
        names = sorted(lines, key=lambda name: before.index(name) if name in before else len(before))
        slots = iter(names)
        ours = [lines[next(slots)] if _gateway_of(line) else line for line in section.splitlines()]
        text = text.replace(section, "\n    balance first" + "\n".join(ours) + "\n", 1)
        ordered += names
    return text, tuple(ordered)


def _gateway_of(line: str) -> str | None:
    """Return the name in a gateway's `server` line, which ends with `-` deployment `-` replica."""
    found = _SERVER.fullmatch(line)
    return found[1] if found is not None and found[1].split("-")[-2:-1] == [GATEWAY] else None


def _rules(servers: list[str], places: HAProxyPaths, head_time: str, maximum: int) -> str:
    ready = [f"acl manta_ready srv_is_up({server})" for server in servers] or ["acl manta_ready always_false"]
    lines = [
        "acl manta_probe path /health /ping",
        "acl manta_metrics path /metrics",
        *ready,
        # A request keeps one id, also in HAProxy's own responses.
        f"acl manta_named req.fhdr(x-request-id) -m reg {REQUEST_ID}",
        "http-request set-header x-request-id %[uuid] if !manta_named",
        "http-request set-var(txn.manta_id) req.fhdr(x-request-id)",
        "acl manta_said res.hdr(x-request-id) -m found",
        "http-after-response set-header x-request-id %[var(txn.manta_id)] "
        "if !manta_said { var(txn.manta_id) -m found }",
        f"acl manta_crowded fe_conn gt {maximum}",
        f"{_returning(CROWDED)} if manta_crowded !{{ path {' '.join(PROBES)} }}",
        f"http-after-response set-header Connection close if {{ fe_conn gt {max(1, maximum // 2)} }}",
        f"acl manta_draining str({DRAINING_ENTRY}) -m str -f {places.draining}",
        f"http-request set-header {RETRY_HEADER} {RETRY_STATUS}",
        # Requests that store something must not be repeated. All others can be sent again if their body has
        # arrived completely and fits the buffer.
        "acl manta_kept path_beg /v1/files /v1/batches",
        "http-request disable-l7-retry if manta_kept",
        f"http-request wait-for-body time {head_time} if METH_POST !manta_kept",
        f"http-response set-status 503 if {{ status {RETRY_STATUS} }}",
        f"acl manta_unfinished res.hdr({UNFINISHED_HEADER}) -m found",
        "http-response wait-for-body time 1s if manta_unfinished",
        "http-response set-var(txn.manta_body) res.body if manta_unfinished",
        *(f"{_closing(status)} if manta_unfinished {{ status {status} }}" for status in UNFINISHED),
        # Errors in text/plain are those of the replica's HTTP server; the application's own are JSON.
        f"http-response return status 400 content-type application/json string '{_wrong()}' "
        "if { status 400 } { res.hdr(content-type) -m beg text/plain }",
        "http-request set-log-level silent if manta_probe or manta_metrics",
        f"{_returning(DRAINING)} if manta_draining !manta_metrics",
        f"{_returning(NOT_READY)} if manta_probe !manta_ready",
    ]
    if len(servers) > 1:
        lines.append("use_backend manta_scrape if manta_metrics")
    return "\n".join(f"    {line}" for line in lines)


def _with_limits(text: str, connections: Connections) -> str:
    """Limit the clients' frontend; add a frontend for probes if they have a port."""
    found = _FRONTEND.search(text)
    if found is None:
        raise ValueError("Serve's HAProxy configuration has no frontend 'http_frontend' with its 'bind'")
    end = text.index("\nbackend ", found.end())
    rest = text[found.end() : end]
    own = [
        f"maxconn {connections.most + connections.for_probes}",
        "stick-table type ipv6 size 64k expire 60s store conn_cur",
        "tcp-request connection track-sc0 src",
        f"tcp-request connection reject if {{ sc0_conn_cur gt {connections.per_source} }}",
    ]
    clients = f"{found[0]}\n" + "".join(f"    {line}\n" for line in own).rstrip("\n") + rest
    if connections.probe_port is None:
        return text[: found.start()] + clients + text[end:]
    is_probe = f"{{ path {' '.join(PROBES)} }}"
    alone = [f"maxconn {connections.for_probes}", f"http-request deny deny_status 404 if !{is_probe}"]
    head = f"frontend manta_probes\n{found[1]}{found[2]}:{connections.probe_port}\n"
    probes = head + "".join(f"    {line}\n" for line in alone).rstrip("\n") + rest
    return f"{text[: found.start()]}{clients}\n{probes}{text[end:]}"


def _scrape_backend(places: HAProxyPaths) -> str:
    return f"\nbackend manta_scrape\n    server scrape unix@{places.scrape}\n"


def _returning(message: str) -> str:
    head = f"http-request return status 503 content-type application/json {_retry_after(503)}"
    return f"{head}string '{_body(message)}'"


def _closing(status: int) -> str:
    """Return the rule that sends a replica's body as HAProxy's, which closes the connection."""
    head = f"http-response return status {status} content-type application/json {_retry_after(status)}"
    return f"{head}lf-string '%[var(txn.manta_body)]'"


def _retry_after(status: int) -> str:
    return f"hdr Retry-After {RETRY_AFTER_S} " if status == 503 else ""


def _wrong() -> str:
    status, _, kind, message = FAILURES[400]
    return _body(message, status, kind)


def _body(message: str, status: int = 503, kind: str = "ServiceUnavailableError") -> str:
    """Return an error body. (`http/wire/errors.py` would import a web framework.)"""
    error = {"message": message, "type": kind, "param": None, "code": status}
    return json.dumps({"error": error}, separators=(",", ":"))


def _changed(pattern: re.Pattern[str], by: str, text: str) -> str:
    text, count = pattern.subn(by, text)
    if count == 0:
        raise ValueError(f"Serve's HAProxy configuration has no line like {pattern.pattern}")
    return text
