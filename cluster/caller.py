"""The key behind a request: what it owns and may see, its tenant, and which prompts it shares a cache with.

Keys themselves are nowhere here: an owner is a digest of one. Made by `actors/http/keys.py` for each request,
handed from a gateway to its replicas, and kept with what a request leaves behind (files, batches, lives).
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from .label_values import ANY, OTHER


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """What the key of a request may do and see.

    Attributes:
        owner: of what the request makes (`owner_of`); None without a key.
        sees_all: may see what others own: an admin key, or any request where no keys are configured.
        tenant: for which all its requests count, whatever they say; None if the key has none.
        names_tenants: its requests may count for any tenant that they name, as those of a trusted proxy.
        domain: prompts share their beginnings with those of the same domain alone; None shares with all.
    """

    owner: str | None = None
    sees_all: bool = False
    tenant: str | None = None
    names_tenants: bool = False
    domain: str | None = None

    def may_see(self, owner: str | None) -> bool:
        """Return whether an object of that owner exists for this caller."""
        return self.sees_all or owner == self.owner

    def tenant_of(self, named: str | None, allowed: tuple[str, ...]) -> str | None:
        """Return the tenant that a request counts for.

        Args:
            named: by the request itself.
            allowed: names that every request may count for; ANY for all.
        """
        if self.tenant is not None or named is None:
            return self.tenant
        return named if self.names_tenants or named in allowed or ANY in allowed else OTHER

    def salt(self, cache_salt: str | None) -> str | None:
        """Return the prefix cache's salt of a request that asks for `cache_salt`.

        Both go through one hash, so that no client can choose a salt of another domain.
        """
        return cache_salt if self.domain is None else _digest("salt", self.domain, cache_salt or "")


SERVER = Caller(sees_all=True)  # of the server's own work


def owner_of(key: str) -> str:
    """Return a key's digest under which what it makes is kept."""
    return _digest("owner", key)


def domain_of(kind: str, name: str) -> str:
    """Return the domain of a key's owner or of a tenant."""
    return _digest("domain", kind, name)


def _digest(*parts: str) -> str:
    """128 bits of parts that cannot run into one another."""
    text = b"".join(b"%d:%b" % (len(each), each) for part in parts for each in [part.encode()])
    return blake2b(text, digest_size=16, person=b"manta caller").hexdigest()
