"""Parts of the schemas of a drafter's config.json: layers, scales, DFlash2's and DSpark's keys.

Used by `config_formats.py` here and in `../eagle3`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, AliasChoices, Field, model_validator

from ..compute.checkpoint.hf_config import Count, Depth, Off
from .known_keys import QUANTIZATION_KEYS, ROPE_KEYS, StrictConfig

BLOCK_SIZE = "an integer from 2 (anchor and one mask)"
BlockSize = Annotated[int, Field(ge=2, description=BLOCK_SIZE)]


def each_once(ids: tuple[int, ...]) -> tuple[int, ...]:
    """Raise ValueError if a layer id occurs twice."""
    if len(set(ids)) < len(ids):
        raise ValueError("must be a list of integers that are all different")
    return ids


LayerIds = Annotated[
    tuple[int, ...],
    Field(min_length=1, description="a non-empty list of integers"),
    AfterValidator(each_once),
]
LayerTypes = Annotated[
    tuple[Literal["full_attention", "sliding_attention"], ...],
    Field(description="a list with full_attention or sliding_attention in every entry"),
]


class Backbone(StrictConfig):
    """The Qwen3 block, with the keys that all formats spell alike."""

    ALSO_READ: ClassVar[frozenset[str]] = ROPE_KEYS | QUANTIZATION_KEYS

    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Depth
    num_attention_heads: Count
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    vocab_size: Count
    rms_norm_eps: float = 1e-6
    layer_types: LayerTypes = ()
    sliding_window: Count | None = None
    hidden_act: Literal["silu"] = "silu"
    attention_bias: bool = False
    is_neox_style: bool = Field(True, validation_alias=AliasChoices("is_neox_style", "rope_is_neox_style"))
    mlp_bias: Off = False
    use_gemma_norm: Off = False
    swiglu_limit: Off = False

    @property
    def kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def dim(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def has_layer_types(self) -> bool:
        return True

    @model_validator(mode="after")
    def _fits_itself(self) -> Backbone:
        heads, count = self.num_attention_heads, self.num_hidden_layers
        if heads % self.kv_heads:
            raise ValueError(f"num_key_value_heads must be a divisor of num_attention_heads ({heads})")
        if self.dim % 2 or not self.dim:
            raise ValueError("head_dim must be even")
        if self.has_layer_types and len(self.layer_types) not in (0, count):
            raise ValueError(f"layer_types must be one entry for each of num_hidden_layers ({count})")
        if self.has_layer_types and "sliding_attention" in self.layer_types and self.sliding_window is None:
            raise ValueError("sliding_window must be a positive integer, for the layers of sliding_attention")
        return self

    def windows(self) -> list[int | None]:
        kinds = self.layer_types or ("full_attention",) * self.num_hidden_layers
        return [self.sliding_window if kind == "sliding_attention" else None for kind in kinds]


class Scales(StrictConfig):
    input_embedding_scale: float | None = None
    output_multiplier: float = 1.0
    final_logit_softcapping: float = 0.0
    attention_value_scale: float = 1.0
    attention_sink_bias: bool = False


# Drafters with a part that is not served, by `projector_type`, and the reason.
UNSERVED_PROJECTORS = {
    "domino": "Domino's GRU over the drafted tokens (prefix_gru, embed_proj) is not supported",
    "lilicorr": "LiLiCorr's transformer over all candidates of a block is not supported",
}


def served_projector(kind: str) -> str:
    if kind not in ("dflash", "dspark"):
        reason = UNSERVED_PROJECTORS.get(kind, "others are not supported")
        raise ValueError(f"must be 'dflash' or 'dspark'; {reason}")
    return kind


class Conditioning(StrictConfig):
    """DFlash2's convolutions and selector, spelled alike in both formats; either may be absent."""

    conv_kernel_size: Count | None = None
    conv_group_size: Count | None = None
    selector_rank: Count | None = None
    selector_top_k: Count | None = None

    @model_validator(mode="before")
    @classmethod
    def _neutral_is_absent(cls, raw: Any) -> Any:  # Any: JSON values
        off = (False, 0)
        if not isinstance(raw, dict):
            return raw
        return {k: None if k in Conditioning.model_fields and v in off else v for k, v in raw.items()}

    @model_validator(mode="after")
    def _comes_in_pairs(self) -> Conditioning:
        for one, other in (("conv_kernel_size", "conv_group_size"), ("selector_rank", "selector_top_k")):
            for name, partner in ((one, other), (other, one)):
                if getattr(self, name) is None and getattr(self, partner) is not None:
                    raise ValueError(f"{name} must be given, because {partner} is")
        return self

    @property
    def convolves(self) -> bool:
        return self.conv_kernel_size is not None

    def check_fits(self, backbone: Backbone) -> None:
        """Raise ValueError, naming the key, if this cannot work with the backbone."""
        if self.conv_group_size is not None and backbone.hidden_size % self.conv_group_size:
            raise ValueError(f"conv_group_size must be a divisor of hidden_size ({backbone.hidden_size})")
        if self.selector_top_k is not None and self.selector_top_k > backbone.vocab_size:
            raise ValueError(f"selector_top_k must be at most vocab_size ({backbone.vocab_size})")


class DSparkHeads(StrictConfig):
    """DSpark's keys, spelled alike in all formats."""

    markov_rank: int = Field(0, ge=0, description="an integer from 0 (no Markov head)")
    markov_head_type: Literal["vanilla"] = Field(
        "vanilla",
        description="'vanilla': a bias that also depends on hidden states (gated, rnn) is not supported",
    )
    enable_confidence_head: bool | None = None
    confidence_head_alpha: float = 0.0  # weight of its loss; decides if the key above is absent
    confidence_head_with_markov: bool = False

    @property
    def has_confidence_head(self) -> bool:
        stated = self.enable_confidence_head
        return self.confidence_head_alpha > 0 if stated is None else stated

    def check_heads(self) -> None:
        """Raise ValueError, naming the key, if the confidence head lacks its Markov head."""
        if self.has_confidence_head and self.confidence_head_with_markov and not self.markov_rank:
            raise ValueError("markov_rank must be positive, for confidence_head_with_markov")


def check_draft_vocabulary(size: int | None, backbone: Backbone, second: Conditioning | None = None) -> None:
    """Raise ValueError unless this may be the drafter's own vocabulary; not with DFlash2's selector."""
    if size is None or size == backbone.vocab_size:
        return
    if size > backbone.vocab_size:
        raise ValueError(f"draft_vocab_size must be at most vocab_size ({backbone.vocab_size})")
    if second is not None and second.selector_rank is not None:
        raise ValueError(f"draft_vocab_size must be vocab_size ({backbone.vocab_size}), for selector_rank")
