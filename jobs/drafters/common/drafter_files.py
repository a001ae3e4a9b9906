"""Reads a drafter's configuration and the headers of its weights from a folder or the hub, not the weights.

Used by the commands that only inspect. The engine reads drafters through `drafter/dflash/checkpoint.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, TypeGuard, TypeVar

from ....actors.checkpoints.checkpoint_paths import (
    SHAPE_FILES,
    TIKTOKEN_MODEL,
    TOKENIZER_CODE,
    resolve_checkpoint,
    revision_of,
)
from ....actors.checkpoints.gguf_files import gguf_files
from ....actors.checkpoints.model_card import card_metadata
from ....cluster.errors import CheckpointError, first_line
from ....drafter.compute.checkpoint.gguf.gguf_file import GgufFile
from ....drafter.compute.checkpoint.gguf.gguf_folder import open_gguf_folder
from ....drafter.compute.checkpoint.hf_config import Json, read_json
from ....drafter.compute.checkpoint.loading.quantized_tensors import QuantizedTensors
from ....drafter.compute.checkpoint.safetensors_reader import TensorFolder, TensorHeaders
from ....drafter.dflash.config import DrafterConfig
from ....drafter.eagle3.config import Eagle3Config
from ....drafter.eagle3.config_formats import is_eagle3

# Files that describe a drafter or target and its tokenizer.
CARD_FILE = "card.json"  # written by `manta drafter eval`
SMALL_FILES = (*SHAPE_FILES, "tokenizer*.json", TIKTOKEN_MODEL, TOKENIZER_CODE, "*.jinja", CARD_FILE)


AnyConfig = DrafterConfig | Eagle3Config
_Config = TypeVar("_Config", bound=AnyConfig, covariant=True)


@dataclass(frozen=True, slots=True)
class DrafterFiles(Generic[_Config]):
    """A drafter without its weights; `name` as given, `raw` is config.json."""

    name: str
    folder: Path
    revision: str
    raw: Json
    config: _Config
    tensors: TensorHeaders

    @property
    def verifier(self) -> Json:
        """Return Speculators' description of the target; empty for other formats."""
        settings = self.raw.get("speculators_config")
        verifier = settings.get("verifier") if isinstance(settings, dict) else None
        return verifier if isinstance(verifier, dict) else {}


def open_drafter(name: str) -> DrafterFiles[AnyConfig]:
    """Read a drafter. Raises CheckpointError naming what is missing, wrong or not supported."""
    folder = resolve_checkpoint(name, field="drafter", files=SMALL_FILES)
    config, raw = read_config(folder), read_json(folder, param="drafter")
    tensors = read_headers(name, folder)
    if config.quantization is not None:
        tensors = QuantizedTensors(tensors, config.quantization)
    return DrafterFiles(name, folder, revision_of(str(folder)), raw, config, tensors)


def is_dflash(files: DrafterFiles[AnyConfig]) -> TypeGuard[DrafterFiles[DrafterConfig]]:
    return isinstance(files.config, DrafterConfig)


def read_config(folder: Path) -> AnyConfig:
    """Read the configuration of a DFlash or EAGLE-3 drafter (without what EAGLE-3 takes from its target)."""
    if is_eagle3(read_json(folder, param="speculative_config.model")):
        return Eagle3Config.load(folder, None)
    return DrafterConfig.load(folder)


def method_of(name: str) -> Literal["dflash", "eagle3"]:
    folder = resolve_checkpoint(name, field="drafter", files=SMALL_FILES)
    return "eagle3" if is_eagle3(read_json(folder, param="drafter")) else "dflash"


def licence_of(folder: Path) -> str:
    """Return the licence that a drafter's README.md or GGUF file names, else ""."""
    for path in gguf_files(folder)[:1]:
        found = GgufFile(path).metadata.get("general.license")
        return found if isinstance(found, str) else ""
    card = card_metadata(folder)
    return str(card.get("license_name") or card.get("license") or "")


def read_headers(name: str, folder: Path) -> TensorHeaders:
    """Read the headers of the weights in `folder`, or on the hub if only small files were downloaded."""
    if files := gguf_files(folder):
        return open_gguf_folder(folder, tuple(map(str, files)))
    if any(folder.glob("*.safetensors")) or not (revision := revision_of(str(folder))):
        return TensorFolder(folder)
    return _hub_headers(name, revision)


def _hub_headers(name: str, revision: str) -> TensorHeaders:
    from huggingface_hub import get_safetensors_metadata
    from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError

    try:
        found = get_safetensors_metadata(name, revision=revision)
    except (OSError, NotASafetensorsRepoError, SafetensorsParsingError) as error:
        reason = first_line(error)
        raise CheckpointError(
            f"drafter={name!r}: the headers of its weights could not be downloaded ({reason}). Check the "
            "connection (HF_TOKEN for a gated model), or download it and give its folder.",
            param="drafter",
        ) from None
    headers = TensorHeaders(name)
    for file_name, file in found.files_metadata.items():
        for tensor, info in file.tensors.items():
            headers.add(tensor, tuple(info.shape), info.dtype, file_name)
    return headers


def public_name(model: str) -> str:
    """Return the name of a folder without its path, which may be private; hub ids are returned unchanged."""
    return Path(model).resolve().name if Path(model).exists() else model
