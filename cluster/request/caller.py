"""The identity behind a request: its objects, its tenant, and the prompts with which it shares a cache.

Keys themselves are not stored: an owner is a digest of a key. Created by `actors/http/middleware/api_keys.py`
for each request, passed from a gateway to its replicas, and stored with what a request leaves behind (files,
batches, timelines).
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from ..metrics.bounded_labels import ANY, OTHER

REQUEST_ID = "^[!-~]{1,256}$"  # pattern of a client's request id: it fits a header and a log line


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


SERVER = Caller(sees_all=True)  # for the server's own work


def owner_of(key: str) -> str:
    return _digest("owner", key)


def domain_of(kind: str, name: str) -> str:
    return _digest("domain", kind, name)


def _digest(*parts: str) -> str:
    """Return 128 bits of the parts, with lengths so that they cannot run into each other."""
    text = b"".join(b"%d:%b" % (len(each), each) for part in parts for each in [part.encode()])
    return blake2b(text, digest_size=16, person=b"manta caller").hexdigest()
