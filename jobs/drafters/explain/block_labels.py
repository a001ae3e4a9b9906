"""Runs rows with whole blocks and labels every verified block for `cluster/records/acceptance_slices.py`.

Labels of generated text follow simple rules, without a model:

* *Code*: within a code fence, or at least `_CODE_SYMBOLS` of the visible characters are `_SYMBOLS`.
* *Language*: the script of at least `_SCRIPT_SHARE` of the letters; for Latin letters the language
  that has most of the common words, or "latin" if few do. Code has no language.

The rules see the last `WINDOW` characters before a block, prompt included, so a label changes within an
answer. They are meant for statistics over many blocks; single labels are often wrong.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from ....actors.chat.chat_formats import ThinkingFormat
from ....actors.chat.chat_model import ChatModel
from ....actors.engine.output_processor import RequestOutput
from ....actors.llm import LLM
from ....actors.tokenization.tokenizer import Tokenizer
from ....cluster.records.acceptance_slices import BlockGroup, Dimension, context_label
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


WINDOW = 240
_CODE_SYMBOLS = 0.06
_SYMBOLS = frozenset("{}[]()<>=;_#*+/\\|&@$%^`~")
_SCRIPT_SHARE = 0.3
_MIN_LETTERS = 12
_MIN_COMMON_WORDS = 0.12  # share of words; English prose has about 0.4
_SCRIPTS = {"CJK": "chinese", "HIRAGANA": "japanese", "KATAKANA": "japanese", "HANGUL": "korean"}
_COMMON_WORDS = {
    "english": "the of and to in is that for it with as was on be this are by from or not",
    "german": "der die und in den von zu das mit sich des auf für ist im dem nicht ein eine wir",
    "french": "de la le et les des en un du une que est pour qui dans par sur pas au il",
    "spanish": "de la que el en y los se del las un por con no una para es al lo como",
    "italian": "di che la il un in per non con una sono da del si le dei come alla i è",
    "portuguese": "de que e do da em um para com não uma os no se na por mais as dos ao",
    "dutch": "de van het een en in is dat op te zijn met voor niet aan er om ook als bij",
    "polish": "w i na z do nie się że jest o to jak po a co za od przez ale był",
}
_COMMON = {name: frozenset(words.split()) for name, words in _COMMON_WORDS.items()}
_WORD = re.compile(r"[^\W\d_]+")


def content_of(before: str) -> str:
    """Return "code" or "prose" for what follows this text."""
    if before.count("```") % 2:
        return "code"
    tail = before.rpartition("```")[2][-WINDOW:]
    visible = [char for char in tail if not char.isspace()]
    symbols = sum(char in _SYMBOLS for char in visible)
    return "code" if visible and symbols >= _CODE_SYMBOLS * len(visible) else "prose"


def language_of(text: str) -> str | None:
    """Return the language of the end of a text; None if there are too few letters."""
    tail = text[-WINDOW:]
    scripts = Counter(unicodedata.name(char, "?").split()[0] for char in tail if char.isalpha())
    if scripts.total() < _MIN_LETTERS:
        return None
    if scripts["HIRAGANA"] + scripts["KATAKANA"] > 0.1 * scripts.total():
        return "japanese"
    others = Counter({name: count for name, count in scripts.items() if name != "LATIN"})
    if others and others.total() >= _SCRIPT_SHARE * scripts.total():
        script = others.most_common(1)[0][0]
        return _SCRIPTS.get(script, script.lower())
    words = [word.lower() for word in _WORD.findall(tail)]
    shares = {name: sum(word in common for word in words) / len(words) for name, common in _COMMON.items()}
    best = max(shares, key=lambda name: shares[name])
    return best if shares[best] >= _MIN_COMMON_WORDS else "latin"


def is_thinking(before: str, begin: str, end: str, *, opened: bool) -> bool:
    """Return whether an answer is within its reasoning after the text `before`; `opened`: it began there."""
    last_begin, last_end = before.rfind(begin), before.rfind(end)
    if last_begin == last_end:  # neither occurs
        return opened
    return last_begin > last_end
