"""Tokens per step of suffix decoding, of the shipped drafter, and of both mixed or forked, without a clock.

    python tests/benchmarks suffix -o docs/benchmarks/suffix-cpu.json

*Repetitive* texts are edits of a file, JSON records and quoted passages. The shipped target is too small to
copy a prompt, so these answers are given: each sampled token is replaced by the text's own. Drafts are made
and verified as always, from the target's hidden states over that text. *Other* texts are the target's own
answers to models/prompts.jsonl.

One request runs at a time, all drafts are verified in every step, and the numbers do not depend on the
machine's load. Chains have up to 15 drafts. `tree` is the drafter with draft trees of 31 nodes, and `fork`
has the copies as branches of such a tree. For mixed drafts and forks also the share of steps without the
drafter's pass is counted. The bar: both give at least 1.5 times the drafter's tokens per step on each
repetitive text, and never less than 0.98 times on other texts; forks also compared with `tree`, which
verifies as many rows.
"""

from __future__ import annotations

import ast
import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from manta import LLM, SamplingParams
from manta.actors.system.atomic_files import write_json
from manta.actors.targets.runners.cpu_runner import CpuModelRunner
from manta.actors.tokenization.tokenizer import Tokenizer
from manta.jobs.bench.common.engine_passes import say
from manta.jobs.bench.common.provenance import provenance
from manta.jobs.common.tables import print_table
from torch import Tensor

from .json_logs import log_lines

_TARGET, _DRAFTER, _PROMPTS = Path("models/target"), Path("models/drafter"), Path("models/prompts.jsonl")
MIN_GAIN, MIN_OTHER = 1.5, 0.98
_TEXTS_OF_EACH, _PROMPTS_OF_EACH = 4, 8
_FILE_TOKENS, _ANSWER_TOKENS, _OWN_ANSWER_TOKENS = 600, 384, 96
_TREES = {"tree_width": 4, "tree_size": 31}
METHODS: Mapping[str, Mapping[str, Any]] = {  # Any: settings
    "dflash": {"model": str(_DRAFTER)},
    "suffix": {"method": "suffix"},
    "mixed": {"model": str(_DRAFTER), "suffix_drafts": True},
    "tree": {"model": str(_DRAFTER), **_TREES},
    "fork": {"model": str(_DRAFTER), "suffix_drafts": True, **_TREES},
}
# Of tokens per step, each of the first to the second.
RATIOS = (("mixed", "dflash"), ("fork", "dflash"), ("fork", "tree"))


class Text(NamedTuple):
    """A prompt and the answer to it; None if the target answers itself."""

    prompt_ids: list[int]
    answer_ids: list[int] | None


def repetitive_texts(tokenizer: Tokenizer) -> dict[str, list[Text]]:
    """Return the texts by kind."""
    from manta.models.recipe.corpus import library_files

    files = [file.text for file in library_files() if file.is_held_out and len(file.text) > 6000]
    found = dict[str, list[Text]]()
    for name, make in {"edit": _edit, "json": _json, "quotes": _quotes}.items():
        pairs = (make(files, number) for number in range(_TEXTS_OF_EACH))
        found[name] = [_text(tokenizer, *pair) for pair in pairs]
    return found


def other_texts(tokenizer: Tokenizer) -> dict[str, list[Text]]:
    """Return the shipped prompts by category."""
    found = dict[str, list[Text]]()
    for line in _PROMPTS.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        texts = found.setdefault(row["category"], [])
        if "prompt" in row and len(texts) < _PROMPTS_OF_EACH:
            texts.append(Text(tokenizer.encode(row["prompt"]), None))
    return {category: texts for category, texts in found.items() if texts}


def _text(tokenizer: Tokenizer, prompt: str, answer: str) -> Text:
    prompt_ids = tokenizer.encode(prompt)[-_FILE_TOKENS:]
    return Text(prompt_ids, tokenizer.encode(answer)[:_ANSWER_TOKENS])


def _edit(files: Sequence[str], number: int) -> tuple[str, str]:
    """Return a file's beginning, and the same with a name replaced and comments inserted."""
    lines = files[number].splitlines()[:60]
    text = "\n".join(lines)
    [(name, _)] = Counter(re.findall(r"\b[a-z_]{5,}\b", text)).most_common(1)
    edited = [re.sub(rf"\b{name}\b", f"new_{name}", line) for line in lines]
    for place in range(len(edited) - 5, 5, -15):
        edited.insert(place, f"# TODO: check case {place}.")
    return text + "\n\n", "\n".join(edited)


def _json(files: Sequence[str], number: int) -> tuple[str, str]:
    lines = log_lines(number, 40).splitlines()
    return "\n".join(lines[:6]) + "\n", "\n".join(lines[6:])


def _quotes(files: Sequence[str], number: int) -> tuple[str, str]:
    """Return prose, and quotes of its lines in another order with other prose in between."""
    prose = [text for file in files if len(text := ast.get_docstring(ast.parse(file)) or "") > 1200]
    passages = [part for part in prose[number % len(prose)].split("\n\n") if len(part) > 80]
    remarks = [line for line in prose[(number + 1) % len(prose)].splitlines() if len(line) > 30]
    random.Random(number).shuffle(passages)
    pairs = zip(passages * 9, remarks * 9, strict=False)
    return prose[number % len(prose)] + "\n\n", "\n".join(
        f"> {passage}\n\n{remark}" for passage, remark in pairs
    )


@contextmanager
def given_answers() -> Iterator[dict[int, int]]:
    """Replace each sampled token by the one at its position in the yielded mapping, if it is not empty."""
    choose, given = CpuModelRunner._choose, dict[int, int]()  # pyright: ignore[reportPrivateUsage]

    def choose_given(self: CpuModelRunner, hidden_XH: Tensor, rows: Any, logprob_rows: Any) -> Any:
        chosen_X, logprobs = choose(self, hidden_XH, rows, logprob_rows)
        if given and len(chosen_X):
            positions = (rows.positions_N[rows.sampled_X] + 1).tolist()
            chosen_X = torch.tensor([given.get(position, 0) for position in positions])
        return chosen_X, logprobs

    CpuModelRunner._choose = choose_given  # pyright: ignore[reportPrivateUsage]
    try:
        yield given
    finally:
        CpuModelRunner._choose = choose  # pyright: ignore[reportPrivateUsage]


class Figures(NamedTuple):
    """Tokens per decoding step, and the share of these steps without the drafter's pass."""

    tokens_per_step: float
    skipped_share: float


def measured(llm: LLM, texts: Sequence[Text], temperature: float, given: dict[int, int]) -> Figures:
    """Decode the texts, one request at a time."""
    before, num_tokens = llm.stats(), 0
    for number, (prompt_ids, answer_ids) in enumerate(texts):
        given.clear()
        given.update(enumerate(answer_ids or (), len(prompt_ids)))
        length = len(answer_ids) if answer_ids else _OWN_ANSWER_TOKENS
        params = SamplingParams(temperature=temperature, seed=number, max_tokens=length, ignore_eos=True)
        (output,) = llm.generate([{"prompt_token_ids": prompt_ids}], params)
        ids = list(output.outputs[0].token_ids)
        assert answer_ids is None or ids == answer_ids, "the answer is given"
        num_tokens += len(ids)
    after = llm.stats()
    num_steps = after.steps - before.steps - len(texts)  # a prompt is computed in a step of its own
    skipped = after.skipped_passes - before.skipped_passes
    return Figures((num_tokens - len(texts)) / num_steps, skipped / num_steps)


def run(
    kinds: Mapping[str, Mapping[str, Sequence[Text]]], temperatures: Sequence[float] = (0.0, 1.0)
) -> dict[str, Any]:  # Any: JSON
    """Measure every method on every text, by kind ("repetitive" or "other") and name."""
    cells = list[dict[str, Any]]()
    for temperature in temperatures:
        speeds = {name: _measure(name, kinds, temperature) for name in METHODS}
        for kind, texts in kinds.items():
            for name in texts:
                found = {method: speeds[method][kind, name] for method in METHODS}
                speed = {method: figures.tokens_per_step for method, figures in found.items()}
                cells.append(
                    {
                        "kind": kind,
                        "text": name,
                        "temperature": temperature,
                        "tokens_per_step": speed,
                        "gains": {f"{one} / {other}": speed[one] / speed[other] for one, other in RATIOS},
                        "skipped_share": {each: found[each].skipped_share for each in ("mixed", "fork")},
                    }
                )
    met = all(
        gain >= (MIN_GAIN if cell["kind"] == "repetitive" else MIN_OTHER)
        for cell in cells
        for gain in cell["gains"].values()
    )
    return {"bar": {"least_gain": MIN_GAIN, "least_other": MIN_OTHER}, "met": met, "cells": cells}


def _measure(
    method: str, kinds: Mapping[str, Mapping[str, Sequence[Text]]], temperature: float
) -> dict[tuple[str, str], Figures]:
    found = dict[tuple[str, str], Figures]()
    settings = {"max_num_seqs": 1, "enable_prefix_caching": False, "dtype": "float32", "num_threads": 1}
    with given_answers() as given:
        for kind, texts in kinds.items():
            for name, each in texts.items():
                say(f"{method}, T = {temperature:g}: {name}")
                spec = {**METHODS[method], "adaptive": False, "num_speculative_tokens": 15}
                with LLM(str(_TARGET), speculative_config=spec, skip_tokenizer_init=True, **settings) as llm:
                    found[kind, name] = measured(llm, each, temperature, given)
    return found


def main(
    output: Annotated[Path | None, typer.Option("-o", "--output", help="JSON file for the figures.")] = None,
) -> None:
    """Compare tokens per step of copied drafts with the drafter's; exit code 1 below the bar."""
    tokenizer = Tokenizer.load(_TARGET)
    kinds = {"repetitive": repetitive_texts(tokenizer), "other": other_texts(tokenizer)}
    figures = {"provenance": provenance(), **run(kinds)}
    if output is not None:
        write_json(output, figures)
    rows = [
        [cell["text"], f"{cell['temperature']:g}"]
        + [f"{cell['tokens_per_step'][method]:.2f}" for method in METHODS]
        + [f"{gain:.2f}" for gain in cell["gains"].values()]
        + [f"{share:.0%}" for share in cell["skipped_share"].values()]
        for cell in figures["cells"]
    ]
    columns = ["text", "T", *METHODS, *(" / ".join(pair) for pair in RATIOS), "no pass: mixed", "fork"]
    print_table("tokens per step", columns, rows)
    if not figures["met"]:
        raise typer.Exit(1)
