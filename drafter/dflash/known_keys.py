"""Keys that may appear in a drafter's config.json although nothing reads them.

A key that no reader knows could change the mathematics, so it is refused by name unless its value is null,
false, zero or empty. The lists here hold keys that trainers record and that transformers writes for any
model. Used by `config_formats.py` of DFlash and EAGLE-3.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar, cast

from pydantic import model_validator

from ..compute.checkpoint.hf_config import HfConfig, keys_of

# Matches keys that describe training.
_OF_TRAINING = re.compile(
    r"(?:.*_)?(?:loss|trained|trainer|train|training|teacher|anchors|dropout|optimizer|lr|learning_rate"
    r"|warmup|weight_decay|epochs?|dataset|seed|lambda|auf|requires_grad|ulysses|gradient_checkpointing"
    r"|initializer)(?:_.*)?"
)
# Keys of drafter formats: notes, and settings of parts that another key enables.
_NOTES = frozenset(
    """
    mask_token num_target_layers speculators_config speculators_version has_no_defaults_at_init
    pure_draft_prefix_len emb_dim gru_hidden_dim has_lm_head next_layer_regular
    parallel_draft_heads_num_layers position_embedding_type target_model_type target_text_model_type
    target_architectures
""".split()  # noqa: SIM905
)
# Keys of transformers' configurations that do not affect a drafter's mathematics.
_OF_TRANSFORMERS = frozenset(
    """
    _name_or_path _attn_implementation _attn_implementation_autoset add_cross_attention architectures
    attn_implementation auto_map bad_words_ids begin_suppress_tokens bos_token_id
    chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id diversity_penalty
    do_sample dtype early_stopping encoder_no_repeat_ngram_size eos_token_id
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id id2label
    is_decoder is_encoder_decoder label2id length_penalty max_length max_position_embeddings
    max_window_layers min_length model_type no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_attentions output_hidden_states output_scores pad_token_id prefix
    pretraining_tp problem_type pruned_heads remove_invalid_values repetition_penalty return_dict
    return_dict_in_generate sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss
    tie_encoder_decoder tie_word_embeddings tokenizer_class top_k top_p torch_dtype torchscript
    transformers_version typical_p use_bfloat16 use_cache use_sliding_window
""".split()  # noqa: SIM905  (a table)
)
QUANTIZATION_KEYS = frozenset(["quantization_config"])  # read by `read_quantization`
ROPE_KEYS = frozenset(  # read by `RopeConfig.read`
    [
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "partial_rotary_factor",
        "rotary_dim",
        "original_max_position_embeddings",
    ]
)


class StrictConfig(HfConfig):
    """Base class for a part of a drafter's config.json; refuses unknown keys that are not in ALSO_READ."""

    ALSO_READ: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _is_understood(cls, raw: Any) -> Any:  # Any: JSON values
        known = keys_of(cls) | cls.ALSO_READ | _NOTES | _OF_TRANSFORMERS
        for key, value in cast(dict[str, Any], raw).items() if isinstance(raw, dict) else ():
            if value and key not in known and not _OF_TRAINING.fullmatch(key):
                raise ValueError(
                    f"{key} must be absent or false: not yet supported. If it does not affect the"
                    " computation, set it to null in speculative_config.hf_overrides"
                )
        return raw
