"""The model families: Hugging Face's class name -> its reader of config.json.

A family is one file: the meaning of its config.json (`ModelSpec`), the names of its tensors, how ranks slice
them and how they are transformed at load. `targets/model/decoder.py` runs any spec. To add a family, add a
file, an entry here, and a row of `families.py` of the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from ....drafter.compute.checkpoint.hf_config import Json, overridden, read_json, text_config, wrong
from ....drafter.compute.checkpoint.loading.read_quantization import read_quantization
from ..model.model_spec import ModelSpec
from . import (
    deepseek_v3,
    gemma3,
    gemma4,
    glm4_moe,
    gpt_oss,
    llama,
    mimo_v2,
    minimax_m2,
    muse_glimmer,
    qwen3_5,
)
from .packed_experts import with_quantization

Reader = Callable[[Json, str], ModelSpec]

FAMILIES: Mapping[str, Reader] = {
    "Qwen3ForCausalLM": llama.read_qwen3,
    "Qwen3MoeForCausalLM": llama.read_qwen3_moe,
    "Qwen3NextForCausalLM": qwen3_5.read_next,
    "Qwen3_5ForCausalLM": qwen3_5.read,
    "Qwen3_5ForConditionalGeneration": qwen3_5.read,
    "Qwen3_5MoeForCausalLM": qwen3_5.read_moe,
    "Qwen3_5MoeForConditionalGeneration": qwen3_5.read_moe,
    "Qwen2ForCausalLM": llama.read_qwen2,
    "LlamaForCausalLM": llama.read_llama,
    "MistralForCausalLM": llama.read_mistral,
    "Gemma3ForCausalLM": gemma3.read,
    "Gemma3ForConditionalGeneration": gemma3.read,
    "Gemma4ForCausalLM": gemma4.read,
    "Gemma4ForConditionalGeneration": gemma4.read,
    "Gemma4UnifiedForCausalLM": gemma4.read_unified,
    "Gemma4UnifiedForConditionalGeneration": gemma4.read_unified,
    "MuseGlimmerForConditionalGeneration": muse_glimmer.read,
    "GptOssForCausalLM": gpt_oss.read,
    "Glm4MoeForCausalLM": glm4_moe.read,
    "MiniMaxM2ForCausalLM": minimax_m2.read,
    "MiMoV2FlashForCausalLM": mimo_v2.read,
    "DeepseekV3ForCausalLM": deepseek_v3.read,
    "KimiK25ForConditionalGeneration": deepseek_v3.read,
}

_GENERATION, _ENDS = "generation_config.json", "eos_token_id"

# Unsupported classes that resemble supported ones, with the feature that is missing here.
_MISSING_FEATURES: Mapping[str, str] = {
    "DeepseekV32ForCausalLM": "an indexer that chooses which keys a row sees",
    "GlmMoeDsaForCausalLM": "an indexer that chooses which keys a row sees",
    "DeepseekV4ForCausalLM": "hyper-connections and compressed keys",
}


def read_model(folder: Path, overrides: Json | None = None) -> ModelSpec:
    """Return a folder's model, without reading a weight. Raises CheckpointError if it is not supported.

    `overrides` replaces keys of config.json; those of the language model may be direct or in a "text_config".
    """
    raw = text_config(read_json(folder, param="model"))
    generation = read_json(folder, _GENERATION, param="model", required=False)
    if generation.get(_ENDS) is not None:
        raw = {**raw, _ENDS: generation[_ENDS]}
    nested = (overrides or {}).get("text_config")
    flat = {key: value for key, value in (overrides or {}).items() if key != "text_config"}
    flat |= nested if isinstance(nested, Mapping) else {}
    found = overridden(raw, flat, lambda raw: _read(raw, folder), param="hf_overrides")
    if not all(0 <= token_id < found.vocab_size for token_id in found.eos_token_ids):
        given = end_tokens_file(folder, flat)
        wanted = f"token ids below vocab_size ({found.vocab_size}); set hf_overrides where the file is wrong"
        raise wrong(given, _ENDS, list(found.eos_token_ids), wanted)
    return found


def read_assistant(folder: Path, overrides: Json | None = None) -> ModelSpec:
    """Return the model of an assistant's folder, without reading a weight; it drafts for Gemma 4."""
    param, file = "speculative_config.model", str(folder / "config.json")
    raw = read_json(folder, param=param)

    def read(raw: Json) -> ModelSpec:
        spec = gemma4.read_assistant(raw, file)
        return with_quantization(spec, read_quantization(raw, folder, param=param), raw, file)

    return overridden(raw, overrides or {}, read, param="speculative_config.hf_overrides")


def end_tokens_file(folder: Path, overrides: Json | None = None) -> str:
    if _ENDS in (overrides or {}):
        return "hf_overrides"
    generation = read_json(folder, _GENERATION, param="model", required=False)
    return str(folder / ("config.json" if generation.get(_ENDS) is None else _GENERATION))


def _read(raw: Json, folder: Path) -> ModelSpec:
    names, file = raw.get("architectures"), str(folder / "config.json")
    name = names[0] if isinstance(names, list) and names else ""
    if name not in FAMILIES:
        reason = f"{name} has {_MISSING_FEATURES[name]}, which" if name in _MISSING_FEATURES else "others"
        verb = "is" if name in _MISSING_FEATURES else "are"
        wanted = f"one of {', '.join(FAMILIES)}: {reason} {verb} not served"
        raise wrong(file, "architectures", names, wanted)
    spec = FAMILIES[name](raw, file)
    return with_quantization(spec, read_quantization(raw, folder, param="model"), raw, file)
