"""Schemas of an EAGLE-3 drafter's config.json in SGLang's and Speculators' format.

Keys that ask for unsupported mathematics are refused. `config.py` combines the keys. Does not import PyTorch.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from ..compute.checkpoint.hf_config import Count, HfConfig, Json, Off
from ..dflash.config_parts import Backbone, check_draft_vocabulary, each_once
from ..dflash.drafter_classes import ASSISTANTS_OF_TARGETS, DFLASH, EAGLE3, DrafterKind
from ..dflash.known_keys import QUANTIZATION_KEYS, StrictConfig

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
LayerIds = Annotated[tuple[int, ...], Field(description="a list of integers"), AfterValidator(each_once)]


class OneLayer(Backbone):
    """The block of both formats: Llama's, or Qwen3's with normed heads."""

    model_type: Literal["llama", "qwen3"] = Field(
        "llama", description="'llama' or 'qwen3': others are not yet supported"
    )
    bias: Off = False
    logit_scale: float = 1.0

    @property
    def head_norms(self) -> bool:
        return self.model_type == "qwen3"

    @field_validator("num_hidden_layers")
    @classmethod
    def _is_one(cls, count: int) -> int:
        if count != 1:
            raise ValueError("must be 1: drafters of more layers are not yet supported")
        return count

    @field_validator("logit_scale")
    @classmethod
    def _changes_nothing(cls, scale: float) -> float:
        if scale != 1.0:
            raise ValueError("must be absent or 1: not yet supported")
        return scale


class Norms(StrictConfig):
    """Norm options at the top level of both formats.

    `fc_norm` and `norm_output` (norms of each tap, and of what a pass hands to the next) are not supported.
    """

    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: Off = False
    norm_output: Off = False
    target_hidden_size: Count | None = None
    eagle_aux_hidden_state_layer_ids: LayerIds = ()


class EagleKeys(StrictConfig):
    """`eagle_config` of SGLang's format; only the values of published files are accepted."""

    eagle_aux_hidden_state_layer_ids: LayerIds = ()
    use_aux_hidden_state: Literal[True] = True
    use_input_layernorm_in_first_layer: Literal[True] = True
    use_last_layernorm: Literal[True] = True
    use_mtp_layernorm: Off = False
    parallel_draft_step: Literal[1] = 1


class Eagle3Kind(DrafterKind):
    CLASSES = EAGLE3


class SGLang(OneLayer, Norms):
    """The original layout, as SafeAILab and SpecForge write it: a Llama configuration with extra keys."""

    draft_vocab_size: Count | None = None
    eagle_config: EagleKeys = EagleKeys()
    tie_word_embeddings: Off = False

    @model_validator(mode="after")
    def _fits(self) -> SGLang:
        check_draft_vocabulary(self.draft_vocab_size, self)
        return self


class Eagle3SpeculatorsKind(HfConfig):
    speculators_model_type: Literal["eagle3"] = Field(
        description="'eagle3' (for 'dflash' and 'dflash2' set speculative_config.method=\"dflash\")"
    )


class Eagle3Speculators(Eagle3SpeculatorsKind, Norms):
    """Speculators' format: the block's configuration is nested."""

    ALSO_READ: ClassVar[frozenset[str]] = QUANTIZATION_KEYS

    transformer_layer_config: OneLayer
    draft_vocab_size: Count = 32000  # the default of Speculators' class

    @model_validator(mode="after")
    def _fits(self) -> Eagle3Speculators:
        check_draft_vocabulary(self.draft_vocab_size, self.transformer_layer_config)
        return self


def is_eagle3(raw: Json) -> bool:
    """Return whether a config.json describes an EAGLE-3 drafter; a plain Llama's has no draft vocabulary."""
    if "speculators_model_type" in raw:
        return raw["speculators_model_type"] == "eagle3"
    named = set(raw.get("architectures") or ())
    return bool(named & {*EAGLE3}) and (named != {"LlamaForCausalLM"} or "draft_vocab_size" in raw)


def method_of_drafter(raw: Json) -> Literal["dflash", "eagle3", "mtp"] | None:
    """Return the method of a drafter that a config.json describes; None for a target's."""
    if is_eagle3(raw):
        return "eagle3"
    named = set(raw.get("architectures") or ())
    if named & ASSISTANTS_OF_TARGETS:
        return "mtp"
    is_drafter = "speculators_model_type" in raw or "dflash_config" in raw or named & DFLASH
    return "dflash" if is_drafter else None
