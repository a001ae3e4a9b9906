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

from ....actors.batch.dataset.row_requests import RowSchema, category_of
from ....actors.capture.records import is_captured
from ....actors.capture.target_outputs import OutputLayout
from ....actors.checkpoints.checkpoint_paths import shipped
from ....actors.system.atomic_files import write_json
from ....actors.tokenization.tokenizer import Tokenizer
from ....cluster.errors import ConfigError, DatasetError, brief
from ...common.options import SHIPPED_PROMPTS
from ...training.heads.trainables import is_small, read_target
from ...training.loop.answering import (
    ANSWERS_SHARE,
    seconds_left,
    seconds_used,
    usual_temperatures,
    write_continuations,
)
from ...training.loop.continuations import ContinuationRequest, Continuations
from .train_data import COMPLETED, Record, captured_completions, prompt_ids, prompt_rows, read_records

NEW_ONE_IN, OLD_ONE_IN = 5, 2  # one of this many prompts is held out
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
    chat: bool | None = None

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


def check_place(path: Path, field: str) -> None:
    """Raise DatasetError if there is no such file or folder."""
    if not path.exists():
        raise DatasetError(f"{field}: {path} does not exist.", param=field)


def read_examples(path: Path, tokenizer: Tokenizer, field: str, rows: RowSchema = COMPLETED) -> list[Example]:
    """Read a folder of captured traffic, or a file of rows with `prompt` or `messages`."""
    check_place(path, field)
    if path.is_dir() or is_captured(path):
        found = [
            Example(each.prompt_token_ids, each.token_ids[:MAX_ANSWER_TOKENS], each.category or "all")
            for each in captured_completions(path)
        ]
    else:
        found = [
            Example(_prompt_of(record, rows, tokenizer, field), None, category_of(record, rows) or "all")
            for record in read_records(str(path))
        ]
    if not found:
        raise DatasetError(f"{field}: {path} contains no prompts.", param=field)
    return [replace(each, prompt=each.prompt[-MAX_PROMPT_TOKENS:]) for each in found[-MAX_EXAMPLES:]]


def _prompt_of(record: Record, rows: RowSchema, tokenizer: Tokenizer, field: str) -> tuple[int, ...]:
    prompt = prompt_ids(record, rows, tokenizer)
    if prompt is None:
        has = brief(sorted(record))
        raise DatasetError(f"{field}: a row has neither messages nor prompt; it has {has}.", param=field)
    return prompt


def is_held_out(prompt: Sequence[int], one_in: int) -> bool:
    digest = hashlib.sha256(array("q", prompt).tobytes()).digest()
    return int.from_bytes(digest[:8], "big") % one_in == 0


def prepare_text(
    key: AdaptRunKey,
    folder: Path,
    tokenizer: Tokenizer,
    report: Callable[[str], None],
    layout: OutputLayout | None = None,
) -> Text:
    """Prepare the text of a run and store it, so that a continued run ignores traffic captured since.

    With a layout the target's outputs are recorded beside the answers that it generates.
    """
    text_file = folder / "text.json"
    if text_file.exists():
        return _load(key, folder, text_file)
    rows = prompt_rows(key.target, key.chat)
    new, new_out = _split(Path(key.data), NEW_ONE_IN, tokenizer, "data", rows)
    if Path(key.replay) == SHIPPED_PROMPTS:  # continuations of the text of a pair that completes
        rows = replace(rows, chat=False)
    old, old_out = _split(shipped(Path(key.replay)), OLD_ONE_IN, tokenizer, "replay", rows)
    answers_s = key.minutes * 60.0 * ANSWERS_SHARE / 2
    used_s = 0.0
    for name, examples in (("new", new), ("old", old), ("watched", new_out[:WATCHED])):
        found = _answered(Path(key.target), examples, folder / name, answers_s, report, layout)
        found.save(folder / f"{name}.npz")
        used_s += seconds_used(folder / name)
    content = {
        "asked": key.as_json(),
        "training_s": seconds_left(key.minutes * 60.0, used_s, "minutes"),
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


def _split(
    path: Path, one_in: int, tokenizer: Tokenizer, field: str, rows: RowSchema
) -> tuple[list[Example], list[Example]]:
    """Split into training examples and held-out prompts (distinct, at most MAX_MEASURED per category)."""
    examples = read_examples(path, tokenizer, field, rows)
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
    target: Path,
    examples: Sequence[Example],
    folder: Path,
    budget_s: float,
    report: Callable[[str], None],
    layout: OutputLayout | None,
) -> Continuations:
    """Return completions with the known answers; the target generates the others within `budget_s`."""
    known = [(each.prompt, each.answer) for each in examples if each.answer is not None]
    temperatures = usual_temperatures(is_small=is_small(read_target(target)[0]))
    requests = [
        ContinuationRequest(each.prompt, temperatures[number % len(temperatures)], number)
        for number, each in enumerate(examples)
        if each.answer is None
    ]
    answered = write_continuations(target, requests, folder, budget_s, report, layout=layout)
    return Continuations.join([Continuations.of_pairs(known), answered])
