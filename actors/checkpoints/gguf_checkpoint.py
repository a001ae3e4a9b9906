"""Writes the Hugging Face folder as which the rest of Manta sees a GGUF file.

    FILE.gguf ─ drafter/compute/checkpoint/gguf ─▶ config.json, generation_config.json
              └ gguf_tokenizer.py ─▶ tokenizer.json, tokenizer_config.json, chat_template.jinja,
                                     additional_chat_templates/

Weights stay where they are: config.json names the files. A folder is in Manta's cache; it is written once per
file and version of the code that writes it, by whichever process is the first, and again if a file in it has
changed. Called by `checkpoint_paths.py`.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import orjson

from ...cluster.disk_cache import cache_folder, read_own_file
from ...cluster.errors import CheckpointError, brief
from ...cluster.json_text import parse_json
from ...drafter.compute.checkpoint.gguf import architectures
from ...drafter.compute.checkpoint.gguf.gguf_file import GgufFile
from ...drafter.compute.checkpoint.gguf.split_files import model_name, parts_of
from . import gguf_pre_tokenizers, gguf_tokenizer
from .file_names import DEFAULT
from .gguf_tokenizer import GgufTokenizer

DIGESTS = ".sha256.json"  # in each folder: the digest of every other file


def gguf_checkpoint(path: Path, field: str) -> Path:
    """Return the folder of a file, written if it is not in the cache; `path` is any part of a split one.

    Raises CheckpointError, which names the setting `field`, if the file or its cache is not usable.
    """
    try:
        paths = parts_of(path.absolute())
        folder = cache_folder() / "gguf" / f"{model_name(path.name)[:100]}-{_identity(paths)}"
        if not _is_whole(folder):
            _discard(folder)
            _write(folder, _content(GgufFile(paths[0])))
    except CheckpointError as error:
        if error.param is not None:
            raise
        raise CheckpointError(f"{field}: {error.message}", param=field) from None
    return folder


def _identity(paths: Sequence[Path]) -> str:
    """Return a digest of names, sizes and times of the files, and of the code that writes the folder."""
    digest = hashlib.sha256(_code())
    for path in paths:
        try:
            stat = path.stat()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from None
        digest.update(json.dumps([str(path), stat.st_size, stat.st_mtime_ns]).encode())
    return digest.hexdigest()[:16]


@cache
def _code() -> bytes:
    """Return the source of the code that decides on the content of folders: an update writes new ones."""
    of_tokenizers = [Path(module.__file__ or "") for module in (gguf_tokenizer, gguf_pre_tokenizers)]
    of_configs = sorted(Path(architectures.__file__).parent.glob("*.py"))
    sources = (Path(__file__), *of_tokenizers, *of_configs)
    return b"".join(path.read_bytes() for path in sources if path.is_file())


def _content(file: GgufFile) -> dict[str, bytes]:
    """Return the files of the folder by name."""
    config, generation = architectures.config_of(file), dict(architectures.generation_config_of(file))
    content: dict[str, bytes] = {"config.json": _json(config)}
    # A drafter has its target's tokenizer.
    tokenizer = None if architectures.is_drafter(file) else GgufTokenizer.read(file)
    if tokenizer is not None:
        content["tokenizer.json"] = orjson.dumps(tokenizer.tokenizer_json())
        content["tokenizer_config.json"] = _json(tokenizer.tokenizer_config())
        generation["eos_token_id"] = list(tokenizer.end_ids)
        for name, source in tokenizer.chat_templates().items():
            content[_template_file(name)] = source.encode()
    return {**content, "generation_config.json": _json(generation)}


def _template_file(name: str) -> str:
    return "chat_template.jinja" if name == DEFAULT else f"additional_chat_templates/{name}.jinja"


def _json(value: Mapping[str, Any]) -> bytes:  # Any: JSON values
    return orjson.dumps(value, option=orjson.OPT_INDENT_2)


def _is_whole(folder: Path) -> bool:
    """Return whether the folder holds what was written: a crash, or another user, may have changed it."""
    try:
        return _matches_digests(folder, folder.stat().st_mtime_ns)
    except (OSError, ValueError, TypeError, AttributeError):
        return False


@cache  # a start asks for one folder ten times
def _matches_digests(folder: Path, changed_ns: int) -> bool:
    digests = parse_json(read_own_file(folder / DIGESTS))
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}
    return found == {DIGESTS, *digests} and all(
        hashlib.sha256(read_own_file(folder / name)).hexdigest() == digest for name, digest in digests.items()
    )


def _discard(folder: Path) -> None:
    """Remove a folder that cannot be used, atomically, if it is there and this user may."""
    old = folder.with_name(f".{uuid.uuid4().hex}")
    with suppress(OSError):
        folder.rename(old)
        shutil.rmtree(old, ignore_errors=True)


def _write(folder: Path, content: Mapping[str, bytes]) -> None:
    """Write a folder atomically: it appears as a whole, or another process has written it."""
    new = folder.with_name(f".{uuid.uuid4().hex}")
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in content.items()}
    try:
        for name, data in {**content, DIGESTS: _json(digests)}.items():
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            (new / name).write_bytes(data)
        new.rename(folder)
    except OSError as error:
        shutil.rmtree(new, ignore_errors=True)
        if not _is_whole(folder):
            raise CheckpointError(
                f"the folder {brief(str(folder.parent))} cannot be written ({error.strerror or error}). Set "
                "MANTA_CACHE_DIR to a folder that can."
            ) from None
