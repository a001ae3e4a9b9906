"""A compressed file as one in which any offset can be read.

What is decompressed is kept in memory, or beyond MEMORY_BYTES in a temporary file (TMPDIR), so that each byte
is decompressed once while the file is open, and only what is read, with all before it.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Mapping

import pyarrow as pa

CODECS: Mapping[str, str] = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".lz4": "lz4", ".br": "brotli"}
MEMORY_BYTES = 16 * 2**20
CHUNK_BYTES = 2**20


class CompressedFile(io.RawIOBase):
    """Raises OSError for a damaged or incomplete file. Closes `file` with itself."""

    def __init__(self, file: pa.NativeFile, codec: str) -> None:
        self._file = file
        self._stream = pa.CompressedInputStream(file, codec)
        self._kept = tempfile.SpooledTemporaryFile(MEMORY_BYTES)  # noqa: SIM115 (`close` closes it)
        self._num_kept = 0
        self._at = 0
        self._has_ended = False

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        assert whence in (io.SEEK_SET, io.SEEK_CUR), "the end is not known"
        self._at = offset + (self._at if whence == io.SEEK_CUR else 0)
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        self._decompress(self._at + len(buffer))
        self._kept.seek(self._at)
        content = self._kept.read(len(buffer))
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)

    def close(self) -> None:
        if not self.closed:
            self._kept.close()
            self._stream.close()
            self._file.close()
        super().close()

    def _decompress(self, end: int) -> None:
        while self._num_kept < end and not self._has_ended:
            chunk = self._stream.read(CHUNK_BYTES)
            self._has_ended = not chunk
            self._kept.seek(self._num_kept)
            self._num_kept += self._kept.write(chunk)
