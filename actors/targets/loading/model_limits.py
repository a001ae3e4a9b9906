"""Limits that a target and its drafter set to contexts and drafts, compared with the settings.

Called by `resolved_config.py`, and by `manta plan`.
"""

from __future__ import annotations

from ....cluster.config import EngineConfig, SpeculativeConfig
from ....cluster.errors import ConfigError
from ....drafter.dflash.config import DrafterConfig
from ....drafter.eagle3.config import DEFAULT_DRAFTS, Eagle3Config
from ..model.model_spec import ModelSpec
from ..model.mtp import MTP_DRAFTS, MtpConfig
from .draft_window import ChainConfig, DraftConfig

_MOST_POSITIONS = 2**24  # that fp32, in which angles of rotations are computed, tells apart
NGRAM_DRAFTS, SUFFIX_DRAFTS = 8, 16  # default numbers of drafts without a model


def find_max_model_len(config: EngineConfig, target: ModelSpec, drafter: DraftConfig | None) -> int:
    """Return the setting, or the smaller limit of both models. ConfigError: the setting exceeds a limit.

    A limit is max_position_embeddings, or what yarn extends it to (factor x original length). EAGLE-3's
    published drafters state their training length (2048 for targets of 128k), which is not a limit.
    """
    ropes = (mixer.rope for mixer in target.attentions if mixer.rope is not None)
    limits = {"the target": max([target.max_position_embeddings, *(rope.max_positions for rope in ropes)])}
    if isinstance(drafter, DrafterConfig):
        trained = drafter.rope.scaling.get("max_position_embeddings")
        if isinstance(trained, int):
            limits["the drafter"] = max(trained, drafter.rope.max_positions)
    limiting_model, limit = min(limits.items(), key=lambda item: item[1])
    limit = min(limit, _MOST_POSITIONS)
    if config.max_model_len is None:
        return limit
    if config.max_model_len > limit:
        remedy = ", or drop speculative_config" if limiting_model == "the drafter" else ""
        raise ConfigError(
            f"max_model_len={config.max_model_len} is longer than {limiting_model}'s limit ({limit}: "
            f"max_position_embeddings, or yarn's factor x original length). "
            f"Set max_model_len to at most {limit}{remedy}.",
            param="max_model_len",
        )
    return config.max_model_len


def find_num_drafts(config: EngineConfig, drafter: DraftConfig | None) -> int:
    """Return the setting, or the drafter's most or usual number. ConfigError: the setting exceeds it."""
    spec = config.speculative_config
    return 0 if spec is None else spec.longest_path(_num_drafts(spec, drafter))


def _num_drafts(spec: SpeculativeConfig, drafter: DraftConfig | None) -> int:
    wanted = spec.num_speculative_tokens
    if drafter is None:  # as many as requested are copied
        return wanted or (SUFFIX_DRAFTS if spec.method == "suffix" else NGRAM_DRAFTS)
    if isinstance(drafter, MtpConfig) and drafter.num_layers > 1:
        maximum = drafter.num_layers
    elif isinstance(drafter, ChainConfig):  # a chain of single drafts has no maximum
        return wanted or (DEFAULT_DRAFTS if isinstance(drafter, Eagle3Config) else MTP_DRAFTS)
    else:
        maximum = drafter.max_drafts
    if wanted is None:
        return maximum
    if wanted > maximum:
        raise ConfigError(
            f"speculative_config.num_speculative_tokens={wanted} is more than the drafter proposes: "
            f"{_why_most(drafter)}",
            param="speculative_config.num_speculative_tokens",
        )
    return wanted


def _why_most(drafter: DrafterConfig | MtpConfig) -> str:
    if isinstance(drafter, MtpConfig):
        return f"each of its {drafter.num_layers} layers makes one, so that is the most."
    maximum, block_size = drafter.max_drafts, drafter.block_size
    if drafter.samples_anchor:
        return f"each of its block's {block_size} slots predicts one, so {maximum} is the most."
    return (
        f"of its block's {block_size} slots the first holds the last known token, so {maximum} is the most "
        "(vLLM's counting; SGLang's --speculative-num-draft-tokens counts that slot too: its "
        f"{block_size} is {maximum} here)."
    )
