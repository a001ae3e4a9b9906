"""Prompts of many users become token ids without holding anybody up.

`Tokenizer.encode` keeps Python's lock, and with it every stream, while it runs. Here a text that can never
fit is refused unread, short ones are encoded on the spot, and long ones in a few threads that leave the lock
alone. The door itself is `prompts.py`. Owned by `AsyncEngine`; HTTP and batch rows come through here.
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
from ..system.loop_yielding import LoopYielder
from .prompts import (
    Chat,
    EncodedPrompt,
    Prompt,
    PromptText,
    encode_bad_words,
    needed,
    read_prompt,
    render_chat,
)
from .tokenizer import Tokenizer

T = TypeVar("T")

# Shorter texts take less than a millisecond; those in between a few, and they wait for no long one.
SHORT_TEXT_CHARS = 2_000
LONG_TEXT_CHARS = 8_000
LONG_CHAT_PARTS = 100  # messages, or variables of the template
# Templates are rendered with Python's lock held, at 5 to 12 ms per million characters. A context of a million
# tokens is about so long.
MAX_CHAT_CHARS = 1 << 22
# While it is encoded, a long text costs a core and 100 to 200 bytes of memory per character.
MAX_LONG_TEXTS = 2
MAX_MIDDLE_TEXTS = 2
# All prompts of a request: their ids are kept until the last answer is there, at about 40 bytes each.
MAX_TOKENS_TOGETHER = 1 << 22
# A text whose tokens are listed: while it is encoded it takes 100 bytes of memory per character.
MAX_CHARS_PER_LISTED_TOKEN = 8
# Where a text is cut its tokens are others than in the whole; after so many they are the same.
CUT_TOKENS = 256


class AsyncPromptEncoder:
    """Encodes for one engine.

    Args:
        tokenizer: None where prompts come as token ids.
        max_model_len: tokens of prompt and output together.
    """

    def __init__(self, tokenizer: Tokenizer | None, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._threads = ThreadPoolExecutor(MAX_LONG_TEXTS, thread_name_prefix="manta-encode")
        self._middle = ThreadPoolExecutor(MAX_MIDDLE_TEXTS, thread_name_prefix="manta-encode-middle")

    async def prompt(self, prompt: Prompt, *, truncate: int | None = None) -> EncodedPrompt:
        """Whatever is given as a prompt, ready for `AsyncEngine`; refused if it does not fit the model.

        Args:
            truncate: `truncate_prompt_tokens`: take only so many tokens from the end; -1 as many as fit.
        """
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
        """Those of one request; refused as soon as they surely have more than MAX_TOKENS_TOGETHER tokens."""
        found: list[EncodedPrompt] = []
        count, turns = 0, LoopYielder()
        for prompt in prompts:
            await turns.yield_if_over()
            found.append(await self.prompt(prompt, truncate=truncate))
            count += len(found[-1].token_ids)
            if count > MAX_TOKENS_TOGETHER:
                raise RequestError(
                    f"prompt: the first {len(found)} of {len(prompts)} prompts have {count} tokens; one "
                    f"request may bring {MAX_TOKENS_TOGETHER}. Send them in several.",
                    param="prompt",
                )
        return found

    async def bad_words(self, params: SamplingParams) -> SamplingParams:
        """The parameters with their bad words as token ids alone."""
        return await self.in_thread(encode_bad_words, params, self._tokenizer) if params.bad_words else params

    async def list_tokens(
        self, prompt: Prompt, max_tokens: int, *, add_special_tokens: bool | None = None
    ) -> list[int]:
        """Token ids of a prompt that need not fit the model, only `max_tokens`.

        Args:
            add_special_tokens: by default to a text, and not to a conversation: they come from its template.
        """
        given = await self._read(prompt)
        if isinstance(given, EncodedPrompt):
            return list(given.token_ids)
        if add_special_tokens is not None:
            given = replace(given, add_special_tokens=add_special_tokens)
        count = self._fewest_tokens(given.text)
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
        """Token ids of a prompt. Raises RequestError, naming `param`, if they do not fit the model.

        With `keep_last` only so many tokens from the end are returned, and no text is too long: of one that
        surely has more tokens than the model takes, only an end with at least that many is read.
        """
        return await self._token_ids(PromptText(text, add_special_tokens, param), keep_last)

    async def in_thread(self, work: Callable[..., T], *arguments: object, **named: object) -> T:
        """Run work on long texts. Who leaves keeps his thread until it is done, so that the limit holds."""
        call = partial(work, *arguments, **named)
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def close(self) -> None:
        for threads in (self._threads, self._middle):
            threads.shutdown(wait=False, cancel_futures=True)

    async def _read(self, prompt: Prompt) -> PromptText | EncodedPrompt:
        """What is given, conversations rendered; long ones apart from the event loop's other turns."""
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
        if self._fewest_tokens(given.text) > limit:
            raise prompt_too_long(f"more than {limit}", self._max_model_len, given.param)
        encoding = await self._encode(given)
        if len(encoding) > limit:
            raise prompt_too_long(len(encoding), self._max_model_len, given.param)
        return encoding.ids

    async def _encode(self, given: PromptText) -> tokenizers.Encoding:
        tokenizer, num_chars = needed(self._tokenizer), len(given.guarded or given.text)
        if num_chars < SHORT_TEXT_CHARS:  # who gives the lock away waits to get it again
            return given.encode(tokenizer.encoding)
        threads = self._middle if num_chars < LONG_TEXT_CHARS else self._threads
        return await asyncio.get_running_loop().run_in_executor(
            threads, given.encode, tokenizer.encode_unlocked
        )

    def _check_length(self, given: PromptText, most_chars: int) -> None:
        if len(given.text) > most_chars:
            raise RequestError(
                f"{given.param}: {len(given.text)} characters; at most {most_chars} are made tokens of to be "
                "listed. Send them in parts.",
                param=given.param,
            )

    def _fewest_tokens(self, text: str) -> int:
        coverage = needed(self._tokenizer).coverage
        return 0 if coverage is None else coverage.fewest_tokens(text)

    def _readable_end(self, given: PromptText, num_tokens: int) -> PromptText:
        coverage = needed(self._tokenizer).coverage
        if coverage is None:
            return given
        guarded = None if given.guarded is None else coverage.tail(given.guarded, num_tokens)
        return replace(given, text=coverage.tail(given.text, num_tokens), guarded=guarded)


def _last_ids(encoding: tokenizers.Encoding, count: int) -> list[int]:
    if len(encoding) > 2 * max(count, LONG_TEXT_CHARS):  # cut before millions of integers are made
        encoding.truncate(max(count, LONG_TEXT_CHARS), direction="left")
    return encoding.ids[-count:] if count else []
