"""What may be given as a prompt, and how it becomes token ids; which tokenizer and seed go with it.

Shared by `LLM` and `AsyncEngine`, so that both doors take the same things.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias, cast

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
    text, token_ids = prompt_parts(prompt)
    if token_ids is not None:
        return text, checked_token_ids(token_ids)
    assert text is not None, "a prompt without token ids has a text"
    return text, needed(tokenizer).encode(text)


def needed(tokenizer: Tokenizer | None) -> Tokenizer:
    """The tokenizer of an engine that is given text."""
    if tokenizer is None:
        raise RequestError(
            "prompt: this engine runs without a tokenizer (skip_tokenizer_init); send token ids.",
            param="prompt",
        )
    return tokenizer


def checked_token_ids(values: Sequence[object]) -> list[int]:
    """The ids as plain integers. Lists of a million come, so what is in order is not looked at one by one."""
    if set(map(type, values)) == {int}:
        plain = cast("list[int]", list(values))
        if min(plain) >= 0 and max(plain) <= MAX_COUNT:
            return plain
    return [_token_id(value) for value in values]


def prompt_parts(prompt: Prompt) -> tuple[str | None, Sequence[object] | None]:
    """Text and token ids as they were given; only the text is to be encoded when there are no ids."""
    if isinstance(prompt, str):
        return prompt, None
    if not isinstance(prompt, Mapping):
        return None, prompt
    token_ids, text = prompt.get("prompt_token_ids"), prompt.get("prompt")
    if isinstance(token_ids, Sequence) and not isinstance(token_ids, str):
        return (text if isinstance(text, str) else None), token_ids
    if isinstance(text, str):
        return text, None
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
