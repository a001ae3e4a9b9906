"""Locates a checkpoint: a local folder, one shipped in this package, a published model that is known by name,
or a snapshot from the Hugging Face hub.

A GGUF file, local or from the hub (`owner/name:Q4_K_M`), is a folder as well: `gguf_checkpoint.py` writes it.
Reads only enough to check that a target is not a drafter.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ...cluster.config import EngineConfig
from ...cluster.errors import CheckpointError, ConfigError, brief, brief_name, did_you_mean, first_line
from ...drafter.compute.checkpoint.gguf.split_files import model_name
from ...drafter.compute.checkpoint.hf_config import read_json
from .file_names import TIKTOKEN_MODEL, TOKENIZER_JSON
from .gguf_files import cached_snapshot, gguf_in, gguf_on_hub, has_gguf, usual_quantization
from .model_download import get_model
from .published_models import PACKAGE, PublishedModel, models_and_drafters

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_HUB_GGUF = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+):(?P<quantization>[\w.-]+)")  # as llama.cpp's -hf
_GGUF = ".gguf"
SHAPE_FILES = (
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "README.md",
    "mask_embedding.pt",
)
TOKENIZER_CODE = "tokenization_*.py"  # parsed for a pattern, never run
_SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "README.md", TOKENIZER_CODE, "mask_embedding.pt")
_HUB_FILES = (*_SMALL_FILES, "*.safetensors")


def resolve_checkpoint(
    name: str,
    *,
    field: str,
    files: Sequence[str] = _HUB_FILES,
    revision: str | None = None,
    download_dir: str | None = None,
) -> Path:
    """Return the folder that `name` refers to.

    Args:
        name: a folder (absolute, relative to the working directory, or to the package), a name in
            `manta models list`, a hub id, or a GGUF file: its path, any part of a split one, or
            `owner/name:quantization` on the hub. A hub id whose repository has only GGUF files is its only
            one, or Q4_K_M.
        field: the setting that contained the name, for error messages.
        files: patterns of the files to get from the hub; `SHAPE_FILES` contains no weights.
        revision: revision on the hub; default: the newest.
        download_dir: folder for snapshots instead of the hub's cache.
    """
    local = Path(name).expanduser()
    for folder in (local, PACKAGE / name):
        if folder.is_dir():
            _refuse_revision(name, "folder", field, revision)
            return _folder_of(folder, field) if has_gguf(folder) else folder.resolve()
    if local.is_file():
        _refuse_revision(name, "file", field, revision)
        return _folder_of(local, field)
    if (known := models_and_drafters().get(name)) is not None:
        _refuse_revision(name, "published model", field, revision)
        return _folder_of(get_model(known), field) if isinstance(known, PublishedModel) else known.path
    if (found := _HUB_GGUF.fullmatch(name)) is not None:
        return _folder_of(
            gguf_on_hub(found["repo"], found["quantization"], field, revision, download_dir), field
        )
    if name.endswith(_GGUF):
        raise CheckpointError(
            f"{field}={name!r}: there is no such file. Give the path of a GGUF file.", param=field
        )
    if not _HUB_ID.fullmatch(name) or name.startswith("."):
        raise CheckpointError(
            f"{field}={name!r}: there is no such folder, and it is not a hub id (owner/name). Give the path "
            "of a checkpoint folder.",
            param=field,
        )
    return _download(name, field, files, revision, download_dir)


def _folder_of(path: Path, field: str) -> Path:
    """Return the folder written for a GGUF file, or for the one in a folder."""
    from .gguf_checkpoint import gguf_checkpoint  # it needs torch

    return gguf_checkpoint(gguf_in(path, field) if path.is_dir() else path, field)


def _refuse_revision(name: str, what: str, field: str, revision: str | None) -> None:
    if revision is not None:
        raise ConfigError(
            f"{field}={name!r} is a {what}, which has no revision {revision!r}. Leave out "
            "revision, or give a hub id.",
            param="revision" if field == "model" else field,
        )


def shipped(path: Path) -> Path:
    return path if path.exists() or not (PACKAGE / path).exists() else PACKAGE / path


def revision_of(name: str, revision: str | None = None, download_dir: str | None = None) -> str:
    """Return the commit of a cached hub snapshot; empty for others. Does not use the network."""
    from huggingface_hub import try_to_load_from_cache

    if Path(name).is_dir():
        return _snapshot_of(Path(name))
    if name in models_and_drafters():
        return ""
    if Path(name).is_file():
        return _snapshot_of(Path(name).absolute().parent)
    if (gguf := _HUB_GGUF.fullmatch(name)) is not None:
        snapshot = cached_snapshot(gguf["repo"], revision, download_dir)
        return "" if snapshot is None else _snapshot_of(snapshot)
    if not _HUB_ID.fullmatch(name):
        return ""
    found = try_to_load_from_cache(name, "config.json", cache_dir=download_dir, revision=revision)
    snapshot = Path(found).parent if isinstance(found, str) else cached_snapshot(name, revision, download_dir)
    return "" if snapshot is None else _snapshot_of(snapshot)


def _snapshot_of(folder: Path) -> str:
    """Return the commit of a folder in the hub's cache, `.../snapshots/<commit>`, else ""."""
    return folder.name if folder.parent.name == "snapshots" else ""


def target_folder(config: EngineConfig, *, field: str = "model", files: Sequence[str] | None = None) -> Path:
    """Return the target's folder; without weights for `load_format="dummy"`."""
    folder = resolve_checkpoint(
        config.model,
        field=field,
        files=files or _files_of(config),
        revision=config.revision,
        download_dir=config.download_dir,
    )
    _refuse_drafter(config.model, folder, field)
    return folder


def _refuse_drafter(model: str, folder: Path, field: str) -> None:
    from ...drafter.eagle3.config_formats import method_of_drafter

    method = method_of_drafter(read_json(folder, param=field, required=False))
    if method is not None:
        also = "" if method == "dflash" else f" --spec-method {method}"
        raise CheckpointError(
            f"{field}={brief(model)} is a drafter ({method}), not a target. Name the target there, and "
            f"the drafter separately: --model TARGET --spec-model {brief_name(model)}{also} "
            "(speculative_config.model).",
            param=field,
        )


def tokenizer_folder(config: EngineConfig) -> Path:
    if config.tokenizer is None:
        return target_folder(config)
    return resolve_checkpoint(config.tokenizer, field="tokenizer", download_dir=config.download_dir)


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (TOKENIZER_JSON, TIKTOKEN_MODEL))


def drafter_folder(config: EngineConfig, model: str, *, files: Sequence[str] | None = None) -> Path:
    return resolve_checkpoint(
        model,
        field="speculative_config.model",
        files=files or _files_of(config),
        revision=_drafter_revision(config, model),
        download_dir=config.download_dir,
    )


def drafter_commit(config: EngineConfig, model: str) -> str:
    return revision_of(model, _drafter_revision(config, model), config.download_dir)


def _drafter_revision(config: EngineConfig, model: str) -> str | None:
    """The configured revision applies only to the configured drafter, not to a replacement."""
    spec = config.speculative_config
    return spec.revision if spec is not None and spec.model == model else None


def _files_of(config: EngineConfig) -> Sequence[str]:
    return _SMALL_FILES if config.load_format == "dummy" else _HUB_FILES


def with_absolute_paths(config: EngineConfig) -> EngineConfig:
    """Make paths absolute, for processes with another working directory; hub ids stay."""
    spec = config.speculative_config
    if spec is not None and spec.model is not None:
        spec = replace(spec, model=absolute_path(spec.model))
    return replace(
        config,
        model=absolute_path(config.model),
        tokenizer=None if config.tokenizer is None else absolute_path(config.tokenizer),
        chat_template=None if config.chat_template is None else absolute_path(config.chat_template),
        download_dir=None if config.download_dir is None else str(Path(config.download_dir).absolute()),
        speculative_config=spec,
    )


def with_drafter(config: EngineConfig, model: str) -> EngineConfig:
    """Return the config with another drafter. Raises ConfigError if there is none to swap."""
    spec = config.speculative_config
    if spec is None or spec.model is None:
        how = "decodes plainly" if spec is None else f"drafts without a model ({spec.method})"
        raise ConfigError(
            f"This engine {how}: there is no drafter to swap. Start it with speculative_config.model.",
            param="speculative_config",
        )
    if spec.method == "mtp":
        raise ConfigError(
            "An assistant of the target is not swapped. Restart the engine with another one.",
            param="speculative_config.model",
        )
    return replace(config, speculative_config=replace(spec, model=absolute_path(model), revision=None))


def absolute_path(name: str) -> str:
    """Return the absolute path of a local checkpoint or file; hub ids are unchanged."""
    if not Path(name).exists():
        return name
    # The hub's cache links to a GGUF file, and only the link has the name with the number of its part.
    return os.path.abspath(name) if name.endswith(_GGUF) else str(Path(name).resolve())  # noqa: PTH100


def served_name(model: str) -> str:
    """Return the default name of a model in the API: a GGUF file's name without its ending, or `model`."""
    is_file = model.endswith(_GGUF) and not _HUB_GGUF.fullmatch(model)
    return model_name(Path(model).name) if is_file else model


def _download(
    name: str, field: str, files: Sequence[str], revision: str | None, download_dir: str | None
) -> Path:
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(name, allow_patterns=list(files), revision=revision, cache_dir=download_dir)
        folder, quantization = Path(found), None
        if _lacks_weights(folder, files):
            quantization = usual_quantization(name, revision, download_dir)
    except (OSError, ValueError) as error:  # every error of the hub's client is one of these
        reason = first_line(error)
        meant = did_you_mean(name, models_and_drafters(), fallback="")
        raise CheckpointError(
            f"{field}={name!r}: there is no such folder, and the hub does not provide it ({reason}). "
            f"{meant}{' ' if meant else ''}Check the spelling and the connection (HF_TOKEN for a gated "
            f"model), or download it once and set {field} to its folder.",
            param=field,
        ) from None
    if quantization is None:
        return folder
    return _folder_of(gguf_on_hub(name, quantization, field, revision, download_dir), field)


def _lacks_weights(folder: Path, files: Sequence[str]) -> bool:
    """Return whether a snapshot, of which `files` were wanted, may be of a repository of GGUF files."""
    if any(folder.glob("*.safetensors")) or has_tokenizer(folder):
        return False
    return "*.safetensors" in files or not (folder / "config.json").is_file()
