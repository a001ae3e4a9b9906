"""Training and held-out text for adapting a drafter: new traffic, and general text against forgetting.

Captured traffic contains answers. Prompt files do not; the target generates the answers, as in all drafter
training. Held-out prompts are chosen by a hash of the prompt, so that the same prompt is always on the same
side, also in later runs. Called by `adapt_run.py`.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from ....actors.capture.records import is_captured
from ....actors.system.atomic_files import write_json
from ....actors.tokenization.tokenizer import Tokenizer
from ....cluster.errors import ConfigError, DatasetError
from ...bench.common.engine_passes import read_rows
from ...bench.common.request_source import encode_rows
from ...training.loop.continuations import (
    TEMPERATURES,
    ContinuationRequest,
    Continuations,
    write_continuations,
)
from .train_data import captured_completions

NEW_ONE_IN, OLD_ONE_IN = 5, 2  # one of this many prompts is held out
ANSWERS_SHARE = 0.2  # of the time, for generating answers where they are missing
MAX_MEASURED = 48  # held-out prompts of a category
MIN_MEASURED = 8
WATCHED = 16
MAX_EXAMPLES = 20_000  # newest examples; they take hours of training on two cores
MAX_PROMPT_TOKENS = 768  # longer prompts keep their end
MAX_ANSWER_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt and the target's answer as token ids; the answer is None until the target has generated it."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...] | None
    category: str


@dataclass(frozen=True, slots=True)
class AdaptRunKey:
    """The inputs of a run. A work folder belongs to one set of inputs."""

    drafter: str
    target: str
    data: str
    replay: str
    minutes: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Text:
    """Text of a run: completions for training, some to watch, and prompts for the gate, never trained on."""

    new: Continuations
    old: Continuations
    new_to_watch: Continuations
    held_out_new: list[Example]
    held_out_old: list[Example]
    training_s: float

    def mixture(self) -> Continuations:
        """Return both, repeated so that about half of all completions are old ones."""
        ratio = len(self.old) / len(self.new)
        times_new, times_old = max(1, round(ratio)), max(1, round(1.0 / ratio))
        return Continuations.join([*[self.new] * times_new, *[self.old] * times_old])


def read_examples(path: Path, tokenizer: Tokenizer, field: str) -> list[Example]:
    """Read a folder of captured traffic, or a JSONL file with `prompt` or `messages` in each line."""
    if path.is_dir() or is_captured(path):
        found = [
            Example(each.prompt_token_ids, each.token_ids[:MAX_ANSWER_TOKENS], each.category or "all")
            for each in captured_completions(path)
        ]
    else:
        rows = encode_rows(read_rows(path), tokenizer)
        found = [Example(tuple(row.prompt), None, row.category) for row in rows]
    if not found:
        raise DatasetError(f"{field}: {path} contains no prompts.", param=field)
    return [replace(each, prompt=each.prompt[-MAX_PROMPT_TOKENS:]) for each in found[-MAX_EXAMPLES:]]


def is_held_out(prompt: Sequence[int], one_in: int) -> bool:
    digest = hashlib.sha256(array("q", prompt).tobytes()).digest()
    return int.from_bytes(digest[:8], "big") % one_in == 0


def prepare_text(key: AdaptRunKey, folder: Path, tokenizer: Tokenizer, report: Callable[[str], None]) -> Text:
    """Prepare the text of a run and store it, so that a continued run ignores traffic captured since."""
    text_file = folder / "text.json"
    if text_file.exists():
        return _load(key, folder, text_file)
    new, new_out = _split(Path(key.data), NEW_ONE_IN, tokenizer, "data")
    old, old_out = _split(Path(key.replay), OLD_ONE_IN, tokenizer, "replay")
    answers_s = key.minutes * 60.0 * ANSWERS_SHARE / 2
    is_generating = False
    for name, examples in (("new", new), ("old", old), ("watched", new_out[:WATCHED])):
        is_generating = is_generating or any(each.answer is None for each in examples)
        found = _answered(Path(key.target), examples, folder / name, answers_s, report)
        found.save(folder / f"{name}.npz")
    content = {
        "asked": key.as_json(),
        "training_s": key.minutes * 60.0 * (1.0 - ANSWERS_SHARE if is_generating else 1.0),
        "held_out_new": [(each.prompt, each.category) for each in new_out],
        "held_out_old": [(each.prompt, each.category) for each in old_out],
    }
    write_json(text_file, content)
    return _load(key, folder, text_file)


def _load(key: AdaptRunKey, folder: Path, text_file: Path) -> Text:
    content = json.loads(text_file.read_text(encoding="utf-8"))
    if content["asked"] != key.as_json():
        raise ConfigError(
            f"output: {folder} is of another run ({content['asked']}). Remove it, or choose another output.",
            param="output",
        )
    new, old, watched = (Continuations.load(folder / f"{name}.npz") for name in ("new", "old", "watched"))
    held_out = (
        [Example(tuple(prompt), None, category) for prompt, category in content[f"held_out_{name}"]]
        for name in ("new", "old")
    )
    return Text(new, old, watched, *held_out, training_s=content["training_s"])


def _split(path: Path, one_in: int, tokenizer: Tokenizer, field: str) -> tuple[list[Example], list[Example]]:
    """Split into training examples and held-out prompts (distinct, at most MOST_MEASURED per category)."""
    examples = read_examples(path, tokenizer, field)
    learnt = [each for each in examples if not is_held_out(each.prompt, one_in)]
    found: dict[str, dict[tuple[int, ...], Example]] = defaultdict(dict)
    for each in examples:
        if is_held_out(each.prompt, one_in):
            found[each.category].setdefault(each.prompt, each)
    held_out = [each for of in found.values() for each in islice(of.values(), MAX_MEASURED)]
    if len(held_out) < MIN_MEASURED or len(learnt) < MIN_MEASURED:
        raise DatasetError(
            f"{field}: {path} has {len(learnt)} completions for training and {len(held_out)} distinct "
            f"held-out prompts; at least {MIN_MEASURED} of both are needed. Give more text.",
            param=field,
        )
    return learnt, held_out


def _answered(
    target: Path, examples: Sequence[Example], folder: Path, budget_s: float, report: Callable[[str], None]
) -> Continuations:
    """Return completions with the known answers; the target generates the others within `budget_s`."""
    known = [(each.prompt, each.answer) for each in examples if each.answer is not None]
    requests = [
        ContinuationRequest(each.prompt, TEMPERATURES[number % len(TEMPERATURES)], number)
        for number, each in enumerate(examples)
        if each.answer is None
    ]
    parts = [Continuations.of_pairs(known)] if known else []
    if requests:
        parts.append(write_continuations(target, requests, folder, budget_s, report))
    return Continuations.join(parts)
