"""Runs rows with whole blocks and labels every verified block for `cluster/records/acceptance_slices.py`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from ....actors.chat.chat_formats import ThinkingFormat
from ....actors.chat.chat_model import ChatModel
from ....actors.engine.output_processor import RequestOutput
from ....actors.llm import LLM
from ....actors.tokenization.tokenizer import Tokenizer
from ....cluster.records.acceptance_slices import BlockGroup, Dimension, context_label
from .text_labels import WINDOW, content_of, is_thinking, language_of
from .traffic import TrafficRow

Labels = dict[Dimension, str]


def measure_blocks(llm: LLM, chat: ChatModel, rows: Sequence[TrafficRow]) -> dict[str, list[BlockGroup]]:
    """Answer the rows and return their verified blocks, by row name."""
    outputs = llm.generate(
        [row.prompt for row in rows], [row.params for row in rows], use_tqdm=False, trace=True
    )
    found: dict[str, list[BlockGroup]] = {}
    for row, output in zip(rows, outputs, strict=True):
        counts: dict[tuple[tuple[Dimension, str], ...], Counter[tuple[int, int]]] = defaultdict(Counter)
        for labels, block in _labeled_blocks(row, output, llm.tokenizer, chat.thinking):
            counts[tuple(labels.items())][block] += 1
        found[row.name] = [BlockGroup(row.name, dict(labels), blocks) for labels, blocks in counts.items()]
    return found


def _labeled_blocks(
    row: TrafficRow, output: RequestOutput, tokenizer: Tokenizer | None, thinking: object
) -> Iterator[tuple[Labels, tuple[int, int]]]:
    """Yield labels and (verified, accepted) drafts of each verify step of an answer."""
    of_request = _request_labels(row, output)
    token_ids, num_before = output.outputs[0].token_ids, 0
    assert output.metrics.trace is not None, "it was requested"
    for step in output.metrics.trace:
        if step.num_drafted:
            labels: Labels = {**of_request, "context": context_label(len(row.prompt.token_ids) + num_before)}
            if tokenizer is not None:
                before = tokenizer.decode(token_ids[:num_before], skip_special_tokens=False)
                labels |= _text_labels(row, before, thinking)
            yield labels, (step.num_drafted, step.num_accepted)
        num_before += step.num_tokens


def _request_labels(row: TrafficRow, output: RequestOutput) -> Labels:
    labels: Labels = {
        "temperature": f"{0.0 if row.params.greedy else row.params.temperature:g}",
        "grammar": "no" if row.params.structured_outputs is None else "yes",
        "prefix_cache": "hit" if output.metrics.num_cached_tokens else "no",
    }
    if row.kind != "captured":
        labels["prompt"] = row.kind
    if row.tenant is not None:
        labels["tenant"] = row.tenant
    return labels


def _text_labels(row: TrafficRow, before: str, thinking: object) -> Labels:
    """Return the labels of a block that follows `before`, the answer so far."""
    text = row.text[-WINDOW:] + before if len(before) < WINDOW else before
    labels: Labels = {"content": content_of(text)}
    if labels["content"] == "prose" and (language := language_of(text)) is not None:
        labels["language"] = language
    if isinstance(thinking, ThinkingFormat):
        is_open = is_thinking(before, thinking.begin, thinking.end, opened=row.opened)
        labels["thinking"] = "yes" if is_open else "no"
    return labels
