"""/v1/files and /v1/batches: files of requests that are answered with spare capacity, and their outputs.

An upload is parsed as it arrives (`upload_form.py`), and the storage reads it from its file without a copy in
memory.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import re
import time
from collections.abc import Callable
from typing import IO, Annotated, Any, Literal, ParamSpec, TypeVar

import pyarrow as pa
from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import Field
from starlette.datastructures import FormData, UploadFile
from starlette.responses import StreamingResponse

from ....cluster.errors import NotOfferedError, RequestError, brief, brief_name
from ....cluster.request.caller import Caller, tenant_of
from ...batch.openai.batch_admission import ENDPOINTS
from ...batch.openai.batch_service import BatchService
from ...batch.openai.batch_store import Batch
from ...batch.openai.file_store import FileStore, Page, StoredFile
from ..middleware.api_keys import caller_of
from ..wire.json_io import JsonObject, JsonRoute, json_response
from ..wire.request_model import RequestModel
from .upload_form import storage_error, upload_form

MAX_FILES_LISTED = 10_000
MAX_FILENAME_CHARS = 255
KNOWN_FIELDS = {"file", "purpose"}

P = ParamSpec("P")
T = TypeVar("T")
Order = Literal["asc", "desc"]


def require_service(service: BatchService | None) -> BatchService:
    """Raises NotOfferedError if the server has no storage for files."""
    if service is None:
        raise NotOfferedError(
            "Files and batches need a storage location, and this server has none: start it with "
            "--batch-storage PATH_OR_URL (the setting batch_storage).",
            param="batch_storage",
        )
    return service


async def in_storage_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    try:
        return await asyncio.to_thread(call, *args, **kwargs)
    except (OSError, ValueError) as error:  # ValueError: stored data has an unexpected format
        raise storage_error(error) from error


def file_routes(service: BatchService | None) -> APIRouter:
    """Return routes that answer 501 without a service."""
    router = APIRouter()

    def store() -> FileStore:
        return require_service(service).files

    Store = Depends(store)

    @router.post("/v1/files")
    async def upload(http: Request, files: FileStore = Store) -> Response:
        """Upload a file of batch lines (multipart)."""
        folder = await in_storage_thread(files.storage.scratch_folder)
        async with upload_form(http, folder) as form:
            file = _checked(form)
            owner = caller_of(http.scope).owner
            name = (file.filename or "batch.jsonl")[:MAX_FILENAME_CHARS]
            stored_file = await in_storage_thread(_store_upload, files, name, file.file, owner)
        return json_response(stored_file.as_openai())

    @router.get("/v1/files")
    async def list_files(
        http: Request,
        files: FileStore = Store,
        purpose: str | None = None,
        limit: int = Query(MAX_FILES_LISTED, ge=1, le=MAX_FILES_LISTED),
        after: str | None = None,
        order: Order = "desc",
    ) -> Response:
        """List the files of this key."""
        page = await in_storage_thread(
            files.list,
            caller_of(http.scope),
            purpose=purpose,
            limit=limit,
            after=after,
            newest_first=order == "desc",
        )
        return json_response(listed(page))

    @router.get("/v1/files/{file_id}")
    async def retrieve(http: Request, file_id: str, files: FileStore = Store) -> Response:
        """Return the metadata of a file."""
        return json_response((await in_storage_thread(files.get, file_id, caller_of(http.scope))).as_openai())

    @router.get("/v1/files/{file_id}/content")
    async def content(http: Request, file_id: str, files: FileStore = Store) -> Response:
        """Return the content of a file."""
        file = await in_storage_thread(files.get, file_id, caller_of(http.scope))
        return StreamingResponse(
            files.chunks(file),
            media_type="application/octet-stream",
            headers={"Content-Length": str(file.bytes)},
        )

    @router.delete("/v1/files/{file_id}")
    async def delete(http: Request, file_id: str) -> Response:
        """Delete a file."""
        await in_storage_thread(require_service(service).delete_file, file_id, caller_of(http.scope))
        return json_response({"id": file_id, "object": "file", "deleted": True})

    return router


def listed(page: Page[Any]) -> JsonObject:  # Any: files or batches
    data = [each.as_openai() for each in page.items]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": page.has_more,
    }


def _checked(form: FormData) -> UploadFile:
    file, purpose = form.get("file"), form.get("purpose")
    if not isinstance(file, UploadFile):
        raise RequestError("file is missing: send multipart/form-data with a part `file`.", param="file")
    if purpose != "batch":
        raise RequestError(f'purpose={brief(purpose)} is not served: only "batch" is.', param="purpose")
    for name in form:
        if name not in KNOWN_FIELDS:
            name = brief_name(name)
            raise RequestError(
                f"{name} is not supported: files are kept until they are deleted. Leave it out.", param=name
            )
    return file


def _store_upload(files: FileStore, filename: str, file: IO[bytes], owner: str | None) -> StoredFile:
    return files.upload(filename, "batch", _mapped(file), owner)


def _mapped(file: IO[bytes]) -> bytes | pa.Buffer:
    """Return the content, memory-mapped unless it is empty."""
    file.flush()
    if not os.fstat(file.fileno()).st_size:
        return b""
    return pa.py_buffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


MAX_BATCHES_LISTED = 100
_WINDOW = re.compile(r"([1-9][0-9]{0,5})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]


class BatchRequest(RequestModel):
    """The body of a new batch.

    Attributes:
        input_file_id: of an uploaded file with one request per line.
        endpoint: the route for its lines.
        completion_window: a number of s, m, h or d; lines that are not answered by then have expired.
        metadata: stored, and returned with the batch.
    """

    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] | None = None

    def window_s(self) -> int:
        """Return the completion window in seconds. Raises RequestError if it is invalid."""
        found = _WINDOW.fullmatch(self.completion_window)
        if found is None:
            raise RequestError(
                f"completion_window={brief(self.completion_window)} must be a number of s, m, h or d: 24h.",
                param="completion_window",
            )
        return int(found[1]) * _SECONDS[found[2]]

    def batch(self, caller: Caller, tenant: str | None) -> Batch:
        now = int(time.time())
        return Batch(
            **self.model_dump(include=set(BatchRequest.model_fields)),
            created_at=now,
            expires_at=now + self.window_s(),
            owner=caller.owner,
            domain=caller.domain,
            tenant=tenant,
        )

    def check(self) -> None:
        if self.endpoint not in ENDPOINTS:
            raise RequestError(
                f"endpoint={brief(self.endpoint)} is not served in batches: use {' or '.join(ENDPOINTS)}.",
                param="endpoint",
            )
        for name in self.model_extra or {}:
            name = brief_name(name)
            raise RequestError(f"{name} is not supported by this server. Leave it out.", param=name)


def batch_routes(service: BatchService | None, tenants: tuple[str, ...]) -> APIRouter:
    """Return routes that answer 501 without a service. `tenants`: names that every batch may count for."""
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/batches")
    async def create(body: BatchRequest, http: Request) -> Response:
        """Create a batch: its requests are answered with the capacity that online requests leave."""
        batches = require_service(service)
        body.check()
        caller = caller_of(http.scope)
        tenant, ignored_fields = tenant_of(http.headers, body.metadata, caller, tenants)
        batch = body.batch(caller, tenant.tenant)
        await in_storage_thread(batches.create, batch, caller)
        batches.wake()
        ignored = {} if ignored_fields is None else {"X-Ignored-Params": ignored_fields}
        return json_response(batch.as_openai(), headers=ignored)

    @router.get("/v1/batches")
    async def list_batches(
        http: Request, limit: int = Query(20, ge=1, le=MAX_BATCHES_LISTED), after: str | None = None
    ) -> Response:
        """List the batches of this key, newest first."""
        caller = caller_of(http.scope)
        page = await in_storage_thread(
            require_service(service).batches.list, caller, limit=limit, after=after
        )
        return json_response(listed(page))

    @router.get("/v1/batches/{batch_id}")
    async def retrieve(http: Request, batch_id: str) -> Response:
        """Return a batch and its progress."""
        batch = await in_storage_thread(require_service(service).batches.get, batch_id, caller_of(http.scope))
        return json_response(batch.as_openai())

    @router.post("/v1/batches/{batch_id}/cancel")
    async def cancel(http: Request, batch_id: str) -> Response:
        """Cancel a batch; existing answers are kept."""
        batch = await in_storage_thread(
            require_service(service).batches.cancel, batch_id, caller_of(http.scope)
        )
        require_service(service).wake()
        return json_response(batch.as_openai())

    return router
