"""Prompts of the shipped pair: their file, questions for training data, answers for the cards' figures."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from ...actors.llm import LLM
from ...cluster.request.request import SamplingParams
from ...jobs.training.loop.answering import NUM_RUNNING
from ...jobs.training.loop.continuations import ContinuationRequest
from .chat_samples import render_chat
from .corpus import CorpusFile
from .prompt_selection import (
    MAX_PROMPT_TOKENS,
    MIN_PROMPT_TOKENS,
    Prompt,
    all_prompts,
    select_prompts,
)
from .tokens import TokenStore

# Temperatures of the target's answers from which it learns while it is trained with the drafter. Afterwards
# its temperature 1 is about what 0.7 was before. Post-training does this to models of full size.
SURE_TEMPERATURES = (0.5, 0.7)
EVALUATION_TOKENS = 128


def write_prompts(prompts: Iterable[Prompt], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for prompt in prompts:
            body = {"messages": list(prompt.messages)} if prompt.messages else {"prompt": prompt.text}
            row = {"id": prompt.id, "category": prompt.category, **body}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def read_prompts(path: Path) -> list[Prompt]:
    prompts: list[Prompt] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        messages = tuple(row.get("messages", ()))
        text = render_chat(list(messages), add_generation_prompt=True) if messages else row["prompt"]
        prompts.append(Prompt(row["id"], row["category"], text, messages))
    return prompts


def questions(
    files: Sequence[CorpusFile],
    corpus: TokenStore,
    tokenizer: Tokenizer,
    num_questions: int,
    temperatures: Sequence[float],
    seed: int,
) -> list[ContinuationRequest]:
    """Return shuffled questions: two thirds like the evaluation's prompts, one third cut from the corpus."""
    random = np.random.default_rng(seed)
    per_category = num_questions * 2 // 15
    selected = select_prompts(all_prompts(files, tokenizer, seed), per_category, seed)
    prompts = [tuple(tokenizer.encode(p.text, add_special_tokens=False).ids) for p in selected]
    while len(prompts) < num_questions:
        length = int(random.integers(MIN_PROMPT_TOKENS, MAX_PROMPT_TOKENS))
        piece = int(random.integers(corpus.num_pieces))
        start, end = corpus.bounds[piece], corpus.bounds[piece + 1] - length
        if end > start:
            at = int(random.integers(start, end))
            prompts.append(tuple(int(i) for i in corpus.ids[at : at + length]))
    order = random.permutation(len(prompts))
    return [
        ContinuationRequest(
            prompts[index], temperatures[number % len(temperatures)], seed * num_questions + number
        )
        for number, index in enumerate(order)
    ]


def held_out_answers(
    target_dir: Path, tokenizer: Tokenizer, prompts: Sequence[Prompt], temperatures: Sequence[float]
) -> list[tuple[list[ContinuationRequest], list[list[int]]]]:
    """Return the questions and answers of each temperature. A prompt's seed is its index."""
    encoded = [tuple(tokenizer.encode(prompt.text, add_special_tokens=False).ids) for prompt in prompts]
    with LLM(str(target_dir), max_num_seqs=NUM_RUNNING) as llm:

        def generate(asked: Sequence[ContinuationRequest]) -> list[list[int]]:
            params = [
                SamplingParams(
                    temperature=q.temperature, seed=q.seed, max_tokens=EVALUATION_TOKENS, detokenize=False
                )
                for q in asked
            ]
            outputs = llm.generate([list(q.prompt_ids) for q in asked], params)
            return [list(output.outputs[0].token_ids) for output in outputs]

        requests = [
            [ContinuationRequest(ids, temperature, seed) for seed, ids in enumerate(encoded)]
            for temperature in temperatures
        ]
        return [(questions, generate(questions)) for questions in requests]
