"""Writes the Hugging Face folder as which the rest of Manta sees a GGUF file.

    FILE.gguf ─ drafter/compute/checkpoint/gguf ─▶ config.json, generation_config.json
              └ gguf_tokenizer.py ─▶ tokenizer.json, tokenizer_config.json, chat_template.jinja,
                                     additional_chat_templates/

Weights stay where they are: config.json names the files. A folder is in Manta's cache; it is written once per
file and version of the code that writes it, by whichever process is the first. Called by
`checkpoint_paths.py`.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import uuid
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import orjson

from ...cluster.disk_cache import cache_folder
from ...cluster.errors import CheckpointError, brief, brief_name
from ...drafter.compute.checkpoint.gguf import architectures
from ...drafter.compute.checkpoint.gguf.gguf_file import GgufFile, model_name, parts_of
from ...drafter.compute.checkpoint.hf_config import read_json
from ...drafter.compute.checkpoint.quantization.checkpoint_quantization import KEY
from . import gguf_pre_tokenizers, gguf_tokenizer
from .gguf_tokenizer import GgufTokenizer
from .tokenizer_config import DEFAULT

_GGUF = ".gguf"
_PROJECTOR = "mmproj"  # begins names of files with an encoder of images, which belongs to a model beside it
_MAX_NAMED = 20  # files in a message


def gguf_checkpoint(path: Path, field: str) -> Path:
    """Return the folder that stands for a file; `path` is any part of a split one.

    Raises CheckpointError, which names the setting `field`, if the file or its cache is not usable.
    """
    try:
        paths = parts_of(path.absolute())
        folder = cache_folder() / "gguf" / f"{model_name(path.name)[:100]}-{_identity(paths)}"
        if not folder.is_dir():
            _write(folder, _content(GgufFile(paths[0])))
    except CheckpointError as error:
        if error.param is not None:
            raise
        raise CheckpointError(f"{field}: {error.message}", param=field) from None
    return folder


def gguf_files(folder: Path) -> tuple[Path, ...]:
    """Return the files for which a folder stands; empty if it holds its weights itself."""
    found = read_json(folder, param="model", required=False).get(KEY)
    if not isinstance(found, Mapping) or found.get("quant_method") != architectures.METHOD:
        return ()
    return tuple(Path(str(name)) for name in found.get("files", ()))


def gguf_in(folder: Path, field: str) -> Path | None:
    """Return the GGUF model of a folder without other weights; None if it has none."""
    names = sorted(path.name for path in folder.glob(f"*{_GGUF}"))
    models = _models(names)
    if not models or any(folder.glob("*.safetensors")):
        return None
    if len(models) > 1:
        raise CheckpointError(
            f"{field}: {folder} holds several GGUF models: {_named(models)}. Give the path of one of them.",
            param=field,
        )
    return folder / next(iter(models.values()))[0]


def gguf_on_hub(
    repo: str, quantization: str, field: str, revision: str | None, download_dir: str | None
) -> Path:
    """Return a file of the hub's cache, downloaded if need be: the only one that `quantization` names."""
    from huggingface_hub import HfApi, snapshot_download

    wanted = f"{field}={brief_name(f'{repo}:{quantization}')}"
    try:
        try:
            names: Iterable[str] = HfApi().list_repo_files(repo, revision=revision)
        except (OSError, ValueError):
            snapshot = cached_snapshot(repo, revision, download_dir)
            if snapshot is None:
                raise
            names = [str(path.relative_to(snapshot)) for path in snapshot.rglob(f"*{_GGUF}")]
        parts = chosen(names, quantization, wanted, field)
        found = snapshot_download(repo, allow_patterns=parts, revision=revision, cache_dir=download_dir)
    except (OSError, ValueError) as error:  # every error of the hub's client is one of these
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"{wanted}: the hub does not provide it ({reason}). Check the spelling and the connection "
            "(HF_TOKEN for a gated model), or download the file and give its path.",
            param=field,
        ) from None
    return Path(found) / parts[0]


def cached_snapshot(repo: str, revision: str | None, download_dir: str | None) -> Path | None:
    """Return the folder of a snapshot in the hub's cache, without the network; None if there is none."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo, revision=revision, cache_dir=download_dir, local_files_only=True))
    except (OSError, ValueError):
        return None


def chosen(names: Iterable[str], quantization: str, wanted: str, field: str) -> list[str]:
    """Return the files, all parts of a split one, of the only model that `quantization` names.

    It is the end of the file's name, after a separator, or all of it; letters' case does not matter. `wanted`
    begins the message of the CheckpointError otherwise.
    """
    models = _models(names)
    name = quantization.lower().removesuffix(_GGUF)
    found = {model: parts for model, parts in models.items() if _is_named(model.lower(), name)}
    exact = {model: parts for model, parts in found.items() if Path(model).name.lower() == name}
    found = exact or found
    if len(found) == 1:
        return next(iter(found.values()))
    if found:
        raise CheckpointError(
            f"{wanted} names several files: {_named(found)}. Give the name of one after the colon.",
            param=field,
        )
    offers = f"It has {_named(models)}" if models else "It has no GGUF file"
    raise CheckpointError(f"{wanted}: no file of this quantization. {offers}.", param=field)


def _is_named(model: str, name: str) -> bool:
    return model == name or (model.endswith(name) and model[-len(name) - 1] in "-._/")


def _models(names: Iterable[str]) -> Mapping[str, list[str]]:
    """Return the files of each model by its name, with folder: parts of split ones, without projectors."""
    models: defaultdict[str, list[str]] = defaultdict(list)
    for name in sorted(names):
        if name.endswith(_GGUF) and not Path(name).name.startswith(_PROJECTOR):
            models[model_name(name)].append(name)
    return models


def _named(models: Iterable[str]) -> str:
    names = [brief_name(f"{Path(model).name}{_GGUF}") for model in models]
    more = len(names) - _MAX_NAMED
    return ", ".join([*names[:_MAX_NAMED], *([f"{more} more"] if more > 0 else [])])


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


def _write(folder: Path, content: Mapping[str, bytes]) -> None:
    """Write a folder atomically: it appears as a whole, or another process has written it."""
    new = folder.with_name(f".{uuid.uuid4().hex}")
    try:
        for name, data in content.items():
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            (new / name).write_bytes(data)
        new.rename(folder)
    except OSError as error:
        shutil.rmtree(new, ignore_errors=True)
        if not folder.is_dir():
            raise CheckpointError(
                f"the folder {brief(str(folder.parent))} cannot be written ({error.strerror or error}). Set "
                "MANTA_CACHE_DIR to a folder that can."
            ) from None
