"""The identity behind a request: its objects, its tenant, and the prompts with which it shares a cache.

Keys themselves are not stored: an owner is a digest of a key. Created by `actors/http/middleware/api_keys.py`
for each request, passed from a gateway to its replicas, and stored with what a request leaves behind (files,
batches, timelines).

A request is counted for a tenant and category, from its API key, a header or OpenAI's `metadata`:

    X-Tenant: acme                    or    "metadata": {"tenant": "acme", "category": "coding"}
    X-Category: coding

The tenant of the key has priority (`ServerSettings.api_key`), then the header, which a trusted proxy sets and
a body cannot override. A name is counted by itself if it is configured (`ServerSettings.tenants`) or the key
may name any tenant; all others are counted as one.

A request's id is the client's own if it is valid, else a new one; it is returned in `X-Request-Id`.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple, cast

from ..metrics.metric import ANY, OTHER

REQUEST_ID = "^[!-~]{1,256}$"  # pattern of a client's request id: it fits a header and a log line
ID_HEADER = "x-request-id"
_REQUEST_ID = re.compile(REQUEST_ID)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Permissions and identity of a request, by its key.

    Attributes:
        owner: owner of the objects that the request creates (`owner_of`); None without a key.
        sees_all: may see objects of any owner: an admin key, or any request if no keys are configured.
        tenant: the tenant of all its requests, whatever they name; None if the key has none.
        names_tenants: its requests may name any tenant, as those of a trusted proxy do.
        domain: prompts share cached prefixes only within a domain; None shares with all.
    """

    owner: str | None = None
    sees_all: bool = False
    tenant: str | None = None
    names_tenants: bool = False
    domain: str | None = None

    def may_see(self, owner: str | None) -> bool:
        return self.sees_all or owner == self.owner

    def tenant_of(self, named: str | None, allowed: tuple[str, ...]) -> str | None:
        """Return the tenant of a request that names `named`, as any may name `allowed` ones (ANY: all)."""
        if self.tenant is not None or named is None:
            return self.tenant
        return named if self.names_tenants or named in allowed or ANY in allowed else OTHER

    def salt(self, cache_salt: str | None) -> str | None:
        """Return the prefix cache's salt, hashed with the domain, so that no client chooses a domain."""
        return cache_salt if self.domain is None else _digest("salt", self.domain, cache_salt or "")


def new_id(prefix: str = "") -> str:
    return prefix + secrets.token_hex(16)


def acceptable_id(client_id: object) -> str | None:
    """Return a client's id if it fits a header and a log line."""
    return client_id if isinstance(client_id, str) and _REQUEST_ID.fullmatch(client_id) else None


SERVER = Caller(sees_all=True)  # for the server's own work


def owner_of(key: str) -> str:
    return _digest("owner", key)


def domain_of(kind: str, name: str) -> str:
    return _digest("domain", kind, name)


def _digest(*parts: str) -> str:
    """Return 128 bits of the parts, with lengths so that they cannot run into each other."""
    text = b"".join(b"%d:%b" % (len(each), each) for part in parts for each in [part.encode()])
    return blake2b(text, digest_size=16, person=b"manta caller").hexdigest()


class Tenant(NamedTuple):
    tenant: str | None = None
    category: str | None = None
    # the tenant of its key, else the one that the request names, whether or not it is counted for it
    named: str | None = None


def tenant_of(
    headers: Mapping[str, str],
    metadata: Any,  # Any: JSON
    caller: Caller,
    tenants: tuple[str, ...],
) -> tuple[Tenant, str | None]:
    """Return the tenant, and the field that names an ignored tenant. Every request may name `tenants`."""
    parsed = parse_tenant(metadata)
    in_header = headers.get("x-tenant")
    named = in_header or parsed.tenant
    tenant = caller.tenant_of(named, tenants)
    ignored_field = None if named in (None, tenant) else "X-Tenant" if in_header else "metadata.tenant"
    category = headers.get("x-category") or parsed.category
    return Tenant(tenant, category, caller.tenant or named), ignored_field


def parse_tenant(metadata: Any) -> Tenant:  # Any: JSON
    fields: Mapping[str, Any] = {}
    if isinstance(metadata, Mapping):
        fields = cast("Mapping[str, Any]", metadata)
    return Tenant(_text(fields.get("tenant")), _text(fields.get("category")))


def _text(value: Any) -> str | None:  # Any: JSON
    return value if isinstance(value, str) and value else None
