"""Prompts of 30 to 250 tokens from the corpus."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from .chat_samples import Message, chat_samples, render_chat
from .corpus import CorpusFile
from .prompt_cuts import CATEGORIES, Category, cuts

MIN_PROMPT_TOKENS, MAX_PROMPT_TOKENS = 30, 250


@dataclass(frozen=True)
class Prompt:
    """`text` is the model's input; chat prompts also have `messages`, which render to `text`."""

    id: str
    category: Category
    text: str
    messages: tuple[Message, ...] = ()


def all_prompts(files: Iterable[CorpusFile], tokenizer: Tokenizer, seed: int) -> Iterator[Prompt]:
    """Yield all prompts of the files, each with a random amount of text before the cut."""
    random = np.random.default_rng(seed)
    for file in files:
        for cut in cuts(file):
            limit = int(random.integers(50, MAX_PROMPT_TOKENS))
            text = _text_before(file.text, cut.offset, limit, tokenizer)
            if text:
                yield Prompt(f"{file.path}:{cut.offset}", cut.category, text)
        for index, messages in enumerate(chat_samples(file)):
            question = messages[:1]
            text = render_chat(question, add_generation_prompt=True)
            if MIN_PROMPT_TOKENS <= _num_tokens(tokenizer, text) <= MAX_PROMPT_TOKENS:
                yield Prompt(f"{file.path}:chat{index}", "chat", text, tuple(question))


def select_prompts(prompts: Iterable[Prompt], per_category: int, seed: int) -> list[Prompt]:
    """Select at most `per_category` prompts of each category, round-robin over files."""
    random = np.random.default_rng(seed)
    selected: list[Prompt] = []
    pool = list(prompts)
    for category in CATEGORIES:
        of_category = [prompt for prompt in pool if prompt.category == category]
        order = random.permutation(len(of_category))
        turns: dict[str, int] = {}
        ranked: list[tuple[int, int]] = []
        for index in order:
            path = of_category[index].id.rsplit(":", 1)[0]
            turns[path] = turns.get(path, 0) + 1
            ranked.append((turns[path], int(index)))
        ranked.sort(key=lambda item: item[0])
        selected += [of_category[index] for _, index in ranked[:per_category]]
    return selected


def _text_before(text: str, offset: int, max_tokens: int, tokenizer: Tokenizer) -> str:
    """Return as many whole lines before `offset` as fit; empty below MIN_PROMPT_TOKENS."""
    start = text.rfind("\n", 0, offset) + 1
    best = ""
    while True:
        candidate = text[start:offset]
        num_tokens = _num_tokens(tokenizer, candidate)
        if num_tokens > max_tokens:
            return best
        if num_tokens >= MIN_PROMPT_TOKENS:
            best = candidate
        if start == 0:
            return best
        start = text.rfind("\n", 0, start - 1) + 1


def _num_tokens(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False).ids)
