"""Reads what a plan needs to know about a target and a drafter, without weights.

From the hub only small files are downloaded (`SHAPE_FILES`). If a folder has weights, their headers are
checked.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...actors.targets.families import read_model
from ...actors.targets.loading.load_plan import find_max_model_len
from ...actors.targets.model.model_spec import ModelSpec
from ...actors.targets.model.tensor_parallel import Sharding
from ...actors.targets.model.weights import open_checkpoint
from ...actors.tokenization.checkpoint_paths import SHAPE_FILES, drafter_folder, target_folder
from ...cluster.config import EngineConfig
from ...cluster.errors import ConfigError
from ...cluster.hardware.model_pair import ModelPair
from ...cluster.hardware.parallel_layouts import TP_SIZES
from ...cluster.speculation.acceptance_length import check_survival, survival_of_length
from ...drafter.card import least_card_length
from ...drafter.dflash.checkpoint import check_drafter
from ...drafter.dflash.config import DrafterConfig
from ...drafter.dflash.target_features import TargetFacts
from .checkpoint_shapes import drafter_shape, target_shape

HalfDType = Literal["bfloat16", "float16"]
# Mean acceptance length without a flag or a card: an estimate between chats at temperature 1 and code at 0.
# Measure yours with `manta bench`.
DEFAULT_LENGTH = 4.0


@dataclass(frozen=True, slots=True)
class ReadPair:
    """Two checkpoints as input of a plan; `acceptance` names the source of the curve."""

    pair: ModelPair
    dtype: HalfDType
    max_model_len: int
    acceptance: str


def read_pair(config: EngineConfig, acceptance: str | None) -> ReadPair:
    """Read the models of `config`.

    `acceptance`: a mean length, or a probability per draft, comma-separated; None uses the drafter's card.
    """
    folder = target_folder(config, files=SHAPE_FILES)
    target = read_model(folder)
    if _has_weights(folder):
        open_checkpoint(folder, target)
    draft_folder, drafter = _read_drafter(config, target)
    max_model_len = find_max_model_len(config, target, drafter)
    survival, source = (), "no drafter"
    if drafter is not None and draft_folder is not None:
        survival, source = _acceptance(acceptance, drafter.max_drafts, draft_folder)
    elif acceptance is not None:
        raise ConfigError("acceptance needs a drafter: give --drafter, too.", param="acceptance")
    spec = config.speculative_config
    of_drafter = None if spec is None else spec.quantization
    pair = ModelPair(
        target=target_shape(target, quantization=config.quantization),
        drafter=None if drafter is None else drafter_shape(drafter, quantization=of_drafter),
        tied=target.tied_head,
        tp_sizes=tuple(tp for tp in TP_SIZES if divides(target, tp)),
        survival=survival,
    )
    return ReadPair(pair, _dtype(config, target), max_model_len, source)


def _read_drafter(config: EngineConfig, target: ModelSpec) -> tuple[Path | None, DrafterConfig | None]:
    if config.speculative_config is None or config.speculative_config.model is None:
        return None, None
    folder = drafter_folder(config, config.speculative_config.model, files=SHAPE_FILES)
    facts = TargetFacts(target.hidden_size, target.num_layers, target.vocab_size, 0)
    if _has_weights(folder):
        return folder, check_drafter(folder, facts)
    drafter = DrafterConfig.load(folder)
    drafter.check_fits(facts)
    return folder, drafter


def _has_weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors"))


def divides(spec: ModelSpec, ranks: int) -> bool:
    try:
        Sharding(spec, 0, ranks)
    except ConfigError:
        return False
    return True


def _dtype(config: EngineConfig, target: ModelSpec) -> HalfDType:
    """Return the configured dtype or the checkpoint's; fp32 is planned as bf16."""
    wanted = target.dtype if config.dtype == "auto" else config.dtype
    return "float16" if wanted == "float16" else "bfloat16"


def _acceptance(text: str | None, num_drafts: int, folder: Path) -> tuple[tuple[float, ...], str]:
    if text is not None:
        return _stated(text, num_drafts), "as given"
    if (length := least_card_length(folder)) is not None:
        return survival_of_length(min(length, num_drafts + 1), num_drafts), "lowest in the drafter's card"
    length = min(DEFAULT_LENGTH, 1 + num_drafts / 2)
    return survival_of_length(length, num_drafts), "an assumption; give --acceptance"


def _stated(text: str, num_drafts: int) -> tuple[float, ...]:
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"acceptance={text!r} must be a mean acceptance length, such as 4.2, or one probability per "
            "draft, such as 0.8,0.7,...",
            param="acceptance",
        ) from None
    if len(numbers) == 1 and numbers[0] >= 1.0:
        return survival_of_length(numbers[0], num_drafts)
    check_survival(numbers, num_drafts, param="acceptance")
    return numbers
