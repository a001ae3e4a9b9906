"""Prompt parsing: text, token ids or a conversation in, an `EncodedPrompt` out.

Both engines take only `EncodedPrompt`s. `LLM` encodes inline (`encode_prompt`), all other code off the event
loop (`async_prompt_encoder.py`). Token ids are checked to be integers here, or by the HTTP models for JSON;
`cluster/step/limits.py` checks them against the vocabulary. Also here: loading a tokenizer, and seeds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, TypeAlias, TypeVar, cast

from ...cluster.config import EngineConfig
from ...cluster.errors import ConfigError, RequestError, brief
from ...cluster.request.request import MAX_SEED, SamplingParams
from .checkpoint_paths import tokenizer_folder
from .client_messages import Message
from .tokenizer import Tokenizer

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """The tokens an engine continues, at least one, and their text if the prompt was text."""

    token_ids: tuple[int, ...] = field(repr=False)
    text: str | None = None

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise RequestError("The prompt is empty: give at least one token.", param="prompt")


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation to be rendered by the model's chat template."""

    # at least one, oldest first; fields besides role and content are passed to the template
    messages: Sequence[Message]
    add_generation_prompt: bool = True  # end with the beginning of an assistant message
    continue_final_message: bool = False  # leave the last message open instead
    # additional template variables, `chat_template_kwargs` (Any: JSON)
    variables: Mapping[str, Any] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None  # the callable tools in OpenAI's format
    documents: Sequence[Mapping[str, Any]] | None = None  # for templates that support them
    template: str | None = None  # Jinja source instead of the model's own template

    def __post_init__(self) -> None:
        if not self.messages or not all(isinstance(message, Mapping) for message in self.messages):
            raise RequestError(
                'messages: give at least one, each a mapping like {"role": "user", "content": "..."}.',
                param="messages",
            )

    @property
    def num_chars(self) -> int:
        """Characters of messages, tools and documents, which determine the time of encoding."""
        values = (value for each in self.messages for key, value in each.items() if value and key != "role")
        lengths = (len(value) if isinstance(value, str) else len(repr(value)) for value in values)
        return sum(lengths) + sum(len(repr(given)) for given in (self.tools, self.documents) if given)


@dataclass(frozen=True, slots=True)
class PromptText:
    text: str
    add_special_tokens: bool = True
    param: str = "prompt"  # the request field that contained it
    # encoded instead of the text if users wrote special tokens in it (`Tokenizer.render`)
    guarded: str | None = None

    def encode(self, encode: Callable[..., T]) -> T:
        if self.guarded is None:
            return encode(self.text, add_special_tokens=self.add_special_tokens)
        return encode(self.guarded, add_special_tokens=self.add_special_tokens, guarded=True)


Prompt: TypeAlias = str | Sequence[int] | Mapping[str, object] | Chat | EncodedPrompt


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer | None) -> EncodedPrompt:
    """Encode a string, ids, {"prompt"|"prompt_token_ids": ..} or a conversation."""
    given = read_prompt(prompt)
    if isinstance(given, Chat):
        given = render_chat(given, tokenizer)
    if isinstance(given, EncodedPrompt):
        return given
    token_ids = given.encode(require_tokenizer(tokenizer, given.param).encode)
    return EncodedPrompt(tuple(token_ids), given.text)


def read_prompt(prompt: Prompt) -> PromptText | Chat | EncodedPrompt:
    """Parse a prompt and check what needs no tokenizer."""
    if isinstance(prompt, Chat | EncodedPrompt):
        return prompt
    if isinstance(prompt, str):
        return PromptText(prompt)
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray):
        return EncodedPrompt(_integers(prompt))
    if not isinstance(prompt, Mapping):
        raise RequestError(
            f"prompt={brief(prompt)} is not allowed: give a string, a list of token ids, a mapping that "
            "holds one of them, or a Chat.",
            param="prompt",
        )
    token_ids, text = prompt.get("prompt_token_ids"), prompt.get("prompt")
    if isinstance(token_ids, Sequence) and not isinstance(token_ids, str):
        return EncodedPrompt(_integers(token_ids), text if isinstance(text, str) else None)
    if isinstance(text, str):
        return PromptText(text)
    raise RequestError(
        'prompt: a mapping must hold "prompt" (text) or "prompt_token_ids" (integers); '
        f"this one holds {sorted(map(str, prompt))}.",
        param="prompt",
    )


def render_chat(chat: Chat, tokenizer: Tokenizer | None) -> PromptText:
    """Render a conversation; its special tokens come from the template alone."""
    text, guarded = require_tokenizer(tokenizer, "messages").render(
        chat.messages,
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
        variables=chat.variables,
        tools=chat.tools,
        documents=chat.documents,
        source=chat.template,
    )
    return PromptText(text, add_special_tokens=False, param="messages", guarded=guarded)


def require_tokenizer(tokenizer: Tokenizer | None, param: str = "prompt") -> Tokenizer:
    """Raises RequestError if the engine has no tokenizer."""
    if tokenizer is None:
        raise RequestError(
            f"{param}: this engine runs without a tokenizer (skip_tokenizer_init); send token ids.",
            param=param,
        )
    return tokenizer


def encode_bad_words(params: SamplingParams, tokenizer: Tokenizer | None) -> SamplingParams:
    """Replace bad words by token ids, each with and without a leading space."""
    if tokenizer is None or not params.bad_words:
        return params
    spellings = (prefix + word.lstrip() for word in params.bad_words for prefix in ("", " "))
    words = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in spellings)
    known = params.bad_words_token_ids
    ids = tuple(dict.fromkeys((*known, *filter(None, words))))
    return replace(params, bad_words=(), bad_words_token_ids=ids)


def load_tokenizer(config: EngineConfig) -> Tokenizer | None:
    if config.skip_tokenizer_init:
        return None
    return Tokenizer.load(
        tokenizer_folder(config),
        chat_template=None if config.chat_template is None else _read_template(config.chat_template),
        template_kwargs=config.default_chat_template_kwargs,
        trust_templates=config.trust_request_chat_template,
        split_special_tokens=config.split_special_tokens,
    )


def _read_template(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"chat_template={path!r} cannot be read: {error}. Give a file that holds a Jinja template.",
            param="chat_template",
        ) from None


class SeedSource:
    """Seeds for requests without one: random, or a reproducible sequence if the engine has a seed."""

    def __init__(self, seed: int | None) -> None:
        self._seed = seed
        self._count = 0
        # Seeded once from the system's randomness: each further call to it would release the GIL, and a
        # request of a thousand prompts would wait for it a thousand times.
        self._random = Random()

    def with_seed(self, params: SamplingParams) -> SamplingParams:
        return params if params.seed is not None else params.with_seed(self._next())

    def _next(self) -> int:
        if self._seed is None:
            return self._random.randrange(MAX_SEED)
        self._count += 1
        digest = hashlib.blake2b(f"{self._seed}/{self._count}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1


def _integers(values: Sequence[object]) -> tuple[int, ...]:
    """Return plain integers. A valid list, which may be long, is checked at once."""
    if set(map(type, values)) <= {int}:
        return tuple(cast("Sequence[int]", values))
    return tuple(map(_integer, values))


def _integer(value: object) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise RequestError(f"prompt: {brief(value)} is not a token id; give integers.", param="prompt")
    return int(value)  # type: ignore[call-overload]
