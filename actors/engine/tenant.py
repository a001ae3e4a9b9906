"""Tenant and category that a request is counted for: from its API key, a header or OpenAI's `metadata`.

    X-Tenant: acme                    or    "metadata": {"tenant": "acme", "category": "coding"}
    X-Category: coding

The tenant of the key has priority (`ServerSettings.api_key`), then the header, which a trusted proxy sets and
a body cannot override. A name is counted by itself if it is configured (`ServerSettings.tenants`) or the key
may name any tenant; all others are counted as one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ...cluster.request.caller import Caller


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
    fields = metadata if isinstance(metadata, Mapping) else {}
    return Tenant(_text(fields.get("tenant")), _text(fields.get("category")))


def _text(value: Any) -> str | None:  # Any: JSON
    return value if isinstance(value, str) and value else None
