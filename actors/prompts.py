"""What may be given as a prompt, and how it becomes token ids; which tokenizer and seed go with it.

Shared by `LLM` and `AsyncEngine`, so that both doors take the same things.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from ..cluster.config import EngineConfig
from ..cluster.errors import RequestError
from ..cluster.request import MAX_COUNT, SamplingParams
from .checkpoints import resolve_checkpoint
from .tokenizer import Tokenizer

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, object]


class SeedSource:
    """Seeds for requests that bring none: random, or a reproducible series when the engine has a seed."""

    def __init__(self, seed: int | None) -> None:
        self._seed = seed
        self._count = 0

    def seeded(self, params: SamplingParams) -> SamplingParams:
        if params.seed is not None or self._seed is None:
            return params.with_seed()
        self._count += 1
        digest = hashlib.blake2b(f"{self._seed}/{self._count}".encode(), digest_size=8).digest()
        return replace(params, seed=int.from_bytes(digest, "little") >> 1)


def load_tokenizer(config: EngineConfig) -> Tokenizer | None:
    """The engine's tokenizer; None with `skip_tokenizer_init`."""
    if config.skip_tokenizer_init:
        return None
    if config.tokenizer is not None:
        return Tokenizer.load(resolve_checkpoint(config.tokenizer, field="tokenizer"))
    return Tokenizer.load(resolve_checkpoint(config.model, field="model"))


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer | None) -> tuple[str | None, list[int]]:
    """Text (or None) and token ids of a prompt: a string, token ids, or {"prompt"|"prompt_token_ids": ..}."""
    if isinstance(prompt, Mapping):
        return _encode_mapping(prompt, tokenizer)
    if not isinstance(prompt, str):
        return None, [_token_id(t) for t in prompt]
    if tokenizer is None:
        raise RequestError(
            "prompt: this engine runs without a tokenizer (skip_tokenizer_init); send token ids.",
            param="prompt",
        )
    return prompt, tokenizer.encode(prompt)


def _encode_mapping(
    prompt: Mapping[str, object], tokenizer: Tokenizer | None
) -> tuple[str | None, list[int]]:
    token_ids, text = prompt.get("prompt_token_ids"), prompt.get("prompt")
    if isinstance(token_ids, Sequence) and not isinstance(token_ids, str):
        return (text if isinstance(text, str) else None), [_token_id(t) for t in token_ids]
    if isinstance(text, str):
        return encode_prompt(text, tokenizer)
    raise RequestError(
        'prompt: a mapping must hold "prompt" (text) or "prompt_token_ids" (integers); '
        f"this one holds {sorted(map(str, prompt))}.",
        param="prompt",
    )


def _token_id(value: object) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise RequestError(f"prompt: {value!r} is not a token id; give integers.", param="prompt")
    token_id = int(value)  # type: ignore[call-overload]
    if not 0 <= token_id <= MAX_COUNT:
        raise RequestError(f"prompt: {token_id} is not a token id; they count from 0.", param="prompt")
    return token_id
