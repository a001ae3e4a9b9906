"""Answers of the target to the prompts, in a folder of JSON lines that `manta drafter train --data` reads.

A folder holds parts of `PROMPTS_PER_PART` answers, each written at once, so that a killed run repeats the
current part only. Training prompts are answered once, half of them greedily; held-out ones at both
temperatures. Called by `__main__.py`.
"""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ....actors.llm import LLM
from ....cluster.request.request import SamplingParams
from ....jobs.training.loop.training_loop import Report
from .prompts import Prompt

TEMPERATURES = (0.0, 0.7)
MAX_ANSWER_TOKENS, MAX_MODEL_LEN = 256, 1024
PROMPTS_PER_PART, NUM_RUNNING = 128, 64
LOOP_TOKENS, MAX_REPEATS = 8, 4
_MAX_QUOTED_CHARS, _MIN_QUOTED_WORDS, _MIN_DISTINCT_WORDS = 900, 12, 0.45


@dataclass(frozen=True)
class Answer:
    """A row of the parts. `prompt_token_ids` and `token_ids`, with the end token, are the trainer's columns.

    `finish_reason` is "stop" or "length".
    """

    id: str
    category: str
    temperature: float
    seed: int
    finish_reason: str
    prompt_token_ids: list[int]
    token_ids: list[int]

    @property
    def key(self) -> tuple[str, float]:
        return self.id, self.temperature

    @property
    def loop_start(self) -> int | None:
        """Index of the first token after the repetitions that are kept; None if the answer does not loop."""
        seen: Counter[tuple[int, ...]] = Counter()
        for start in range(len(self.token_ids) - LOOP_TOKENS + 1):
            gram = tuple(self.token_ids[start : start + LOOP_TOKENS])
            seen[gram] += 1
            if seen[gram] > MAX_REPEATS:
                return start
        return None


def temperature_of(prompt: Prompt) -> float:
    """Return the temperature at which a training prompt is answered."""
    return TEMPERATURES[_hash_of(prompt.id) % len(TEMPERATURES)]


def read_answers(folder: Path) -> Iterator[Answer]:
    for part in sorted(folder.glob("part-*.jsonl")):
        with part.open(encoding="utf-8") as lines:
            yield from (Answer(**json.loads(line)) for line in lines)


class AnswerWriter:
    """Answers prompts with a target and keeps the answers in a folder."""

    def __init__(self, model: str, folder: Path, report: Report) -> None:
        self._folder, self._report = folder, report
        folder.mkdir(parents=True, exist_ok=True)
        self._num_parts = len(list(folder.glob("part-*.jsonl")))
        self._done = {answer.key for answer in read_answers(folder)}
        self._llm = LLM(model, max_num_seqs=NUM_RUNNING, max_model_len=MAX_MODEL_LEN)

    def __enter__(self) -> "AnswerWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._llm.close()

    def answer(self, requests: Iterable[tuple[Prompt, float]]) -> None:
        """Answer what has no answer yet, in parts."""
        left = [each for each in requests if (each[0].id, each[1]) not in self._done]
        start, num_tokens = time.monotonic(), 0
        for at in range(0, len(left), PROMPTS_PER_PART):
            answers = self._generate(left[at : at + PROMPTS_PER_PART])
            self._write(answers)
            num_tokens += sum(len(answer.token_ids) for answer in answers)
            rate = num_tokens / (time.monotonic() - start)
            self._report(
                f"{at + len(answers)} of {len(left)} answers, {num_tokens} tokens, {rate:.0f} tokens/s"
            )

    def texts(self, prompts: Sequence[Prompt]) -> Mapping[str, str]:
        """Return the answers to prompts as quotable texts by id, without those that say nothing or loop."""
        wanted = {(prompt.id, temperature_of(prompt)) for prompt in prompts}
        tokenizer = self._llm.tokenizer
        assert tokenizer is not None, "a target that chats has a tokenizer"
        found = (
            (answer.id, quotable(tokenizer.decode(answer.token_ids), answer.finish_reason))
            for answer in read_answers(self._folder)
            if answer.key in wanted and answer.loop_start is None
        )
        return {prompt_id: text for prompt_id, text in found if is_worth_quoting(text)}

    def _generate(self, requests: Sequence[tuple[Prompt, float]]) -> list[Answer]:
        params = [
            SamplingParams(temperature=temperature, seed=_hash_of(prompt.id), max_tokens=MAX_ANSWER_TOKENS)
            for prompt, temperature in requests
        ]
        outputs = self._llm.chat([list(prompt.messages) for prompt, _ in requests], params, use_tqdm=False)
        return [
            Answer(
                prompt.id,
                prompt.category,
                temperature,
                _hash_of(prompt.id),
                str(output.outputs[0].finish_reason),
                list(output.prompt_token_ids),
                list(output.outputs[0].token_ids),
            )
            for (prompt, temperature), output in zip(requests, outputs, strict=True)
        ]

    def _write(self, answers: Sequence[Answer]) -> None:
        path = self._folder / f"part-{self._num_parts:05}.jsonl"
        temporary = path.with_suffix(".partial")
        temporary.write_text(
            "".join(json.dumps(asdict(answer)) + "\n" for answer in answers), encoding="utf-8"
        )
        temporary.replace(path)
        self._num_parts += 1
        self._done.update(answer.key for answer in answers)


def quotable(text: str, finish_reason: str) -> str:
    """Return at most `_MAX_QUOTED_CHARS` of an answer; one that was cut ends with a sentence or line."""
    text = text.strip()
    if finish_reason == "stop" and len(text) <= _MAX_QUOTED_CHARS:
        return text
    text = text[:_MAX_QUOTED_CHARS]
    end = max(text.rfind(mark) + 1 for mark in (". ", ".\n", "! ", "? ", "\n"))
    text = text[:end].rstrip() if end > 0 else text
    return f"{text}\n```" if text.count("```") % 2 else text


def is_worth_quoting(text: str) -> bool:
    """Return whether a text has a sentence or two and is not a list of the same words."""
    words = [word for word in text.split() if not any(map(str.isdigit, word))]
    return len(words) >= _MIN_QUOTED_WORDS and len(set(words)) >= _MIN_DISTINCT_WORDS * len(words)


def write_training_data(answers: Iterable[Answer], path: Path) -> Mapping[str, tuple[int, int, int]]:
    """Write answers, cut where they loop, to a file for `manta drafter train --data`.

    Returns the numbers of answers, of those that loop, and of tokens kept, by category and
    temperature.
    """
    counts: dict[str, tuple[int, int, int]] = {}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for answer in answers:
            kept = answer.token_ids[: answer.loop_start]
            row = {"id": answer.id, "category": answer.category, "temperature": answer.temperature}
            row |= {"prompt_token_ids": answer.prompt_token_ids, "token_ids": kept}
            file.write(json.dumps(row) + "\n")
            kind = f"{answer.category}, {answer.temperature}"
            num, looping, tokens = counts.get(kind, (0, 0, 0))
            loops = len(kept) < len(answer.token_ids)
            counts[kind] = num + 1, looping + loops, tokens + len(kept)
    return dict(sorted(counts.items()))


def _hash_of(prompt_id: str) -> int:
    return int.from_bytes(hashlib.sha256(prompt_id.encode()).digest()[:4], "big")
