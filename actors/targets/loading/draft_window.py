"""Limits how much context a drafter's attention reads: as set, or where reading more costs too much.

A drafter reads its K/V in all layers. Next to a target that reads few weights for a row (experts), or little
K/V (windows, latents, states), that becomes a large part of a step at long contexts. Shorter contexts are
read in full, so the window is the context from which on a drafter's K/V are more than a share of what the
target reads for a row. Called by `resolved_config.py`. Counts values, which have the same size in all models.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace

from ....cluster.config import SpeculativeConfig
from ....cluster.errors import ConfigError
from ....drafter.dflash.config import DrafterConfig
from ....drafter.eagle3.config import Eagle3Config
from ..model.assistant import AssistantConfig
from ..model.model_spec import ModelSpec
from ..model.mtp import MtpConfig
from ..model.tensor_parallel import Sharding
from ..model.weights import target_shapes

logger = logging.getLogger(__name__)

# A pass for each draft, and a feature kept for each page.
ChainConfig = Eagle3Config | MtpConfig | AssistantConfig
DraftConfig = DrafterConfig | ChainConfig

_MAX_SHARE = 0.05  # of what the target reads for one row
_MIN_WINDOW = 4096  # usual training length of drafters: below it nothing is known to be lost
_EXPERTS = ".experts."  # in names of tensors of which a row reads a part


def find_window(
    spec: SpeculativeConfig, target: ModelSpec, drafter: DraftConfig, max_model_len: int, num_passes: int
) -> int | None:
    """Return the window of the drafter's layers, as set or by cost; None for no limit.

    Args:
        num_passes: of the drafter in a step.
    """
    if spec.draft_window is not None:
        if isinstance(drafter, DrafterConfig) and 0 < spec.draft_window < drafter.block_size:
            raise ConfigError(
                f"speculative_config.draft_window={spec.draft_window} is less than the drafter's block of "
                f"{drafter.block_size} tokens, which see each other. Set it to at least that, or to 0 for "
                "all.",
                param="speculative_config.draft_window",
            )
        return spec.draft_window or None
    full_layers = sum(layer.window is None for layer in drafter.layers)
    window = _affordable(target, num_passes * full_layers * drafter.kv_geometry.width)
    if window is None or window >= max_model_len:
        return None
    logger.info(
        "the drafter's attention reads the last %s tokens of longer contexts, since reading more would take "
        "over %d %% of what the target reads for a row (draft_window)",
        f"{window:,}",
        round(100 * _MAX_SHARE),
    )
    return window


def with_window(drafter: DraftConfig, window: int | None) -> DraftConfig:
    """Return a drafter of which no layer sees more than `window` tokens."""
    if window is None:
        return drafter
    if isinstance(drafter, MtpConfig | AssistantConfig):
        return drafter.with_window(window)
    layers = (replace(each, window=min(each.window or window, window)) for each in drafter.layers)
    return replace(drafter, layers=tuple(layers))


def _affordable(target: ModelSpec, draft_width: int) -> int | None:
    """Return the context up to which `draft_width` values per token are affordable; None: any."""
    geometries = Sharding(target, 0, 1).kv_geometries()
    target_width = sum(
        kind.width for kind, window in zip(geometries, target.windows, strict=True) if window is None
    )
    excess = draft_width - _MAX_SHARE * target_width
    if excess <= 0:
        return None
    return max(_MIN_WINDOW, int(_MAX_SHARE * _values_of_row(target) / excess))


def _values_of_row(target: ModelSpec) -> float:
    """Return the stored values of weights that a pass over one row reads, with the head."""
    sizes = {name: math.prod(shape) for name, shape in target_shapes(target).items()}
    of_experts = sum(size for name, size in sizes.items() if _EXPERTS in name)
    routers = [layer.routed.router for layer in target.layers if layer.routed is not None]
    chosen = routers[0].top_k / routers[0].num_experts if routers else 0.0
    embedding = 0 if target.tied_head else target.vocab_size * target.hidden_size
    return sum(sizes.values()) - embedding - (1.0 - chosen) * of_experts
