"""Encodes prompts of many clients without blocking the event loop.

`Tokenizer.encode` holds the GIL and so blocks every stream while it runs. Here a text that can never fit is
rejected without encoding it, short texts are encoded inline, and long ones in a few threads that release the
GIL.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TypeVar

import tokenizers

from ...cluster.errors import RequestError
from ...cluster.request.request import SamplingParams
from ...cluster.step.limits import prompt_too_long
from ..system.event_loop import LoopYielder
from .prompts import (
    Chat,
    EncodedPrompt,
    Prompt,
    PromptText,
    encode_bad_words,
    read_prompt,
    render_chat,
    require_tokenizer,
)
from .tokenizer import Tokenizer

T = TypeVar("T")

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
