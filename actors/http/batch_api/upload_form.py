"""Reads an upload straight into a file beside the storage, so that no other disk fills up, and no memory.

The file has no name: the system removes it when it is closed, also if this process is killed.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.datastructures import FormData
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from ....cluster.errors import StorageError
from ..middleware.request_gate import FORM_BYTES, is_upload

MAX_FIELDS = 16


@asynccontextmanager
async def upload_form(http: Request, folder: Path | None) -> AsyncGenerator[FormData, None]:
    """Parse a form with one file; any other body is an empty form.

    `folder`: for the file; None is the system's folder for temporary files. Raises HTTPException (400) for
    an invalid form, StorageError if the file cannot be written.
    """
    if not is_upload(http.method, http.url.path, http.headers):
        yield FormData()
        return
    parser = _UploadParser(folder, http)
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise HTTPException(400, error.message) from None
    except OSError as error:
        raise storage_error(error) from error
    try:
        yield form
    finally:
        await form.close()


class _UploadParser(MultiPartParser):
    def __init__(self, folder: Path | None, http: Request) -> None:
        limits = {"max_files": 1, "max_fields": MAX_FIELDS, "max_part_size": FORM_BYTES}
        super().__init__(http.headers, http.stream(), **limits)
        self._folder = folder

    def on_headers_finished(self) -> None:
        """Replace the file of a new part, which would be in memory first and then in another folder."""
        super().on_headers_finished()
        if (upload := self._current_part.file) is not None:
            upload.file.close()
            # Any: Starlette names its own kind of file. Closed with the form.
            file: Any = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115
            upload.file = self._files_to_close_on_error[-1] = file


def storage_error(error: OSError | ValueError) -> StorageError:
    why = getattr(error, "strerror", None) or type(error).__name__
    return StorageError(
        f"Files and batches cannot be read or written now ({why}). No stored data is lost. Retry.",
        param="batch_storage",
    )
