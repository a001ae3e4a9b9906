"""Chooses the mask token of a new drafter: a token that occurs neither in text nor in a chat.

Most published vocabularies are full, and few name a mask. Called before any answer is generated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from ....actors.checkpoints.checkpoint_paths import has_tokenizer
from ....actors.targets.model.model_spec import ModelSpec
from ....actors.tokenization.tokenizer import Tokenizer
from ....actors.tokenization.tokenizer_config import read_special_tokens
from ....cluster.errors import ConfigError
from ..loop.training_loop import Report

_RESERVED = re.compile(r"reserved|unused|placeholder|extra|dummy", re.I)
# Tokens that begin, end, separate or pad text, or stand for unknown words, by their usual names.
_STRUCTURE = re.compile(r"bos|eo[stm]|end|pad|unk|sep\b|cls|im_start|start_of|begin|</?s>", re.I)
_NEVER_IN_UTF8 = frozenset(bytes([byte]) for byte in (0xC0, 0xC1, *range(0xF5, 0x100)))


def mask_token(spec: ModelSpec, folder: Path, given: int | None, report: Report) -> int:
    """Return the id that is `given`, or choose one and report it.

    The order is: a special token named mask; an id without a token; a reserved special token; another one
    that neither delimits text nor is written by the chat template; a byte that UTF-8 never contains.
    """
    if given is not None:
        if not 0 <= given < spec.vocab_size:
            raise ConfigError(
                f"mask_token_id={given}: the target has the tokens 0 to {spec.vocab_size - 1}.",
                param="mask_token_id",
            )
        return given
    tokenizer = Tokenizer.load(folder) if has_tokenizer(folder) else None
    named = set(read_special_tokens(folder, byte_level=False).values())
    chosen = next(_candidates(spec, tokenizer, named) if tokenizer is not None else iter(()), None)
    if tokenizer is None or chosen is None:
        raise ConfigError(
            f"mask_token_id: {folder} has no {'tokenizer' if tokenizer is None else 'token'} from which one "
            "can be chosen. Give the id of a token that does not occur in text.",
            param="mask_token_id",
        )
    token_id, why = chosen
    report(f"mask token: {token_id} ({tokenizer.tokens([token_id])[0]}), {why}")
    return token_id


def _candidates(spec: ModelSpec, tokenizer: Tokenizer, named: set[str]) -> Iterator[tuple[int, str]]:
    """Yield ids with the reason, best first. `named`: special tokens with a role (`bos_token` ..)."""
    special = sorted(tokenizer.special_token_ids.items(), key=lambda token: -token[1])
    special = [(text, token_id) for text, token_id in special if token_id < spec.vocab_size]
    yield from ((token_id, "which is named so") for text, token_id in special if "mask" in text.lower())
    ids = range(spec.vocab_size)
    unused = (i for i, text in zip(ids, tokenizer.tokens(ids), strict=True) if text is None)
    yield from ((token_id, "an id that no token has") for token_id in unused)
    template = tokenizer.template.source if tokenizer.template is not None else ""
    free = [
        (text, token_id)
        for text, token_id in special
        if text not in template and text not in named and token_id not in spec.eos_token_ids
    ]
    yield from ((token_id, "a reserved token") for text, token_id in free if _RESERVED.search(text))
    yield from (
        (token_id, "a special token that neither delimits text nor is in the chat template")
        for text, token_id in free
        if not _STRUCTURE.search(text)
    )
    unseen = (i for i in ids if tokenizer.token_bytes(i) in _NEVER_IN_UTF8)
    yield from ((token_id, "a byte that UTF-8 never contains") for token_id in unseen)
