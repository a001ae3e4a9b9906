"""Text in, token ids out, and back: the `tokenizers` library plus the checkpoint's chat template.

Not a general tokenizer zoo: it reads `tokenizer.json` (every fast tokenizer) and renders ChatML-like
templates with minijinja, 10 times faster than transformers and without importing it. Used by `LLM`, the
replica's engine and the HTTP front. Thread-safe: the tokenizer is never changed after loading.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import minijinja
import tokenizers
from tokenizers.decoders import DecodeStream

from ..cluster.errors import CheckpointError, RequestError
from .token_coverage import token_coverage

Message = Mapping[str, Any]  # Any: message content is a string or a list of typed parts.
MAX_TEMPLATE_STEPS = 2_000_000
TEMPLATE_ARGUMENTS = frozenset({"messages", "add_generation_prompt", "continue_final_message"})


class Tokenizer:
    """One checkpoint's tokenizer.

    Attributes:
        vocab_size: number of ids, added tokens included.
        chat_template: Jinja source, or None when the checkpoint has none.
        coverage: how much text a token stands for at most; None where there is no such bound.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, chat_template: str | None, special_tokens: Mapping[str, str]
    ) -> None:
        self._backend = backend
        self.chat_template = chat_template
        self._special_tokens = dict(special_tokens)
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.coverage = token_coverage(backend)
        self._environment = _template_environment(chat_template) if chat_template else None
        self._token_texts: dict[int, str] = {}

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read `tokenizer.json`, `tokenizer_config.json` and the chat template from a checkpoint folder."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(
                f"tokenizer: {folder} holds no tokenizer.json. Set `tokenizer` to a folder that does, or "
                "save the checkpoint's tokenizer with transformers (save_pretrained).",
                param="tokenizer",
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
            settings = _read_json(folder / "tokenizer_config.json")
        except Exception as error:  # the library raises bare Exception for a malformed file
            raise CheckpointError(f"tokenizer: {path} cannot be read: {error}.", param="tokenizer") from error
        backend.no_padding()
        backend.no_truncation()
        return cls(backend, _chat_template(folder, settings), _special_tokens(settings))

    def to_json(self) -> str:
        """The whole tokenizer as the `tokenizers` library writes it."""
        return self._backend.to_str()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_unlocked(self, text: str, *, add_special_tokens: bool = True) -> tokenizers.Encoding:
        """The same for a thread: other threads run meanwhile (`encode` holds Python's lock to its end).

        The encoding knows its length at once, before a list of millions of integers is made of it.
        """
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]

    def decode_unlocked(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """As `decode`, for a thread."""
        return self._backend.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)[0]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """A token decoded by itself. Log probabilities ask for twenty of them in each place."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = self.decode([token_id], skip_special_tokens=False)
        return text

    def tokens(self, token_ids: Sequence[int]) -> list[str | None]:
        """The vocabulary's own spelling of tokens, None beyond the vocabulary."""
        return [self._backend.id_to_token(token_id) for token_id in token_ids]

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render messages to the prompt text.

        Args:
            variables: further ones for the template, as `chat_template_kwargs`.

        Raises:
            RequestError: the template refuses the messages, or `variables` names an argument of its own.
        """
        variables = dict(variables or {})
        for name in TEMPLATE_ARGUMENTS & variables.keys():
            raise RequestError(
                f"chat_template_kwargs.{name}: send {name} as a field of the request itself.",
                param=f"chat_template_kwargs.{name}",
            )
        if self._environment is None:
            raise RequestError(
                "messages: this model has no chat template. Use /v1/completions with a prompt, or a "
                "tokenizer that has one.",
                param="messages",
            )
        try:
            text = self._environment.render_template(
                "chat",
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                **{**self._special_tokens, **variables},
            )
        except minijinja.TemplateError as error:
            raise RequestError(
                f"messages: the chat template refused them: {error.message}.", param="messages"
            ) from error
        return _cut_after_final_message(text, messages) if continue_final_message else text

    def template_uses(self, variable: str) -> bool:
        """Whether the chat template names a variable; one that it does not name has no effect."""
        return variable in (self.chat_template or "")

    def detokenizer(
        self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool
    ) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(self._backend, prompt_token_ids, skip_special_tokens)


class IncrementalDetokenizer:
    """Turns blocks of tokens into text as they come; holds back bytes of an unfinished UTF-8 character.

    The text of all steps and of `flush` is the same however the tokens were cut into blocks.
    """

    # Enough left context for decoders that treat the first token of a text differently.
    _CONTEXT_TOKENS = 6

    def __init__(
        self, backend: tokenizers.Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool
    ) -> None:
        self._backend = backend
        self._skip_special_tokens = skip_special_tokens
        self._context = list(prompt_token_ids[-self._CONTEXT_TOKENS :])
        self._held: list[int] = []  # tokens that have not come out as text
        # Made at the first step: until the engine has taken the prompt, its ids may be anything.
        self._stream: DecodeStream | None = None

    def step(self, token_ids: Sequence[int]) -> str:
        if not token_ids:
            return ""
        if self._stream is None:
            self._stream = DecodeStream(ids=self._context, skip_special_tokens=self._skip_special_tokens)
        self._held.extend(token_ids)
        text = self._stream.step(self._backend, list(token_ids)) or ""
        if text:
            self._context = [*self._context, *self._held][-self._CONTEXT_TOKENS :]
            self._held.clear()
        return text

    def flush(self) -> str:
        """What is held back at the end of the tokens; an unfinished character becomes U+FFFD."""
        if not self._held:
            return ""
        whole = self._decode([*self._context, *self._held])
        before = self._decode(self._context)
        self._held.clear()
        return whole[len(before) :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._backend.decode(list(token_ids), skip_special_tokens=self._skip_special_tokens)


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """The template lives in a file of its own (transformers >= 4.50) or in tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named templates: the default one
        return next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    return template


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = settings.get(name)
        text = value.get("content") if isinstance(value, Mapping) else value
        found[name] = text or ""
    return found


def _template_environment(source: str) -> minijinja.Environment:
    environment = minijinja.Environment(
        templates={"chat": source}, trim_blocks=True, lstrip_blocks=True, pycompat=True
    )
    environment.fuel = MAX_TEMPLATE_STEPS  # a template is code: bound what it may burn
    environment.add_function("raise_exception", _raise_exception)  # type: ignore[attr-defined]  # not in its stubs
    environment.add_function("strftime_now", _strftime_now)  # type: ignore[attr-defined]
    return environment


# Templates call these with whatever they are given.
def _raise_exception(message: object) -> None:
    raise RequestError(str(message), param="messages")


def _strftime_now(form: object) -> str:
    try:
        return datetime.now().strftime(form)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise RequestError(
            f"messages: the chat template cannot tell the time as {form!r}: {error}.", param="messages"
        ) from None


def _cut_after_final_message(text: str, messages: Sequence[Message]) -> str:
    """Drop what the template put after the last message, so that the model continues it."""
    final = str(messages[-1].get("content") or "").strip()
    at = text.rfind(final)
    if not final or at < 0:
        raise RequestError(
            "continue_final_message: the final message must have text that the chat template keeps.",
            param="continue_final_message",
        )
    return text[: at + len(final)]
