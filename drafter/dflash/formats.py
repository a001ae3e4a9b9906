"""The keys of a drafter's config.json in z-lab's and in Speculators' format, checked one by one.

What asks for mathematics that we do not have is refused. What the keys mean together is said in `config.py`,
which alone calls this.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from ..compute.config_json import Count, HfConfig, Off

BLOCK_SIZE = "an integer from 2 (anchor and one mask)"
BlockSize = Annotated[int, Field(ge=2, description=BLOCK_SIZE)]
LayerIds = Annotated[tuple[int, ...], Field(min_length=1, description="a non-empty list of integers")]


class Backbone(HfConfig):
    """The Qwen3 block: what both formats spell alike."""

    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    vocab_size: Count
    rms_norm_eps: float = 1e-6
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] = Field(
        (), description="a list with full_attention or sliding_attention in every entry"
    )
    sliding_window: Count | None = None
    hidden_act: Literal["silu"] = "silu"
    attention_bias: Off = False
    mlp_bias: Off = False

    @property
    def kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def dim(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def has_layer_types(self) -> bool:
        """Whether `layer_types`, if it is there, says anything."""
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
        """Of each layer; None is full attention."""
        kinds = self.layer_types or ("full_attention",) * self.num_hidden_layers
        return [self.sliding_window if kind == "sliding_attention" else None for kind in kinds]


class DFlash(HfConfig):
    """`dflash_config` of z-lab's format; what it may ask for and we do not have is refused."""

    mask_token_id: int
    target_layer_ids: LayerIds
    block_size: BlockSize | None = None
    causal: bool | None = None
    use_swa: bool = False
    swa_window_size: Count | None = None
    input_embedding_scale: float | None = None
    output_multiplier: float = 1.0
    final_logit_softcapping: float = 0.0
    attention_value_scale: Literal[1] = Field(1, description="absent or 1: not yet supported")
    attention_sink_bias: Off = False
    conv_kernel_size: Off = False
    conv_group_size: Off = False
    selector_rank: Off = False
    selector_top_k: Off = False

    @model_validator(mode="before")
    @classmethod
    def _has_no_lilicorr(cls, raw: Any) -> Any:  # Any: JSON values
        for key, value in raw.items() if isinstance(raw, dict) else ():
            if key.startswith("lilicorr_") and value not in (None, False):
                raise ValueError(f"{key} must be absent or false: not yet supported")
        return raw

    @model_validator(mode="after")
    def _has_its_window(self) -> DFlash:
        if self.use_swa and self.swa_window_size is None:
            raise ValueError("swa_window_size must be a positive integer, for use_swa")
        return self


class Kind(HfConfig):
    """Which of z-lab's drafters it is."""

    architectures: tuple[str, ...] = ()

    @field_validator("architectures")
    @classmethod
    def _is_v1(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if set(names) - {"DFlashDraftModel"}:
            raise ValueError("must be ['DFlashDraftModel']: others are not yet supported")
        return names


class ZLab(Backbone):
    """z-lab's format: a Qwen3 configuration and `dflash_config`."""

    dflash_config: DFlash
    block_size: BlockSize | None = None
    is_causal: bool | None = None
    num_target_layers: Count | None = None

    @property
    def has_layer_types(self) -> bool:
        return not self.dflash_config.use_swa


class Speculators(HfConfig):
    """Speculators' format: the Qwen3 configuration is nested."""

    speculators_model_type: Literal["dflash"] = Field(description="'dflash': others are not yet supported")
    transformer_layer_config: Backbone
    aux_hidden_state_layer_ids: LayerIds
    mask_token_id: int
    block_size: BlockSize = 8
    draft_vocab_size: Count | None = None
    target_hidden_size: Count | None = None
    sliding_window_non_causal: bool = False
    sample_from_anchor: Literal[False] = Field(
        False, description="false: a drafter whose anchor slot predicts (DSpark) is not yet supported"
    )

    @model_validator(mode="after")
    def _fits_itself(self) -> Speculators:
        vocab_size = self.transformer_layer_config.vocab_size
        if self.draft_vocab_size is not None and self.draft_vocab_size > vocab_size:
            raise ValueError(f"draft_vocab_size must be at most vocab_size ({vocab_size})")
        return self
