"""Schemas of a DFlash drafter's config.json in z-lab's, Speculators' and transformers' format.

Keys that ask for unsupported mathematics are refused. `config.py`, the only caller, combines the keys.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, AliasChoices, Field, field_validator, model_validator

from ..compute.checkpoint.hf_config import Count, HfConfig, Off
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
    num_hidden_layers: Count
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

    def check_fits(self, backbone: Backbone) -> None:
        """Raise ValueError, naming the key, if this cannot work with the backbone."""
        if self.conv_group_size is not None and backbone.hidden_size % self.conv_group_size:
            raise ValueError(f"conv_group_size must be a divisor of hidden_size ({backbone.hidden_size})")
        if self.selector_top_k is not None and self.selector_top_k > backbone.vocab_size:
            raise ValueError(f"selector_top_k must be at most vocab_size ({backbone.vocab_size})")


class DFlash(Conditioning, Scales):
    """`dflash_config` of z-lab's format."""

    mask_token_id: int
    target_layer_ids: LayerIds
    block_size: BlockSize | None = None
    causal: bool | None = None
    use_swa: bool = False
    swa_window_size: Count | None = None
    use_aux_hidden_state: Literal[True] = True
    projector_type: Literal["dflash"] = Field("dflash", description="'dflash': others are not yet supported")

    @model_validator(mode="after")
    def _has_its_window(self) -> DFlash:
        if self.use_swa and self.swa_window_size is None:
            raise ValueError("swa_window_size must be a positive integer, for use_swa")
        return self


ASSISTANT = "MuseGlimmerAssistantModel"
KINDS = {"DFlashDraftModel", "DFlash2DraftModel", ASSISTANT}


class DFlashKind(HfConfig):
    """The key that says which of z-lab's drafters this is."""

    architectures: tuple[str, ...] = ()

    @field_validator("architectures")
    @classmethod
    def _is_known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if len(names) > 1 or set(names) - KINDS:
            known = ", ".join(sorted(KINDS))
            raise ValueError(f'must be one of {known}; EAGLE-3 drafters are run with method="eagle3"')
        return names

    @property
    def name(self) -> str:
        return self.architectures[0] if self.architectures else "DFlashDraftModel"


class ZLab(Backbone):
    """z-lab's format: a Qwen3 configuration and `dflash_config`."""

    dflash_config: DFlash
    block_size: BlockSize | None = None
    is_causal: bool | None = None
    num_target_layers: Count | None = None
    draft_vocab_size: Count | None = None
    architectures: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _fits_its_kind(self) -> ZLab:
        dflash = self.dflash_config
        if "DFlash2DraftModel" in self.architectures:
            for key in Conditioning.model_fields:
                if getattr(dflash, key) is None:
                    raise ValueError(f"dflash_config.{key} must be given, for DFlash2DraftModel")
        try:
            dflash.check_fits(self)
        except ValueError as error:
            raise ValueError(f"dflash_config.{error}") from None
        _check_draft_vocabulary(self.draft_vocab_size, self, dflash)
        return self

    @property
    def has_layer_types(self) -> bool:
        return not self.dflash_config.use_swa


class Assistant(Backbone, Scales):
    """transformers' own format: a bidirectional Qwen3 block with DFlash's keys at the same level."""

    vocab_size: Count = 202048  # default: the target's vocabulary, as the published file has no such key
    rms_norm_eps: float = 1e-5
    mask_token_id: int
    target_layer_ids: LayerIds
    block_size: BlockSize = 16


class DFlashSpeculatorsKind(HfConfig):
    """The key that says which of Speculators' drafters this is."""

    speculators_model_type: Literal["dflash", "dflash2"] = Field(
        description="'dflash' or 'dflash2'; 'eagle3' is run with method=\"eagle3\""
    )


class DFlashSpeculators(DFlashSpeculatorsKind, Conditioning, Scales):
    """Speculators' format: the Qwen3 configuration is nested; windows may be at the top level."""

    ALSO_READ: ClassVar[frozenset[str]] = QUANTIZATION_KEYS

    transformer_layer_config: Backbone
    layer_types: LayerTypes | None = None
    sliding_window: Count | None = None
    aux_hidden_state_layer_ids: LayerIds
    mask_token_id: int
    block_size: BlockSize = 8
    draft_vocab_size: Count | None = None
    target_hidden_size: Count | None = None
    sliding_window_non_causal: bool | None = None
    projector_type: Literal["dflash"] = Field("dflash", description="'dflash': others are not yet supported")
    shift_label: Off = False
    draft_ffn_type: Literal["dense"] = Field("dense", description="'dense': not yet supported")
    sample_from_anchor: Literal[False] = Field(
        False, description="false: a drafter whose anchor slot predicts (DSpark) is not yet supported"
    )

    @model_validator(mode="after")
    def _fits_itself(self) -> DFlashSpeculators:
        self.check_fits(self.transformer_layer_config)
        _check_draft_vocabulary(self.draft_vocab_size, self.transformer_layer_config, self)
        return self

    @model_validator(mode="before")
    @classmethod
    def _windows_are_of_the_layers(cls, raw: Any) -> Any:  # Any: JSON values
        nested = raw.get("transformer_layer_config") if isinstance(raw, dict) else None
        if not isinstance(nested, dict):
            return raw
        top_level = {key: raw[key] for key in ("layer_types", "sliding_window") if raw.get(key) is not None}
        for key, value in top_level.items():
            if nested.get(key) not in (None, value):
                raise ValueError(f"{key} must be absent, or transformer_layer_config.{key}: {nested[key]}")
        return {**raw, "transformer_layer_config": {**nested, **top_level}}

    @model_validator(mode="before")
    @classmethod
    def _fill_dflash2_defaults(cls, raw: Any) -> Any:  # Any: JSON values
        if isinstance(raw, dict) and raw.get("speculators_model_type") == "dflash2":
            return {**_DFLASH2_DEFAULTS, **{key: value for key, value in raw.items() if value is not None}}
        return raw


# Defaults of Speculators' 'dflash2' class.
_DFLASH2_DEFAULTS = {
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 256,
    "selector_top_k": 16,
    "sliding_window_non_causal": True,
}


def _check_draft_vocabulary(size: int | None, backbone: Backbone, second: Conditioning) -> None:
    if size is None or size == backbone.vocab_size:
        return
    if size > backbone.vocab_size:
        raise ValueError(f"draft_vocab_size must be at most vocab_size ({backbone.vocab_size})")
    if second.selector_rank is not None:
        raise ValueError(f"draft_vocab_size must be vocab_size ({backbone.vocab_size}), for selector_rank")
