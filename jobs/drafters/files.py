"""A drafter's small files and the headers of its weights, from a folder or the hub; no weight is read.

Called by the commands that only look. Who drafts reads through `drafter/dflash/checkpoint.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, TypeGuard, TypeVar

from ...actors.checkpoints import (
    SHAPE_FILES,
    TIKTOKEN_MODEL,
    TOKENIZER_CODE,
    resolve_checkpoint,
    revision_of,
)
from ...cluster.errors import CheckpointError
from ...drafter.compute.config_json import Json, read_json
from ...drafter.compute.tensors import TensorFolder, TensorHeaders
from ...drafter.dflash.config import DrafterConfig
from ...drafter.eagle3.config import Eagle3Config
from ...drafter.eagle3.formats import is_eagle3

# Of a drafter and of a target: what says what they are, and how they read text.
CARD_FILE = "card.json"  # of `manta drafter eval`
SMALL_FILES = (*SHAPE_FILES, "tokenizer*.json", TIKTOKEN_MODEL, TOKENIZER_CODE, "*.jinja", CARD_FILE)


AnyConfig = DrafterConfig | Eagle3Config
_Config = TypeVar("_Config", bound=AnyConfig, covariant=True)


@dataclass(frozen=True, slots=True)
class DrafterFiles(Generic[_Config]):
    """A drafter that is described, not loaded.

    Attributes:
        name: as it was asked for.
        raw: its config.json.
    """

    name: str
    folder: Path
    revision: str
    raw: Json
    config: _Config
    tensors: TensorHeaders

    @property
    def verifier(self) -> Json:
        """What Speculators' format says of its target; empty in the others."""
        settings = self.raw.get("speculators_config")
        verifier = settings.get("verifier") if isinstance(settings, dict) else None
        return verifier if isinstance(verifier, dict) else {}


def open_drafter(name: str) -> DrafterFiles[AnyConfig]:
    """Read what it says; CheckpointError names what is missing, wrong or not served."""
    folder = resolve_checkpoint(name, field="drafter", files=SMALL_FILES)
    config, raw = read_config(folder), read_json(folder, param="drafter")
    return DrafterFiles(name, folder, revision_of(str(folder)), raw, config, read_headers(name, folder))


def is_dflash(files: DrafterFiles[AnyConfig]) -> TypeGuard[DrafterFiles[DrafterConfig]]:
    """Whether it drafts blocks, and not an EAGLE-3 chain."""
    return isinstance(files.config, DrafterConfig)


def read_config(folder: Path) -> AnyConfig:
    """Of either method; of an EAGLE-3 drafter without what only its target says."""
    if is_eagle3(read_json(folder, param="speculative_config.model")):
        return Eagle3Config.load(folder, None)
    return DrafterConfig.load(folder)


def method_of(name: str) -> Literal["dflash", "eagle3"]:
    """The `method` with which an engine runs it."""
    folder = resolve_checkpoint(name, field="drafter", files=SMALL_FILES)
    return "eagle3" if is_eagle3(read_json(folder, param="drafter")) else "dflash"


def read_headers(name: str, folder: Path) -> TensorHeaders:
    """Of the weights in `folder`, or of those that the hub has under `name`.

    Args:
        folder: what `name` was resolved to.
    """
    if any(folder.glob("*.safetensors")) or not (revision := revision_of(str(folder))):
        return TensorFolder(folder)
    return _hub_headers(name, revision)


def _hub_headers(name: str, revision: str) -> TensorHeaders:
    """By ranges: the hub gives the first bytes of each file."""
    from huggingface_hub import get_safetensors_metadata
    from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError

    try:
        found = get_safetensors_metadata(name, revision=revision)
    except (OSError, NotASafetensorsRepoError, SafetensorsParsingError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"drafter={name!r}: the hub did not give the headers of its weights ({reason}). Check the "
            "connection (HF_TOKEN for a gated model), or download it and give its folder.",
            param="drafter",
        ) from None
    headers = TensorHeaders(name)
    for file_name, file in found.files_metadata.items():
        for tensor, info in file.tensors.items():
            headers.add(tensor, tuple(info.shape), info.dtype, file_name)
    return headers
