"""Reads traffic to explain: JSONL of prompts or chats, OpenAI batch files, or a folder of --capture.

Each row becomes a request with its own sampling parameters, as `manta batch` reads it. A row may have a
`tenant`. Of captured traffic the prompts are answered again; captures without prompts cannot be used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from ....actors.batch.dataset.row_requests import RowSchema, category_of, parse_line, read_request, row_id
from ....actors.batch.dataset.source import Dataset, open_source
from ....actors.capture.records import is_captured, read_captured
from ....actors.chat.chat_model import ChatModel
from ....actors.http.protocol.chat_completion import ChatRequest, conversation
from ....actors.http.protocol.preparation import with_formats
from ....actors.tokenization.generation_config import GenerationDefaults
from ....actors.tokenization.prompts import EncodedPrompt, encode_prompt
from ....actors.tokenization.tokenizer import Tokenizer
from ....cluster.errors import DatasetError, RequestError
from ....cluster.request.request import SamplingParams

Record = Mapping[str, Any]  # Any: a user's row
_T = TypeVar("_T")
PromptKind = Literal["chat", "text", "captured"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficRow:
    """A request to run.

    Attributes:
        text: the prompt's text, with special tokens; "" without a tokenizer.
        kind: captured prompts are token ids, chats and texts alike.
        opened: the answer begins within reasoning.
        category: the category in the drafter's card.
    """

    name: str
    prompt: EncodedPrompt
    text: str
    params: SamplingParams
    kind: PromptKind
    opened: bool = False
    tenant: str | None = None
    category: str | None = None


@dataclass(frozen=True, slots=True)
class TrafficReader:
    """Turns records into rows, as the server would with these formats and defaults.

    `temperature` is for rows that name none; None is the default of the model's `generation` settings.
    Answers end after `max_tokens`.
    """

    tokenizer: Tokenizer | None
    chat: ChatModel
    generation: GenerationDefaults
    temperature: float | None
    max_tokens: int

    def read(self, path: Path, count: int) -> list[TrafficRow]:
        """Return at most `count` rows, taken evenly. Raises DatasetError."""
        return self._captured(path, count) if is_captured(path) else self._lines(path, count)

    def row(self, record: Record, row_schema: RowSchema, *, is_captured: bool = False) -> TrafficRow:
        """Return the row of a record. Raises RequestError."""
        name = row_id(record, row_schema)
        request = read_request(record, row_schema, self.generation, name)
        body, limit = request.body, request.params.max_tokens
        max_tokens = self.max_tokens if limit is None else min(limit, self.max_tokens)
        is_chat = isinstance(body, ChatRequest)
        # Not `prompt_of`: its server may have parsed tools with a format that the template does not tell.
        given = conversation(body, body.messages, self.tokenizer) if is_chat else body.prompts()[0]
        prompt = encode_prompt(given, self.tokenizer)
        text = self._text(prompt)
        params, parsers = with_formats(self.chat, body, replace(request.params, max_tokens=max_tokens), text)
        if not is_chat:  # a rendered conversation may have been captured
            parsers = self.chat.reading(text)
        tenant = record.get("tenant")
        return TrafficRow(
            name=name,
            prompt=prompt,
            text=text,
            params=params,
            kind="chat" if is_chat else "captured" if is_captured else "text",
            opened=parsers.opened,
            tenant=None if tenant is None else str(tenant),
            category=category_of(record, row_schema),
        )

    def row_schema(self, kind: Literal["dataset", "openai"] = "dataset") -> RowSchema:
        defaults = {} if self.temperature is None else {"temperature": self.temperature}
        category = "category" if kind == "dataset" else None
        return RowSchema(kind=kind, defaults=defaults, category_column=category)

    def _lines(self, path: Path, count: int) -> list[TrafficRow]:
        source = open_traffic(path)
        lines: list[tuple[str, bytes]] = []
        for file in source.files:
            with file.reading(), file.open_text("jsonl") as text:
                for number, (_, line) in enumerate(text.raw_records(), start=1):
                    assert isinstance(line, bytes)
                    lines.append((f"{file}, record {number}", line))
        row_schema = self.row_schema("openai" if source.format == "openai" else "dataset")
        rows: list[TrafficRow] = []
        for where, line in _evenly(lines, count, path):
            try:
                rows.append(self.row(parse_line(line), row_schema))
            except RequestError as error:
                raise DatasetError(f"data: {where}: {error.message}", param="data") from None
        return rows

    def _captured(self, path: Path, count: int) -> list[TrafficRow]:
        row_schema = self.row_schema()
        records = [
            {
                "id": f"captured-{number}",
                "prompt": list(each.prompt_token_ids),
                "temperature": each.temperature,
                "tenant": each.tenant,
                "category": each.category,
            }
            for number, each in enumerate(read_captured(path))
            if each.prompt_token_ids
        ]
        return [self.row(each, row_schema, is_captured=True) for each in _evenly(records, count, path)]

    def _text(self, prompt: EncodedPrompt) -> str:
        if prompt.text is not None or self.tokenizer is None:
            return prompt.text or ""
        return self.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)


def open_traffic(path: Path) -> Dataset:
    """Open lines of traffic. Raises DatasetError if there is no such file, or it has no lines."""
    source = open_source([path])
    if not source.lines:
        raise DatasetError(f"data: {path} must be JSONL, or a folder of captured traffic.", param="data")
    return source


def _evenly(found: Sequence[_T], count: int, path: Path) -> list[_T]:
    if not found:
        raise DatasetError(f"data: {path} contains no prompts.", param="data")
    some = min(count, len(found))
    return [found[i * len(found) // some] for i in range(some)]
