"""What a drafter is trained on: data sets and captured traffic, as sequences that the target wrote.

A drafter must know what its target says, not what a data set says. So the answers of a data set are not
taken: its prompts are asked anew, as published. What stands as it is are plain text and captured traffic,
which the target did write. Called by `train.py`; `adapt_text.py` reads captured
traffic by it.

    {"messages": [..]}                          asked anew, an assistant's last message left out
    {"prompt": ".."}                            asked anew
    {"text": ".."}                              taken as it is, in pieces
    {"prompt_token_ids": [..], "token_ids": [..]}   taken as it is; so are folders of captured traffic
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tokenizers

from ...actors.batch.rows import parse_line
from ...actors.batch.source import Source, SourceFile, open_parquet, open_source
from ...actors.capture.records import CapturedRecord, is_captured, read_captured
from ...actors.prompts import Chat, encode_prompt
from ...actors.tokenizer import Tokenizer
from ...cluster.errors import DatasetError, RequestError, shown
from ..training.answers import write_continuations
from ..training.continuations import SPOKEN_TEMPERATURES, Continuations, Question
from ..training.corpus import library_files
from ..training.loop import Report
from ..training.prompts import all_prompts, select_prompts

_PIECE_TOKENS, _FIRST_TOKENS = 512, 32  # of plain text: a sequence, and what of it is not learnt
_PROMPTS_PER_CATEGORY = 2000
_LEAST_ANSWER_TOKENS = 2  # of captured traffic
Record = Mapping[str, Any]  # Any: a row of a data set
Pair = tuple[Sequence[int], Sequence[int]]


@dataclass(frozen=True)
class Asking:
    """How the target is asked.

    Attributes:
        max_tokens: of an answer.
        longest: tokens of prompt and answer together.
    """

    target: str
    tokenizer: Tokenizer | None
    max_tokens: int
    longest: int


def gather(places: Sequence[str], asking: Asking, folder: Path, report: Report) -> Continuations:
    """All of these places, or without any the sources of Python's standard library.

    Args:
        folder: gets the answers, part by part: who is killed asks nothing twice.

    Raises:
        DatasetError: a place cannot be read, or has nothing to learn from.
    """
    prompts: list[tuple[int, ...]] = []
    pairs: list[Pair] = []
    for record in _records(places, asking.tokenizer):
        prompt = _asked(record, asking.tokenizer)
        if prompt is None:
            pairs += _taken(record, asking.tokenizer)
        else:
            prompts.append(prompt)
    fitting = [prompt for prompt in prompts if len(prompt) + asking.max_tokens <= asking.longest]
    if len(fitting) < len(prompts):
        left_out = len(prompts) - len(fitting)
        report(
            f"data: {left_out} prompts left out, for with {asking.max_tokens} tokens of answer each is "
            f"longer than {asking.longest}"
        )
    pairs = [(prompt, answer[: asking.longest - len(prompt)]) for prompt, answer in pairs]
    asked = [
        Question(prompt, SPOKEN_TEMPERATURES[number % len(SPOKEN_TEMPERATURES)], number)
        for number, prompt in enumerate(fitting)
    ]
    parts = [Continuations.of_pairs(pairs)]
    if asked:
        parts.append(
            write_continuations(
                asking.target, asked, folder, float("inf"), report, max_new_tokens=asking.max_tokens
            )
        )
    data = Continuations.join(parts)
    if not len(data):
        raise DatasetError(f"data: {', '.join(places)}: no row to learn from.", param="data")
    report(f"data: {len(data)} sequences, {len(data.ids)} tokens, {len(asked)} of them asked anew")
    return data


def completions_of_one_model(path: Path) -> Iterator[CapturedRecord]:
    """A folder's or a segment's records, each with a prompt and an answer of at least two tokens. Where
    prompts are private, the answer's first quarter stands for one.

    Raises:
        DatasetError: it cannot be read, or several models wrote it.
    """
    model: str | None = None
    for record in read_captured(path):
        model = model or record.model
        if record.model != model:
            raise DatasetError(
                f"data: {path} was captured of several models ({model} and {record.model}), whose tokens "
                "differ. Give each a folder of its own.",
                param="data",
            )
        prompt, answer = record.prompt_token_ids, record.token_ids
        if not prompt:
            first = max(1, len(answer) // 4)
            prompt, answer = answer[:first], answer[first:]
        if len(answer) >= _LEAST_ANSWER_TOKENS:
            yield replace(record, prompt_token_ids=prompt, token_ids=answer)


def _records(places: Sequence[str], tokenizer: Tokenizer | None) -> Iterator[Record]:
    if not places:
        yield from _library(tokenizer)
    for place in places:
        if is_captured(Path(place)):
            for each in completions_of_one_model(Path(place)):
                yield {"prompt_token_ids": each.prompt_token_ids, "token_ids": each.token_ids}
        else:
            yield from _rows(open_source([place]))


def _library(tokenizer: Tokenizer | None) -> Iterator[Record]:
    """Prompts cut out of it, as those that the shipped pair is measured on; of other files than these."""
    backend = tokenizers.Tokenizer.from_str(_needed(tokenizer).to_json())
    learned = [file for file in library_files() if not file.is_held_out]
    for prompt in select_prompts(all_prompts(learned, backend, seed=9), _PROMPTS_PER_CATEGORY, seed=9):
        yield {"messages": list(prompt.messages)} if prompt.messages else {"prompt": prompt.text}


def _rows(source: Source) -> Iterator[Record]:
    """Yield the records of JSON lines or Parquet files."""
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


def _asked(record: Record, tokenizer: Tokenizer | None) -> tuple[int, ...] | None:
    """The prompt that the target is to answer; None where the record holds what it said."""
    messages, prompt = record.get("messages"), record.get("prompt")
    if isinstance(messages, list | tuple) and messages:
        said = list(messages)
        if isinstance(said[-1], Mapping) and said[-1].get("role") == "assistant":
            said = said[:-1]
        return encode_prompt(Chat(said), _needed(tokenizer)).token_ids
    if isinstance(prompt, str) and prompt:
        return encode_prompt(prompt, _needed(tokenizer)).token_ids
    return None


def _taken(record: Record, tokenizer: Tokenizer | None) -> Iterator[Pair]:
    """Sequences as they stand in a record."""
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
            f"this one has {shown(sorted(record))}.",
            param="data",
        )


def _needed(tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise DatasetError(
            "data: the target has no tokenizer, so text cannot be read; give prompt_token_ids and token_ids.",
            param="data",
        )
    return tokenizer
