"""Training data for drafters: datasets and captured traffic, as sequences that the target generated.

A drafter must predict what its target says. So the answers in a dataset are not used: the target answers the
prompts again, as in the DFlash paper. Plain text and captured traffic are used as they are. Called by
`train_run.py`; `adapt_data.py` uses it to read captured traffic.

    {"messages": [..]}                          answered again, without an assistant's last message
    {"prompt": ".."}                            answered again
    {"text": ".."}                              used as it is, in pieces
    {"prompt_token_ids": [..], "token_ids": [..]}   used as it is; so are folders of captured traffic
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ....actors.batch.dataset.row_requests import parse_line
from ....actors.batch.dataset.source import Dataset, SourceFile, open_parquet, open_source
from ....actors.capture.records import CapturedRecord, is_captured, read_captured
from ....actors.tokenization.prompts import Chat, encode_prompt
from ....actors.tokenization.tokenizer import Tokenizer
from ....cluster.errors import DatasetError, RequestError, brief
from ...training.loop.continuations import (
    TEMPERATURES,
    ContinuationRequest,
    Continuations,
    write_continuations,
)
from ...training.loop.training_loop import Report

_PIECE_TOKENS, _FIRST_TOKENS = 512, 32  # plain text: tokens of a sequence; first ones, without a loss
_MIN_ANSWER_TOKENS = 2  # shorter captured answers are skipped
Record = Mapping[str, Any]  # Any: a row of a data set
Pair = tuple[Sequence[int], Sequence[int]]


@dataclass(frozen=True)
class AnswerSettings:
    """Settings by which the target generates answers; `longest`: tokens of prompt and answer together."""

    target: str
    tokenizer: Tokenizer | None
    max_tokens: int
    longest: int


def gather(places: Sequence[str], settings: AnswerSettings, folder: Path, report: Report) -> Continuations:
    """Read all sources and generate missing answers, stored in parts in `folder`."""
    prompts: list[tuple[int, ...]] = []
    pairs: list[Pair] = []
    for record in _records(places):
        prompt = _prompt_of(record, settings.tokenizer)
        if prompt is None:
            pairs += _pairs_of(record, settings.tokenizer)
        else:
            prompts.append(prompt)
    fitting = [prompt for prompt in prompts if len(prompt) + settings.max_tokens <= settings.longest]
    if len(fitting) < len(prompts):
        left_out = len(prompts) - len(fitting)
        report(
            f"data: {left_out} prompts are skipped: with {settings.max_tokens} tokens of answer they exceed "
            f"{settings.longest} tokens"
        )
    pairs = [(prompt, answer[: settings.longest - len(prompt)]) for prompt, answer in pairs]
    requests = [
        ContinuationRequest(prompt, TEMPERATURES[number % len(TEMPERATURES)], number)
        for number, prompt in enumerate(fitting)
    ]
    parts = [Continuations.of_pairs(pairs)]
    if requests:
        parts.append(
            write_continuations(
                settings.target, requests, folder, float("inf"), report, max_new_tokens=settings.max_tokens
            )
        )
    data = Continuations.join(parts)
    if not len(data):
        raise DatasetError(f"data: {', '.join(places)}: no usable row.", param="data")
    report(f"data: {len(data)} sequences, {len(data.ids)} tokens, {len(requests)} of them answered again")
    return data


def captured_completions(path: Path) -> Iterator[CapturedRecord]:
    """Yield records with an answer of at least two tokens; its first quarter replaces a missing prompt."""
    model: str | None = None
    for record in read_captured(path):
        model = model or record.model
        if record.model != model:
            raise DatasetError(
                f"data: {path} contains traffic of several models ({model} and {record.model}), whose tokens "
                "differ. Capture each into its own folder.",
                param="data",
            )
        prompt, answer = record.prompt_token_ids, record.token_ids
        if not prompt:
            first = max(1, len(answer) // 4)
            prompt, answer = answer[:first], answer[first:]
        if len(answer) >= _MIN_ANSWER_TOKENS:
            yield replace(record, prompt_token_ids=prompt, token_ids=answer)


def _records(places: Sequence[str]) -> Iterator[Record]:
    for place in places:
        if is_captured(Path(place)):
            for each in captured_completions(Path(place)):
                yield {"prompt_token_ids": each.prompt_token_ids, "token_ids": each.token_ids}
        else:
            yield from _rows(open_source([place]))


def _rows(source: Dataset) -> Iterator[Record]:
    for file in source.files:
        if source.format == "parquet":
            for batch in open_parquet(file).iter_batches():
                yield from batch.to_pylist()
        elif source.format in ("jsonl", "openai"):
            yield from _line_records(file)
        else:
            raise DatasetError(f"data: {file} is neither .jsonl nor .parquet. Convert it.", param="data")


def _line_records(file: SourceFile) -> Iterator[Record]:
    with file.reading(), file.open_text("jsonl") as text:
        for number, (_, line) in enumerate(text.raw_records(), start=1):
            assert isinstance(line, bytes)
            try:
                yield parse_line(line)
            except RequestError as error:
                raise DatasetError(f"data: {file}, record {number}: {error.message}", param="data") from None


def _prompt_of(record: Record, tokenizer: Tokenizer | None) -> tuple[int, ...] | None:
    """Return the prompt for the target to answer; None if the record is used as it is."""
    messages, prompt = record.get("messages"), record.get("prompt")
    if isinstance(messages, list | tuple) and messages:
        history = list(messages)
        if isinstance(history[-1], Mapping) and history[-1].get("role") == "assistant":
            history = history[:-1]
        return encode_prompt(Chat(history), _needed(tokenizer)).token_ids
    if isinstance(prompt, str) and prompt:
        return encode_prompt(prompt, _needed(tokenizer)).token_ids
    return None


def _pairs_of(record: Record, tokenizer: Tokenizer | None) -> Iterator[Pair]:
    text, prompt, answer = (record.get(name) for name in ("text", "prompt_token_ids", "token_ids"))
    if isinstance(prompt, list | tuple) and isinstance(answer, list | tuple):
        yield prompt, answer
    elif isinstance(text, str):
        ids = _needed(tokenizer).encode(text)
        for at in range(0, len(ids), _PIECE_TOKENS):
            piece = ids[at : at + _PIECE_TOKENS]
            yield piece[:_FIRST_TOKENS], piece[_FIRST_TOKENS:]
    else:
        raise DatasetError(
            "data: a record must have a column messages, prompt or text, or prompt_token_ids and token_ids; "
            f"this one has {brief(sorted(record))}.",
            param="data",
        )


def _needed(tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise DatasetError(
            "data: the target has no tokenizer, so text cannot be read; give prompt_token_ids and token_ids.",
            param="data",
        )
    return tokenizer
