"""Prompt parsing: text, token ids or a conversation in, an `EncodedPrompt` out.

Both engines take only `EncodedPrompt`s. `LLM` encodes inline (`encode_prompt`), all other code by
`AsyncPromptEncoder`. Token ids are checked to be integers here, or by the HTTP models for JSON;
`cluster/step/limits.py` checks them against the vocabulary. Also here: loading a tokenizer, and seeds.

`Tokenizer.encode` holds the GIL and so blocks every stream while it runs. `AsyncPromptEncoder` rejects a text
that can never fit without encoding it, encodes short texts inline, and long ones in a few threads that
release the GIL.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, TypeAlias, TypeVar, cast

import tokenizers

from ...cluster.config import EngineConfig
from ...cluster.errors import ConfigError, RequestError, brief
from ...cluster.request.request import MAX_SEED, SamplingParams
from ...cluster.step.limits import prompt_too_long
from ..checkpoints.checkpoint_paths import tokenizer_folder
from ..system.event_loop import LoopYielder
from .client_messages import Message
from .tokenizer import Tokenizer
from .tokenizer_config import read_chat_templates

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


def has_chat_template(config: EngineConfig) -> bool:
    """Return whether `load_tokenizer` has a chat template, without loading the tokenizer."""
    if config.skip_tokenizer_init:
        return False
    return config.chat_template is not None or bool(read_chat_templates(tokenizer_folder(config)))


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


# Shorter texts take less than a millisecond. Medium ones take a few; their threads run no long ones.
SHORT_TEXT_CHARS = 2_000
LONG_TEXT_CHARS = 8_000
LONG_CHAT_PARTS = 100  # messages, or template variables
# Templates are rendered with the GIL held, at 5 to 12 ms per million characters. A context of a million
# tokens has about this many characters.
MAX_CHAT_CHARS = 1 << 22
# Encoding a long text occupies a core and 100 to 200 bytes of memory per character.
MAX_LONG_TEXTS = 2
MAX_MIDDLE_TEXTS = 2
# For all prompts of a request: their ids are kept until the last response is complete, at about 40 bytes
# each.
MAX_TOKENS_TOGETHER = 1 << 22
# For texts whose tokens are listed: encoding takes 100 bytes of memory per character.
MAX_CHARS_PER_LISTED_TOKEN = 8
# Tokens near a cut differ from those of the whole text; after this many they are the same.
CUT_TOKENS = 256


class AsyncPromptEncoder:
    """`tokenizer`: None if prompts are always token ids."""

    def __init__(self, tokenizer: Tokenizer | None, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._threads = ThreadPoolExecutor(MAX_LONG_TEXTS, thread_name_prefix="manta-encode")
        self._middle = ThreadPoolExecutor(MAX_MIDDLE_TEXTS, thread_name_prefix="manta-encode-middle")

    async def prompt(self, prompt: Prompt, *, truncate: int | None = None) -> EncodedPrompt:
        """Raises RequestError if it is too long. `truncate`: keep the last N tokens; -1: all that fit."""
        keep_last = self._max_model_len - 1 if truncate == -1 else truncate
        given = await self._read(prompt)
        if isinstance(given, PromptText):
            token_ids = await self._token_ids(given, keep_last)
            return EncodedPrompt(tuple(token_ids), given.text)
        if keep_last is not None:
            return EncodedPrompt(given.token_ids[-keep_last:] if keep_last else (), given.text)
        if len(given.token_ids) >= self._max_model_len:
            raise prompt_too_long(len(given.token_ids), self._max_model_len)
        return given

    async def prompts(self, prompts: Sequence[Prompt], *, truncate: int | None = None) -> list[EncodedPrompt]:
        """Encode one request's prompts. Raises RequestError beyond MAX_TOKENS_TOGETHER tokens."""
        found: list[EncodedPrompt] = []
        count, yielder = 0, LoopYielder()
        for prompt in prompts:
            await yielder.yield_if_over()
            found.append(await self.prompt(prompt, truncate=truncate))
            count += len(found[-1].token_ids)
            if count > MAX_TOKENS_TOGETHER:
                raise RequestError(
                    f"prompt: the first {len(found)} of {len(prompts)} prompts have {count} tokens; one "
                    f"request may have {MAX_TOKENS_TOGETHER}. Send them in several requests.",
                    param="prompt",
                )
        return found

    async def bad_words(self, params: SamplingParams) -> SamplingParams:
        return await self.in_thread(encode_bad_words, params, self._tokenizer) if params.bad_words else params

    async def list_tokens(
        self, prompt: Prompt, max_tokens: int, *, add_special_tokens: bool | None = None
    ) -> list[int]:
        """Return at most `max_tokens` tokens. Special ones are added to a text, but not to a chat, by
        default.
        """
        given = await self._read(prompt)
        if isinstance(given, EncodedPrompt):
            return list(given.token_ids)
        if add_special_tokens is not None:
            given = replace(given, add_special_tokens=add_special_tokens)
        count = self._min_tokens(given.text)
        if count <= max_tokens:
            self._check_length(given, MAX_CHARS_PER_LISTED_TOKEN * max_tokens)
            encoding = await self._encode(given)
            if len(encoding) <= max_tokens:
                return encoding.ids
            count = len(encoding)
        raise RequestError(
            f"{given.param}: at least {count} tokens; at most {max_tokens} are listed. Send them in parts.",
            param=given.param,
        )

    async def text(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        keep_last: int | None = None,
        param: str = "prompt",
    ) -> list[int]:
        """Return a text's token ids. Raises RequestError, naming `param`, if they do not fit the model.

        With `keep_last` only the last N tokens are returned and no text is too long: of a text that certainly
        exceeds the model's limit, only the end is encoded.
        """
        return await self._token_ids(PromptText(text, add_special_tokens, param), keep_last)

    async def in_thread(self, work: Callable[..., T], *arguments: object, **named: object) -> T:
        """Run in a thread, which stays occupied after a cancellation until the work is done."""
        call = partial(work, *arguments, **named)
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def close(self) -> None:
        for threads in (self._threads, self._middle):
            threads.shutdown(wait=False, cancel_futures=True)

    async def _read(self, prompt: Prompt) -> PromptText | EncodedPrompt:
        """Parse the prompt and render a conversation, in a thread if it is long."""
        given = read_prompt(prompt)
        if not isinstance(given, Chat):
            return given
        if given.num_chars > MAX_CHAT_CHARS:
            raise RequestError(
                f"messages: {given.num_chars} characters; at most {MAX_CHAT_CHARS} are read. Shorten them.",
                param="messages",
            )
        many = max(len(given.messages), len(given.variables or ()))
        if given.num_chars < LONG_TEXT_CHARS and many < LONG_CHAT_PARTS:
            return render_chat(given, self._tokenizer)
        return await self.in_thread(render_chat, given, self._tokenizer)

    async def _token_ids(self, given: PromptText, keep_last: int | None) -> list[int]:
        limit = self._max_model_len - 1
        if keep_last is not None:
            encoding = await self._encode(self._readable_end(given, max(keep_last, limit) + CUT_TOKENS))
            return _last_ids(encoding, keep_last)
        if self._min_tokens(given.text) > limit:
            raise prompt_too_long(f"more than {limit}", self._max_model_len, given.param)
        encoding = await self._encode(given)
        if len(encoding) > limit:
            raise prompt_too_long(len(encoding), self._max_model_len, given.param)
        return encoding.ids

    async def _encode(self, given: PromptText) -> tokenizers.Encoding:
        tokenizer, num_chars = require_tokenizer(self._tokenizer), len(given.guarded or given.text)
        if num_chars < SHORT_TEXT_CHARS:  # releasing the GIL means waiting to get it back
            return given.encode(tokenizer.encoding)
        threads = self._middle if num_chars < LONG_TEXT_CHARS else self._threads
        return await asyncio.get_running_loop().run_in_executor(
            threads, given.encode, tokenizer.encode_unlocked
        )

    def _check_length(self, given: PromptText, max_chars: int) -> None:
        if len(given.text) > max_chars:
            raise RequestError(
                f"{given.param}: {len(given.text)} characters; at most {max_chars} can be listed as "
                "tokens. Send them in parts.",
                param=given.param,
            )

    def _min_tokens(self, text: str) -> int:
        coverage = require_tokenizer(self._tokenizer).coverage
        return 0 if coverage is None else coverage.min_tokens(text)

    def _readable_end(self, given: PromptText, num_tokens: int) -> PromptText:
        coverage = require_tokenizer(self._tokenizer).coverage
        if coverage is None:
            return given
        guarded = None if given.guarded is None else coverage.tail(given.guarded, num_tokens)
        return replace(given, text=coverage.tail(given.text, num_tokens), guarded=guarded)


def _last_ids(encoding: tokenizers.Encoding, count: int) -> list[int]:
    if len(encoding) > 2 * max(count, LONG_TEXT_CHARS):  # truncate before millions of integers are created
        encoding.truncate(max(count, LONG_TEXT_CHARS), direction="left")
    return encoding.ids[-count:] if count else []
