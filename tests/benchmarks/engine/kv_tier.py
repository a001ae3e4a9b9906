"""Benchmark of the K/V tier in files: what it costs, and what it saves after a restart.

    python tests/benchmarks kv-tier -m smollm2 --spec-model smollm2-drafter -o kv-tier.json

*Load*: chats that fit the cache, 8 at once, with the tier and without in turns, each with a new engine and,
with the tier, an empty folder. *Next turn*: a conversation of about 6,000 tokens goes on in a new engine,
without the tier and with the pages of the engine before; the answer and its tokens per step must be the same.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from manta import LLM, SamplingParams
from manta.actors.engine.outputs import RequestOutput
from manta.actors.system.atomic_files import write_json
from manta.actors.system.wait_messages import say
from manta.jobs.bench.common.engine_passes import Figures, encode_prompts, read_prompts
from manta.jobs.bench.common.provenance import provenance
from manta.jobs.common.tables import print_table

LOAD_BAR, TTFT_BAR = 0.99, 0.15
_PAGE = Path("docs/architecture.md")  # the conversation's text
_ANSWER = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
_QUESTION = "\nWhich of these folders knows nothing of torch?\n"


def main(
    model: Annotated[str, typer.Option("-m", "--model", help="Target checkpoint.")] = "models/target",
    spec_model: Annotated[str | None, typer.Option("--spec-model", help="Drafter checkpoint.")] = None,
    prompts: Annotated[Path, typer.Option("--prompts", help="JSONL of the load.")] = Path(
        "models/chats.jsonl"
    ),
    num_prompts: Annotated[int, typer.Option("--num-prompts", help="Requests of the load.")] = 24,
    num_tokens: Annotated[int, typer.Option("--conversation", help="Tokens of the conversation.")] = 6000,
    rounds: Annotated[int, typer.Option("--rounds", help="Rounds; medians are reported.")] = 3,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="JSON file for the figures.")] = None,
) -> None:
    """Measure the K/V tier in files; exit code 1 if a bar is missed or an answer differs."""
    settings: dict[str, Any] = {"model": model, "seed": 0, "max_model_len": num_tokens + 512}
    if spec_model is not None:
        settings["speculative_config"] = {"model": spec_model}
    load = _load(settings, prompts, num_prompts, rounds)
    if spec_model is not None:  # as many drafts in every step, so that both sides' acceptance can be compared
        settings["speculative_config"] = {"model": spec_model, "adaptive": False}
    turn = _next_turn(settings, num_tokens, rounds)
    met = load["ratio"] >= LOAD_BAR and turn["ratio"] <= TTFT_BAR and turn["same"]
    figures = {"provenance": provenance(), "settings": settings, "load": load, "next_turn": turn, "met": met}
    if output is not None:
        write_json(output, figures)
    rows = [
        ["load, tokens/s", f"{load['off']:.1f}", f"{load['on']:.1f}", f"{load['ratio']:.3f}"],
        ["next turn, first token s", f"{turn['off']:.3f}", f"{turn['on']:.3f}", f"{turn['ratio']:.3f}"],
    ]
    print_table("K/V tier", ["", "without", "with", "ratio"], rows)
    if not met:
        raise typer.Exit(1)


def _load(settings: dict[str, Any], path: Path, num_prompts: int, rounds: int) -> Figures:
    speeds: dict[str, list[float]] = {"off": [], "on": []}
    params = SamplingParams(temperature=0.0, max_tokens=96, ignore_eos=True)
    for number in range(rounds):
        for side in ("off", "on") if number % 2 else ("on", "off"):
            say(f"load, round {number + 1}/{rounds}: {side}")
            with tempfile.TemporaryDirectory() as folder:
                tier: dict[str, Any] = {"kv_tier_path": f"{folder}/tier"} if side == "on" else {}
                with LLM(**settings, **tier, max_num_seqs=8) as llm:
                    rows = encode_prompts(read_prompts(path, num_prompts), llm.tokenizer)
                    batch = [{"prompt_token_ids": ids} for _, ids in rows]
                    llm.generate(batch[:8], params)
                    begin_s = time.perf_counter()
                    answers = llm.generate(batch, params)
                    seconds = time.perf_counter() - begin_s
            speeds[side].append(sum(len(each.outputs[0].token_ids) for each in answers) / seconds)
    ratios = [on / off for on, off in zip(speeds["on"], speeds["off"], strict=True)]
    return {**_medians(speeds), "ratio": statistics.median(ratios), "rounds": speeds}


def _next_turn(settings: dict[str, Any], num_tokens: int, rounds: int) -> Figures:
    times: dict[str, list[float]] = {"off": [], "on": []}
    same, facts = True, Figures()
    for number in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            tier: dict[str, Any] = {"kv_tier_path": f"{folder}/tier"}
            say(f"next turn, round {number + 1}/{rounds}: the turn before")
            with LLM(**settings, **tier) as llm:
                assert llm.tokenizer is not None, "a conversation is text"
                text = _PAGE.read_text() * (1 + num_tokens // 1000)
                ids = list(llm.tokenizer.encode(text))[:num_tokens]
                first = _answer(llm, ids)
                ids = [*ids, *first.outputs[0].token_ids, *llm.tokenizer.encode(_QUESTION)]
            outputs = dict[str, RequestOutput]()
            for side in ("off", "on"):
                say(f"next turn, round {number + 1}/{rounds}: {side}")
                with LLM(**settings, **(tier if side == "on" else {})) as llm:
                    outputs[side] = _answer(llm, ids)
                ttft_s = outputs[side].metrics.ttft_s
                assert ttft_s is not None, "it has answered"
                times[side].append(ttft_s)
        on, off = outputs["on"], outputs["off"]
        same &= on.outputs[0].token_ids == off.outputs[0].token_ids
        same &= on.metrics.acceptance_histogram == off.metrics.acceptance_histogram
        facts = {
            "prompt_tokens": len(ids),
            "cached": on.metrics.num_cached_tokens,
            "tokens_per_step": on.metrics.mean_acceptance_length,
        }
    ratios = [on / off for on, off in zip(times["on"], times["off"], strict=True)]
    return {**_medians(times), "ratio": statistics.median(ratios), "same": same, **facts, "rounds": times}


def _answer(llm: LLM, ids: list[int]) -> RequestOutput:
    return llm.generate([{"prompt_token_ids": ids}], _ANSWER)[0]


def _medians(sides: dict[str, list[float]]) -> dict[str, float]:
    return {side: statistics.median(values) for side, values in sides.items()}
