"""GET /receipts?day=...&tenant=...: usage per tenant and what speculation saved.

A key sees the receipts of its tenant, an admin key those of all. They are summed from the folder that all
replicas write (`actors/observability/usage_store.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from fastapi import APIRouter, Request, Response

from ....cluster.errors import NotAllowedError, NotOfferedError, StorageError
from ...observability.usage_store import read_receipts
from ..middleware.api_keys import caller_of
from ..wire.json_io import json_response

PATH = "/receipts"


def receipt_routes(folder: str | None, keep: Callable[[], None] | None = None) -> APIRouter:
    """Return the router of the receipts.

    Args:
        folder: the setting `receipts`; None if no receipts are kept.
        keep: writes receipts that are not in the folder yet.
    """
    router = APIRouter()

    @router.get(PATH)
    async def receipts(http: Request, day: str | None = None, tenant: str | None = None) -> Response:
        """Return the usage and savings of this key's tenant; an admin key may query all tenants."""
        if folder is None:
            raise NotOfferedError(
                "This server keeps no receipts: start it with --receipts PATH (the setting receipts).",
                param="receipts",
            )
        caller = caller_of(http.scope)
        if not caller.sees_all and caller.tenant is None:
            raise NotAllowedError(
                "Receipts are of tenants, and this key has none: the operator writes it behind the key, or "
                "asks with an admin key."
            )
        if keep is not None:
            await asyncio.to_thread(keep)
        try:
            found = await asyncio.to_thread(read_receipts, Path(folder), day, tenant)
        except OSError as error:
            raise StorageError(f"The receipts cannot be read ({error.strerror}). Retry.") from None
        mine = [one for one in found if caller.sees_all or one["tenant"] == caller.tenant]
        return json_response({"object": "list", "data": mine})

    return router
