"""Schemas of a DFlash drafter's config.json in z-lab's, DeepSpec's, Speculators' and transformers' format.

Keys that ask for unsupported mathematics are refused. `config.py`, the only caller, combines the keys.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import AfterValidator, Field, model_validator

from ..compute.checkpoint.hf_config import Count, HfConfig, Off
from .config_parts import (
    UNSERVED_PROJECTORS,
    Backbone,
    BlockSize,
    Conditioning,
    DSparkHeads,
    LayerIds,
    LayerTypes,
    Scales,
    check_draft_vocabulary,
    served_projector,
)
from .drafter_classes import DEEPSPEC, DFLASH, SPECFORGE, DrafterKind
from .known_keys import QUANTIZATION_KEYS


class DFlash(Conditioning, Scales, DSparkHeads):
    """`dflash_config` of z-lab's format."""

    mask_token_id: int
    target_layer_ids: LayerIds
    block_size: BlockSize | None = None
    causal: bool | None = None
    causal_head: bool | None = None
    use_swa: bool = False
    swa_window_size: Count | None = None
    use_aux_hidden_state: Literal[True] = True
    projector_type: Annotated[str, AfterValidator(served_projector)] = "dflash"
    attention_mode: Literal["gqa", "mha"] | None = None  # follows from the numbers of heads
    target_hidden_size: Count | None = None

    @model_validator(mode="before")
    @classmethod
    def _has_no_lattice(cls, raw: Any) -> Any:  # Any: JSON values
        items = raw.items() if isinstance(raw, dict) else ()
        if keys := [key for key, value in items if key.startswith("lilicorr_") and value]:
            raise ValueError(f"{keys[0]} must be absent: {UNSERVED_PROJECTORS['lilicorr']}")
        return raw

    @model_validator(mode="after")
    def _has_its_window(self) -> DFlash:
        if self.use_swa and self.swa_window_size is None:
            raise ValueError("swa_window_size must be a positive integer, for use_swa")
        if None not in (self.causal, self.causal_head) and self.causal != self.causal_head:
            raise ValueError(f"causal_head must be absent, or as causal ({self.causal})")
        return self

    @property
    def is_causal(self) -> bool | None:
        return self.causal_head if self.causal is None else self.causal


class DFlashKind(DrafterKind):
    CLASSES = DFLASH

    medusa_num_heads: Off = False  # Medusa's own files name no class

    @property
    def name(self) -> str:
        return self.architectures[0] if self.architectures else "DFlashDraftModel"


class ZLab(Backbone, DSparkHeads):
    """z-lab's format: a Qwen3 configuration and `dflash_config`.

    SpecForge's DSpark drafters are in it, with the keys of their heads in either place.
    """

    dflash_config: DFlash
    block_size: BlockSize | None = None
    is_causal: bool | None = None
    num_target_layers: Count | None = None
    draft_vocab_size: Count | None = None
    sample_from_anchor: bool | None = None
    architectures: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _fits_its_kind(self) -> ZLab:
        dflash = self.dflash_config
        if "DFlash2DraftModel" in self.architectures:
            for key in Conditioning.model_fields:
                if getattr(dflash, key) is None:
                    raise ValueError(f"dflash_config.{key} must be given, for DFlash2DraftModel")
        if dflash.target_hidden_size not in (None, self.hidden_size):
            wanted = f"hidden_size ({self.hidden_size}): an adapter between sizes is not supported"
            raise ValueError(f"dflash_config.target_hidden_size must be {wanted}")
        try:
            dflash.check_fits(self)
        except ValueError as error:
            raise ValueError(f"dflash_config.{error}") from None
        check_draft_vocabulary(self.draft_vocab_size, self, dflash)
        self._check_heads_are_of_dspark()
        return self

    def _check_heads_are_of_dspark(self) -> None:
        """Refuse DSpark's heads in a drafter of another kind, and DFlash2's parts in a DSpark drafter.

        Keys may be at the top and in `dflash_config`, with equal values.
        """
        heads, nested = self.heads, self.dflash_config
        for key in self.model_fields_set & nested.model_fields_set & DSparkHeads.model_fields.keys():
            if getattr(self, key) != (inner := getattr(nested, key)):
                raise ValueError(f"{key} must be absent, or as dflash_config.{key}: {inner}")
        if not self.is_dspark and (heads.markov_rank or heads.has_confidence_head):
            key = "markov_rank" if heads.markov_rank else "enable_confidence_head"
            path = key if key in self.model_fields_set else f"dflash_config.{key}"
            raise ValueError(f"{path} must be absent, or architectures [{SPECFORGE!r}]")
        if self.sample_from_anchor and not self.is_dspark:
            raise ValueError(f"sample_from_anchor must be absent, or architectures [{SPECFORGE!r}]")
        if self.is_dspark and (nested.convolves or nested.selector_rank):
            raise ValueError("dflash_config.selector_rank must be absent, for a DSpark drafter")
        heads.check_heads()

    @property
    def is_dspark(self) -> bool:
        kinds = {DEEPSPEC, SPECFORGE}
        return self.dflash_config.projector_type == "dspark" or not kinds.isdisjoint(self.architectures)

    @property
    def samples_anchor(self) -> bool:
        return self.is_dspark if self.sample_from_anchor is None else self.sample_from_anchor

    @property
    def heads(self) -> DSparkHeads:
        """The keys of DSpark's heads from both places."""
        places = (self.dflash_config, self)
        keys = {k: getattr(p, k) for p in places for k in DSparkHeads.model_fields if k in p.model_fields_set}
        return DSparkHeads(**keys)

    @property
    def has_layer_types(self) -> bool:
        return not self.dflash_config.use_swa


class DeepSpec(Backbone, DSparkHeads):
    """DeepSpec's format of a DSpark drafter: all keys at the level of the Qwen3 configuration."""

    mask_token_id: int
    target_layer_ids: LayerIds
    block_size: BlockSize
    num_target_layers: Count | None = None
    draft_vocab_size: Count | None = None

    @model_validator(mode="after")
    def _fits_its_heads(self) -> DeepSpec:
        check_draft_vocabulary(self.draft_vocab_size, self)
        self.check_heads()
        return self


class DeepSpecGemma4(DeepSpec):
    """DeepSpec's format for Gemma 4: its full layers, with the keys of its text configuration.

    Sizes of sliding layers, embeddings per layer and the target's mask for images have no meaning here.
    """

    ALSO_READ: ClassVar[frozenset[str]] = DeepSpec.ALSO_READ | {
        "use_bidirectional_attention",
        "vocab_size_per_layer_input",
    }

    global_head_dim: Count = 512
    num_global_key_value_heads: Count | None = None
    attention_k_eq_v: bool = False
    hidden_activation: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"
    final_logit_softcapping: float | None = None
    # pyright's rule is for fields that are assigned; a checkpoint's config is frozen.
    layer_types: Annotated[  # pyright: ignore[reportIncompatibleVariableOverride]
        tuple[Literal["full_attention"], ...],
        Field(description="a list with full_attention in every entry: DeepSpec's class has no others"),
    ] = ()

    @property
    def kv_heads(self) -> int:
        of_full = self.num_global_key_value_heads if self.attention_k_eq_v else None
        return of_full or self.num_key_value_heads or self.num_attention_heads

    @property
    def dim(self) -> int:
        return self.global_head_dim


class Assistant(Backbone, Scales):
    """transformers' own format: a bidirectional Qwen3 block with DFlash's keys at the same level."""

    vocab_size: Count = 202048  # default: the target's vocabulary, as the published file has no such key
    rms_norm_eps: float = 1e-5
    mask_token_id: int
    target_layer_ids: LayerIds
    block_size: BlockSize = 16


class DFlashSpeculatorsKind(HfConfig):
    """The key that says which of Speculators' drafters this is."""

    speculators_model_type: Literal["dflash", "dflash2", "dspark"] = Field(
        description="'dflash', 'dflash2' or 'dspark'; 'eagle3' is run with method=\"eagle3\""
    )


class DFlashSpeculators(DFlashSpeculatorsKind, Conditioning, Scales, DSparkHeads):
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
    projector_type: Annotated[str, AfterValidator(served_projector)] = "dflash"
    shift_label: Off = False
    draft_ffn_type: Literal["dense"] = Field("dense", description="'dense': not yet supported")
    sample_from_anchor: bool | None = None

    @model_validator(mode="after")
    def _fits_itself(self) -> DFlashSpeculators:
        self.check_fits(self.transformer_layer_config)
        check_draft_vocabulary(self.draft_vocab_size, self.transformer_layer_config, self)
        self._check_anchor()
        self.check_heads()
        return self

    def _check_anchor(self) -> None:
        if self.speculators_model_type != "dspark":
            if self.markov_rank or self.has_confidence_head:
                raise ValueError("markov_rank must be absent, or speculators_model_type 'dspark'")
        elif self.sample_from_anchor is None:
            raise ValueError(
                "sample_from_anchor must be given, for 'dspark': Speculators means true where it is absent, "
                "vLLM false. Set it as the drafter was trained, in speculative_config.hf_overrides"
            )
        elif self.convolves or self.selector_rank:
            raise ValueError("selector_rank must be absent, for 'dspark'")

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
    def _fill_defaults(cls, raw: Any) -> Any:  # Any: JSON values
        if not isinstance(raw, dict):
            return raw
        stated = {key: value for key, value in cast(dict[str, Any], raw).items() if value is not None}
        return {**_SPECULATORS_DEFAULTS.get(str(stated.get("speculators_model_type")), {}), **stated}


# Defaults of Speculators' classes.
_SPECULATORS_DEFAULTS = {
    "dflash2": {
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 256,
        "selector_top_k": 16,
        "sliding_window_non_causal": True,
    },
    "dspark": {
        "markov_rank": 256,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    },
}
