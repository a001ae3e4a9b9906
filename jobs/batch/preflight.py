"""Checks a dataset without engines: `manta batch --validate-only` (every row) and `--dry-run` (a few rows).

Each row becomes the request that an engine would get, and its prompt is tokenized. That needs the tokenizer
and the headers of the checkpoints, but no weights, no Ray and no output.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from ...actors.batch.dataset.row_reader import Row, RowReader, id_of, record_of
from ...actors.batch.dataset.row_requests import (
    MESSAGE_COLUMNS,
    PROMPT_COLUMNS,
    RowSchema,
    prompt_column,
    read_request,
)
from ...actors.batch.dataset.source import Dataset, check_columns, open_source
from ...actors.batch.dataset.storage import Storage
from ...actors.batch.row_answerer import ignored_fields
from ...actors.batch.row_index import Duplicates, RowIndex, index_rows
from ...actors.batch.row_stats import NameCounts
from ...actors.chat.chat_model import ChatModel
from ...actors.http.protocol.preparation import prompt_of, with_formats
from ...actors.tokenization.prompts import EncodedPrompt, encode_prompt
from ...cluster.batch.row_ranges import from_rows
from ...cluster.config import EngineConfig
from ...cluster.errors import RequestError, brief_url
from ...cluster.records.percentiles import percentiles
from ...cluster.step.limits import check_vocabulary, prompt_too_long
from ..common.model_check import check_model
from ..common.tables import print_table
from .options import BatchOptions
from .report import print_ignored

DRY_RUN_ROWS = 64
ROWS_PER_READ = 256
BAD_ROWS_SHOWN = 10
FILES_SHOWN = 5
PROMPT_CHARS_SHOWN = 2000
BAR_CHARS = 40


class BadRow(NamedTuple):
    """A row that would become an error row. `place` is its file and line, or file and row of Parquet."""

    number: int
    place: str
    why: str


@dataclass(slots=True, kw_only=True)
class Preflight:
    """Findings of a check of `num_checked` rows; `num_numbered` of them have the id of an earlier row.

    `ignored` counts rows by columns and fields that have no effect; `max_completion_tokens` bounds all good
    rows together.
    """

    files: tuple[str, ...]
    num_bytes: int
    format: str
    num_rows: int
    num_numbered: int
    max_model_len: int
    num_checked: int = 0
    num_bad: int = 0
    num_too_long: int = 0
    bad: list[BadRow] = field(default_factory=list)
    lengths: array[int] = field(default_factory=lambda: array("q"))
    max_completion_tokens: int = 0
    ignored: NameCounts = field(default_factory=NameCounts)
    first_prompt: str = ""
    seconds: float = 0.0

    @property
    def num_good(self) -> int:
        return self.num_checked - self.num_bad

    @property
    def prompt_tokens(self) -> int:
        return sum(length for length in self.lengths if length < self.max_model_len)


def preflight(
    source: Dataset,
    row_schema: RowSchema,
    config: EngineConfig,
    *,
    duplicates: Duplicates,
    num_rows: int | None = None,
) -> Preflight:
    """Check `num_rows` rows, spread evenly over the dataset, or all."""
    begin_s = time.monotonic()
    checker = _RowChecker(row_schema, config)
    index = index_rows(source, row_schema, duplicates=duplicates)
    found = Preflight(
        files=tuple(str(file) for file in source.files),
        num_bytes=sum(file.size for file in source.files),
        format=source.format,
        num_rows=index.num_rows,
        num_numbered=len(index.duplicates.rows),
        max_model_len=checker.max_model_len,
    )
    for row in _rows(source, row_schema, index, num_rows):
        found.num_checked += 1
        try:
            prompt, num_tokens, maximum, ignored = checker.check(row)
            found.ignored.merge(NameCounts.of(ignored))
            found.lengths.append(num_tokens)
            found.max_completion_tokens += maximum
            shown = prompt.text or str(list(prompt.token_ids))
        except RequestError as error:
            found.num_bad += 1
            if isinstance(error, _TooLongError):
                found.lengths.append(error.num_tokens)
                found.num_too_long += 1
            if len(found.bad) < BAD_ROWS_SHOWN:
                found.bad.append(BadRow(row.number, index.location(row.number, source), error.message))
            shown = f"(fails: {error.message})"
        found.first_prompt = found.first_prompt or shown
    found.seconds = time.monotonic() - begin_s
    return found


def run_preflight(config: EngineConfig, options: BatchOptions, *, dry_run: bool) -> int:
    """Check a job's input, print the result, and return the command's exit code."""
    source = open_source(options.input, options.input_format)
    row_schema = options.row_schema(source, config)
    check_columns(source, row_schema)
    options.format(source)
    output = Storage.open(options.output, field="output")
    row_schema = options.continued(row_schema, source, config, output)
    words = text_prompts(row_schema, source)
    num_rows = DRY_RUN_ROWS if dry_run else None
    found = preflight(source, row_schema, config, duplicates=options.duplicate_ids, num_rows=num_rows)
    if not dry_run:
        print_validation(found)
        print(words, end="\n" if words else "")
        return 1 if found.num_bad else 0
    spec = config.speculative_config
    settings = {
        "model": config.model,
        "drafter": "none" if spec is None else spec.drafter,
        "engines": options.concurrency,
        "sampling": dict(options.sampling) or "the checkpoint's defaults",
    }
    if words:
        settings["texts"] = words
    print_dry_run(found, row_schema, brief_url(options.output), settings)
    return 0


def text_prompts(row_schema: RowSchema, source: Dataset) -> str:
    """Return a sentence on what happens to prompts that are texts; empty if there are none."""
    if row_schema.kind == "openai":
        return ""
    found = row_schema.template or row_schema.prompt_column or prompt_column(source.columns(), row_schema)
    if found is None or found in MESSAGE_COLUMNS:
        return ""
    texts = "texts of the template" if row_schema.template else f"texts in {found}"
    if row_schema.chat:
        also = " after the system message" if row_schema.system is not None else ""
        return (
            f"{texts} are sent as chats{also}, through the chat template (--raw completes them as they are)"
        )
    return f"{texts} are completed as they are (--chat sends them through the model's chat template)"


def print_dry_run(found: Preflight, row_schema: RowSchema, output: str, settings: Mapping[str, Any]) -> None:
    more = [f"and {len(found.files) - FILES_SHOWN} more"] if len(found.files) > FILES_SHOWN else []
    per_checked = found.num_rows / found.num_checked
    tokens_in, tokens_out = (
        f"about {tokens * per_checked:,.0f}" if found.num_good else "unknown: every row that was tried fails"
        for tokens in (found.prompt_tokens, found.max_completion_tokens)
    )
    lines = {
        "input": "\n".join([*found.files[:FILES_SHOWN], *more]),
        "format": f"{found.format}, {found.num_bytes:,} bytes",
        "rows": f"{found.num_rows:,}",
        "ids numbered": f"{found.num_numbered:,}",
        "prompt": _prompt_from(row_schema),
        "rows tried": f"{found.num_checked}, of which {found.num_bad} would fail",
        "tokens in": tokens_in,
        "tokens out at most": tokens_out,
        "time": "unknown: no speed is measured for this pair here; --sample N measures it on N rows",
        "output": output,
        **{name: str(value) for name, value in settings.items()},
        "first prompt": found.first_prompt[:PROMPT_CHARS_SHOWN],
    }
    rows = [[name, value] for name, value in lines.items()]
    print_table("dry run: nothing is answered or written", ["what", ""], rows, num_left=2)
    print_ignored(found.ignored)


def print_validation(found: Preflight) -> None:
    """Print what the input holds, the lengths of its prompts, and the rows that would fail."""
    counts = (found.num_rows, found.num_bad, found.num_too_long, found.num_numbered)
    print_table(
        f"{len(found.files)} file(s) of {found.format}, read in {found.seconds:.1f} s",
        ["rows", "bad", "too long", "ids numbered", "tokens in", "tokens out at most"],
        [[str(number) for number in (*counts, found.prompt_tokens, found.max_completion_tokens)]],
        num_left=0,
    )
    if len(found.lengths):
        lengths = np.array(found.lengths)
        shares = percentiles(found.lengths)
        print_table(
            f"prompts in tokens: {lengths.min()} to {lengths.max()}, median {shares['p50']:.0f}, 95th "
            f"percentile {shares['p95']:.0f}; prompt and answer together: at most {found.max_model_len}",
            ["tokens", "", "rows"],
            histogram(lengths),
            num_left=2,
        )
    print_ignored(found.ignored)
    if found.bad:
        first = f", the first {len(found.bad)}" if found.num_bad > len(found.bad) else ""
        print_table(
            f"rows that would fail: {found.num_bad}{first}",
            ["row", "where", "why"],
            [[str(row.number), row.place, row.why] for row in found.bad],
            num_left=3,
        )


def histogram(lengths: np.ndarray) -> list[list[str]]:
    """Return table rows: a range of lengths between powers of two, a bar, the number of prompts in it."""
    bins = np.floor(np.log2(np.maximum(lengths, 1))).astype(int)
    counts = np.bincount(bins)
    bars = ["█" * -(-BAR_CHARS * int(count) // int(counts.max())) for count in counts]
    return [
        [f"{2**i} to {2 ** (i + 1) - 1}", bars[i], str(counts[i])]
        for i in range(int(bins.min()), len(counts))
    ]


class _TooLongError(RequestError):
    def __init__(self, num_tokens: int, max_model_len: int) -> None:
        super().__init__(prompt_too_long(num_tokens, max_model_len).message)
        self.num_tokens = num_tokens


class _RowChecker:
    def __init__(self, row_schema: RowSchema, config: EngineConfig) -> None:
        model = check_model(config, elsewhere=True)
        self.max_model_len = model.resolved.max_model_len
        self._row_schema = row_schema
        self._vocab_size = model.resolved.target.vocab_size
        self._tokenizer = model.tokenizer
        self._chat = ChatModel.of(model.tokenizer)
        self._generation = model.defaults

    def check(self, row: Row) -> tuple[EncodedPrompt, int, int, list[str]]:
        """Return the prompt, its tokens after truncation, the most completion tokens, and what is ignored."""
        record = record_of(row, self._row_schema)
        request = read_request(record, self._row_schema, self._generation, id_of(row, self._row_schema))
        body = request.body
        prompt = encode_prompt(prompt_of(self._chat, body, self._tokenizer), self._tokenizer)
        params, _ = with_formats(self._chat, body, request.params, prompt.text or "")
        ignored = ignored_fields(replace(request, params=params), self._tokenizer)
        check_vocabulary("prompt", prompt.token_ids, self._vocab_size)
        length, truncate = len(prompt.token_ids), body.truncate_prompt_tokens
        if truncate is not None:
            length = min(length, self.max_model_len - 1 if truncate == -1 else truncate)
        if length >= self.max_model_len:
            raise _TooLongError(length, self.max_model_len)
        free = self.max_model_len - length
        return prompt, length, min(free, params.max_tokens or free) * params.n, ignored


def _rows(source: Dataset, row_schema: RowSchema, index: RowIndex, wanted: int | None) -> Iterator[Row]:
    num_rows = min(index.num_rows, index.num_rows if wanted is None else wanted)
    with closing(RowReader(source, row_schema)) as reader:
        for begin in range(0, num_rows, ROWS_PER_READ):
            places = range(begin, min(begin + ROWS_PER_READ, num_rows))
            yield from reader.read(index.spans(from_rows(i * index.num_rows // num_rows for i in places)))


def _prompt_from(row_schema: RowSchema) -> str:
    if row_schema.kind == "openai":
        return "the bodies of OpenAI batch lines"
    if row_schema.template is not None:
        return f"template {row_schema.template!r}"
    return f"column {row_schema.prompt_column or ' or '.join(PROMPT_COLUMNS)}"
