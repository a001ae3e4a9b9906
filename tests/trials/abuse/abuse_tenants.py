"""One key against another on a running server: what it must not see, take or charge to another.

`abuse.py` runs it on a server with the keys and settings of `SETTINGS`, a `batch_storage` and a prefix cache.
`test_tenancy.py` tests the rules in detail; here a foreign key tries many ways.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx

OWNER, STRANGER, ROOT = "owner-key", "stranger-key", "root-key"
SETTINGS: dict[str, Any] = {
    "api_key": [OWNER, f"{STRANGER} acme"],
    "admin_api_key": ROOT,
    "tenants": ["globex"],
    "max_stored_bytes": 200_000,
}
MARKER = "a secret beginning that only its owner sends, and which is longer than a page of tokens, twice over"
ODD_KEYS = ("owner", "owner-key,stranger-key", "OWNER-KEY", "owner-key acme", "*", "None", "x" * 30_000)
ODD_IDS = ("..", "%2e%2e", "file-..%2f..%2fetc%2fpasswd", "file-%00", "batch_", "file-" + "0" * 5000, "*")
ODD_SALTS = (OWNER, "none", "key", "salt:", "\x00", "0" * 32, "f" * 1024)
ODD_TENANTS = ("acme", "*", "other", "none", "x" * 1000, 'a"b', "\xe9", "globex, acme")
FORGED = {"X-Manta-Caller": '{"sees_all": true}', "X-Manta-Token": "x", "X-Api-Key": ROOT}

Ask = Callable[..., httpx.Response]


def refuse_strangers(url: str) -> Iterator[str]:
    """What a foreign key gets although it must not; there should be nothing."""
    with httpx.Client(base_url=url, timeout=60) as client:

        def ask(key: str | None, method: str, path: str, **more: Any) -> httpx.Response:
            headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
            return client.request(method, path, headers=headers | more.pop("headers", {}), **more)

        row = {"custom_id": "r", "method": "POST", "url": "/v1/completions", "body": {"prompt": MARKER}}
        file_id = _upload(ask, OWNER, json.dumps(row).encode()).json()["id"]
        new = {"input_file_id": file_id, "endpoint": "/v1/completions"}
        batch_id = ask(OWNER, "POST", "/v1/batches", json=new).json()["id"]
        yield from _looks(ask, file_id, batch_id, new)
        yield from _prompts(ask)
        yield from _labels(ask)
        statuses = [_upload(ask, STRANGER, b"x" * 150_000).status_code for _ in range(3)]
        if statuses != [200, 413, 413] or not _upload(ask, OWNER, b"x").is_success:
            yield f"uploads of a key that is full: {statuses}; or it fills another's share"


def _looks(ask: Ask, file_id: str, batch_id: str, new: dict[str, Any]) -> Iterator[str]:
    """Each way to an object of another key."""
    file, batch = f"/v1/files/{file_id}", f"/v1/batches/{batch_id}"
    ways = [
        ("GET", file),
        ("GET", f"{file}/content"),
        ("DELETE", file),
        ("GET", batch),
        ("GET", f"/v1//{file}"),
    ]
    ways += [
        ("POST", f"{batch}/cancel"),
        ("GET", f"/explain?id={batch_id}/r"),
        ("GET", f"/explain?id={batch_id}"),
    ]
    for method, path in ways:
        if (status := ask(STRANGER, method, path, headers=FORGED).status_code) != 404:
            yield f"{method} {path}: {status} for a stranger"
        for key in ODD_KEYS:
            if (status := ask(key, method, path).status_code) not in (400, 401, 431):
                yield f"{method} {path}: {status} for the key {key[:20]!r}"
    for kind in ("files", "batches"):
        if ask(STRANGER, "GET", f"/v1/{kind}").json()["data"]:
            yield f"/v1/{kind} lists what is another's"
        id = file_id if kind == "files" else batch_id
        if (status := ask(STRANGER, "GET", f"/v1/{kind}?after={id}").status_code) != 400:
            yield f"/v1/{kind} knows the place of another's id: {status}"
    if (status := ask(STRANGER, "POST", "/v1/batches", json=new).status_code) != 404:
        yield f"a batch of another key's file: {status}"
    for odd in ODD_IDS:
        if (status := ask(STRANGER, "GET", f"/v1/files/{odd}").status_code) != 404:
            yield f"/v1/files/{odd[:40]}: {status}"
    for path, status in (("/load", 403), ("/explain", 200)):
        if (found := ask(STRANGER, "GET", path).status_code) != status:
            yield f"{path}: {found}"


def _prompts(ask: Ask) -> Iterator[str]:
    """Whether a prefix is reported as sent by another key."""

    def cached(key: str, **more: Any) -> int:
        answer = ask(key, "POST", "/v1/completions", json={"prompt": MARKER, "max_tokens": 1, **more})
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    cached(OWNER)
    if not cached(OWNER):
        yield "a beginning is not found again by the key that sent it"
    for salt in ODD_SALTS:
        if found := cached(STRANGER, cache_salt=salt):
            yield f"cache_salt {salt[:20]!r} finds {found} tokens of another key"
    if found := cached(STRANGER) or cached(ROOT):
        yield f"{found} tokens of another key are found"


def _labels(ask: Ask) -> Iterator[str]:
    """The labels of client-chosen names in metrics; the foreign key has a tenant."""
    for i in range(100):
        odd = ODD_TENANTS[i] if i < len(ODD_TENANTS) else f"t{i}"
        reported = {"metadata": {"tenant": f"m{i}", "category": f"c{i}"}, "user": f"u{i}"}
        headers: Any = {"X-Tenant": odd.encode("latin-1"), "User-Agent": f"agent-{i}"}
        ask(
            OWNER,
            "POST",
            "/v1/completions",
            json={"prompt": "x", "max_tokens": 1, **reported},
            headers=headers,
        )
        ask(OWNER, f"M{i}", f"/v1/invented-{i}", headers=headers)
    reported = ask(ROOT, "GET", "/metrics").text
    found = set(re.findall(r'(?:tenant|category|method|handler)="([^"]*)"', reported))
    if invented := {each for each in found if re.fullmatch(r"[tmcMu]\d+|.*invented.*", each)}:
        yield f"invented names have labels: {sorted(invented)[:5]}"


def _upload(ask: Ask, key: str, content: bytes) -> httpx.Response:
    return ask(key, "POST", "/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"})
