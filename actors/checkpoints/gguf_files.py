"""Finds GGUF files: in a folder, on the hub by the name of a quantization, and those of a written folder.

Imports neither torch nor the package `gguf`. Called by `checkpoint_paths.py`, and where files of weights are
measured.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from ...cluster.errors import CheckpointError, brief_name, first_line
from ...drafter.compute.checkpoint.gguf.split_files import METHOD, model_name
from ...drafter.compute.checkpoint.hf_config import read_json

_GGUF = ".gguf"
_PROJECTOR = "mmproj"  # begins names of files with an encoder of images, which belongs to a model beside it
_MAX_NAMED = 20  # files in a message
_USUAL = "Q4_K_M"  # what llama.cpp takes of a repository, too


def gguf_files(folder: Path) -> tuple[Path, ...]:
    """Return the GGUF files that a folder was written for; empty if it holds its weights itself."""
    found = read_json(folder, param="model", required=False).get("quantization_config")
    if not isinstance(found, Mapping) or found.get("quant_method") != METHOD:
        return ()
    return tuple(Path(str(name)) for name in found.get("files", ()))


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Return the files that hold a checkpoint's weights: its own, or those of GGUF."""
    return gguf_files(folder) or tuple(sorted(folder.glob("*.safetensors")))


def has_gguf(folder: Path) -> bool:
    """Return whether a folder's weights are in GGUF files."""
    return any(folder.glob(f"*{_GGUF}")) and not any(folder.glob("*.safetensors"))


def gguf_in(folder: Path, field: str) -> Path:
    """Return a file of the only GGUF model in a folder. Raises CheckpointError for none or several."""
    models = _models(path.name for path in folder.glob(f"*{_GGUF}"))
    if len(models) == 1:
        return folder / next(iter(models.values()))[0]
    holds = f"holds several GGUF models: {_named(models)}" if models else "holds no model in its GGUF files"
    raise CheckpointError(f"{field}: {folder} {holds}. Give the path of one.", param=field)


def gguf_on_hub(
    repo: str, quantization: str, field: str, revision: str | None, download_dir: str | None
) -> Path:
    """Return a file of the hub's cache, downloaded if need be: the only one that `quantization` names.

    Raises CheckpointError if there is no such file or the hub does not provide it.
    """
    from huggingface_hub import snapshot_download

    wanted = f"{field}={brief_name(f'{repo}:{quantization}')}"
    try:
        parts = chosen(_names_on_hub(repo, revision, download_dir), quantization, wanted, field)
        found = snapshot_download(repo, allow_patterns=parts, revision=revision, cache_dir=download_dir)
    except (OSError, ValueError) as error:  # every error of the hub's client is one of these
        reason = first_line(error)
        raise CheckpointError(
            f"{wanted}: the hub does not provide it ({reason}). Check the spelling and the connection "
            "(HF_TOKEN for a gated model), or download the file and give its path.",
            param=field,
        ) from None
    return Path(found) / parts[0]


def usual_quantization(repo: str, revision: str | None, download_dir: str | None) -> str | None:
    """Return the quantization of a repository's only GGUF model, or Q4_K_M if it has several, None if none.

    Raises what the hub's client raises.
    """
    models = _models(_names_on_hub(repo, revision, download_dir))
    if not models:
        return None
    return _USUAL if len(models) > 1 else Path(next(iter(models))).name


def _names_on_hub(repo: str, revision: str | None, download_dir: str | None) -> Iterable[str]:
    """Return the names of a repository's files, or of those in the cache if the hub is not reachable."""
    from huggingface_hub import HfApi

    try:
        return HfApi().list_repo_files(repo, revision=revision)
    except (OSError, ValueError):
        snapshot = cached_snapshot(repo, revision, download_dir)
        if snapshot is None:
            raise
        return [str(path.relative_to(snapshot)) for path in snapshot.rglob(f"*{_GGUF}")]


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
