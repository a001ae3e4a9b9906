"""Rows that a report shows as they are: what was asked, and what was answered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

from ...actors.batch.figures import RowFigures
from ...actors.batch.reading import RowReader, record_of
from ...actors.batch.rows import Layout, read_request
from ...actors.batch.source import Source
from ...actors.batch.survey import Survey
from ...actors.http.chat_request import ChatRequest
from ...actors.http.defaults import GenerationDefaults
from ...cluster.errors import MantaError
from ...cluster.row_ranges import of_rows

MAX_PROMPT = 600  # characters; the end of a longer one is shown


@dataclass(frozen=True, slots=True)
class Sample:
    """A row of the dataset; `prompt` is empty where it is not text or cannot be read any more."""

    id: str
    prompt: str
    answer: str


def samples(figures: RowFigures, source: Source, layout: Layout, survey: Survey) -> list[Sample]:
    """The rows that `figures` kept the answers of, with their prompts."""
    numbers = sorted(row for row, _, _ in figures.samples)
    prompts = dict(zip(numbers, _prompts(numbers, source, layout, survey), strict=False))
    return [Sample(row_id, prompts.get(row, ""), answer) for row, row_id, answer in figures.samples]


def _prompts(rows: Sequence[int], source: Source, layout: Layout, survey: Survey) -> Iterator[str]:
    try:
        with closing(RowReader(source, layout)) as reader:
            found = reader.read(survey.work(of_rows(rows)))
        for row in found:
            request = read_request(record_of(row, layout), layout, GenerationDefaults(), row.id).body
            chat = isinstance(request, ChatRequest)
            yield _shown(request.messages[-1].content if chat else request.prompt[0])
    except MantaError:
        return


def _shown(prompt: object) -> str:
    text = prompt if isinstance(prompt, str) else ""
    return text if len(text) <= MAX_PROMPT else f"... {text[-MAX_PROMPT:]}"
