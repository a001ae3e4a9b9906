"""A tokenizer of single bytes and special tokens."""

from __future__ import annotations

import tokenizers
from manta.actors.chat.chat_formats import CALLS, texts_of
from manta.actors.tokenization.tokenizer import Tokenizer

SPECIAL = sorted(
    {
        mark
        for syntax in CALLS.values()
        for mark in texts_of(syntax)
        if (mark.startswith("<|") or mark.endswith("|>")) and "\n" not in mark
    }
)


def byte_tokenizer(
    template: str = "", special: list[str] = SPECIAL, added: tuple[str, ...] = ()
) -> Tokenizer:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), vocab_size=300, show_progress=False
    )
    backend.train_from_iterator([], trainer)
    backend.add_special_tokens(["<|endoftext|>", "<|im_end|>", *special])
    backend.add_tokens(list(added))
    return Tokenizer(backend, template or None, {})
