"""HTTP client for the replicas: one connection pool, and the headers forwarded in each direction."""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable
from typing import Any
from urllib.parse import quote

import aiohttp
from aiohttp.client import _RequestContextManager  # there is no public name for the return type of `request`
from starlette.requests import Request
from starlette.types import Scope
from yarl import URL

from ..http.generation.resume_origin import CALLER_HEADER, PRIVATE_PREFIX, TOKEN_HEADER
from ..http.middleware.api_keys import caller_of, encode_caller
from .replica_set import Member

CONNECT_S = 2.0
# Read buffer of one connection; a replica pauses while its client reads slowly.
BUFFER_BYTES = 64 * 1024
# Headers of one hop, not of the message.
_OWN = frozenset(
    {
        *("connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"),
        *("host", "expect", "content-length", "date", "server"),
    }
)
_RETRIES = "_retry_connection"
_RAW = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")  # only if the client sends them

Body = bytes | AsyncIterable[bytes]


class Upstream:
    """Connections to replicas. Create and close it on the event loop."""

    def __init__(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=_RAW,
            read_bufsize=BUFFER_BYTES,
        )
        # aiohttp repeats safe methods by itself, which would send them to the replica that died under them.
        assert hasattr(self._session, _RETRIES), "this version of aiohttp is not supported"
        setattr(self._session, _RETRIES, False)

    def request(
        self, member: Member, method: str, path: str, headers: Iterable[tuple[str, str]], body: Body | None
    ) -> _RequestContextManager:
        """Send a request; `path` is encoded, with its query. Raises aiohttp.ClientError."""
        url = URL(member.record.url + path, encoded=True)
        named = [*headers, (TOKEN_HEADER, member.record.token)]
        return self._session.request(method, url, headers=named, data=body, allow_redirects=False)

    async def close(self) -> None:
        await self._session.close()


def path_of(http: Request) -> str:
    """Return the path as the client sent it (encoded), with its query."""
    path = http.scope.get("raw_path") or quote(http.scope["path"]).encode()
    query = http.scope["query_string"]
    return (path + (b"?" + query if query else b"")).decode("latin-1")


def request_headers(http: Request) -> list[tuple[str, str]]:
    own = ("x-request-id", http.scope["state"]["request_id"])
    mine = [(name, value) for name, value in http.headers.items() if _continues(name) and name != own[0]]
    return [*mine, own, caller_header(http.scope)]


def caller_header(scope: Scope) -> tuple[str, str]:
    return CALLER_HEADER, encode_caller(caller_of(scope))


def response_headers(headers: Any) -> list[tuple[bytes, bytes]]:  # Any: aiohttp's multidict
    found = ((name.lower(), value) for name, value in headers.items())
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in found if _continues(name)]


def _continues(name: str) -> bool:
    return name not in _OWN and not name.startswith(PRIVATE_PREFIX)
