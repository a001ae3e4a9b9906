"""Tokens per step of draft trees, and of chains with as many verified rows, without a clock.

    python tests/benchmarks trees -o docs/benchmarks/trees-cpu.json

Every request of the shipped pair verifies its anchor and `rows` - 1 drafts in each step: a chain, which has
at most the block's drafts, or the nodes of a tree. Prompts are spread over models/prompts.jsonl, which the
drafter was not trained on. The numbers do not depend on the machine's load.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from manta import LLM, SamplingParams
from manta.actors.system.atomic_files import write_json
from manta.actors.tokenization.tokenizer import Tokenizer
from manta.jobs.bench.common.provenance import provenance
from manta.jobs.common.tables import print_table

_TARGET, _DRAFTER, _PROMPTS = Path("models/target"), Path("models/drafter"), Path("models/prompts.jsonl")
BARS = {16: 1.15, 64: 1.25}  # least tokens per step of a tree, relative to a chain, by rows
ROWS, TEMPERATURES, WIDTH = (8, 16, 32, 64), (0.0, 1.0), 4
_BLOCK = 16


class Steps(NamedTuple):
    """Tokens of decoding steps, and how they were drafted."""

    tokens_per_step: float
    rows_per_step: float


def prompt_ids(count: int) -> list[list[int]]:
    """Return `count` prompts, spread over all categories."""
    tokenizer = Tokenizer.load(_TARGET)
    lines = _PROMPTS.read_text(encoding="utf-8").splitlines()
    rows = [json.loads(lines[number * len(lines) // count]) for number in range(count)]
    return [
        tokenizer.encode(tokenizer.apply_chat_template(row["messages"]), add_special_tokens=False)
        if "messages" in row
        else tokenizer.encode(row["prompt"])
        for row in rows
    ]


def measure(
    prompts: Sequence[list[int]], rows: int, width: int, temperature: float, num_tokens: int
) -> Steps:
    """Return the tokens of a request's decoding step."""
    spec: dict[str, Any] = {"model": str(_DRAFTER), "adaptive": False}  # Any: settings
    if width > 1:
        spec |= {"tree_width": width, "tree_size": rows - 1}
    else:
        spec |= {"num_speculative_tokens": min(rows, _BLOCK) - 1}
    settings = {"max_num_seqs": 16, "enable_prefix_caching": False, "max_model_len": 512}
    with LLM(str(_TARGET), speculative_config=spec, skip_tokenizer_init=True, **settings) as llm:
        params = [
            SamplingParams(temperature=temperature, seed=number, max_tokens=num_tokens, ignore_eos=True)
            for number in range(len(prompts))
        ]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    steps = sum(output.metrics.num_steps for output in outputs)
    accepted = sum(output.metrics.num_accepted_tokens for output in outputs)
    drafted = sum(output.metrics.num_draft_tokens for output in outputs)
    return Steps(1 + accepted / steps, 1 + drafted / steps)


def run(
    num_prompts: int,
    num_tokens: int,
    rows: Sequence[int] = ROWS,
    temperatures: Sequence[float] = TEMPERATURES,
) -> dict[str, Any]:  # Any: JSON
    """Measure chains and trees with every number of rows."""
    prompts, cells = prompt_ids(num_prompts), list[dict[str, Any]]()
    for temperature in temperatures:
        chains = dict[int, Steps]()
        for count in rows:
            if (chain_rows := min(count, _BLOCK)) not in chains:
                chains[chain_rows] = measure(prompts, chain_rows, 1, temperature, num_tokens)
            chain, tree = chains[chain_rows], measure(prompts, count, WIDTH, temperature, num_tokens)
            gain = tree.tokens_per_step / chain.tokens_per_step
            cells.append(
                {
                    "rows": count,
                    "temperature": temperature,
                    "chain": chain._asdict(),
                    "tree": tree._asdict(),
                    "gain": gain,
                    "least": BARS.get(count),
                }
            )
    met = all(cell["least"] is None or cell["gain"] >= cell["least"] for cell in cells)
    sizes = {"prompts": num_prompts, "tokens": num_tokens, "width": WIDTH}
    return {"sizes": sizes, "met": met, "cells": cells}


def main(
    output: Annotated[Path | None, typer.Option("-o", "--output", help="JSON file for the figures.")] = None,
    num_prompts: Annotated[int, typer.Option(help="Prompts, spread over the file.")] = 240,
    num_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 32,
    rows: Annotated[list[int] | None, typer.Option(help="Verified rows of a request.")] = None,
) -> None:
    """Compare tokens per step of draft trees and chains of as many rows; exit code 1 below the bar."""
    figures = {"provenance": provenance(), **run(num_prompts, num_tokens, rows or ROWS)}
    if output is not None:
        write_json(output, figures)
    table = [
        [
            f"{cell['rows']}",
            f"{cell['temperature']:g}",
            f"{cell['chain']['tokens_per_step']:.3f}",
            f"{cell['tree']['tokens_per_step']:.3f}",
            f"{cell['tree']['rows_per_step']:.1f}",
            f"{cell['gain']:.3f}",
        ]
        for cell in figures["cells"]
    ]
    print_table("tokens per step", ["rows", "T", "chain", "tree", "tree's rows", "tree / chain"], table)
    if not figures["met"]:
        raise typer.Exit(1)
