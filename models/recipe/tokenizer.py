"""The pair's tokenizer: byte-level BPE, split like Qwen2's, with a ChatML template.

This file writes the Hugging Face files; transformers or tokenizers read them.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from .chat_samples import IM_END, IM_START

VOCAB_SIZE = 4096
END_OF_TEXT, MASK = "<|endoftext|>", "<|mask|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END, MASK)
MAX_CONTEXT_TOKENS = 1024

_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Train a tokenizer on `texts`. Special tokens have the last ids, as in Qwen's files."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN2_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, "the corpus is too small for the vocabulary"
    return tokenizer


def special_id(tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None, f"{token} is not in the vocabulary"
    return token_id


def write_tokenizer_files(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json, special_tokens_map.json and generation_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    special_tokens = {"eos_token": IM_END, "pad_token": END_OF_TEXT}
    decoder = {
        str(special_id(tokenizer, token)): {"content": token, "special": True, "normalized": False}
        for token in SPECIAL_TOKENS
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_CONTEXT_TOKENS,
        "bos_token": None,
        "unk_token": None,
        **special_tokens,
        "additional_special_tokens": list(SPECIAL_TOKENS),
        "added_tokens_decoder": decoder,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    generation = {
        "eos_token_id": [special_id(tokenizer, END_OF_TEXT), special_id(tokenizer, IM_END)],
        "pad_token_id": special_id(tokenizer, END_OF_TEXT),
        "do_sample": False,
        "temperature": 0.0,
    }
    _write_json(folder / "tokenizer_config.json", config)
    _write_json(folder / "special_tokens_map.json", special_tokens)
    _write_json(folder / "generation_config.json", generation)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
