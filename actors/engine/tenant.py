"""For whom a request is counted: tenant and category, by its key, a header or OpenAI's `metadata`.

    X-Tenant: acme                    or    "metadata": {"tenant": "acme", "category": "coding"}
    X-Category: coding

A key that has a tenant wins (`ServerSettings.api_key`). Else the header does: whoever stands in front and
knows the client sets it, and no body may contradict. A name counts as itself if it is configured
(`ServerSettings.tenants`) or the key may name any; all others count as one. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ...cluster.request.caller import Caller


class Tenant(NamedTuple):
    """Whom a request counts for.

    Attributes:
        named: the tenant that the request names, whether it counts for it or not; its key's, if it has one.
    """

    tenant: str | None = None
    category: str | None = None
    named: str | None = None


def tenant_of(
    headers: Mapping[str, str],
    metadata: Any,  # Any: JSON
    caller: Caller,
    tenants: tuple[str, ...],
) -> tuple[Tenant, str | None]:
    """Return tenant and category of a request over HTTP, and the field that names a tenant in vain.

    Args:
        tenants: that every request may count for.
    """
    told = parse_tenant(metadata)
    in_header = headers.get("x-tenant")
    named = in_header or told.tenant
    tenant = caller.tenant_of(named, tenants)
    unheeded = None if named in (None, tenant) else "X-Tenant" if in_header else "metadata.tenant"
    category = headers.get("x-category") or told.category
    return Tenant(tenant, category, caller.tenant or named), unheeded


def parse_tenant(metadata: Any) -> Tenant:  # Any: JSON
    """What a body says."""
    told = metadata if isinstance(metadata, Mapping) else {}
    return Tenant(_text(told.get("tenant")), _text(told.get("category")))


def _text(value: Any) -> str | None:  # Any: JSON
    return value if isinstance(value, str) and value else None
