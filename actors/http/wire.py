"""JSON as it leaves: one alias, one response."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import orjson
from starlette.responses import Response

JsonObject: TypeAlias = dict[str, Any]  # Any: JSON.


def json_response(body: JsonObject, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(body), status, headers, media_type="application/json")
