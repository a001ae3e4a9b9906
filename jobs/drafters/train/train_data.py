"""Training data for drafters: datasets and captured traffic, as sequences that the target generated.

A drafter must predict what its target says. So the answers in a dataset are not used: the target answers the
prompts again, as in the DFlash paper. Plain text and captured traffic are used as they are. Called by
`train_run.py`; `adapt_data.py` uses it to read captured traffic.

    {"messages": [..]}                          answered again, without an assistant's last message
    {"prompt": ".."}                            answered again, as a user's message if `rows.chat`
    {"text": ".."}                              used as it is, in pieces
    {"prompt_token_ids": [..], "token_ids": [..]}   used as it is; so are folders of captured traffic
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ....actors.batch.dataset.row_requests import RowSchema, parse_line, prompt_column, read_request
from ....actors.batch.dataset.source import SourceFile, open_parquet, open_source
from ....actors.capture.records import CapturedRecord, is_captured, read_captured
from ....actors.capture.target_outputs import OutputLayout
from ....actors.http.protocol.chat_completion import ChatRequest, conversation
from ....actors.tokenization.generation_config import GenerationDefaults
from ....actors.tokenization.prompts import encode_prompt, has_chat_template
from ....actors.tokenization.tokenizer import Tokenizer
from ....cluster.config import EngineConfig
from ....cluster.errors import ConfigError, DatasetError, RequestError, brief
from ...training.loop.answering import TEMPERATURES, write_continuations
from ...training.loop.continuations import MIN_ANSWER_TOKENS, ContinuationRequest, Continuations
from ...training.loop.training_loop import Report

_PIECE_TOKENS, _FIRST_TOKENS = 512, 32  # plain text: tokens of a sequence; first ones, without a loss
Record = Mapping[str, Any]  # Any: a row of a data set
COMPLETED = RowSchema(category_column="category")  # rows whose texts are completed as they are
Pair = tuple[Sequence[int], Sequence[int]]


@dataclass(frozen=True)
class AnswerSettings:
    """Settings by which the target generates answers.

    Attributes:
        rows: how rows become prompts (`prompt_rows`).
        longest: most tokens of prompt and answer together.
        budget_s: seconds after which no further answer begins.
        least: least sequences that a run can train on.
        temperatures: sampling temperatures, used in turn.
        layout: the target's outputs to record beside the answers; None records none.
    """

    target: str
    tokenizer: Tokenizer | None
    max_tokens: int
    longest: int
    budget_s: float = float("inf")
    least: int = 1
    rows: RowSchema = COMPLETED
    temperatures: Sequence[float] = TEMPERATURES
    layout: OutputLayout | None = None


def check_sources(places: Sequence[str]) -> None:
    """Raise DatasetError if a source cannot be opened, before models are."""
    for place in places:
        if not is_captured(Path(place)):
            open_source([place])


def gather(places: Sequence[str], settings: AnswerSettings, folder: Path, report: Report) -> Continuations:
    """Read all sources and generate missing answers, stored in parts in `folder`."""
    prompts: list[tuple[int, ...]] = []
    pairs: list[Pair] = []
    for record in _records(places):
        prompt = prompt_ids(record, settings.rows, settings.tokenizer)
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
    if (count := len(pairs) + len(fitting)) < settings.least:  # said before anything is answered
        raise DatasetError(
            f"data: {', '.join(places)}: {count} usable rows are fewer than {settings.least}: a sequence of "
            "each example of a step, and one to measure on. Give more.",
            param="data",
        )
    requests = [
        ContinuationRequest(prompt, settings.temperatures[number % len(settings.temperatures)], number)
        for number, prompt in enumerate(fitting)
    ]
    answered = write_continuations(
        settings.target,
        requests,
        folder,
        settings.budget_s,
        report,
        max_new_tokens=settings.max_tokens,
        layout=settings.layout,
    )
    data = Continuations.join([Continuations.of_pairs(pairs), answered])
    if not len(data):
        raise DatasetError(f"data: {', '.join(places)}: no usable row.", param="data")
    report(f"data: {len(data)} sequences, {len(data.ids)} tokens, {len(answered)} of them answered again")
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
        if len(answer) >= MIN_ANSWER_TOKENS:
            yield replace(record, prompt_token_ids=prompt, token_ids=answer)


def _records(places: Sequence[str]) -> Iterator[Record]:
    for place in places:
        if is_captured(Path(place)):
            for each in captured_completions(Path(place)):
                yield {"prompt_token_ids": each.prompt_token_ids, "token_ids": each.token_ids}
        else:
            yield from read_records(place)


def read_records(place: str) -> Iterator[Record]:
    """Yield the rows of JSON lines or Parquet."""
    source = open_source([place])
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


def prompt_rows(target: str, chat: bool | None) -> RowSchema:
    """Return how rows become prompts, by the rules of `manta batch`.

    Texts are a user's messages if the target has a chat template, or as `chat` says. (`manta batch` completes
    those of a column named `prompt`, as OpenAI's API does; a drafter is trained for chats.)
    """
    has_template = has_chat_template(EngineConfig.from_dict({"model": target}))
    if chat and not has_template:
        raise ConfigError("chat: the target has no chat template. Leave --chat out.", param="chat")
    return replace(COMPLETED, chat=has_template if chat is None else chat)


def prompt_ids(record: Record, rows: RowSchema, tokenizer: Tokenizer | None) -> tuple[int, ...] | None:
    """Return the prompt for the target to answer; None if the record has none."""
    if prompt_column([name for name, value in record.items() if value], rows) is None:
        return None
    try:
        body = read_request(record, rows, GenerationDefaults()).body
        if isinstance(body, ChatRequest):
            is_answered = body.messages[-1].role == "assistant"
            history = body.messages[:-1] if is_answered else body.messages
            return encode_prompt(conversation(body, history, _needed(tokenizer)), tokenizer).token_ids
        return encode_prompt(body.prompts()[0], _needed(tokenizer)).token_ids
    except RequestError as error:
        raise DatasetError(f"data: {brief(dict(record))}: {error.message}", param="data") from None


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
