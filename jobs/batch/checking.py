"""A row as far as it can be checked without an engine: its request, its prompt's tokens, what is ignored.

Only the tokenizer and the checkpoints' headers are read. Used by `validate.py` for all rows, by `dry_run.py`
for some.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...actors.batch.reading import Row, id_of, record_of
from ...actors.batch.rows import (
    ID_COLUMNS,
    PROMPT_COLUMNS,
    SAMPLING_COLUMNS,
    Layout,
    Record,
    RowRequest,
    read_request,
)
from ...actors.batch.template import template_columns
from ...actors.http.chat_request import ChatRequest, conversation
from ...actors.http.completion_request import CompletionRequest
from ...actors.http.defaults import GenerationDefaults
from ...actors.http.fields import REFUSED, check_extra_fields
from ...actors.prompts import EncodedPrompt, encode_prompt, load_tokenizer
from ...actors.targets.loading.plan import plan_load
from ...cluster.config import EngineConfig
from ...cluster.limits import check_vocabulary, prompt_too_long

FIELDS = frozenset({*ChatRequest.model_fields, *CompletionRequest.model_fields, *REFUSED})
NEAR = 0.85  # how like a sampling column's name another must be to be its misspelling


@dataclass(frozen=True, slots=True)
class CheckedRow:
    """A row that an engine would take.

    Attributes:
        num_prompt_tokens: after truncation, if the row asks for it.
        max_completion_tokens: the most that its answers can have.
    """

    request: RowRequest
    prompt: EncodedPrompt
    num_prompt_tokens: int
    max_completion_tokens: int


class PromptLengthError(Exception):
    """A prompt that does not fit the model; `num_tokens` it has."""

    def __init__(self, num_tokens: int, message: str) -> None:
        super().__init__(message)
        self.num_tokens = num_tokens
        self.message = message


class RowChecker:
    """Checks rows for a job. Raises ConfigError, CheckpointError when the models cannot be.

    Attributes:
        max_model_len: tokens of prompt and output together.
    """

    def __init__(self, layout: Layout, config: EngineConfig) -> None:
        if config.device != "cpu":  # what the engines compute with is another node's matter
            config = replace(config, device="cpu", attention_backend="auto")
        plan = plan_load(config)
        self.max_model_len = plan.max_model_len
        self._layout = layout
        self._vocab_size = plan.target.vocab_size
        self._tokenizer = load_tokenizer(config)
        self._generation = GenerationDefaults.load(plan.target_folder)
        self._used = frozenset(
            {
                *SAMPLING_COLUMNS,
                *PROMPT_COLUMNS,
                *((layout.id_column,) if layout.id_column else ID_COLUMNS),
                *((layout.prompt_column,) if layout.prompt_column else ()),
                *(template_columns(layout.template) if layout.template else ()),
                *(layout.columns if layout.columns != "all" else ()),
            }
        )

    def check(self, row: Row) -> CheckedRow:
        """Raises RequestError, PromptLengthError."""
        record = record_of(row, self._layout)
        request = read_request(record, self._layout, self._generation, id_of(row, self._layout))
        body = request.body
        given = (
            conversation(body, body.messages, self._tokenizer)
            if isinstance(body, ChatRequest)
            else body.prompts()[0]
        )
        prompt = encode_prompt(given, self._tokenizer)
        check_vocabulary("prompt", prompt.token_ids, self._vocab_size)
        length = self._truncated(len(prompt.token_ids), body.truncate_prompt_tokens)
        if length >= self.max_model_len:
            raise PromptLengthError(length, prompt_too_long(length, self.max_model_len).message)
        room = self.max_model_len - length
        most = min(room, request.params.max_tokens or room) * request.params.n
        return CheckedRow(request, prompt, length, most)

    def ignored(self, row: Row) -> list[str]:
        """What the row holds that looks like a parameter and has no effect. Raises RequestError."""
        record = record_of(row, self._layout)
        if self._layout.kind == "dataset":
            return [name for name in record if name not in self._used and _like_a_parameter(name)]
        return self._unknown(record)

    def _unknown(self, record: Record) -> list[str]:
        body: Any = record.get("body")
        if not isinstance(body, Mapping):
            return []
        extra = {name: value for name, value in body.items() if name not in FIELDS}
        return check_extra_fields(extra, (), "ignore")

    def _truncated(self, length: int, truncate: int | None) -> int:
        if truncate is None:
            return length
        return min(length, self.max_model_len - 1 if truncate == -1 else truncate)


@functools.cache
def _like_a_parameter(name: str) -> bool:
    return name in FIELDS or bool(difflib.get_close_matches(name, SAMPLING_COLUMNS, n=1, cutoff=NEAR))
